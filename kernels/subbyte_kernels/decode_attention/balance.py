"""Cutting rows and heads into blocks that take equally long, where tiles of different tiers cost differently.

A block takes a fixed time and then its units' cost divided among its warps. Multiprocessors take the blocks of a
launch in order, so the longest come first.
"""

import heapq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray


MAX_SPLITS = 128
_FIXED_ROUNDS = 2.5  # what a block costs beside its units, in rounds of its warps
_WAVES = 3

# Cost of one side of a unit, half of what a unit of the two fastest tiers costs; measured at batch 8, 128k tokens.
SIDE_COSTS = {"VQ175": 0.5, "VQ2": 0.5, "VQ3": 0.7, "VQ4": 0.75, "FP6": 1.25, "FP8": 1.3}


def _makespan(times: NDArray[np.float64], slots: int) -> float:
    """When the last block ends, if the longest start first."""
    busy = [0.0] * slots
    for time in np.sort(times)[::-1].tolist():
        heapq.heappush(busy, heapq.heappop(busy) + time)
    return max(busy)


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
    return _cut(costs, heads, slots, warps)


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
    return _cut(unit_costs, heads, slots, warps)


def _cut(unit_costs: NDArray[np.float64], heads: int, slots: int, warps: int) -> NDArray[np.int32]:
    costs, prefix, units = unit_costs.sum(1), unit_costs.cumsum(1), (unit_costs > 0).sum(1)
    most = np.clip(-(-units // warps), 1, MAX_SPLITS)  # a unit for each warp
    best: tuple[float, NDArray[np.int64]] | None = None
    for wave in range(1, _WAVES + 1):
        if best is not None and slots * wave <= len(costs):
            continue  # still one block each
        counts = _counts(costs, most, slots * wave)
        times = np.repeat(costs / counts / warps + _FIXED_ROUNDS, counts)
        makespan = _makespan(times, slots)
        if best is None or makespan < best[0]:
            best = makespan, counts
    assert best is not None
    counts = best[1]
    pair = np.repeat(np.arange(len(costs)), counts)
    first = np.repeat(counts.cumsum() - counts, counts)
    split = np.arange(len(pair)) - first
    starts, ends = np.zeros(len(pair), dtype=np.int64), units[pair]
    for cut in np.flatnonzero(counts > 1).tolist():
        places = slice(int(counts[:cut].sum()), int(counts[: cut + 1].sum()))
        targets = costs[cut] / counts[cut] * np.arange(1, counts[cut])
        edges = np.minimum(np.searchsorted(prefix[cut], targets, side="left") + 1, units[cut])
        starts[places][1:], ends[places][:-1] = edges, edges
    columns = (pair // heads, pair % heads, split, counts[pair], starts, ends, first)
    made = np.stack(columns, axis=1)
    order = np.argsort(-(costs / counts)[pair], kind="stable")
    return made[order].astype(np.int32)


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
