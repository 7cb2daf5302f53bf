"""Decode attention whose launch stays the same while tiles are added: what a CUDA graph captures once and replays.

The CUDA kernel's parameters name pages and a list of blocks by address. Here both lie in buffers with room to spare,
which :meth:`SteadyAttention.refit` fills anew after a flush, so that a captured launch computes attention over the new
tiles. The grid is as large as a list of blocks can get; blocks beyond the list's end return at once.

Gives up: a pool that moved, a new tier or full buffers need another capture, and so does every flush where another
implementation than the CUDA kernel computes the attention.
"""

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.decode_attention import cuda_plan
from subbyte_kernels.decode_attention.balance import cut_rows, extend_blocks, union_of_blocks
from subbyte_kernels.decode_attention.cuda_kernel import (
    _aligned,
    _Launch,
    _layout,
    _Variant,
    cuda_obstacle,
)
from subbyte_kernels.decode_attention.cuda_plan import Plan
from subbyte_kernels.decode_attention.reference import AttentionResult, AttentionTiles, ExactTokens
from subbyte_kernels.decode_attention.select import decode_attention
from subbyte_kernels.formats import NO_PAGE
from subbyte_kernels.nvrtc import BuildError


SPARE_TILES = 32  # at least so many tiles of a row can be added before the buffers are full
_MOST_WAVES = 3  # of blocks that a list has
_GROWTH = 1 + 1 / 16  # rows that grew by no more keep their blocks: cutting takes milliseconds


def tiles_ahead(tiles: int) -> int:
    """Tiles of a row that pages (and pools) should have room for beyond so many."""
    return max(SPARE_TILES, tiles // 16)


@dataclass
class Scratch:
    """Memory that all launches of a graph share: they follow each other on one stream."""

    _held: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def take(self, kind: str, size: int, dtype: torch.dtype, device: int) -> Tensor:
        """Zeros; the same tensor for the same request, and never freed while the scratch is there."""
        key = (kind, size, dtype, device)
        if key not in self._held:
            with torch.inference_mode(False):  # it outlives the call
                self._held[key] = torch.zeros(size, dtype=dtype, device=f"cuda:{device}")
        return self._held[key]


class _SteadyPlan(Plan):
    """A plan whose pages lie in a buffer of its owner."""

    def __init__(self, tiles: AttentionTiles | None, buffer: Tensor | None) -> None:
        self._buffer = buffer
        super().__init__(tiles)

    def _sorted_pages(self, keys: Any, values: Any) -> list[Tensor]:
        """Pages of both sides in the buffer, which is made where there is none or it is full."""
        host = [cuda_plan._host_pages(side) for side in (keys, values)]
        self.mixed = len(keys.pools) > 1 or len(values.pools) > 1
        if self.mixed:
            host = cuda_plan.sort_by_pair(*host)
            self._tiers_of_tiles = [side >> cuda_plan._SLOT_BITS for side in host]
        rows, heads, tiles = host[0].shape
        if self._buffer is None or self._buffer.shape[-1] < tiles:
            shape = (2, rows, heads, tiles + tiles_ahead(tiles))
            with torch.inference_mode(False):
                self._buffer = torch.empty(shape, dtype=torch.int32, device=keys.pages.device)
        padded = np.full(tuple(self._buffer.shape), NO_PAGE, dtype=np.int32)
        padded[..., :tiles] = np.stack(host)
        self._buffer.copy_(torch.from_numpy(padded), non_blocking=True)
        return [self._buffer[0], self._buffer[1]]

    @property
    def buffer(self) -> Tensor | None:
        """Where the pages lie."""
        return self._buffer

    def unit_costs(self) -> NDArray[np.float64] | None:
        """As :meth:`Plan.unit_costs`, and ones where rows are alike: a list of blocks can always follow the tiles."""
        if self.obstacle is not None or not self.count:
            return None
        costs = super().unit_costs()
        if costs is not None:
            return costs
        held = (self._tiers_of_tiles[0] >= 0).astype(np.float64)
        return np.repeat(held.reshape(-1, held.shape[-1]), 2, axis=1)

    def fixed(self) -> tuple[Any, ...]:
        """Everything that a captured launch took from the plan and cannot take again."""
        return (
            self.obstacle,
            self.tiers,
            self.pairs,
            self.tables,
            self.pointers,
            self.strides,
            self.ends,
            self.count > 0,
        )


class _SteadyLaunch(_Launch):
    """A launch for any tiles of the same plan."""

    def __init__(self, plan: _SteadyPlan, query: Tensor, exact: ExactTokens, scaling: float, scratch: Scratch) -> None:
        self.plan = plan
        self.layout = _layout(query, exact, scaling, None, None)
        self._scratch = scratch
        self._work: Tensor | None = None
        self._blocks: NDArray[np.int32] | None = None  # as they were cut last
        self._units: NDArray[np.int64] = np.zeros(0, dtype=np.int64)  # of each row and head at that time
        super().__init__(plan, query, exact, scaling, None, None)

    def _cut(
        self, plan: Plan, variant: _Variant, pairs: tuple[int, int], splits: int | None
    ) -> tuple[int, int, int, tuple[int, int, int]]:
        self._variant, self._heads = variant, pairs[1]
        costs = plan.unit_costs()
        if costs is None:
            return super()._cut(plan, variant, pairs, 1)
        slots = nvrtc.device_limits(variant.device)[0] * variant.config.blocks_per_sm
        count = pairs[0] * pairs[1]
        blocks = max(count, slots if 2 * count <= slots else _MOST_WAVES * slots)
        with torch.inference_mode(False):
            self._work = torch.empty(blocks, 8, dtype=torch.int32, device=f"cuda:{variant.device}")
        self._list(plan, costs)
        return self._work.data_ptr(), blocks, 1, (blocks, 1, 1)

    def _list(self, plan: Plan, costs: NDArray[np.float64]) -> None:
        assert self._work is not None
        units = (costs > 0).sum(1)
        made, cut = self._blocks, self._units
        if made is not None and ((cut <= units) & (units <= cut * _GROWTH)).all():
            made = extend_blocks(made, units, self._heads)
        else:
            slots = nvrtc.device_limits(self._variant.device)[0] * self._variant.config.blocks_per_sm
            made = self._blocks = cut_rows(costs, self._heads, slots, self._variant.config.warps)
            self._units = units
        padded = np.full(tuple(self._work.shape), -1, dtype=np.int32)
        padded[: len(made), :7] = made
        padded[: len(made), 7] = union_of_blocks(made, plan.tables_of_tiles(), self._heads)
        self._work.copy_(torch.from_numpy(padded), non_blocking=True)

    def _share(self, stream: int) -> bytes:
        del stream
        room = self._scratch.take("partial", self._rows * (self._dim // 2 + 4), torch.float32, self._device)
        arrived = self._scratch.take("arrived", self._counters, torch.int32, self._device).data_ptr()
        partial = room.data_ptr()
        return struct.pack("<3Q", partial, partial + 2 * self._rows * self._dim, arrived)

    def refit(self, tiles: AttentionTiles | None) -> bool:
        """Follow the tiles; False if the launch cannot."""
        fresh = _SteadyPlan(tiles, self.plan.buffer)
        if fresh.fixed() != self.plan.fixed():
            return False
        self.plan = fresh
        costs = fresh.unit_costs()
        if costs is not None:
            self._list(fresh, costs)
        return True


class SteadyAttention:
    """Decode attention of one layer; called like :func:`decode_attention`.

    Calls may be captured once a first one has built what they need.
    """

    def __init__(self, scratch: Scratch) -> None:
        """``scratch``: shared with calls of the same graph."""
        self._scratch = scratch
        self._launch: _SteadyLaunch | None = None

    def __call__(
        self,
        query: Tensor,
        exact: ExactTokens,
        tiles: AttentionTiles | None,
        scaling: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
        backend: str = "auto",
    ) -> AttentionResult:
        """See :func:`decode_attention`."""
        if backend in ("auto", "cuda") and query.is_cuda and softcap is None:
            launch = self._launch_for(query, exact, tiles, scaling, sink_logits)
            if launch is not None:
                return launch(*_aligned(query, exact), sink_logits)
        return decode_attention(query, exact, tiles, scaling, softcap, sink_logits, backend)

    def _launch_for(
        self,
        query: Tensor,
        exact: ExactTokens,
        tiles: AttentionTiles | None,
        scaling: float,
        sink_logits: Tensor | None,
    ) -> _SteadyLaunch | None:
        launch, layout = self._launch, _layout(*_aligned(query, exact), scaling, None, None)
        if launch is not None and launch.layout == layout:
            return launch
        if cuda_obstacle(query, exact, tiles, None, sink_logits) is not None:
            return None
        try:
            aligned = _aligned(query, exact)
            self._launch = _SteadyLaunch(_SteadyPlan(tiles, None), *aligned, scaling, self._scratch)
        except BuildError:
            return None  # the selection says what computes the call instead
        return self._launch

    def refit(self, tiles: AttentionTiles | None) -> bool:
        """Follow a flush.

        Args:
            tiles: the layer's packed tiles now.

        Returns:
            Whether launches that were captured before compute attention over these tiles; if not, capture again.
        """
        if self._launch is not None and self._launch.refit(tiles):
            return True
        self._launch = None
        return False
