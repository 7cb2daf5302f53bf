"""Decode attention that dequantizes a tile once instead of once a step: what the harness computes in PyTorch with.

The codes are the packed cache's own, chosen and packed as ever; only what they stand for is kept between steps, until
a tile is added. Scores are those of :func:`decode_attention_reference` but for the order of sums in fp32.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from hf_subbyte_moe.ops import TILE_TOKENS, AttentionResult, AttentionTiles, ExactTokens, unpack_pages


class UnpackedAttention:
    """``decode_attention`` for one query a row, with what tiles stand for in memory."""

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[AttentionTiles, tuple[Tensor, Tensor]] = weakref.WeakKeyDictionary()

    def __call__(
        self,
        query: Tensor,
        exact: ExactTokens,
        tiles: AttentionTiles | None,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        *_: Any,
    ) -> AttentionResult:
        """See ``decode_attention``; there is no entropy in the result."""
        batch, query_heads, length, _width = query.shape
        heads = exact.keys.shape[1]
        rows = query.float().reshape(batch, heads, -1, query.shape[-1]) * scaling
        keys, values = [exact.keys.float()], [exact.values.float()]
        shown = exact.visible[:, None, :].repeat(1, 1, 1 if exact.visible.shape[1] == 1 else query_heads // heads, 1)
        shown = shown.expand(batch, heads, rows.shape[2], -1)
        # what no query sees may hold anything, and 0 * NaN is NaN
        values[0] = values[0].masked_fill(~exact.visible.any(1)[:, None, :, None], 0)
        if tiles is not None and tiles.values.pages.shape[-1]:
            for states, unpacked in zip((keys, values), self._unpacked(tiles, query.dtype), strict=True):
                states.append(unpacked)
            there = (tiles.values.pages >= 0).repeat_interleave(TILE_TOKENS, -1)[:, :, None]
            shown = torch.cat([shown, there.expand(-1, -1, rows.shape[2], -1)], dim=-1)
        scores = torch.cat([rows @ part.transpose(-1, -2) for part in keys], dim=-1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~shown, -torch.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        if sink_logits is not None:
            lse = torch.logaddexp(lse, sink_logits.float().repeat_interleave(length).view(1, heads, -1, 1))
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0)).exp()
        parts = weights.split([part.shape[2] for part in keys], dim=-1)
        output = sum(part @ states for part, states in zip(parts, values, strict=True))
        assert isinstance(output, Tensor)
        return AttentionResult(output.view(batch, query_heads, length, -1), lse.view(batch, query_heads, length), None)

    def _unpacked(self, tiles: AttentionTiles, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, H, T * 128, D]`` fp32 of tiles that are the same object until one is added."""
        if tiles not in self._held:
            sides = [unpack_pages(side, dtype).float() for side in tiles.keys]
            shared = [made for side, made in zip(tiles.keys, sides, strict=True) if side is tiles.values]
            values = shared[0] if shared else unpack_pages(tiles.values, dtype).float()
            self._held[tiles] = (torch.cat(sides, dim=-1), values)
        return self._held[tiles]
