"""The fused kernel in CUDA C++ (``decode_attention.cu``), compiled by NVRTC for what a call needs.

A kernel is made once for each combination of head dimension, group, dtype and tiers, in a second for a pair of tiers
(up to 20 for all pairs of five); it needs no compiler on the machine, only the two libraries that come with a CUDA
build of PyTorch. Launching allocates the output and reads nothing back, so a call that was made before can be captured
in a CUDA graph.

Between two flushes every decode step is the same call with other tensors, so what the checks of the first one found
stays with the tiles: ``repeat_attention_cuda`` only fills in addresses.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.decode_attention import cuda_plan
from subbyte_kernels.decode_attention.balance import MAX_SPLITS, cut_rows, union_of_blocks
from subbyte_kernels.decode_attention.cuda_config import CudaConfig, choose_config, choose_splits
from subbyte_kernels.decode_attention.cuda_plan import Plan, plan_of
from subbyte_kernels.decode_attention.reference import AttentionResult, AttentionTiles, ExactTokens


_HEAD_DIMS = (64, 128)
_MAX_GROUP = 16
_MIN_CAPABILITY = (8, 0)
_SOURCE = Path(__file__).with_name("decode_attention.cu")
_MAX_LAUNCHES = 64  # layouts that are remembered with the same tiles
_LARGE_TABLE = 256
_ENTRY_BYTES = 128  # what the copies of one table entry take in shared memory


def cuda_obstacle(
    query: Tensor, exact: ExactTokens, tiles: AttentionTiles | None, softcap: float | None, sink_logits: Tensor | None
) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone.

    Args:
        query: ``[B, HQ, Sq, D]``.
        exact: exact tokens.
        tiles: packed tokens, or None.
        softcap: cap of the scores, or None.
        sink_logits: sinks of the softmax, or None; any are possible.
    """
    del sink_logits
    if not query.is_cuda:
        return f"the tensors lie on {query.device}, not on a CUDA device"
    missing = nvrtc.obstacle(query.device.index)
    if missing is not None:
        return missing
    if nvrtc.capability(query.get_device()) < _MIN_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    if query.shape[2] != 1:
        return f"it takes one query token, not {query.shape[2]}"
    dim, group = query.shape[-1], query.shape[1] // exact.keys.shape[1]
    if dim not in _HEAD_DIMS or exact.values.shape[-1] != dim:
        return f"it takes head dimensions {_HEAD_DIMS} for keys and values alike, not {dim}/{exact.values.shape[-1]}"
    if group > _MAX_GROUP:
        return f"it takes at most {_MAX_GROUP} query heads for a KV head, not {group}"
    dtypes = {query.dtype, exact.keys.dtype, exact.values.dtype}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return f"it takes fp16 and bf16, not {query.dtype}"
    if softcap is not None:
        return "it has no softcap"
    plan = plan_of(tiles)
    if plan.obstacle is None and _fitting_config(plan, query, group, None) is None:
        return "the tables of so many tiers do not fit into shared memory"
    return plan.obstacle


@dataclass(frozen=True)
class _Variant:
    """What a kernel is compiled for.

    Attributes:
        device: CUDA device.
        head_dim: D.
        quads: groups of four queries.
        bf16: the model's dtype is bf16, else fp16.
        config: how a launch is cut.
        tiers: per side, for each tier its number, kind and the index of its table (-1 without one).
        pairs: places in ``tiers`` of the pairs that have a loop of their own.
        tables: entries and vector_dim of each table, the largest first.
    """

    device: int
    head_dim: int
    quads: int
    bf16: bool
    config: CudaConfig
    tiers: tuple[tuple[tuple[int, str, int], ...], ...]
    pairs: tuple[tuple[int, int], ...]
    tables: tuple[tuple[int, int], ...]

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; the kernel asserts the same number when it is compiled."""
        queries, warps = 4 * self.quads, self.config.warps
        sums = 2 * warps * queries * (self.head_dim * 4 + 8)
        large = sum(entries == _LARGE_TABLE for entries, _ in self.tables)  # two of them lie between each other
        others = sum(entries for entries, _ in self.tables if entries != _LARGE_TABLE)
        tables = (math.ceil(large / 2) * 2 * _LARGE_TABLE + others) * _ENTRY_BYTES
        return sums + queries * (self.head_dim * 2 + 8) + tables

    def defined(self) -> dict[str, object]:
        """What the kernel's text wants to know."""
        keys, values = ([(index, *tier) for index, tier in enumerate(side)] for side in self.tiers)
        sides = [
            " ".join(f"TIER({index}, {tier}, {kind})" for index, tier, kind, _ in side) for side in (keys, values)
        ]
        pairs = [", ".join(str(part) for part in (*keys[key], *values[value])) for key, value in self.pairs]
        return {
            "HEAD_DIM": self.head_dim,
            "QUADS": self.quads,
            "WARPS": self.config.warps,
            "BLOCKS": self.config.blocks_per_sm,
            "MODEL_BF16": int(self.bf16),
            "SHARED_BYTES": self.shared_bytes,
            "SHARED_BASE": nvrtc.RESERVED_SHARED_BYTES,
            "KEY_TIERS": sides[0],
            "VALUE_TIERS": sides[1],
            "PAIRS": " ".join(f"PAIR({pair})" for pair in pairs),
            "TABLES": " ".join(f"TABLE({index}, {size}, {dim})" for index, (size, dim) in enumerate(self.tables)),
        }


@lru_cache(maxsize=256)
def _kernel(variant: _Variant) -> nvrtc.Kernel:
    threads = 32 * variant.config.warps
    shared = variant.shared_bytes
    return nvrtc.Kernel(_SOURCE, "decode_attention", variant.defined(), variant.device, threads, shared, waits=True)


def _current_stream(device: int) -> int:
    """What ``torch.cuda.current_stream(device).cuda_stream`` is, without an object for it."""
    return torch._C._cuda_getCurrentRawStream(device)


# Calls on one stream follow each other, so they can share memory, and so can the calls that one graph captures; there
# the memory is the graph's, and zeroing it a part of the graph. It is never freed: a graph goes on writing there.


@cache
def _arrived(device: int, stream: int, capture: int, size: int) -> Tensor:
    """Counters of finished splits: zero between calls, because the last one puts them back."""
    del stream, capture
    return torch.zeros(size, dtype=torch.int32, device=f"cuda:{device}")


@cache
def _partial(device: int, stream: int, capture: int, size: int) -> Tensor:
    """Room for what the splits of a row hand to the last of them."""
    del stream, capture
    return torch.empty(size, dtype=torch.float32, device=f"cuda:{device}")


def _variant(plan: Plan, query: Tensor, group: int, config: CudaConfig) -> _Variant:
    return _Variant(
        device=query.device.index,
        head_dim=query.shape[-1],
        quads=_quads(group),
        bf16=query.dtype == torch.bfloat16,
        config=config,
        tiers=plan.tiers,
        pairs=plan.pairs,
        tables=plan.tables,
    )


def _quads(group: int) -> int:
    """Groups of four queries, a power of two."""
    return 1 << (math.ceil(group / 4) - 1).bit_length()


def _fitting_config(plan: Plan, query: Tensor, group: int, config: CudaConfig | None) -> _Variant | None:
    """The variant for the given or the tuned configuration, with fewer warps where the tables need the room."""
    device = query.device.index
    heads = query.shape[0] * query.shape[1] // group
    config = config or choose_config(device, heads, plan.count, plan.mixed)
    limit = nvrtc.device_limits(device)[1]
    for fewer in (config, CudaConfig(12, 1), CudaConfig(8, 1), CudaConfig(4, 1)):
        variant = _variant(plan, query, group, fewer)
        if fewer.warps <= config.warps and variant.shared_bytes <= limit:
            return variant
    return None


def decode_attention_cuda(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    splits: int | None = None,
    config: CudaConfig | None = None,
) -> AttentionResult:
    """Attention of one query token; arguments and result as in :func:`decode_attention_reference`.

    Args:
        query: ``[B, HQ, 1, D]`` fp16 or bf16.
        exact: tokens held exactly, with their mask.
        tiles: packed tokens, or None.
        scaling: factor of the scores.
        softcap: None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.
        splits: blocks for each row and KV head; chosen by size if None.
        config: how a launch is cut; tuned if None.

    Returns:
        Output ``[B, HQ, 1, D]`` in the query's dtype and log-sum-exp ``[B, HQ, 1]`` fp32; no entropy.

    Raises:
        ValueError: the kernel cannot compute this call; says why.
        BuildError: the kernel cannot be built here.
    """
    made = repeat_attention_cuda(query, exact, tiles, scaling, softcap, sink_logits, splits, config)
    if made is not None:
        return made
    obstacle = cuda_obstacle(query, exact, tiles, softcap, sink_logits)
    if obstacle is not None:
        raise ValueError(f"the cuda kernel cannot compute this attention: {obstacle}")
    if splits is not None and not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"splits={splits} is not possible: from 1 to {MAX_SPLITS}")
    plan = plan_of(tiles)
    query, exact = _aligned(query, exact)
    launch = _Launch(plan, query, exact, scaling, splits, config)
    if len(plan.launches) >= _MAX_LAUNCHES:
        plan.launches.clear()
    plan.launches[_layout(query, exact, scaling, splits, config)] = launch
    return launch(query, exact, sink_logits)


def repeat_attention_cuda(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    splits: int | None = None,
    config: CudaConfig | None = None,
) -> AttentionResult | None:
    """The same as :func:`decode_attention_cuda` without any check, or None where it has not made this call before.

    The same call has the same tiles, the same layout of all tensors and the same numbers.
    """
    plan = cuda_plan.NO_TILES if tiles is None else cuda_plan.plans.get(tiles)
    if plan is None or not plan.launches or softcap is not None:
        return None
    launch = plan.launches.get(_layout(query, exact, scaling, splits, config))
    return None if launch is None else launch(query, exact, sink_logits)


_Layout = tuple[Any, ...]


def _layout(
    query: Tensor, exact: ExactTokens, scaling: float, splits: int | None, config: CudaConfig | None
) -> _Layout:
    """All that the checks and the parameters of a call depend on, next to its tiles and addresses."""
    keys, values, visible = exact.keys, exact.values, exact.visible
    devices_and_dtypes = (query.get_device(), query.dtype, keys.dtype, values.dtype, visible.dtype)
    places = (query.data_ptr() & 3, keys.data_ptr() & 15, values.data_ptr() & 15)
    shapes = (query.shape, keys.shape, values.shape)
    strides = (query.stride(), keys.stride(), values.stride(), visible.stride())
    return devices_and_dtypes, places, shapes, strides, scaling, splits, config


def _aligned(query: Tensor, exact: ExactTokens) -> tuple[Tensor, ExactTokens]:
    """The same tensors as the kernel can read them, copied where they lie otherwise.

    The last axis must be dense; keys and values must lie alike and start at multiples of 16 bytes, queries of 4.
    """
    keys, values = exact.keys, exact.values
    if query.stride(-1) != 1 or not _is_multiple(query, 4):
        query = query.clone(memory_format=torch.contiguous_format)
    if (
        keys.stride(-1) != 1
        or keys.stride() != values.stride()
        or not (_is_multiple(keys, 16) and _is_multiple(values, 16))
    ):
        keys, values = (states.clone(memory_format=torch.contiguous_format) for states in (keys, values))
    visible = exact.visible if exact.visible.stride(-1) == 1 else exact.visible.contiguous()
    return query, ExactTokens(keys, values, visible)


def _is_multiple(states: Tensor, unit: int) -> bool:
    """Whether every vector of a tensor starts at a multiple of ``unit`` bytes."""
    return not any(place % unit for place in (states.data_ptr(), *(2 * stride for stride in states.stride()[:-1])))


def list_blocks(plan: Plan, costs: NDArray[np.float64], variant: _Variant, heads: int) -> NDArray[np.int32]:
    """``[blocks, 8]``: what each block of a launch does, as the kernel reads it; the longest blocks first."""
    slots = nvrtc.device_limits(variant.device)[0] * variant.config.blocks_per_sm
    made = cut_rows(costs, heads, slots, variant.config.warps)
    return np.column_stack((made, union_of_blocks(made, plan.tables_of_tiles(), heads)))


class _Launch:
    """A call that passed the checks, for any tensors of its layout."""

    def __init__(
        self,
        plan: Plan,
        query: Tensor,
        exact: ExactTokens,
        scaling: float,
        splits: int | None,
        config: CudaConfig | None,
    ) -> None:
        batch, query_heads, _, dim = query.shape
        heads = exact.keys.shape[1]
        group, pairs = query_heads // heads, batch * heads
        variant = _fitting_config(plan, query, group, config)
        if variant is None:
            raise ValueError("the tables of so many tiers do not fit into shared memory with this configuration")
        self._device = variant.device
        work, blocks, splits, self._grid = self._cut(plan, variant, (batch, heads), splits)
        self._kernel = _kernel(variant)
        self._output_shape = (batch, query_heads, 1, dim)
        queries = 4 * variant.quads
        self._counters, self._rows, self._dim = pairs * queries, blocks * queries, dim
        pages, (mean, key_signs, value_signs) = plan.pointers[:2], plan.pointers[2:]
        counts = (heads, group, exact.keys.shape[2], plan.count, splits)
        # all but addresses of the call's own tensors, in the order of the kernel's `Params`
        self._front = struct.pack("<Q5if4Q", work, *counts, scaling, *pages, *plan.strides)
        self._queries = struct.pack("<4Q", *query.stride()[:2], mean, key_signs)
        self._exact = struct.pack("<5Q", *exact.keys.stride()[:3], exact.visible.stride(0), value_signs)
        self._end = struct.pack(f"<{len(plan.ends)}Q", *plan.ends)
        self._params = struct.Struct(f"<{len(self._front)}sQ32s3Q40s3Q24s{len(self._end)}s")
        self._shared: dict[int, bytes] = {}  # stream -> addresses of what its calls share
        self._captured: dict[tuple[int, int], bytes] = {}  # the same for a stream that captures a graph
        self._held: list[tuple[Tensor, ...]] = []  # what these addresses point into

    def _cut(
        self, plan: Plan, variant: _Variant, pairs: tuple[int, int], splits: int | None
    ) -> tuple[int, int, int, tuple[int, int, int]]:
        """Cut rows and heads into blocks.

        Returns:
            Address of a list of blocks where units cost differently, else 0; blocks; splits; grid.
        """
        batch, heads = pairs
        multiprocessors = nvrtc.device_limits(variant.device)[0]
        costs = None if splits else plan.unit_costs()
        if costs is not None:
            work = list_blocks(plan, costs, variant, heads)
            return plan.upload(work), len(work), 1, (len(work), 1, 1)
        splits = splits or choose_splits(batch * heads, plan.count, variant.config, multiprocessors)
        return 0, batch * heads * splits, splits, (splits, heads, batch)

    def _share(self, stream: int) -> bytes:
        """Addresses of what the calls of a stream share, or of those that one CUDA graph captures on it."""
        capture = nvrtc.capture_id(stream)
        shared = self._captured.get((stream, capture))
        if shared is None:
            size = self._rows * (self._dim // 2 + 4)  # fp16 sums, then four numbers for each
            held = (
                _partial(self._device, stream, capture, 1 << size.bit_length()),
                _arrived(self._device, stream, capture, 1 << self._counters.bit_length()),
            )
            self._held.append(held)
            partial, arrived = (tensor.data_ptr() for tensor in held)
            shared = struct.pack("<3Q", partial, partial + 2 * self._rows * self._dim, arrived)
            self._captured[stream, capture] = shared
        if not capture:
            self._shared[stream] = shared
        return shared

    def __call__(self, query: Tensor, exact: ExactTokens, sink_logits: Tensor | None) -> AttentionResult:
        device = query.device
        sinks = None if sink_logits is None else sink_logits.float().contiguous()
        output = torch.empty(self._output_shape, dtype=query.dtype, device=device)
        lse = torch.empty(self._output_shape[:3], dtype=torch.float32, device=device)
        stream = _current_stream(self._device)
        shared = None if torch.cuda.is_current_stream_capturing() else self._shared.get(stream)
        if shared is None:
            shared = self._share(stream)
        params = self._params.pack(
            self._front,
            query.data_ptr(),
            self._queries,
            exact.keys.data_ptr(),
            exact.values.data_ptr(),
            exact.visible.data_ptr(),
            self._exact,
            0 if sinks is None else sinks.data_ptr(),
            output.data_ptr(),
            lse.data_ptr(),
            shared,
            self._end,
        )
        self._kernel.launch(self._grid, params, stream)
        return AttentionResult(output, lse, None)
