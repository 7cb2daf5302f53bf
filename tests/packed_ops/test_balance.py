"""Blocks cover every unit once and take about equally long."""

import numpy as np
import pytest

from subbyte_kernels.decode_attention.balance import MAX_SPLITS, cut_lengths, cut_rows, union_of_blocks


def blocks_of(costs: np.ndarray, heads: int, slots: int = 132, warps: int = 8) -> np.ndarray:
    blocks = cut_rows(costs, heads, slots, warps)
    seen = np.zeros(costs.shape, dtype=int)
    partials = set()
    for row, head, split, splits, first, end, base in blocks.tolist():
        pair = row * heads + head
        assert 0 <= first <= end
        assert 0 <= split < splits <= MAX_SPLITS
        seen[pair, first:end] += 1
        partials.add(base + split)
    assert (seen == (costs > 0)).all()
    assert partials == set(range(len(blocks)))
    return blocks


def times_of(blocks: np.ndarray, costs: np.ndarray, heads: int) -> np.ndarray:
    return np.array([costs[b[0] * heads + b[1], b[4] : b[5]].sum() for b in blocks])


@pytest.mark.parametrize("units", [1, 2, 7, 128, 2044])
@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 8), (8, 8), (33, 8)])
def test_every_unit_is_in_one_block_whatever_the_shape(rows: int, heads: int, units: int) -> None:
    costs = np.random.default_rng(0).choice([1.0, 1.4, 2.5], (rows * heads, units))
    blocks_of(costs, heads)


def test_expensive_heads_get_more_blocks_and_no_block_is_much_longer_than_another() -> None:
    costs = np.repeat([1.0, 1.0, 1.0, 2.5, 1.0, 1.0, 1.4, 2.5], 2044).reshape(8, 2044)
    blocks = blocks_of(costs, heads=8)
    splits = {int(b[1]): int(b[3]) for b in blocks}
    assert splits[3] > 2 * splits[0]
    times = times_of(blocks, costs, 8)
    assert times.max() <= 1.15 * times.mean()
    assert len(blocks) <= 132


def test_within_a_head_the_cut_follows_the_cost() -> None:
    costs = np.ones((1, 1000))
    costs[0, :500] = 3.0
    times = times_of(blocks_of(costs, heads=1), costs, 1)
    assert times.max() <= 1.25 * times.mean()


def test_few_rounds_are_cut_by_rounds_and_many_by_cost() -> None:
    """With few, no block has a round more than it must; with many, all cost the same but for a unit."""
    costs = np.repeat([1.0, 1.0, 1.2, 1.2], 510).reshape(4, 510)
    few = blocks_of(costs, heads=4)
    rounds = [-(-(end - first) // 8) * costs[head, 0] for _, head, _, _, first, end, _ in few.tolist()]
    assert max(rounds) <= 2.4  # two rounds; blocks of the same cost would have three
    costs = np.repeat(costs, 4, axis=1)
    many = blocks_of(costs, heads=4)
    for head in range(4):
        times = [costs[head, first:end].sum() for _, of, _, _, first, end, _ in many.tolist() if of == head]
        assert max(times) - min(times) <= 2 * costs[head, 0]


def test_rows_of_different_length_and_rows_without_tiles() -> None:
    costs = np.zeros((4, 600))
    costs[0, :600], costs[1, :60], costs[3, :2] = 1.0, 1.0, 1.0
    blocks = blocks_of(costs, heads=1)
    assert set(blocks[:, 0].tolist()) == {0, 1, 2, 3}
    assert blocks[0, 0] == 0


def test_rows_whose_units_cost_the_same_are_cut_by_their_lengths() -> None:
    units = (600, 0, 60, 2)
    costs = (np.arange(600) < np.array(units)[:, None]) * 1.0
    assert (cut_lengths(units, 2, 132, 8) == cut_rows(costs, 2, 132, 8)).all()
    assert cut_lengths(units, 2, 132, 8) is cut_lengths(units, 2, 132, 8)


def test_a_block_wants_what_any_of_its_tiles_wants() -> None:
    random = np.random.default_rng(1)
    wanted = random.integers(0, 8, (6, 50)) * (random.random((6, 50)) < 0.2)
    blocks = blocks_of(np.repeat(1.0 + (wanted > 0), 2, axis=1), heads=3, slots=40)
    unions = union_of_blocks(blocks, wanted.astype(np.int32), heads=3)
    for (row, head, _, _, first, end, _), union in zip(blocks.tolist(), unions.tolist(), strict=True):
        tiles = {unit // 2 for unit in range(first, end)}
        assert union == np.bitwise_or.reduce([0, *(int(wanted[row * 3 + head, tile]) for tile in tiles)])
    assert len(set(unions.tolist())) > 2
