"""Attention over packed tiles and exact tokens with a streaming softmax, in plain PyTorch.

The exact tokens come first, then blocks of tiles. A block's records are gathered from their pools, decoded in units of
their token's scale and used at once; the scales are folded in after the dot products. So the working memory is one
block, whatever the context. Everything packed lives in one space per side, the rotated one: queries are rotated once,
and the sum over values is rotated back once.

    score(q, k) = scaling * (q . mean + scale_k * (R q) . code_k)
    output      = R^T sum_k p_k (R mean + scale_k code_k)

Keys may consist of parts that lie side by side (latent attention: the latent, and the rotary part of the key), each
with its own tiles; the values may be one of these parts and are then decoded once. Tiers that are stored unrotated
(``RAW``, ``SCALAR``) are brought into the rotated space after decoding. Everything is fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from subbyte_kernels.formats import TILE_TOKENS, PackedTiles, page_slots, page_tiers
from subbyte_kernels.pack_tiles.reference import decode_codes


BLOCK_TILES = 32  # on a CPU, a block of decoded tiles stays in its caches
_DEVICE_BLOCK_VALUES = 1 << 25  # on an accelerator, launches cost more than memory
_MAX_SCORES = 1 << 25


@dataclass(frozen=True)
class ExactTokens:
    """Tokens that are held as the model made them.

    Attributes:
        keys: ``[B, H, E, D]`` in the model's dtype; may hold anything where no query sees it.
        values: ``[B, H, E, Dv]``.
        visible: ``[B, 1 or Sq, E]`` bool, whether a query may see a token.
    """

    keys: Tensor
    values: Tensor
    visible: Tensor


@dataclass(frozen=True, eq=False)
class AttentionTiles:
    """The packed tiles that a query attends to; two are equal if they are the same object.

    Attributes:
        keys: parts of the keys, side by side; their widths add up to the query's.
        values: the values; may be one of the parts.
    """

    keys: tuple[PackedTiles, ...]
    values: PackedTiles


@dataclass(frozen=True)
class AttentionResult:
    """Outputs and the quantities that statistics need.

    Attributes:
        output: ``[B, HQ, Sq, Dv]`` fp32, from the CUDA kernel in the query's dtype; zero where a query sees nothing.
        lse: ``[B, HQ, Sq]`` fp32, natural logarithm of the softmax denominator; -inf where a query sees nothing.
        entropy: ``[B, HQ, Sq]`` fp32 in bits; a sink in the softmax counts as one more token. None from the kernels,
            which decode and measure nothing.
    """

    output: Tensor
    lse: Tensor
    entropy: Tensor | None


class _Softmax:
    """Running softmax over blocks: maximum, denominator, weighted values, weighted scores."""

    def __init__(self, rows: torch.Size, value_dim: int, device: torch.device, sink: Tensor | None) -> None:
        """``sink``: ``[1, H, R]`` logits that take part without a value, or None."""
        nothing = torch.zeros(rows, dtype=torch.float32, device=device)
        self.maximum = nothing - torch.inf if sink is None else sink.expand(rows).clone()
        self.total = nothing if sink is None else nothing + 1
        self.score = nothing.clone() if sink is None else self.maximum.clone()
        self.output = nothing.new_zeros(*rows, value_dim)

    def absorb(
        self, scores: Tensor, values: Tensor, value_scales: Tensor | None, value_mean: Tensor | None = None
    ) -> None:
        """Add a block.

        Args:
            scores: ``[B, H, R, n]``, -inf where masked.
            values: ``[B, H, n, Dv]`` in units of the scales.
            value_scales: ``[B, H, 1, n]``, or None.
            value_mean: ``[B, H, 1, Dv]`` to add to every value, or None.
        """
        maximum = torch.maximum(self.maximum, scores.amax(-1))
        base = maximum.masked_fill(maximum == -torch.inf, 0)
        weights = torch.exp(scores - base.unsqueeze(-1))
        keep = torch.exp(self.maximum - base)
        self.maximum = maximum
        self.total = self.total * keep + weights.sum(-1)
        self.score = self.score * keep + (weights * scores.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)
        scaled = weights if value_scales is None else weights * value_scales
        self.output = self.output * keep.unsqueeze(-1) + scaled @ values
        if value_mean is not None:
            self.output = self.output + weights.sum(-1, keepdim=True) * value_mean

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        total = self.total.clamp(min=torch.finfo(torch.float32).tiny)
        lse = torch.where(self.total > 0, self.maximum + total.log(), -torch.inf)
        nats = torch.where(self.total > 0, lse - self.score / total, 0)
        return self.output / total.unsqueeze(-1), lse, (nats / torch.log(torch.tensor(2.0))).clamp(min=0)


def gather_block(side: PackedTiles, first: int, last: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Decode tiles ``first`` to ``last - 1`` of every row and head into the rotated space.

    Returns:
        ``[B, H, n, D]`` fp32 in units of the scales (zero where a row has no such tile), ``[B, H, 1, n]`` fp32 scales.
    """
    pages = side.pages[:, :, first:last]
    batch, heads, tiles = pages.shape
    dim, device = side.head_dim, side.rotation.device
    flat = pages.reshape(-1)
    tiers, slots = page_tiers(flat), page_slots(flat)
    values = scales = None
    for tier_id, pool in side.pools.items():
        chosen = (tiers == tier_id).nonzero().squeeze(-1)
        if not len(chosen):
            continue
        fmt = side.formats[tier_id]
        unit = chosen // tiles  # row * heads + head
        records = pool.index_select(0, slots[chosen])
        table, rows = side.table_rows(tier_id, unit)
        decoded, scale = decode_codes(records, fmt, dim, table, rows, dtype, side.order)
        if not fmt.rotated:
            if scale is not None:
                decoded = decoded * scale.unsqueeze(-1)
            if side.mean is not None and not fmt.centred:
                decoded = decoded - side.mean.flatten(0, 1)[unit].unsqueeze(1)
            decoded, scale = decoded @ side.rotation.t(), None
        if scale is None:
            scale = torch.ones(decoded.shape[:2], dtype=torch.float32, device=device)
        if len(chosen) == len(flat):
            values, scales = decoded, scale
            break
        if values is None or scales is None:
            values = torch.zeros(len(flat), TILE_TOKENS, dim, dtype=torch.float32, device=device)
            scales = torch.zeros(len(flat), TILE_TOKENS, dtype=torch.float32, device=device)
        values[chosen], scales[chosen] = decoded, scale
    if values is None or scales is None:  # no row has a tile here
        values = torch.zeros(len(flat), TILE_TOKENS, dim, dtype=torch.float32, device=device)
        scales = torch.zeros(len(flat), TILE_TOKENS, dtype=torch.float32, device=device)
    return values.view(batch, heads, -1, dim), scales.view(batch, heads, 1, -1)


def _blocks(exact: ExactTokens, group: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """``size`` exact tokens at a time: keys, values, mask ``[B, 1, R or 1, n]`` for the group's rows."""
    for start in range(0, exact.keys.shape[2], size):
        part = slice(start, start + size)
        mask = exact.visible[:, None, :, part]
        if mask.shape[2] > 1:
            mask = mask.repeat(1, 1, group, 1)
        unseen = ~exact.visible[:, :, part].any(1)[:, None, :, None]  # 0 * NaN is NaN
        yield exact.keys[:, :, part].float(), exact.values[:, :, part].float().masked_fill(unseen, 0), mask


def _cap(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def decode_attention_reference(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> AttentionResult:
    """Attention of every query over a row's exact tokens and all of its packed tiles.

    Args:
        query: ``[B, HQ, Sq, D]``; HQ a multiple of H. Packed tiles are older than every query.
        exact: tokens held exactly, with their mask.
        tiles: packed tokens, or None.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.

    Returns:
        Output, log-sum-exp and entropy of every query.
    """
    batch, query_heads, length, dim = query.shape
    heads = exact.keys.shape[1]
    group = query_heads // heads
    block = _block_tiles(exact.keys)
    step = max(1, _MAX_SCORES // (batch * query_heads * block * TILE_TOKENS))
    if length > step:
        parts = []
        for start in range(0, length, step):
            part = slice(start, start + step)
            visible = exact.visible if exact.visible.shape[1] == 1 else exact.visible[:, part]
            piece = ExactTokens(exact.keys, exact.values, visible)
            parts.append(decode_attention_reference(query[:, :, part], piece, tiles, scaling, softcap, sink_logits))
        return AttentionResult(
            torch.cat([part.output for part in parts], dim=2),
            torch.cat([part.lse for part in parts], dim=2),
            torch.cat([part.entropy for part in parts if part.entropy is not None], dim=2),
        )
    # [B, H, group * Sq, D]: the whole group of a KV head is one block of rows
    rows = query.float().reshape(batch, heads, group * length, dim) * scaling
    sink = None if sink_logits is None else sink_logits.float().repeat_interleave(length).view(1, heads, -1)
    softmax = _Softmax(rows.shape[:3], exact.values.shape[-1], query.device, sink)
    for block_keys, block_values, mask in _blocks(exact, group, block * TILE_TOKENS):
        scores = _cap(rows @ block_keys.transpose(-1, -2), softcap).masked_fill(~mask, -torch.inf)
        softmax.absorb(scores, block_values, None)
    if tiles is not None and tiles.values.pages.shape[-1]:
        _absorb_tiles(softmax, rows, tiles, query.dtype, softcap, block)
    output, lse, entropy = softmax.finish()
    return AttentionResult(
        output.view(batch, query_heads, length, -1),
        lse.view(batch, query_heads, length),
        entropy.view(batch, query_heads, length),
    )


def _block_tiles(keys: Tensor) -> int:
    """Tiles that are decoded at once, given the exact keys ``[B, H, E, D]``."""
    if keys.device.type == "cpu":
        return BLOCK_TILES
    batch, heads, _, dim = keys.shape
    return max(BLOCK_TILES, _DEVICE_BLOCK_VALUES // (batch * heads * TILE_TOKENS * dim))


def _absorb_tiles(
    softmax: _Softmax, rows: Tensor, tiles: AttentionTiles, dtype: torch.dtype, softcap: float | None, block: int
) -> None:
    parts = rows.split([part.head_dim for part in tiles.keys], dim=-1)
    rotated = [query @ part.rotation.t() for query, part in zip(parts, tiles.keys, strict=True)]
    offset = sum(
        query @ part.mean.unsqueeze(-1) for query, part in zip(parts, tiles.keys, strict=True) if part.mean is not None
    )
    values = tiles.values
    value_mean = None if values.mean is None else (values.mean @ values.rotation.t()).unsqueeze(2)
    softmax.output = softmax.output @ values.rotation.t()
    count = values.pages.shape[-1]
    for first in range(0, count, block):
        last = min(first + block, count)
        blocks = [gather_block(part, first, last, dtype) for part in tiles.keys]
        scores = offset + sum(
            (query @ codes.transpose(-1, -2)) * scales for query, (codes, scales) in zip(rotated, blocks, strict=True)
        )
        scores = _cap(scores, softcap)
        missing = values.pages[:, :, first:last] < 0
        if missing.any():
            scores = scores.masked_fill(missing.repeat_interleave(TILE_TOKENS, -1).unsqueeze(2), -torch.inf)
        shared = [block for part, block in zip(tiles.keys, blocks, strict=True) if part is values]
        codes, scales = shared[0] if shared else gather_block(values, first, last, dtype)
        softmax.absorb(scores, codes, scales, value_mean)
    softmax.output = softmax.output @ values.rotation
