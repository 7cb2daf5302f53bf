"""The stored tokens of one layer: how new ones are measured, packed and kept.

A row never looks at another one, so results do not depend on who shares a batch; rows that are alike are packed by the
same calls.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.accounting import TILE_TOKENS, tiles_of
from hf_subbyte_moe.cache.balance import divide_keys
from hf_subbyte_moe.cache.choices import TierChoice
from hf_subbyte_moe.cache.groups import RowGroup, group_rows
from hf_subbyte_moe.cache.prompts import PromptQueries, SampledQueries
from hf_subbyte_moe.cache.stored import StoredRows
from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.codecs import codec_of
from hf_subbyte_moe.config import WHOLE_PROMPT
from hf_subbyte_moe.distributed.heads import HeadRanks
from hf_subbyte_moe.ops import ExactTokens
from hf_subbyte_moe.policy import (
    KEYS,
    VALUES,
    Measured,
    RowProbe,
    SideCodec,
    attention_states,
    own_needs,
    positions_on,
    unmeasured,
)
from hf_subbyte_moe.transfers import Answers, upload


_MIN_REGION = 32  # tokens that are worth measuring when nothing is packed yet
_MIN_QUERIES = 8  # queries that tell more than prior knowledge
_MIN_NEW_QUERIES = 32  # queries that are worth measuring again what an earlier prompt settled
_PACK_TILES = 1024  # tiles quantized at once: one for every warp that a large GPU runs


def _records(side: SideCodec, blocks: Tensor, tier_id: int, places: Tensor) -> Iterator[Tensor]:
    """Records of the tiles at ``[m, 2]`` heads and numbers of ``[H, n, 128, D]``, as many at once as is fast."""
    for part in places.split(_PACK_TILES):
        heads, tiles = part.unbind(1)
        yield side.pack(blocks, heads, codec_of(tier_id), tiles)


class _Measuring(NamedTuple):
    """Rows between measuring and packing.

    Attributes:
        sides: how their sides are quantized.
        tiers: chooses the tiers ``[b, tiles, H, 2]`` of their new tiles, once answers were sent; holds no tokens.
    """

    sides: tuple[SideCodec, SideCodec]
    tiers: Callable[[], TierChoice]


class PackedRows(StoredRows):
    """Sinks, tiles and window of every row of a layer, and how they grow."""

    def alike(self, rows: Iterable[tuple[int, int]], tokens: int) -> list[RowGroup]:
        """Groups of rows that can be packed together.

        Args:
            rows: numbers, and how many tokens each of them is to store or pack.
            tokens: that are looked at in each row, at most.
        """
        kinds = []
        for row, new in rows:
            place = (new, int(self.lengths[row]), int(self.store.counts[row]), bool(self.settled[row]))
            kinds.append((row, (*place, self.codecs.kind(row))))
        return group_rows(kinds, tokens, self.window.keys.device)

    def share_heads(self, ranks: HeadRanks | None) -> None:
        """Say who holds the layer's other heads, before anything is packed."""
        self.choices.ranks = ranks
        if ranks is not None:
            self.codecs.keep_metric_of(ranks.part(ranks.size * self.heads))

    def keep_slack(self) -> None:
        """From now on, keep a tile more exact: new tokens may be taken back, and their tiles wait for :meth:`trim`."""
        if not self._slack:
            self._slack = TILE_TOKENS
            self._ahead = None
            self.window.widen(TILE_TOKENS, self.lengths, self.first_recent())

    def _tiles_due(self, length: int) -> int:
        return tiles_of(length - self._slack, self._config.sinks, self._config.window)

    def rows_due(self, new_tokens: int) -> list[RowGroup]:
        """Rows whose oldest tile must be packed before so many tokens more are stored."""
        return self._with_oldest(self.lengths + new_tokens - self._slack)

    def trim(self) -> None:
        """Pack what was only kept exact because it might have been taken back."""
        while due := self._with_oldest(self.lengths):
            for rows in due:
                self.pack_oldest(rows, *self.oldest_tile(rows))

    def _with_oldest(self, lengths: Ints) -> list[RowGroup]:
        """Rows that would have another tile if they were so long."""
        tiles = [tiles_of(length, self._config.sinks, self._config.window) for length in lengths.tolist()]
        due = [(row, TILE_TOKENS) for row, count in enumerate(tiles) if count > self.store.counts[row]]
        return self.alike(due, TILE_TOKENS)

    def oldest_tile(self, rows: RowGroup) -> tuple[Tensor, Tensor]:
        """The 128 oldest exact tokens behind the tiles of rows that are alike, ``[b * H, 128, D]``."""
        first = int(self.first_recent()[rows.first])
        return self._held(rows, first, first + TILE_TOKENS)

    def pack_oldest(self, rows: RowGroup, key: Tensor, value: Tensor) -> None:
        """Pack the oldest tile of rows in the tiers that their prompts settled, or by prior knowledge."""
        key = self._balanced(rows, key, key)[0]
        if not self.settled[rows.first]:
            first = int(self.store.counts[rows.first])
            unknown = [unmeasured(self._policy.tiers, self.heads, first, 1)]
            self.choices.choose(rows, [unknown] * len(rows), int(self.lengths[rows.first]))
        self.codecs.fit(rows, key, value, freeze=True)
        self._pack(rows, key, value, self.choices.later(rows)[:, None], self._sides(rows))

    def grown(self, lengths: Ints) -> None:
        """Somebody else has written the rows' newest tokens."""
        self.lengths = lengths
        self._ahead = None

    def has_room(self) -> bool:
        """Whether the tiles that are due before another token fit into pools as they are, as far as that is known."""
        return self.store.has_room(self._due_tiles()[0])

    def make_room(self, tiles: int) -> None:
        """Let pools grow until the tiles that are due before another token fit some times, and so many of each row."""
        due, rows = self._due_tiles()
        self.store.make_room(due, rows, tiles)

    def _due_tiles(self) -> tuple[Counter[tuple[int, int]], int]:
        """Tiles that are due before another token and whose tiers are settled, by pool; and of how many rows."""
        due = [rows for rows in self.rows_due(1) if self.settled[rows.first]]
        found: Counter[tuple[int, int]] = Counter()
        for rows, side in itertools.product(due, (KEYS, VALUES)):
            found += self.store.pool_keys(side, self.choices.later(rows)[..., side])
        return found, sum(map(len, due))

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

    def _held(self, rows: RowGroup, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Exact tokens ``first`` to ``last - 1`` of some rows, ``[b * H, n, D]``."""
        key, value = self.window.read(rows.index, first, last)
        return key.flatten(0, 1), value.flatten(0, 1)

    def _keep(self, rows: RowGroup, first: int, key: Tensor, value: Tensor) -> None:
        """Keep exact tokens ``[b * H, n, D]`` of some rows, the first of them at index ``first``."""
        shape = (len(rows), self.heads)
        self.window.write(rows.index, first, key.unflatten(0, shape), value.unflatten(0, shape))

    def _balanced(self, rows: RowGroup, packed: Tensor, *keys: Tensor) -> tuple[Tensor, ...]:
        """Keys ``[b * H, n, D]`` by the factors that ``packed``, the first to be packed, may give to their rows."""
        factors = None if self.store.counts[rows.first] else self.codecs.fit_balance(rows, packed)
        if factors is None:
            return keys
        self.window.keys[rows.index] = divide_keys(self.window.keys[rows.index], factors)
        return tuple(divide_keys(key, factors.flatten(0, 1)) for key in keys)

    def _sides(self, rows: RowGroup) -> tuple[SideCodec, SideCodec]:
        """How both sides of some rows are quantized."""
        return self.codecs.side(KEYS, rows), self.codecs.side(VALUES, rows)

    def add(
        self,
        rows: RowGroup,
        key: Tensor,
        value: Tensor,
        queries: PromptQueries | None,
        answers: Answers,
        ahead: bool,
    ) -> Iterator[Callable[[], TierChoice] | None]:
        """Store new tokens of rows that are :meth:`alike` and pack what is due.

        Stops once, where it has asked for all that was measured: go on when the answers were sent. Or drop it, tokens
        and all, and call what it has given to choose the tiers alone; None where nothing was measured.

        Args:
            rows: which.
            key: ``[b, H, n, D]`` new keys, n at least 1.
            value: ``[b, H, n, Dv]``.
            queries: the rows' queries ``[b, HQ, n, D]`` for measuring, or None.
            answers: to ask for what is measured.
            ahead: keys are taken for usual ones, which need no factors, without a look at them; where that was wrong,
                they are measured again.
        """
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        sinks, held = self._config.sinks, int(self.lengths[rows.first])
        length = held + key.shape[1]
        first, tiles = int(self.first_recent()[rows.first]), int(self.store.counts[rows.first])
        key = self.codecs.balance.divided(key, rows)
        more = max(0, self._tiles_due(length) - tiles)
        recent_key, recent_value = key[:, max(0, sinks - held) :], value[:, max(0, sinks - held) :]
        if held > first:
            old_key, old_value = self._held(rows, first, held)
            recent_key = torch.cat([old_key, recent_key], dim=1)
            recent_value = torch.cat([old_value, recent_value], dim=1)
        measured, unusual = None, None
        if more or (recent_key.shape[1] >= _MIN_REGION and not self.settled[rows.first]):
            region = slice(more * TILE_TOKENS if more else None)
            sampled = None if queries is None else self._sampled(queries)
            seen = None if queries is None else queries.seen
            if more and ahead and not tiles and not self.codecs.saw_queries(rows):
                needed = self.codecs.balance.needed(recent_key[:, region])
                unusual = None if needed is None else answers.ask(needed)
            elif more:
                key, recent_key = self._balanced(rows, recent_key[:, region], key, recent_key)
            part = (recent_key[:, region], recent_value[:, region])
            measured = self._measure(rows, key, value, part, more, sampled, answers, seen, ahead and not held)
            del seen
        del queries  # many more than the sampled ones
        yield None if measured is None else measured.tiers
        if unusual is not None and unusual()[0]:
            self.codecs.begin_again(rows)
            key, recent_key = self._balanced(rows, recent_key[:, region], key, recent_key)
            part, answers = (recent_key[:, region], part[VALUES]), Answers()
            measured = self._measure(rows, key, value, part, more, sampled, answers)
            answers.send()
        if measured is not None:
            tiers = measured.tiers()
            if more:
                self._pack(rows, *part, tiers, measured.sides)
        if held < sinks:
            self._keep(rows, held, key[:, : sinks - held], value[:, : sinks - held])
        fresh = max(held, first + more * TILE_TOKENS)
        if fresh < length:
            self._keep(rows, fresh, recent_key[:, fresh - first :], recent_value[:, fresh - first :])
        self._set_length(rows.rows, length)

    def _sampled(self, queries: PromptQueries) -> SampledQueries:
        """What is needed of a prompt's queries."""
        tokens, device = queries.query.shape[2], queries.query.device
        return queries.sampled(positions_on(tokens, device), self.codecs.moment_positions(tokens))

    def _measure(
        self,
        rows: RowGroup,
        key: Tensor,
        value: Tensor,
        region: tuple[Tensor, Tensor],
        more: int,
        queries: SampledQueries | None,
        answers: Answers,
        seen: tuple[Tensor, Tensor] | None = None,
        beside: bool = False,
    ) -> _Measuring:
        """Fit means and tables to a region of ``more`` tiles, and measure it, if that is possible.

        Args:
            rows: which.
            key: ``[b * H, n, D]`` new keys.
            value: ``[b * H, n, Dv]``.
            region: exact tokens behind the rows' tiles, of both sides.
            more: tiles of these that will be packed.
            queries: the sampled ones, or None.
            answers: to ask for what is measured.
            seen: ``[b, H, N, D]`` all keys and values of the rows; needed where some are packed.
            beside: with the model going on meanwhile; for rows that hold nothing yet.
        """
        self.codecs.fit(rows, *region, freeze=more > 0)
        if queries is not None:
            queries = self.codecs.balance.of_prompt(queries, rows)
            self.codecs.see_queries(rows, queries)
        sides = self._sides(rows)
        settled = bool(self.settled[rows.first])
        enough = _MIN_NEW_QUERIES if settled else _MIN_QUERIES
        alike = self._policy.needs.chunk is not None  # the policy goes by position alone
        probes = queries is not None and key.shape[1] >= enough and not alike
        if not probes and settled and not alike:
            later = np.repeat(self.choices.later(rows)[:, None], more, axis=1)
            return _Measuring(sides, lambda: later)
        position = int(self.lengths[rows.first]) + positions_on(key.shape[1], key.device)
        place: AbstractContextManager[None] = nullcontext()
        if queries is not None and probes and beside:
            others = [given for given in (queries.weight, queries.form.sink_logits) if given is not None]
            place = answers.beside(key, value, *region, queries.probe, position, *others, keep=sides)
        with place:
            probe = None
            if queries is not None and probes:
                probe = self._probe(rows, key, value, queries, position, seen)
            chunks, choices = self._chunks(rows, region, more, probe, sides, answers), self.choices
        length = int(self.lengths[rows.first]) + key.shape[1]
        return _Measuring(
            sides,
            lambda: choices.choose(rows, list(zip(*(chunk() for chunk in chunks), strict=True)), length),
        )

    def _probe(
        self,
        rows: RowGroup,
        key: Tensor,
        value: Tensor,
        queries: SampledQueries,
        position: Tensor,
        seen: tuple[Tensor, Tensor] | None,
    ) -> RowProbe:
        """Sampled queries of some rows' new tokens, at ``[S]`` positions, over everything that they see."""
        held = int(self.lengths[rows.first])
        if seen is not None:
            key, value = (states.flatten(0, 1) for states in seen)
            key = self.codecs.balance.divided(key, rows)
        elif held:
            assert not self.store.counts[rows.first]
            old_key, old_value = self._held(rows, 0, held)
            key, value = torch.cat([old_key, key], dim=1), torch.cat([old_value, value], dim=1)
        visible = (torch.arange(key.shape[1], device=key.device) <= position[:, None])[None]
        shape = (len(rows), self.heads)
        states = attention_states(key.unflatten(0, shape), value.unflatten(0, shape), self._latent)
        exact, ranks = ExactTokens(*states, visible), self.choices.ranks
        return RowProbe(queries.probe, position, exact, queries.form, queries.weight, self._latent, ranks)

    def _chunks(
        self,
        rows: RowGroup,
        region: tuple[Tensor, Tensor],
        more: int,
        probe: RowProbe | None,
        sides: tuple[SideCodec, SideCodec],
        answers: Answers,
    ) -> list[Callable[[], list[Measured]]]:
        """Of each chunk of a region that follows the rows' tiles, what each row shows of it.

        There is one chunk without tiles if nothing is packed yet.
        """
        key, value = region
        tiles, first = int(self.store.counts[rows.first]), int(self.first_recent()[rows.first])
        edges = [tiles, tiles + more]
        needs = own_needs(self._policy.needs, self.choices.ranks)
        size = needs.chunk
        if size is None and self._config.chunk != WHOLE_PROMPT:
            size = int(self._config.chunk) // TILE_TOKENS
        if more and size is not None:
            edges[1:1] = range((tiles // size + 1) * size, tiles + more, size)
        chunks: list[Callable[[], list[Measured]]] = []
        for low, high in itertools.pairwise(edges):
            if probe is None:
                unknown = [unmeasured(self._policy.tiers, self.heads, low, high - low)] * len(rows)
                chunks.append(partial(list, unknown))
                continue
            start = (low - tiles) * TILE_TOKENS
            stop = (high - tiles) * TILE_TOKENS if more else key.shape[1]
            part = slice(start, stop)
            place = ((key[:, part], value[:, part]), first + start, sides, low, high - low)
            chunks.append(probe.measure(*place, self._policy.tiers, answers, needs))
        return chunks

    def _pack(
        self, rows: RowGroup, key: Tensor, value: Tensor, tiers: TierChoice, sides: tuple[SideCodec, SideCodec]
    ) -> None:
        """Quantize whole tiles ``[b * H, n * 128, D]`` of some rows in ``[b, n, H, 2]`` tiers and append them."""
        first = int(self.store.counts[rows.first])
        self.store.extend(rows.rows, tiers.shape[1])
        # [2, b * H, n], and of both sides together side, head and tile of every record by side and tier
        chosen = np.ascontiguousarray(tiers.transpose(3, 0, 2, 1)).reshape(2, len(key), -1)
        order = np.lexsort((chosen.ravel(), np.arange(chosen.size) // chosen[0].size))
        places = np.stack(np.unravel_index(order, chosen.shape), axis=1)
        uploaded = upload(places[:, 1:], key.device)
        row, head = np.divmod(places[:, 1], self.heads)
        stored = np.stack([np.array(rows.rows)[row], head, places[:, 2] + first], axis=1)
        taken = chosen.ravel()[order]
        blocks = [states.to(self.dtype).unflatten(1, (-1, TILE_TOKENS)) for states in (key, value)]  # [b*H, n, 128, D]
        edges = np.flatnonzero((np.diff(taken) != 0) | (np.diff(places[:, 0]) != 0)) + 1
        for start, end in itertools.pairwise([0, *edges.tolist(), len(taken)]):
            side, tier_id = int(places[start, 0]), int(taken[start])
            records = _records(sides[side], blocks[side], tier_id, uploaded[start:end])
            self.store.write(side, tier_id, stored[start:end], records)
