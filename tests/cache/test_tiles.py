"""Pools and page tables against a dictionary of records."""

import random

import numpy as np
import pytest
import torch

from hf_subbyte_moe.accounting import PAGE_BYTES, pool_capacity
from hf_subbyte_moe.cache.tiles import TilePool, TileStore
from hf_subbyte_moe.ops import page_slots, page_tiers
from support.packing import CPU


HEADS = 2
TIERS = (2, 5, 8)


def words(tier: int, width: int) -> int:
    return tier + width


class Model:
    """A store, and beside it (side, row, head, tile) -> (tier, record) for every tile."""

    def __init__(self, rows: int, widths: tuple[int, int] = (4, 4)) -> None:
        self.store = TileStore(rows, HEADS, widths, CPU)
        self.widths = widths
        self.tiles: dict[tuple[int, int, int, int], tuple[int, list[int]]] = {}
        self.counts = [0] * rows
        self.stamp = 0
        self.peaks: dict[tuple[int, int], int] = {}

    def append(self, row: int, tiers: list[list[list[int]]]) -> None:
        """Append tiles to a row; ``tiers`` by side, head and new tile."""
        first, count = self.counts[row], len(tiers[0][0])
        self.store.extend([row], count)
        self.counts[row] += count
        for side in (0, 1):
            for tier in TIERS:
                places = [(h, t) for h in range(HEADS) for t in range(count) if tiers[side][h][t] == tier]
                if not places:
                    continue
                records = []
                for head, tile in places:
                    self.stamp += 1
                    records.append([self.stamp] * words(tier, self.widths[side]))
                    self.tiles[side, row, head, first + tile] = (tier, records[-1])
                where = np.array([(row, head, first + tile) for head, tile in places], dtype=np.int64)
                self.store.write(side, tier, where, torch.tensor(records, dtype=torch.int32).split(3))

    def append_one(self, row: int, tier: int = 2, count: int = 1) -> None:
        self.append(row, [[[tier] * count] * HEADS] * 2)

    def truncate(self, row: int, count: int) -> None:
        self.store.truncate(row, count)
        self.counts[row] = count
        self.tiles = {k: v for k, v in self.tiles.items() if k[1] != row or k[3] < count}

    def select(self, rows: list[int]) -> None:
        self.store.select_rows(np.array(rows, dtype=np.int64))
        self.counts = [self.counts[row] for row in rows]
        self.tiles = {
            (side, new, head, tile): value
            for new, old in enumerate(rows)
            for (side, row, head, tile), value in self.tiles.items()
            if row == old
        }

    def slots(self) -> dict[tuple[int, int], set[int]]:
        """(tier, width) -> slots that some page names."""
        used: dict[tuple[int, int], set[int]] = {}
        for side in (0, 1):
            pages = self.store.pages(side).flatten()
            for tier, slot in zip(page_tiers(pages).tolist(), page_slots(pages).tolist(), strict=True):
                if tier >= 0:
                    used.setdefault((tier, self.widths[side]), set()).add(slot)
        return used

    def check(self) -> None:
        assert self.store.counts.tolist() == self.counts
        assert self.store.empty == (not self.tiles)
        for side in (0, 1):
            pages, pools = self.store.pages(side), self.store.pools(side)
            assert pages.shape == (len(self.counts), HEADS, max(self.counts, default=0))
            tiers, slots = page_tiers(pages), page_slots(pages)
            for (row, head, tile), tier in np.ndenumerate(tiers.numpy()):
                if tile >= self.counts[row]:
                    assert tier == -1
                    continue
                expected_tier, record = self.tiles[side, row, head, tile]
                assert tier == expected_tier
                assert pools[int(tier)][int(slots[row, head, tile])].tolist() == record
        counts: dict[tuple[int, int], int] = {}
        for (side, *_), (tier, _) in self.tiles.items():
            counts[tier, self.widths[side]] = counts.get((tier, self.widths[side]), 0) + 1
        assert self.store.tile_counts() == counts


def random_tiers(rng: random.Random, count: int) -> list[list[list[int]]]:
    return [[[rng.choice(TIERS) for _ in range(count)] for _ in range(HEADS)] for _ in range(2)]


@pytest.mark.parametrize("widths", [(4, 4), (4, 6)])
@pytest.mark.parametrize("seed", range(12))
def test_any_course_of_events_keeps_every_record(seed: int, widths: tuple[int, int]) -> None:
    rng = random.Random(seed)
    model = Model(3, widths)
    model.check()
    for _ in range(30):
        row = rng.randrange(len(model.counts))
        event = rng.random()
        if event < 0.6:
            model.append(row, random_tiers(rng, rng.randint(1, 3)))
        elif event < 0.8:
            model.truncate(row, rng.randint(0, model.counts[row]))
        else:
            model.select([rng.randrange(len(model.counts)) for _ in range(rng.randint(1, 4))])
        model.check()


def test_rows_share_slots_until_one_of_them_moves_on() -> None:
    model = Model(2)
    model.append_one(0, count=2)
    before = {key: pool.clone() for key, pool in model.store.pools(0).items()}
    model.select([0, 0, 0])
    pages = model.store.pages(0)
    assert torch.equal(pages[0], pages[1])
    assert torch.equal(pages[0], pages[2])
    assert all(torch.equal(model.store.pools(0)[key], pool) for key, pool in before.items())
    model.truncate(1, 1)
    model.append_one(1)
    model.check()
    assert not torch.equal(model.store.pages(0)[1], model.store.pages(0)[0])


def test_a_slot_is_free_only_when_no_row_names_it() -> None:
    model = Model(1)
    model.append_one(0)
    model.select([0, 0])
    shared = model.slots()
    model.truncate(0, 0)
    model.append_one(0)
    fresh = {int(slot) for side in (0, 1) for slot in page_slots(model.store.pages(side)[0].flatten())}
    assert not fresh & shared[2, 4]
    model.check()


def test_freed_slots_are_used_again_the_lowest_first() -> None:
    model = Model(2)
    for row in (0, 1):
        model.append_one(row, count=2)
    capacity = model.store.pools(0)[2].shape[0]
    freed = sorted({int(s) for side in (0, 1) for s in page_slots(model.store.pages(side)[0].flatten())})
    model.truncate(0, 0)
    model.append_one(0, count=1)
    taken = [int(s) for side in (0, 1) for s in page_slots(model.store.pages(side)[0, :, 0])]
    assert taken == freed[:4]
    model.append_one(0, count=1)
    assert model.store.pools(0)[2].shape[0] == capacity
    model.check()


def test_crop_and_refill_never_grow_the_pools() -> None:
    model = Model(1)
    model.append_one(0, count=10)
    held = model.store.nbytes()
    for keep in (9, 3, 0, 7):
        model.truncate(0, min(keep, model.counts[0]))
        model.append_one(0, count=10 - model.counts[0])
        model.check()
    assert model.store.nbytes() == held


def test_growing_copies_the_records() -> None:
    pool = TilePool(3, CPU)
    for count in range(1, 200):
        (slot,) = pool.take(1)
        pool.records[slot] = count
        assert slot == count - 1
        assert pool.records.shape[0] == pool_capacity(count)
    assert torch.equal(pool.records[:199], torch.arange(1, 200).unsqueeze(1).expand(-1, 3).to(torch.int32))


def test_growing_is_rare() -> None:
    pool = TilePool(1, CPU)
    moves, before = 0, pool.records.data_ptr()
    for _ in range(2000):
        pool.take(1)
        moves += pool.records.data_ptr() != before
        before = pool.records.data_ptr()
    assert moves < 200  # at least 16 steps for each doubling, 32 of single slots at the start


@pytest.mark.parametrize("steps", [[100], [1] * 100, [50, 1, 49], [99, 1]])
def test_capacity_depends_on_the_peak_alone(steps: list[int]) -> None:
    pool = TilePool(2, CPU)
    for count in steps:
        pool.take(count)
    assert pool.records.shape[0] == pool_capacity(100)


def test_capacity_follows_the_peak_and_not_what_is_left() -> None:
    model = Model(1, widths=(4, 6))
    model.append_one(0, count=40)
    model.truncate(0, 3)
    model.append_one(0, count=2)
    assert model.store.pools(0)[2].shape[0] == pool_capacity(40 * HEADS)


def test_sides_of_one_width_share_a_pool_and_others_do_not() -> None:
    shared, apart = Model(1, (4, 4)), Model(1, (4, 6))
    for model in (shared, apart):
        model.append_one(0)
    assert shared.store.pools(0)[2] is shared.store.pools(1)[2]
    assert apart.store.pools(0)[2].shape[1] == words(2, 4)
    assert apart.store.pools(1)[2].shape[1] == words(2, 6)


def test_bytes_are_those_of_pools_and_pages() -> None:
    model = Model(2, (4, 6))
    model.append(0, random_tiers(random.Random(1), 20))
    model.append(1, random_tiers(random.Random(2), 3))
    pages = 2 * 2 * HEADS * pool_capacity(20) * PAGE_BYTES
    counts = model.store.tile_counts()
    pools = sum(4 * words(tier, width) * pool_capacity(count) for (tier, width), count in counts.items())
    assert model.store.nbytes() == pages + pools


def test_pages_follow_every_change() -> None:
    """They are kept on the device between changes, and never longer."""
    model = Model(2)
    assert model.store.pages(0).shape == (2, HEADS, 0)
    model.append_one(0)
    first = model.store.pages(0)
    assert first.data_ptr() == model.store.pages(0).data_ptr()
    model.append_one(1, tier=5)
    assert page_tiers(model.store.pages(0)[1]).unique().tolist() == [5]
    model.truncate(0, 0)
    assert page_tiers(model.store.pages(0)[0]).unique().tolist() == [-1]
    model.select([1])
    assert model.store.pages(0).shape == (1, HEADS, 1)
