"""The stored tokens of one layer, exact and packed: how they are read, moved, saved and counted.

Everything here counts positions from a row's first real token; padding and columns are the layer's business.

What a layer keeps is made outside PyTorch's inference mode, whatever the caller's mode: a prompt that was read in it
may be gone on with outside of it, and inference tensors could not be written there.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.accounting import TILE_TOKENS, LayerGeometry
from hf_subbyte_moe.cache.choices import TierChoice, TierChoices
from hf_subbyte_moe.cache.groups import RowGroup, group_rows
from hf_subbyte_moe.cache.prompts import BitLedger, LayerStatistics, RowsSnapshot
from hf_subbyte_moe.cache.rows import RowCodecs
from hf_subbyte_moe.cache.tiles import TileStore
from hf_subbyte_moe.cache.window import ExactWindow, Ints, StepsAhead
from hf_subbyte_moe.codecs import codec_of
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.distributed.heads import HeadRanks
from hf_subbyte_moe.ops import AttentionTiles, ExactTokens, PackedTiles, unpack_pages
from hf_subbyte_moe.policy import KEYS, VALUES, Policy, attention_states


class StoredRows:
    """Sinks, tiles and window of every row of a layer.

    Attributes:
        lengths: ``[B]`` stored tokens of each row; never changed in place, so that a snapshot can keep it.
        window: the exact tokens.
        store: the packed tiles.
        codecs: means, tables and rotations.
        choices: the tiers that rows took, and how the next ones are chosen.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        policy: Policy,
        ledger: BitLedger,
        statistics: LayerStatistics,
        key_states: Tensor,
        value_states: Tensor,
        latent: bool = False,
        metric: Tensor | None = None,
    ) -> None:
        """Start empty; shapes, dtype and device come from ``[B, H, any, D]`` states.

        ``metric``: ``[H, D, D]`` what errors of keys cost, or None. ``latent``: the first side is a latent, which is
        value and part of the key, the second the rest of the key.
        """
        batch, heads, _, key_dim = key_states.shape
        self._config, self._policy = config, policy
        self._dims, self._latent = (key_dim, value_states.shape[-1]), latent
        self._slack = 0
        self._ahead: StepsAhead | None = None
        self.window = ExactWindow(key_states, value_states, config.sinks, config.window)
        self.store = TileStore(batch, heads, self._dims, key_states.device)
        self.codecs = RowCodecs(policy.tiers, config.codebook, key_states, value_states, latent, metric)
        self.lengths: Ints = np.zeros(batch, dtype=np.int64)
        self.choices = TierChoices(config, policy, ledger, statistics, self._dims, latent, batch)

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of keys. Under autocast, which leaves keys in fp32, values come in another one."""
        return self.window.keys.dtype

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.window.keys.shape[1]

    @property
    def ranks(self) -> HeadRanks | None:
        """Who holds the layer's other heads; None where these are all."""
        return self.choices.ranks

    @property
    def settled(self) -> list[list[tuple[TierChoice, int]]]:
        """Per row the tiers ``[H, 2]`` that later tiles take, and the row's length at that time; newest last."""
        return self.choices.settled

    def first_recent(self) -> Ints:
        """``[B]`` index of each row's oldest token behind its tiles."""
        return self._config.sinks + TILE_TOKENS * self.store.counts

    def _steps(self) -> StepsAhead:
        """What the next steps need, made anew where anything but a step changed rows or tiles."""
        if self._ahead is None or self._ahead.version != self.store.version:
            self._ahead = StepsAhead(self.window, self.lengths, self.first_recent(), self.free(), self.store.version)
        return self._ahead

    def free(self) -> int:
        """Tokens that can be appended to every row until one must pack a tile."""
        most = self._config.sinks + self._config.window + self._slack + TILE_TOKENS * (self.store.counts + 1) - 1
        return max(0, int((most - self.lengths).min(initial=TILE_TOKENS)))

    def _set_length(self, rows: list[int], length: int) -> None:
        self.lengths = self.lengths.copy()
        self.lengths[rows] = length
        self._ahead = None

    # ------------------------------------------------------------------ reading

    def packed(self) -> AttentionTiles:
        """Packed keys and values of all rows, as attention sees them; the same object until a tile changes."""
        if self.store.view is None:
            every = RowGroup(range(len(self.lengths)), self.window.keys.device)
            keys, values = (self._packed_side(side, every) for side in (KEYS, VALUES))
            whole = (keys, values) if self._latent else (keys,)
            self.store.view = AttentionTiles(keys=whole, values=keys if self._latent else values)
        return self.store.view

    def _packed_side(self, side: int, rows: RowGroup, tiles: slice = slice(None)) -> PackedTiles:
        """Some tiles of keys or values of some rows."""
        pools = self.store.pools(side)
        return PackedTiles(
            pages=self.store.pages(side)[rows.index, :, tiles],
            host_pages=self.store.host_pages(side, rows.rows)[:, :, tiles],
            pools=pools,
            formats={tier: codec_of(tier).format for tier in pools},
            tables=self.codecs.tables(side, rows.index),
            rotation=self.codecs.rotations[side],
            mean=self.codecs.mean[rows.index] if side == KEYS else None,
            order=self.codecs.orders[side],
            signs=self.codecs.signs[side],
        )

    def seen(self, visible: Tensor) -> ExactTokens:
        """Sinks and window of all rows, as attention sees them through a mask ``[B, 1, slots]``."""
        return ExactTokens(*attention_states(self.window.keys, self.window.values, self._latent), visible)

    def queries(self, query: Tensor) -> Tensor:
        """Queries ``[B, HQ, q, D]`` of all rows for what :meth:`exact` and :meth:`packed` give."""
        return self.codecs.balance.of_query(query)

    def exact(self, pending: tuple[Tensor, Tensor] | None = None, causal: Tensor | None = None) -> ExactTokens:
        """Sinks and window of all rows, as attention sees them, and new tokens behind them.

        Args:
            pending: new states ``[B, H, q, D]`` of both sides, or None for one query that is stored already.
            causal: ``[B, q, q]`` which of the new tokens their queries see.
        """
        first, second = self.window.keys, self.window.values
        visible = self._steps().mask
        if pending is not None:
            assert causal is not None
            new = (self.codecs.balance.divided(pending[KEYS]), pending[VALUES])
            first, second = (torch.cat(pair, dim=2) for pair in zip((first, second), new, strict=True))
            visible = torch.cat([visible.expand(-1, causal.shape[1], -1), causal], dim=2)
        return ExactTokens(*attention_states(first, second, self._latent), visible)

    def read(self, starts: Ints, out: tuple[Tensor, Tensor]) -> None:
        """Write all tokens of all rows, packed ones dequantized.

        Args:
            starts: ``[B]`` columns in which the rows begin.
            out: keys and values ``[B, H, T, D]`` in the model's dtype.
        """
        every, sinks = RowGroup(range(len(self.lengths)), self.window.keys.device), self._config.sinks
        layout = np.stack([starts, self.lengths, self.store.counts], axis=1).tolist()
        groups = group_rows(enumerate(map(tuple, layout)), TILE_TOKENS, self.window.keys.device)
        for side, states in enumerate(out):
            held = self.window.keys if side == KEYS else self.window.values
            packed = None if self.store.empty else unpack_pages(self._packed_side(side, every), self.dtype)
            for rows in groups:
                (start, length, tiles), index = layout[rows.first], rows.index
                column = start + min(length, sinks)
                states[index, :, start:column] = held[index, :, : column - start]
                if packed is not None:
                    states[index, :, column : column + tiles * TILE_TOKENS] = packed[index, :, : tiles * TILE_TOKENS]
                first = sinks + tiles * TILE_TOKENS
                if length > first:
                    states[index, :, start + first : start + length] = self.window.read(index, first, length)[side]
        if self.codecs.balance.factors is not None:
            out[KEYS].copy_(self.codecs.balance.multiplied(out[KEYS]))

    # ------------------------------------------------------------------ dropping and moving

    def crop(self, row: int, length: int) -> None:
        """Shorten a row; what is left of a tile that is cut comes back into the window, with its error."""
        first, sinks = int(self.first_recent()[row]), self._config.sinks
        if length < first:
            tiles = max(0, (length - sinks) // TILE_TOKENS)
            start = sinks + tiles * TILE_TOKENS
            if length > start:
                tile = (RowGroup([row], self.window.keys.device), slice(tiles, tiles + 1))
                last = [unpack_pages(self._packed_side(side, *tile), self.dtype) for side in (KEYS, VALUES)]
                held = (self.window.keys, self.window.values)
                cut = [made[0, :, : length - start].to(kept.dtype) for made, kept in zip(last, held, strict=True)]
                self.window.write(row, start, cut[KEYS], cut[VALUES])
            self.store.truncate(row, tiles)
            if not tiles:
                self.codecs.thaw(row)
        kept = int(self.store.counts[row])
        self.choices.crop(row, length, kept)
        self._set_length([row], length)

    @torch.inference_mode(False)
    def snapshot(self, new_tokens: int) -> RowsSnapshot:
        """What :meth:`undo` needs after a step of ``new_tokens``."""
        buffers = (self.window.keys.clone(), self.window.values.clone()) if new_tokens > 1 else None
        return RowsSnapshot(
            lengths=self.lengths,
            tiles=self.store.counts.copy(),
            frozen=self.codecs.frozen.copy(),
            factors=self.codecs.balance.factors,
            settled=[list(row) for row in self.settled],
            chunks=[list(row) for row in self.choices.statistics.chunks],
            moments=self.codecs.moments(),
            window=buffers,
        )

    def undo(self, before: RowsSnapshot | Ints) -> None:
        """Take the last step back. One new token overwrote nothing that a row still needs: its slot was free."""
        self._ahead = None
        if isinstance(before, np.ndarray):
            self.lengths = before
            return
        for row, tiles in enumerate(before.tiles.tolist()):
            if tiles < self.store.counts[row]:
                self.store.truncate(row, tiles)
        self.lengths, self.codecs.frozen = before.lengths, before.frozen
        self.window.keys = self.codecs.balance_again(before.factors, self.window.keys)
        self.codecs.see_again(before.moments)
        if before.window is not None:
            self.window.keys, self.window.values = before.window
        self.choices.settled, self.choices.statistics.chunks = before.settled, before.chunks

    def select_rows(self, rows: Ints) -> None:
        """Keep, reorder or repeat rows; everything that belongs to a row moves with it."""
        self._ahead = None
        on_device = torch.from_numpy(rows).to(self.window.keys.device)
        self.window.select_rows(on_device)
        self.codecs.select_rows(on_device)
        self.store.select_rows(rows)
        self.choices.select_rows(rows)
        self.lengths = self.lengths[rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> "StoredRows":
        """Copy as ever, but outside inference mode."""
        made = memo[id(self)] = object.__new__(type(self))
        with torch.inference_mode(False):
            made.__setstate__(copy.deepcopy(vars(self), memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what was pickled or copied, without what is made of it: a pickle takes views of tensors apart."""
        vars(self).update(state)
        self._ahead = self.store.view = None

    # ------------------------------------------------------------------ saving

    def state(self) -> dict[str, Tensor]:
        """Every tensor that is needed to go on elsewhere, and the counts as tensors."""
        return {
            "lengths": torch.from_numpy(self.lengths),
            "window.keys": self.window.keys,
            "window.values": self.window.values,
            **self.store.state(),
            **self.codecs.state(),
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of :meth:`state`, into rows that hold nothing yet."""
        with torch.inference_mode(False):
            state = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in state.items()}
        self._ahead = None
        self.lengths = state["lengths"].cpu().numpy()
        self.window.keys, self.window.values = state["window.keys"], state["window.values"]
        self.store.load_state(state)
        self.codecs.load_state(state)

    # ------------------------------------------------------------------ counting

    def geometry(self) -> LayerGeometry:
        """Shapes, for the byte formula."""
        return LayerGeometry(
            rows=len(self.lengths),
            kv_heads=self.heads,
            key_dim=self._dims[KEYS],
            value_dim=self._dims[VALUES],
            itemsize=self.dtype.itemsize,
            window=self.window.ring - TILE_TOKENS,
            sinks=self._config.sinks,
        )

    def nbytes(self) -> int:
        """Everything held, spare capacity included."""
        return sum(tensor.nbytes for tensor in self.window.tensors()) + self.codecs.nbytes() + self.store.nbytes()
