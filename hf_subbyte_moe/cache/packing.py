"""The stored tokens of one layer: exact ones, packed ones, and how the next ones will be packed.

Everything here counts positions from a row's first real token; padding and columns are the layer's business. A row
never looks at another one, so results do not depend on who shares a batch.

What a layer keeps is made outside PyTorch's inference mode, whatever the caller's mode: a prompt that was read in it
may be gone on with outside of it, and inference tensors could not be written there.
"""

import copy
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.accounting import TILE_TOKENS, LayerGeometry, tiles_of
from hf_subbyte_moe.cache.prompts import BitLedger, LayerStatistics, PromptQueries, RowsSnapshot
from hf_subbyte_moe.cache.rows import RowCodecs
from hf_subbyte_moe.cache.tiles import TileStore
from hf_subbyte_moe.cache.window import ExactWindow, Ints, StepsAhead
from hf_subbyte_moe.codecs import codec_of
from hf_subbyte_moe.config import WHOLE_PROMPT, KVCacheConfig
from hf_subbyte_moe.distributed.heads import HeadRanks
from hf_subbyte_moe.ops import AttentionTiles, ExactTokens, PackedTiles, unpack_pages
from hf_subbyte_moe.policy import (
    KEYS,
    VALUES,
    ChunkStatistics,
    Measured,
    Policy,
    RowProbe,
    attention_states,
    budget_bits,
    gather_chunks,
    own_needs,
    sample_positions,
    side_bits,
    side_codec,
    unmeasured,
)


_MIN_REGION = 32  # tokens that are worth measuring when nothing is packed yet
_MIN_QUERIES = 8  # queries that tell more than prior knowledge
_MIN_NEW_QUERIES = 32  # queries that are worth measuring again what an earlier prompt settled
_PACK_TILES = 1024  # tiles quantized at once: one for every warp that a large GPU runs

TierChoice = NDArray[np.int64]


class PackedRows:
    """Sinks, tiles and window of every row of a layer.

    Attributes:
        lengths: ``[B]`` stored tokens of each row; never changed in place, so that a snapshot can keep it.
        window: the exact tokens.
        store: the packed tiles.
        codecs: means, tables and rotations.
        settled: per row the tiers ``[H, 2]`` that later tiles take, and the row's length at that time; newest last.
        ranks: who holds the layer's other heads; None where these are all.
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
        self._config, self._policy, self._ledger, self._statistics = config, policy, ledger, statistics
        self._dims, self._latent = (key_dim, value_states.shape[-1]), latent
        self.ranks: HeadRanks | None = None
        self._slack = 0
        self._ahead: StepsAhead | None = None
        self.window = ExactWindow(key_states, value_states, config.sinks, config.window)
        self.store = TileStore(batch, heads, self._dims, key_states.device)
        self.codecs = RowCodecs(policy.tiers, config.codebook, key_states, value_states, latent, metric)
        self.lengths: Ints = np.zeros(batch, dtype=np.int64)
        self.settled: list[list[tuple[TierChoice, int]]] = [[] for _ in range(batch)]
        ledger.open(batch)
        statistics.chunks = [[] for _ in range(batch)]

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype: that of keys. Under autocast, which leaves keys in fp32, values come in another one."""
        return self.window.keys.dtype

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.window.keys.shape[1]

    def share_heads(self, ranks: HeadRanks | None) -> None:
        """Say who holds the layer's other heads, before anything is packed."""
        self.ranks = ranks
        if ranks is not None:
            self.codecs.keep_metric_of(ranks.part(ranks.size * self.heads))

    def first_recent(self) -> Ints:
        """``[B]`` index of each row's oldest token behind its tiles."""
        return self._config.sinks + TILE_TOKENS * self.store.counts

    # ------------------------------------------------------------------ adding tokens

    def keep_slack(self) -> None:
        """From now on, keep a tile more exact: new tokens may be taken back, and their tiles wait for :meth:`trim`."""
        if not self._slack:
            self._slack = TILE_TOKENS
            self._ahead = None
            self.window.widen(TILE_TOKENS, self.lengths, self.first_recent())

    def _tiles_due(self, length: int) -> int:
        return tiles_of(length - self._slack, self._config.sinks, self._config.window)

    def rows_due(self, new_tokens: int) -> list[int]:
        """Rows whose oldest tile must be packed before so many tokens more are stored."""
        lengths = enumerate(self.lengths.tolist())
        return [row for row, length in lengths if self._tiles_due(length + new_tokens) > self.store.counts[row]]

    def trim(self) -> None:
        """Pack what was only kept exact because it might have been taken back."""
        for row, length in enumerate(self.lengths.tolist()):
            while tiles_of(length, self._config.sinks, self._config.window) > self.store.counts[row]:
                self.pack_oldest(row, *self.oldest_tile(row))

    def oldest_tile(self, row: int) -> tuple[Tensor, Tensor]:
        """The 128 oldest exact tokens of a row behind its tiles, ``[H, 128, D]``."""
        first = int(self.first_recent()[row])
        return self.window.read(row, first, first + TILE_TOKENS)

    def pack_oldest(self, row: int, key: Tensor, value: Tensor) -> None:
        """Pack a row's oldest tile in the tiers that its prompt settled, or by prior knowledge."""
        if self._balance(row, key):
            key = self.codecs.balance.divided(key, row)
        if not self.settled[row]:
            first = int(self.store.counts[row])
            self._choose(row, [unmeasured(self._policy.tiers, self.heads, first, 1)], int(self.lengths[row]))
        self._pack(row, key, value, self._later_tiers(row)[None])

    def _steps(self) -> StepsAhead:
        """What the next steps need, made anew where anything but a step changed rows or tiles."""
        if self._ahead is None or self._ahead.version != self.store.version:
            self._ahead = StepsAhead(self.window, self.lengths, self.first_recent(), self.free(), self.store.version)
        return self._ahead

    def free(self) -> int:
        """Tokens that can be appended to every row until one must pack a tile."""
        most = self._config.sinks + self._config.window + self._slack + TILE_TOKENS * (self.store.counts + 1) - 1
        return max(0, int((most - self.lengths).min(initial=TILE_TOKENS)))

    def grown(self, lengths: Ints) -> None:
        """Somebody else has written the rows' newest tokens."""
        self.lengths = lengths
        self._ahead = None

    def make_room(self, row: int, tiles: int) -> None:
        """Where pools have no room for a row's next tile, let them grow by so many of its tiles at once."""
        if self.settled[row]:
            for side in (KEYS, VALUES):
                self.store.make_room(side, self._later_tiers(row)[:, side], tiles)

    def takes_another(self, layout: object) -> bool:
        """Whether rows and tiles are as :meth:`append` left them after a token of this layout, and none is due."""
        ahead = self._ahead
        return ahead is not None and ahead.left > 0 and ahead.version == self.store.version and ahead.layout == layout

    def append(self, key_states: Tensor, value_states: Tensor, layout: object) -> None:
        """One token ``[B, H, 1, D]`` for every row; none may be due. ``layout``: see :meth:`takes_another`."""
        ahead = self._steps()
        if not ahead.left:
            self._ahead = None
            ahead = self._steps()
        ahead.append(self.codecs.balance.divided(key_states), value_states)
        ahead.layout = layout
        self.lengths = self.lengths + 1

    def _balance(self, row: int, key: Tensor) -> bool:
        """Before a row's first tiles: whether its keys ``[H, n, D]`` need factors, which it then has from now on."""
        if self.store.counts[row] or not self.codecs.fit_balance(row, key):
            return False
        self.window.keys[row] = self.codecs.balance.divided(self.window.keys[row], row)
        return True

    def _set_length(self, row: int, length: int) -> None:
        self.lengths = self.lengths.copy()
        self.lengths[row] = length
        self._ahead = None

    def add(self, row: int, key: Tensor, value: Tensor, queries: PromptQueries | None) -> None:
        """Store new tokens of one row and pack what is due.

        Args:
            row: which row.
            key: ``[H, n, D]`` new keys, n at least 1.
            value: ``[H, n, Dv]``.
            queries: the row's queries ``[1, HQ, n, D]`` for measuring, or None.
        """
        sinks, held = self._config.sinks, int(self.lengths[row])
        length = held + key.shape[1]
        first, tiles = int(self.first_recent()[row]), int(self.store.counts[row])
        balance = self.codecs.balance
        key = balance.divided(key, row)
        more = max(0, self._tiles_due(length) - tiles)
        recent_key, recent_value = key[:, max(0, sinks - held) :], value[:, max(0, sinks - held) :]
        if held > first:
            old_key, old_value = self.window.read(row, first, held)
            recent_key = torch.cat([old_key, recent_key], dim=1)
            recent_value = torch.cat([old_value, recent_value], dim=1)
        if more or (recent_key.shape[1] >= _MIN_REGION and not self.settled[row]):
            region = more * TILE_TOKENS if more else recent_key.shape[1]
            if more and self._balance(row, recent_key[:, :region]):
                key, recent_key = (balance.divided(states, row) for states in (key, recent_key))
            part = (recent_key[:, :region], recent_value[:, :region])
            self.codecs.fit(row, *part, freeze=more > 0)
            if queries is not None:
                queries = balance.of_prompt(queries, row)
                self.codecs.see_queries(row, queries)
            tiers = self._settle(row, key, value, part, more, queries)
            if more:
                self._pack(row, *part, tiers)
        if held < sinks:
            self.window.write(row, held, key[:, : sinks - held], value[:, : sinks - held])
        fresh = max(held, first + more * TILE_TOKENS)
        if fresh < length:
            self.window.write(row, fresh, recent_key[:, fresh - first :], recent_value[:, fresh - first :])
        self._set_length(row, length)

    def _settle(
        self,
        row: int,
        key: Tensor,
        value: Tensor,
        region: tuple[Tensor, Tensor],
        more: int,
        queries: PromptQueries | None,
    ) -> TierChoice:
        """Measure a region of ``more`` tiles, if that is possible, and choose its tiers ``[more, H, 2]``."""
        probe = None
        enough = _MIN_NEW_QUERIES if self.settled[row] else _MIN_QUERIES
        alike = self._policy.needs.chunk is not None  # the policy goes by position alone
        if queries is not None and key.shape[1] >= enough and not alike:
            probe = self._probe(row, key, value, queries)
        if probe is None and self.settled[row] and not alike:
            return np.repeat(self._later_tiers(row)[None], more, axis=0)
        chunks = self._measure(row, region, more, probe)
        return self._choose(row, chunks, int(self.lengths[row]) + key.shape[1])

    def _probe(self, row: int, key: Tensor, value: Tensor, queries: PromptQueries) -> RowProbe:
        """Sampled queries of one row's new tokens over everything that they see."""
        held, first = int(self.lengths[row]), int(self.first_recent()[row])
        position = sample_positions(key.shape[1]).to(key.device)
        index = torch.arange(held, held + key.shape[1], device=key.device)
        if held:
            sink_key, sink_value = self.window.read(row, 0, min(held, self._config.sinks))
            old_key, old_value = self.window.read(row, first, max(first, held))
            key = torch.cat([sink_key, old_key, key], dim=1)
            value = torch.cat([sink_value, old_value, value], dim=1)
            # what is held is older than every query
            index = torch.cat([index.new_full((key.shape[1] - len(index),), -1), index])
        visible = (index <= (held + position)[:, None])[None]
        exact = ExactTokens(*attention_states(key[None], value[None], self._latent), visible)
        tiles = self._packed_rows(row) if self.store.counts[row] else None
        query = queries.sample(0, position)
        return RowProbe(query, held + position, exact, tiles, queries.form, queries.weight, self._latent, self.ranks)

    def _measure(self, row: int, region: tuple[Tensor, Tensor], more: int, probe: RowProbe | None) -> list[Measured]:
        """The chunks of a region that follows the row's tiles; one chunk without tiles if nothing is packed yet."""
        key, value = region
        tiles, first = int(self.store.counts[row]), int(self.first_recent()[row])
        edges = [tiles, tiles + more]
        needs = own_needs(self._policy.needs, self.ranks)
        size = needs.chunk
        if size is None and self._config.chunk != WHOLE_PROMPT:
            size = int(self._config.chunk) // TILE_TOKENS
        if more and size is not None:
            edges[1:1] = range((tiles // size + 1) * size, tiles + more, size)
        sides = (self.codecs.side(KEYS, row), self.codecs.side(VALUES, row))
        chunks = []
        for low, high in itertools.pairwise(edges):
            if probe is None:
                chunks.append(unmeasured(self._policy.tiers, self.heads, low, high - low))
                continue
            start = (low - tiles) * TILE_TOKENS
            stop = (high - tiles) * TILE_TOKENS if more else key.shape[1]
            part = slice(start, stop)
            states = (key[:, part], value[:, part])
            chunks.append(probe.measure(states, first + start, sides, low, high - low, self._policy.tiers, needs))
        return chunks

    def _choose(self, row: int, chunks: list[Measured], length: int) -> TierChoice:
        """Choose and remember tiers for a row of ``length`` tokens; ids ``[tiles, H, 2]`` of their tiles.

        The choice is for all of the layer's heads, on whatever rank they are, and so is what is remembered of it.
        """
        tiers, own = self._policy.tiers, slice(None)
        if self.ranks is not None:
            chunks = gather_chunks(chunks, self.ranks)
            own = self.ranks.part(self.ranks.size * self.heads)
        heads = len(chunks[0].entropy)
        bits = side_bits(tiers, self._dims, self._latent)
        sizes = np.array(
            [[max(1, chunk.tiles) * TILE_TOKENS * dim for dim in self._dims] for chunk in chunks], dtype=np.float64
        )
        wanted = budget_bits(self._config, self._dims, self._latent)
        budget = (wanted or 0.0) * float(sizes.sum()) * heads + self._ledger.inherited(row)
        chosen = self._policy.choose(chunks, bits, sizes, budget)
        sides = np.broadcast_to(np.arange(2), chosen.shape)
        if wanted is not None:
            spent = bits[sides, chosen] * sizes[:, None, :]
            self._ledger.leave(row, budget - float(spent.sum()))
        ids = np.array([[side_codec(codec, side, self._latent).tier_id for codec in tiers] for side in (KEYS, VALUES)])
        chosen_ids = ids[sides, chosen]
        for chunk, choice, tier_ids in zip(chunks, chosen, chosen_ids, strict=True):
            errors = np.take_along_axis(chunk.errors, choice[..., None], axis=-1)[..., 0]
            self._statistics.chunks[row].append(ChunkStatistics(**vars(chunk), tiers=tier_ids, chosen_errors=errors))
        self.settled[row].append((chosen_ids[-1, own], length))
        return np.repeat(chosen_ids[:, own], [chunk.tiles for chunk in chunks], axis=0)

    def _later_tiers(self, row: int) -> TierChoice:
        """``[H, 2]`` tier ids of tiles that come without measurement: those of the last chunk that was settled."""
        return self.settled[row][-1][0]

    def _pack(self, row: int, key: Tensor, value: Tensor, tiers: TierChoice) -> None:
        """Quantize whole tiles ``[H, n * 128, D]`` of a row in ``[n, H, 2]`` tiers and append them."""
        first = int(self.store.counts[row])
        self.codecs.fit(row, key, value, freeze=True)
        self.store.extend(row, len(tiers))
        for side, states in ((KEYS, key), (VALUES, value)):
            blocks = states.to(self.dtype).unflatten(1, (-1, TILE_TOKENS))  # [H, n, 128, D]
            row_codec = self.codecs.side(side, row)
            chosen = tiers[:, :, side].T  # [H, n]
            order = np.argsort(chosen, axis=None, kind="stable")
            places = np.stack(np.unravel_index(order, chosen.shape), axis=1)  # head, tile, by tier
            uploaded = torch.from_numpy(places).to(key.device)
            tier_ids, starts = np.unique(chosen.ravel()[order], return_index=True)
            ends = [*starts[1:].tolist(), len(places)]
            for tier_id, start, end in zip(tier_ids.tolist(), starts.tolist(), ends, strict=True):
                for low in range(start, end, _PACK_TILES):
                    part = slice(low, min(low + _PACK_TILES, end))
                    heads, tiles = uploaded[part].unbind(1)
                    records = row_codec.pack(blocks, heads, codec_of(tier_id), tiles)
                    self.store.write(side, row, tier_id, places[part] + np.array([0, first]), records)

    # ------------------------------------------------------------------ reading

    def packed(self) -> AttentionTiles:
        """Packed keys and values of all rows, as attention sees them; the same object until a tile changes."""
        if self.store.view is None:
            self.store.view = self._packed_rows(None)
        return self.store.view

    def _packed_rows(self, row: int | None) -> AttentionTiles:
        """Packed keys and values of all rows or of one."""
        rows = slice(None) if row is None else slice(row, row + 1)
        keys, values = (self._packed_side(side, rows) for side in (KEYS, VALUES))
        if self._latent:
            return AttentionTiles(keys=(keys, values), values=keys)
        return AttentionTiles(keys=(keys,), values=values)

    def _packed_side(self, side: int, rows: slice, tiles: slice = slice(None)) -> PackedTiles:
        """Some tiles of keys or values of neighbouring rows."""
        pools = self.store.pools(side)
        return PackedTiles(
            pages=self.store.pages(side)[rows, :, tiles],
            host_pages=self.store.host_pages(side, rows)[:, :, tiles],
            pools=pools,
            formats={tier: codec_of(tier).format for tier in pools},
            tables=self.codecs.tables(side, rows),
            rotation=self.codecs.rotations[side],
            mean=self.codecs.mean[rows] if side == KEYS else None,
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
        every, sinks = slice(0, len(self.lengths)), self._config.sinks
        layout = np.stack([starts, self.lengths, self.store.counts])
        groups = [every] if (layout == layout[:, :1]).all() else [slice(row, row + 1) for row in range(every.stop)]
        for side, states in enumerate(out):
            held = self.window.keys if side == KEYS else self.window.values
            packed = None if self.store.empty else unpack_pages(self._packed_side(side, every), self.dtype)
            for rows in groups:
                start, length, tiles = layout[:, rows.start].tolist()
                column = start + min(length, sinks)
                states[rows, :, start:column] = held[rows, :, : column - start]
                if packed is not None:
                    states[rows, :, column : column + tiles * TILE_TOKENS] = packed[rows, :, : tiles * TILE_TOKENS]
                first = sinks + tiles * TILE_TOKENS
                if length > first:
                    states[rows, :, start + first : start + length] = self.window.read(rows, first, length)[side]
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
                tile = (slice(row, row + 1), slice(tiles, tiles + 1))
                last = [unpack_pages(self._packed_side(side, *tile), self.dtype) for side in (KEYS, VALUES)]
                cut = [states[0, :, : length - start] for states in last]
                self.window.write(row, start, cut[KEYS], cut[VALUES])
            self.store.truncate(row, tiles)
            if not tiles:
                self.codecs.thaw(row)
        kept = int(self.store.counts[row])
        settled = [entry for entry in self.settled[row] if entry[1] <= length]
        if kept and not settled:  # the tiles that are left were chosen by the oldest entry
            settled = [(tiers, min(length, settled_at)) for tiers, settled_at in self.settled[row][:1]]
        self.settled[row] = settled
        self._statistics.chunks[row] = [
            chunk for chunk in self._statistics.chunks[row] if chunk.first_tile < kept or self.settled[row]
        ]
        self._set_length(row, length)

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
            chunks=[list(row) for row in self._statistics.chunks],
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
        self.settled, self._statistics.chunks = before.settled, before.chunks

    def select_rows(self, rows: Ints) -> None:
        """Keep, reorder or repeat rows; everything that belongs to a row moves with it."""
        self._ahead = None
        on_device = torch.from_numpy(rows).to(self.window.keys.device)
        self.window.select_rows(on_device)
        self.codecs.select_rows(on_device)
        self.store.select_rows(rows)
        self._ledger.select_rows(rows)
        self.lengths = self.lengths[rows]
        self.settled = [list(self.settled[row]) for row in rows]
        self._statistics.chunks = [list(self._statistics.chunks[row]) for row in rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedRows":
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
