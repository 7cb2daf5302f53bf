"""The packed tiles of a layer: one pool of records per tier and width, and a page table for each side.

Tiles are immutable. A page names a tile's tier and slot; rows may share slots, so reordering or repeating rows moves
pages, never records. The page table is kept on the host, which therefore knows every reference to a slot: after rows
or tiles were dropped, slots that no page names any more are free, and the lowest free slot is used first.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.accounting import pool_capacity
from hf_subbyte_moe.ops import NO_PAGE, AttentionTiles, make_page, page_slots, page_tiers
from hf_subbyte_moe.transfers import upload


Pages = NDArray[np.int32]
_TILES_AT_ONCE = 8


class TilePool:
    """Records of one tier at one width.

    Attributes:
        records: ``[capacity, record_words]`` int32.
        peak: slots that were ever in use at once.
    """

    @torch.inference_mode(False)
    def __init__(self, record_words: int, device: torch.device) -> None:
        self.records = torch.empty(0, record_words, dtype=torch.int32, device=device)
        self._free: list[int] = []  # a heap
        self.peak = 0

    def take(self, count: int) -> list[int]:
        """Reserve the lowest free slots, growing the pool where there are too few."""
        reused = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        fresh = count - len(reused)
        slots = [*reused, *range(self.peak, self.peak + fresh)]
        self.peak += fresh
        if self.peak > self.records.shape[0]:  # room that was made is used up before
            self._hold(pool_capacity(self.peak))
        return slots

    @torch.inference_mode(False)
    def _hold(self, capacity: int) -> None:
        if capacity > self.records.shape[0]:
            grown = self.records.new_empty(capacity, self.records.shape[1])
            grown[: self.records.shape[0]] = self.records
            self.records = grown

    def write(self, slots: NDArray[np.int64], records: Tensor) -> None:
        """Store ``[m, record_words]`` records in slots that were taken."""
        if slots[-1] - slots[0] == len(slots) - 1:  # ascending, so these are neighbours: nothing to upload
            self.records[slots[0] : slots[-1] + 1] = records
        else:
            self.records[upload(slots, self.records.device)] = records

    def has_room(self, count: int) -> bool:
        """Whether so many records more fit without the pool growing."""
        return self.peak - len(self._free) + count <= self.records.shape[0]

    def make_room(self, count: int) -> None:
        """Grow, if need be, until so many records more fit."""
        self._hold(self.peak - len(self._free) + count)

    def keep_only(self, used: Pages) -> None:
        """Free every slot that is not in ``used`` (any order, any number of times)."""
        free = np.ones(self.peak, dtype=bool)
        free[used] = False
        self._free = np.flatnonzero(free).tolist()  # ascending, which is a heap


class TileStore:
    """Pools and page tables of one layer.

    Attributes:
        counts: ``[B]`` tiles of each row.
        version: changes whenever a page or a pool does.
        empty: no row has a tile.
        view: what its owner made of pages and pools, forgotten with the first change: it would keep pools that grow.
    """

    def __init__(self, rows: int, heads: int, widths: tuple[int, int], device: torch.device) -> None:
        """Start empty; ``widths`` are the head dimensions of keys and values."""
        self.counts: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self._pages: Pages = np.full((2, rows, heads, 0), NO_PAGE, dtype=np.int32)
        self._widths = widths
        self._device = device
        self._pools: dict[tuple[int, int], TilePool] = {}  # (tier id, width)
        self._device_pages: Tensor | None = None
        self.version = 0
        self.empty = True
        self.view: AttentionTiles | None = None

    def _changed(self) -> None:
        self._device_pages = self.view = None
        self.version += 1
        self.empty = not self.counts.any()

    def extend(self, rows: Sequence[int], tiles: int) -> None:
        """Give each of some rows that have as many tiles more of them, whose records follow by :meth:`write`."""
        last = int(self.counts[rows[0]]) + tiles
        if last > self._pages.shape[3]:
            spare = pool_capacity(last) - self._pages.shape[3]
            self._pages = np.pad(self._pages, ((0, 0), (0, 0), (0, 0), (0, spare)), constant_values=NO_PAGE)
        self.counts[list(rows)] = last
        self._changed()

    def write(self, side: int, tier_id: int, places: NDArray[np.int64], records: Iterable[Tensor]) -> None:
        """Store records of one tier.

        Args:
            side: 0 keys, 1 values.
            tier_id: their tier.
            places: ``[m, 3]`` row, head and tile of each record, m at least 1.
            records: ``[m, record_words]`` int32, in as many parts as it takes to make them.
        """
        slots: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        pool, done = self._pools.get((tier_id, self._widths[side])), 0
        for part in records:
            if pool is None:
                pool = self._pools[tier_id, self._widths[side]] = TilePool(part.shape[1], self._device)
            if not done:  # room for all of them, once
                slots = np.array(pool.take(len(places)))
            pool.write(slots[done : done + len(part)], part)
            done += len(part)
        make_page(tier_id, int(slots.max()))  # refuses what does not fit
        self._pages[side, places[:, 0], places[:, 1], places[:, 2]] = make_page(tier_id, 0) | slots
        self._changed()

    def pool_keys(self, side: int, tier_ids: NDArray[np.int64]) -> Counter[tuple[int, int]]:
        """In which pools, by tier and width, tiles of these tiers lie, and how many; both sides may share one."""
        tiers, counts = np.unique(tier_ids, return_counts=True)
        return Counter(
            {(int(tier), self._widths[side]): int(count) for tier, count in zip(tiers, counts, strict=True)}
        )

    def has_room(self, tiles: Mapping[tuple[int, int], int]) -> bool:
        """Whether pools hold so many tiles more without growing; a pool that is not there yet is not asked."""
        return all(self._pools[key].has_room(count) for key, count in tiles.items() if key in self._pools)

    def make_room(self, tiles: Mapping[tuple[int, int], int], rows: int, at_once: int) -> None:
        """Let pools grow until some times as many tiles of some rows fit, and at least so many of one row."""
        for key, count in tiles.items():
            if key in self._pools:
                self._pools[key].make_room(max(_TILES_AT_ONCE * count, math.ceil(count / rows) * at_once))

    def pages(self, side: int) -> Tensor:
        """``[B, H, T]`` int32 on the device, T the tiles of the longest row."""
        if self._device_pages is None:
            self._device_pages = upload(self._pages, self._device)
        longest = int(self.counts.max(initial=0))
        return self._device_pages[side, :, :, :longest]

    def host_pages(self, side: int, rows: slice | Sequence[int]) -> Pages:
        """:meth:`pages` of some rows on the host, a copy."""
        pages: Pages = self._pages[side, rows, :, : int(self.counts.max(initial=0))].copy()
        return pages

    def pools(self, side: int) -> dict[int, Tensor]:
        """Tier id -> records, for one side."""
        return {tier: pool.records for (tier, width), pool in self._pools.items() if width == self._widths[side]}

    def truncate(self, row: int, tiles: int) -> None:
        """Drop a row's tiles from ``tiles`` on."""
        self._pages[:, row, :, tiles:] = NO_PAGE
        self.counts[row] = tiles
        self._release()

    def select_rows(self, rows: NDArray[np.int64]) -> None:
        """Keep, reorder or repeat rows; records stay where they are."""
        self._pages = self._pages[:, rows].copy()
        self.counts = self.counts[rows].copy()
        self._release()

    def _release(self) -> None:
        self._changed()
        for (tier_id, width), pool in self._pools.items():
            sides = [side for side in (0, 1) if self._widths[side] == width]
            pages = torch.from_numpy(self._pages[sides])
            pool.keep_only(page_slots(pages[page_tiers(pages) == tier_id]).numpy())

    def state(self) -> dict[str, Tensor]:
        """Pages, counts and the used part of each pool."""
        pools = {f"pool.{tier}.{width}": pool.records[: pool.peak] for (tier, width), pool in self._pools.items()}
        return {"pages": torch.from_numpy(self._pages), "counts": torch.from_numpy(self.counts), **pools}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Inverse of :meth:`state`."""
        self._pages, self.counts = state["pages"].cpu().numpy().copy(), state["counts"].cpu().numpy().copy()
        for name, records in state.items():
            if name.startswith("pool."):
                tier, width = name.split(".")[1:]
                pool = self._pools[(int(tier), int(width))] = TilePool(records.shape[1], self._device)
                pool.take(len(records))
                pool.records[: len(records)] = records
        self._release()

    def tile_counts(self) -> dict[tuple[int, int], int]:
        """(tier id, width) -> tiles that rows see; a slot that two rows share counts twice."""
        counts: dict[tuple[int, int], int] = {}
        for side in (0, 1):
            tiers = page_tiers(torch.from_numpy(self._pages[side]))
            for tier_id in tiers[tiers >= 0].unique().tolist():
                key = (tier_id, self._widths[side])
                counts[key] = counts.get(key, 0) + int((tiers == tier_id).sum())
        return counts

    def nbytes(self) -> int:
        """Bytes of pools and page tables, spare capacity included."""
        return self._pages.nbytes + sum(pool.records.nbytes for pool in self._pools.values())
