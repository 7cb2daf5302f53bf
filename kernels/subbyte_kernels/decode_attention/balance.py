"""Cutting rows and heads into blocks that take equally long, where tiles of different tiers cost differently.

A block deals its units out to its warps in turn, so it takes a round for each unit of a warp, as long as the round's
dearest unit, and a fixed time. Multiprocessors take the blocks of a launch in order, so the longest come first.

Where blocks have few rounds, they are cut so that the longest sum of rounds is as short as it can be; where they have
many, so that their units cost the same together: measured, not derived (``benchmarks/NOTES.md``).
"""

import heapq
import math
from array import array
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


MAX_SPLITS = 128
_FIXED_ROUNDS = 2.5  # what a block costs beside its units, in rounds of its warps
_WAVES = 3
_PRECISION = 0.02
_FINE_ROUNDS = 16
_FEW_ROUNDS = 4.0
_EVEN = 1.05

# Cost of one side of a unit, half of what a unit of the two fastest tiers costs; measured at batch 8, 128k tokens.
SIDE_COSTS = {"VQ175": 0.5, "VQ2": 0.5, "VQ3": 0.7, "VQ4": 0.75, "FP6": 1.25, "FP8": 1.3}


def _makespan(times: list[float], slots: int) -> float:
    """When the last block ends, if the longest start first."""
    busy = [0.0] * slots
    for time in sorted(times, reverse=True):
        heapq.heappush(busy, heapq.heappop(busy) + time)
    return max(busy)


@lru_cache(maxsize=64)
def cut_lengths(units: tuple[int, ...], heads: int, slots: int, warps: int) -> NDArray[np.int32]:
    """:func:`cut_rows` where all units cost the same: remembered, because every layer of a model asks for this cut.

    Args:
        units: units of each (row, head).
        heads: H.
        slots: blocks that run at once.
        warps: warps of a block.
    """
    costs = (np.arange(max(units)) < np.array(units)[:, None]).astype(np.float64)
    return _cut_by_rounds(costs, heads, slots, warps)


def same_cost(costs: NDArray[np.float64]) -> bool:
    """Whether everything that costs anything costs the same."""
    return bool((costs[costs > 0] == costs.max()).all())


def cut_rows(unit_costs: NDArray[np.float64], heads: int, slots: int, warps: int) -> NDArray[np.int32]:
    """The blocks of a launch.

    Args:
        unit_costs: ``[B * H, U]`` cost of each unit of 64 tokens, zero where a row has none.
        heads: H.
        slots: blocks that run at once.
        warps: warps of a block.

    Returns:
        ``[blocks, 7]`` row, head, split, splits; first unit, end, first partial result of the (row, head). The longest
        blocks first.
    """
    if same_cost(unit_costs):
        return cut_lengths(tuple((unit_costs > 0).sum(1).tolist()), heads, slots, warps)
    few = float(unit_costs.sum()) < _FEW_ROUNDS * slots * warps
    return (_cut_by_rounds if few else _cut_by_cost)(unit_costs, heads, slots, warps)


def _counts(costs: NDArray[np.float64], most: NDArray[np.int64], blocks: int) -> NDArray[np.int64]:
    """Splits of each (row, head), about ``blocks`` together and in proportion to cost; 1 to ``most``."""
    share = costs / max(costs.sum(), 1e-9) * blocks
    counts: NDArray[np.int64] = np.clip(np.floor(share).astype(np.int64), 1, most)
    for _ in range(blocks - int(counts.sum())):  # the rest to those whose splits are the longest
        longest = np.argmax(np.where(counts < most, costs / counts, -1))
        if counts[longest] == most[longest]:
            break
        counts[longest] += 1
    return counts


def _cut_by_cost(unit_costs: NDArray[np.float64], heads: int, slots: int, warps: int) -> NDArray[np.int32]:
    """The blocks of a (row, head) cost the same, and those of all about the same."""
    costs, prefix, units = unit_costs.sum(1), unit_costs.cumsum(1), (unit_costs > 0).sum(1)
    most = np.clip(-(-units // warps), 1, MAX_SPLITS)  # a unit for each warp
    best: tuple[float, NDArray[np.int64]] | None = None
    for wave in range(1, _WAVES + 1):
        if best is not None and slots * wave <= len(costs):
            continue  # still one block each
        counts = _counts(costs, most, slots * wave)
        makespan = _makespan(np.repeat(costs / counts / warps + _FIXED_ROUNDS, counts).tolist(), slots)
        if best is None or makespan < best[0]:
            best = makespan, counts
    assert best is not None
    counts = best[1]
    pair = np.repeat(np.arange(len(costs)), counts)
    first = np.repeat(counts.cumsum() - counts, counts)
    starts, ends = np.zeros(len(pair), dtype=np.int64), units[pair]
    for cut in np.flatnonzero(counts > 1).tolist():
        places = slice(int(counts[:cut].sum()), int(counts[: cut + 1].sum()))
        targets = costs[cut] / counts[cut] * np.arange(1, counts[cut])
        edges = np.minimum(np.searchsorted(prefix[cut], targets, side="left") + 1, units[cut])
        starts[places][1:], ends[places][:-1] = edges, edges
    columns = (pair // heads, pair % heads, np.arange(len(pair)) - first, counts[pair], starts, ends, first)
    order = np.argsort(-(costs / counts)[pair], kind="stable")
    made: NDArray[np.int32] = np.stack(columns, axis=1)[order].astype(np.int32)
    return made


def _cut_by_rounds(unit_costs: NDArray[np.float64], heads: int, slots: int, warps: int) -> NDArray[np.int32]:
    """The longest sum of a block's rounds is nearly as short as it can be."""
    # where a block has many rounds, edges between groups of units are fine enough
    ideal = float(unit_costs.sum()) / (slots * warps)
    grain = max(1, int(ideal / _FINE_ROUNDS))
    lengths, groups = (unit_costs > 0).sum(1), -(-unit_costs.shape[1] // grain)
    grouped = np.zeros((len(unit_costs), groups * grain))
    grouped[:, : unit_costs.shape[1]] = unit_costs
    rounds = _Rounds(grouped.reshape(-1, groups, grain).sum(-1), warps)
    best: tuple[float, list[_Block]] | None = None
    for wave in range(1, _WAVES + 1):
        if best is not None and (2 * len(unit_costs) <= slots or best[0] <= _EVEN * (ideal + _FIXED_ROUNDS)):
            break  # with few heads, one wave can be cut as finely as any
        cut = rounds.cut(slots * wave)
        makespan = _makespan([block.time + _FIXED_ROUNDS for block in cut], slots)
        if best is None or makespan < best[0]:
            best = makespan, cut
    assert best is not None
    counts = np.bincount([block.pair for block in best[1]], minlength=len(unit_costs)).tolist()
    made, first, before = [], 0, -1
    for number, block in enumerate(best[1]):
        if block.pair != before:
            first, before = number, block.pair
        place = (block.pair // heads, block.pair % heads, number - first, counts[block.pair])
        made.append((*place, grain * block.start, min(grain * block.end, lengths[block.pair]), first))
    order = sorted(range(len(made)), key=lambda number: -best[1][number].time)
    return np.array([made[number] for number in order], dtype=np.int32)


class _Block(NamedTuple):
    """A block: its (row, head), its first unit, the one behind its last, what its rounds cost."""

    pair: int
    start: int
    end: int
    time: float


class _Rounds:
    """What rounds of units cost, wherever they begin."""

    def __init__(self, unit_costs: NDArray[np.float64], warps: int) -> None:
        """``unit_costs`` ``[P, U]``."""
        pairs, most = unit_costs.shape
        self._warps, self._units = warps, (unit_costs > 0).sum(1).tolist()
        self._columns = -(-most // warps) + 1
        padded = np.zeros((pairs, self._columns * warps))
        padded[:, :most] = unit_costs
        round_costs, width = padded, 1  # the dearest of so many units from each on
        while width < warps:
            ahead = min(width, warps - width)
            round_costs = round_costs.copy()
            np.maximum(round_costs[:, :-ahead], round_costs[:, ahead:], out=round_costs[:, :-ahead])
            width += ahead
        # [P, warps, columns]: of the rounds that begin at unit r, r + warps, ...: the sum of those before
        by_start = round_costs.reshape(pairs, self._columns, warps).transpose(0, 2, 1)
        sums = by_start.cumsum(-1) - by_start
        self._least = float(unit_costs.sum()) / warps
        self._dearest = float(unit_costs.max(initial=0.0))
        self._sums = array("d", sums.tobytes())  # the steps below are few and small: faster without numpy

    def cut(self, blocks: int) -> list[_Block]:
        """At most so many blocks, or one for each row and head; the longest nearly as short as it can be."""
        if blocks <= len(self._units):
            whole = self._fill(math.inf)
            assert whole is not None
            return whole
        low = max(self._least / blocks, self._dearest)  # no block is shorter than its dearest round
        best = self._fill(low)
        if best is not None and len(best) <= blocks:
            return best
        high = 1.25 * low + self._dearest
        while (best := self._fill(high)) is None or len(best) > blocks:
            low, high = high, 1.5 * high
        while high - low > max(_PRECISION * high, 0.1 * self._dearest):
            middle = (low + high) / 2
            made = self._fill(middle)
            if made is None or len(made) > blocks:
                low = middle
            else:
                high, best = middle, made
        return best

    def _fill(self, limit: float) -> list[_Block] | None:
        """Blocks of rounds up to a cost; None if a row and head would need more than the kernel's ``MAX_SPLITS``."""
        warps, columns, sums = self._warps, self._columns, self._sums
        limit *= 1 + 1e-9
        made: list[_Block] = []
        for pair, units in enumerate(self._units):
            at, count = 0, len(made)
            while at < units or len(made) == count:  # a row without units has a block, too
                row = (pair * warps + at % warps) * columns
                first = row + at // warps
                last = max(
                    bisect_right(sums, sums[first] + limit, first, row + columns) - 1,
                    min(first + 1, row + columns - 1),
                )
                end = min(at % warps + (last - row) * warps, units)
                made.append(_Block(pair, at, end, sums[last] - sums[first]))
                at = end
            if len(made) - count > MAX_SPLITS:
                return None
        return made


def extend_blocks(blocks: NDArray[np.int32], units: NDArray[np.int64], heads: int) -> NDArray[np.int32]:
    """Blocks of rows that have grown a little since they were cut: the last block of each takes what is new.

    Args:
        blocks: ``[blocks, 7]`` as :func:`cut_rows` makes them.
        units: ``[B * H]`` units of each (row, head) now, none less than when they were cut.
        heads: H.
    """
    extended: NDArray[np.int32] = blocks.copy()
    last = blocks[:, 2] == blocks[:, 3] - 1
    extended[last, 5] = units[blocks[last, 0] * heads + blocks[last, 1]]
    return extended


def union_of_blocks(blocks: NDArray[np.int32], wanted: NDArray[np.int32], heads: int) -> NDArray[np.int32]:
    """What the tiles of each block want together.

    Args:
        blocks: ``[blocks, 7]`` as :func:`cut_rows` makes them.
        wanted: ``[B * H, T]`` bits of each tile of 128 tokens.
        heads: H.

    Returns:
        ``[blocks]`` bits that any of a block's tiles has.
    """
    start = (blocks[:, 0] * heads + blocks[:, 1]) * wanted.shape[1]
    first, end = start + blocks[:, 4] // 2, start + (blocks[:, 5] + 1) // 2
    union = np.zeros(len(blocks), dtype=np.int32)
    for bit in range(int(wanted.max(initial=0)).bit_length()):
        having = np.concatenate([[0], (wanted >> bit & 1).cumsum()])
        union |= (having[end] > having[first]).astype(np.int32) << bit
    return union
