"""What the CUDA kernel wants to know about packed tiles. They stay the same between two flushes, so once is enough."""

from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subbyte_kernels.decode_attention.balance import SIDE_COSTS, same_cost
from subbyte_kernels.decode_attention.reference import AttentionTiles
from subbyte_kernels.formats import NO_PAGE, PackedTiles, kernel_kind
from subbyte_kernels.lanes import Order


_SLOT_BITS = 24
_EVEN = 1.25  # longest row against the mean: up to here one cut for all rows wastes little
_LAST = np.iinfo(np.int16).max


class Plan:
    """Packed tiles as the kernel reads them.

    A softmax does not care for the order of its tokens, so where tiers differ, the tiles of each row and head are
    sorted by their pair of tiers: what a block computes then has one pair or few.

    Attributes:
        obstacle: why the kernel cannot read them, or None.
        tiers: per side, for each tier that its pages name its number, kind and index of its table (-1 without one).
        pairs: places in ``tiers`` of the pairs that tiles have: a loop each, and those of other pairs are no code.
        tables: entries and vector_dim of each table, the largest first.
        pointers: addresses of pages, mean and signs.
        strides: of the pages.
        ends: the end of the kernel's parameters: pools of both sides, tables and their strides.
        count: tiles of the longest row.
        mixed: tiles differ in their tiers.
        launches: layout of a call that was checked -> how to repeat it.
    """

    def __init__(self, tiles: AttentionTiles | None) -> None:
        self.launches: dict[Any, Any] = {}
        self.obstacle: str | None = None
        self.tiers: tuple[tuple[tuple[int, str, int], ...], ...] = ((), ())
        self.pairs: tuple[tuple[int, int], ...] = ()
        self.tables: tuple[tuple[int, int], ...] = ()
        self.pointers = [0] * 5
        self.strides = [0, 0]
        self.ends = [0] * 5
        self.count = 0 if tiles is None else tiles.values.pages.shape[-1]
        self.mixed = False
        self._held: list[Tensor | None] = []  # what the addresses point into
        if tiles is None or not self.count:
            return
        if len(tiles.keys) != 1 or tiles.values.mean is not None:
            self.obstacle = "it takes one part of keys, and values without a mean"
            return
        self._shape = tiles.values.pages.shape
        self._sides = tuple(_used(side) for side in (tiles.keys[0], tiles.values))
        self.obstacle = _side_obstacle(self._sides[0], Order.KEYS) or _side_obstacle(self._sides[1], Order.VALUES)
        if self.obstacle is None:
            self._read(*self._sides)

    def _read(self, keys: PackedTiles, values: PackedTiles) -> None:
        pages = self._sorted_pages(keys, values)
        mean = None if keys.mean is None else keys.mean.contiguous()
        self._held = [*pages, mean, keys.signs, values.signs]
        self.pointers = [0 if tensor is None else tensor.data_ptr() for tensor in self._held]
        self.strides = list(pages[0].stride()[:2])
        found: dict[tuple[int, int, int], tuple[int, int]] = {}
        for side in (keys, values):
            for tier in side.pools:
                if tier in side.tables:
                    entries, vector_dim = side.tables[tier].shape[2:]
                    found[_identity(side.tables[tier])] = (entries, vector_dim)
        identities = sorted(found, key=lambda identity: -found[identity][0])
        self.tables = tuple(found[identity] for identity in identities)
        tiers = []
        for side in (keys, values):
            places = {
                tier: identities.index(_identity(table)) for tier, table in side.tables.items() if tier in side.pools
            }
            kinds = ((tier, kernel_kind(side.formats[tier]) or "", places.get(tier, -1)) for tier in side.pools)
            tiers.append(tuple(kinds))
        self.tiers = tuple(tiers)
        self.pairs = self._used_pairs()
        pools = [[pool.data_ptr() for pool in side.pools.values()] for side in (keys, values)]
        fields = [*pools, *([identity[part] for identity in identities] for part in range(3))]
        self.ends = [value for field in fields for value in field or [0]]
        self._held += [tensor for side in (keys, values) for tensor in (*side.pools.values(), *side.tables.values())]

    def _used_pairs(self) -> tuple[tuple[int, int], ...]:
        places = [{tier: place for place, (tier, _, _) in enumerate(side)} for side in self.tiers]
        if min(map(len, places)) == 0 or max(map(len, places)) == 1:  # one pair, whatever the pages say
            return tuple((key, value) for key in places[0].values() for value in places[1].values())
        keys, values = self._tiers_of_tiles
        found = np.unique((keys.astype(np.int32) << 7 | values)[keys >= 0]).tolist()
        return tuple((places[0][pair >> 7], places[1][pair & 127]) for pair in found)

    def _sorted_pages(self, keys: PackedTiles, values: PackedTiles) -> list[Tensor]:
        """Pages of both sides, laid out alike; sorted by pairs of tiers where there are several."""
        pages = [keys.pages, values.pages]
        if len(keys.pools) > 1 or len(values.pools) > 1:
            self.mixed = True
            host = sort_by_pair(_host_pages(keys), _host_pages(values))
            self._tiers_of_tiles = [side >> _SLOT_BITS for side in host]
            return [torch.from_numpy(side).to(keys.pages.device, non_blocking=True) for side in host]
        if pages[0].stride() != pages[1].stride() or pages[0].stride(-1) != 1:
            return [side.contiguous() for side in pages]
        return pages

    def upload(self, values: NDArray[np.int32]) -> int:
        """Copy to the tiles' device, for as long as the tiles are there; the address."""
        device = self._sides[1].pages.device
        copy = torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)
        self._held.append(copy)
        return copy.data_ptr()

    def unit_costs(self) -> NDArray[np.float64] | None:
        """``[B * H, units]`` cost of each unit of 64 tokens, zero where there is none; None where rows are alike."""
        if self.obstacle is not None or not self.count:
            return None
        costs: NDArray[np.float64] = np.zeros(1)
        for named, tiers in zip(self._tiers_of_tiles, self.tiers, strict=True):
            by_tier = np.zeros(129)
            for tier, kind, _ in tiers:
                by_tier[tier] = SIDE_COSTS[kind]
            costs = costs + by_tier[named]  # tier -1 is the last place: no page, no cost
        lengths = (costs > 0).sum(-1)
        if same_cost(costs) and not self.mixed and lengths.max() <= _EVEN * lengths.mean():
            return None
        return np.repeat(costs.reshape(-1, costs.shape[-1]), 2, axis=1)

    def tables_of_tiles(self) -> NDArray[np.int32]:
        """``[B * H, T]``: for each tile the tables that decoding it needs, a bit for each."""
        wanted = np.zeros(self._shape, dtype=np.int32)
        for named, tiers in zip(self._tiers_of_tiles, self.tiers, strict=True):
            by_tier = np.zeros(129, dtype=np.int32)
            for tier, _, table in tiers:
                by_tier[tier] = 1 << table if table >= 0 else 0
            wanted |= by_tier[named]
        return wanted.reshape(-1, wanted.shape[-1])

    @cached_property
    def _tiers_of_tiles(self) -> list[NDArray[np.int32]]:
        """``[B, H, T]`` tier of each tile in the order of the kernel's pages, for both sides; -1 without a tile."""
        return [_host_pages(side) >> _SLOT_BITS for side in self._sides]


def sort_by_pair(keys: NDArray[np.int32], values: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Pages ``[B, H, T]`` of both sides with tiles of the same pair of tiers together, those without a page last."""
    pair = np.where(keys == NO_PAGE, _LAST, keys >> _SLOT_BITS << 7 | values >> _SLOT_BITS).astype(np.int16)
    order = np.argsort(pair, axis=-1, kind="stable")
    return [np.take_along_axis(side, order, axis=-1) for side in (keys, values)]


def _host_pages(side: PackedTiles) -> NDArray[np.int32]:
    """The pages on the host; read back if nobody has them there."""
    return side.pages.cpu().numpy() if side.host_pages is None else side.host_pages


def _used(side: PackedTiles) -> PackedTiles:
    """A side with the pools of those tiers alone that its pages name, in order: fewer and smaller kernels."""
    named = sorted(side.pools)
    if len(named) > 1:
        side = replace(side, host_pages=_host_pages(side))
        named = [tier for tier in np.unique(_host_pages(side) >> _SLOT_BITS).tolist() if tier >= 0]
    return replace(
        side,
        pools={tier: side.pools[tier] for tier in named},
        formats={tier: side.formats[tier] for tier in named},
        tables={tier: table for tier, table in side.tables.items() if tier in named},
    )


def _side_obstacle(side: PackedTiles, order: Order) -> str | None:
    for fmt in side.formats.values():
        if kernel_kind(fmt) is None:
            return f"it has no path for tier {fmt.name!r}"
    for tier, table in side.tables.items():
        if tier in side.pools and table.dtype != torch.float16:
            return f"the table of tier {side.formats[tier].name!r} is not fp16"
    if side.signs is None or side.order is not order:
        return "the tiles were packed for another kernel"
    return None


def _identity(table: Tensor) -> tuple[int, int, int]:
    """Address and strides of a row's and a head's table; zero where all share one."""
    return table.data_ptr(), table.stride(0) * (table.shape[0] > 1), table.stride(1) * (table.shape[1] > 1)


NO_TILES = Plan(None)
plans: WeakKeyDictionary[AttentionTiles, Plan] = WeakKeyDictionary()


def plan_of(tiles: AttentionTiles | None) -> Plan:
    """The plan of these tiles, made when they are seen first."""
    if tiles is None:
        return NO_TILES
    plan = plans.get(tiles)
    if plan is None:
        plan = plans[tiles] = Plan(tiles)
    return plan
