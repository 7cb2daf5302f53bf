"""Packing in CUDA C++ (``pack_tiles.cu``): one launch for any number of tiles of one tier."""

import struct
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.formats import TILE_TOKENS, Encoding, TileFormat, kernel_kind
from subbyte_kernels.lanes import Order


_MAX_HEAD_DIM = 256
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_SOURCE = Path(__file__).with_name("pack_tiles.cu")
Places = tuple[Tensor, Tensor]  # heads and tiles, [M] int64 each
_UNPACK_SOURCE = Path(__file__).with_name("unpack_tiles.cu")
_MIN_CAPABILITY = {Encoding.FLOAT8: (8, 9)}  # the conversion to E4M3
_LOOKUP_POINTS = 1 << 16  # of the lattice that 2-D codes are looked up on
_LOOKUP_THREADS = 256
_TEAM = 8  # warps that share a unit of 64 tokens where there are few units
_FEW_UNITS = 4  # for each multiprocessor


def pack_obstacle(states: Tensor, fmt: TileFormat, signs: Tensor | None) -> str | None:
    """Why the kernel cannot pack these tiles, or None; looks at shapes alone.

    Args:
        states: ``[M, 128, D]``.
        fmt: the layout.
        signs: of the rotation, None for one that is not Hadamard blocks behind signs.
    """
    return _obstacle(states.device, states.shape[-1], states.dtype, fmt, signs)


def unpack_obstacle(records: Tensor, fmt: TileFormat, dtype: torch.dtype, signs: Tensor | None) -> str | None:
    """Why the kernel cannot unpack records ``[M, record_words]`` to ``dtype``, or None."""
    return _obstacle(records.device, 0 if signs is None else len(signs), dtype, fmt, signs)


def _obstacle(
    device: torch.device, head_dim: int, dtype: torch.dtype, fmt: TileFormat, signs: Tensor | None
) -> str | None:
    if device.type != "cuda":
        return f"the tensors lie on {device}, not on a CUDA device"
    missing = nvrtc.obstacle(device.index)
    if missing is not None:
        return missing
    least = _MIN_CAPABILITY.get(fmt.encoding, (8, 0))
    if nvrtc.capability(device.index) < least:
        return f"the GPU is older than compute capability {least[0]}.{least[1]}"
    if not packs_head_dim(head_dim):
        return f"it packs head dimensions 64, 128, 256 and other multiples of 16, not {head_dim}"
    if dtype not in _DTYPES:
        return f"it packs fp32, fp16 and bf16, not {dtype}"
    if signs is None:
        return "the rotation is not known to be Hadamard blocks behind signs"
    return None if kernel_kind(fmt) else f"it has no path for tier {fmt.name!r}"


def packs_head_dim(dim: int) -> bool:
    """Whether lanes can divide a token: powers of two from 64 on, or multiples of 16 that lie token by token."""
    return dim <= _MAX_HEAD_DIM and dim % 16 == 0 and (dim % 64 != 0 or dim & (dim - 1) == 0)


def _warps(head_dim: int, dtype: torch.dtype) -> int:
    """Warps of a block: fewer where a lane needs more than 128 registers."""
    return 8 if head_dim == _MAX_HEAD_DIM or dtype == torch.float32 else 16


def defined_for(head_dim: int, fmt: TileFormat, order: Order, dtype: torch.dtype, mean: bool) -> dict[str, object]:
    """What the kernel's text wants to know."""
    return {
        "ANY_HEAD_DIM": 1,
        "HEAD_DIM": head_dim,
        "KIND": kernel_kind(fmt),
        "ENTRIES": fmt.entries,
        "ORDER_KEYS": int(order is Order.KEYS),
        "DTYPE": _DTYPES[dtype],
        "MEAN": int(mean),
        "WARPS": _warps(head_dim, dtype),
        "TEAM": 1,
    }


def _shared_bytes(head_dim: int, fmt: TileFormat, warps: int, team: int) -> int:
    """Shared memory of a block: tables, each unit's codes and scales, and each warp's rows for the tensor cores."""
    tables = {1: 0, 2: _LOOKUP_POINTS, 4: 16 * fmt.entries}[fmt.vector_dim] + 4 * fmt.entries
    own = 16 if head_dim % 64 else head_dim // 4
    rows = 32 * (own // 4) * 16 if fmt.vector_dim == 4 else 0
    return tables + warps // team * (64 * head_dim // fmt.vector_dim + 128) + warps * rows


@lru_cache(maxsize=128)
def _kernel(
    device: int, head_dim: int, fmt: TileFormat, order: Order, dtype: torch.dtype, mean: bool, few: bool
) -> tuple[nvrtc.Kernel, int, int]:
    """The kernel, its blocks that are launched at most, and units that a block works on; ``few`` units in all."""
    warps, team = (_TEAM, _TEAM) if few else (_warps(head_dim, dtype), 1)
    defined = {**defined_for(head_dim, fmt, order, dtype, mean), "WARPS": warps, "TEAM": team}
    shared = _shared_bytes(head_dim, fmt, warps, team)
    kernel = nvrtc.Kernel(_SOURCE, "pack_tiles", defined, device, 32 * warps, shared)
    return kernel, (_FEW_UNITS if few else 1) * nvrtc.device_limits(device)[0], warps // team


@lru_cache(maxsize=128)
def _unpack_kernel(
    device: int, head_dim: int, fmt: TileFormat, order: Order, dtype: torch.dtype, mean: bool
) -> tuple[nvrtc.Kernel, int, int]:
    """As :func:`_kernel`."""
    defined = defined_for(head_dim, fmt, order, dtype, mean)
    warps = _warps(head_dim, dtype)
    shared = 4 * fmt.entries * fmt.vector_dim + warps * 64 * head_dim // fmt.vector_dim
    kernel = nvrtc.Kernel(_UNPACK_SOURCE, "unpack_tiles", defined, device, 32 * warps, shared)
    return kernel, nvrtc.device_limits(device)[0], warps


@lru_cache(maxsize=8)
def _lookup_kernel(device: int, fmt: TileFormat) -> nvrtc.Kernel:
    defined = defined_for(64, fmt, Order.KEYS, torch.bfloat16, mean=False)
    return nvrtc.Kernel(_SOURCE, "pack_lookup", defined, device, _LOOKUP_THREADS, 16 * fmt.entries)


def _lookup(table: Tensor, fmt: TileFormat, stream: int) -> Tensor:
    """``[65536]`` uint8: the code of every point of the lattice."""
    lookup = torch.empty(_LOOKUP_POINTS, dtype=torch.uint8, device=table.device)
    params = struct.pack("<2Q", table.data_ptr(), lookup.data_ptr())
    blocks = _LOOKUP_POINTS // _LOOKUP_THREADS
    _lookup_kernel(table.device.index, fmt).launch((blocks, 1, 1), params, stream)
    return lookup


def placed(states: Tensor, places: Places | None) -> tuple[Tensor, Tensor | None]:
    """Tiles as kernels read them: a tensor, and where each tile begins in it; None where they follow each other."""
    if places is None:
        return states.contiguous(), None
    strides = states.stride()
    width = 16 // states.element_size()  # of a load
    if strides[2:] != (states.shape[-1], 1) or any(stride % width for stride in strides[:2]) or states.data_ptr() % 16:
        return states[places].contiguous(), None
    return states, places[0] * strides[0] + places[1] * strides[1]


def pack_tiles_cuda(
    states: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    mean: Tensor | None,
    order: Order,
    signs: Tensor,
    places: Places | None = None,
) -> Tensor:
    """Quantize whole tiles and pack their codes; bit by bit what :func:`pack_tiles_reference` gives with ``signs``.

    Args:
        states: ``[M, 128, D]`` fp16, bf16 or fp32, finite; ``[H, n, 128, D]`` with ``places``.
        fmt: the layout.
        table: ``[entries, vector_dim]`` fp32, or None without a table.
        mean: ``[M, D]`` fp32 to remove first, or None.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of the rotation.
        places: ``[M]`` head and tile of each tile that is packed; it is read where it lies.

    Returns:
        ``[M, record_words]`` int32.
    """
    states, begins = placed(states, places)
    tiles, dim = len(states if begins is None else begins), states.shape[-1]
    records = torch.empty(tiles, fmt.record_words(dim), dtype=torch.int32, device=states.device)
    table = None if table is None else table.float().contiguous()
    mean = None if mean is None else mean.float().contiguous()
    assert states.shape[-2] == TILE_TOKENS
    stream = torch.cuda.current_stream(states.device).cuda_stream
    lookup = None
    if table is not None and fmt.vector_dim == 2:
        lookup = _lookup(table, fmt, stream)
    pointers = (states, begins, mean, signs, table, lookup, records)
    units = 2 * tiles
    params = struct.pack("<8Q", *(0 if tensor is None else tensor.data_ptr() for tensor in pointers), units)
    device = states.device.index
    few = units <= _FEW_UNITS * nvrtc.device_limits(device)[0]
    kernel, most, together = _kernel(device, dim, fmt, order, states.dtype, mean is not None, few)
    kernel.launch((min(most, -(-units // together)), 1, 1), params, stream)
    return records


def unpack_tiles_cuda(
    records: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    mean: Tensor | None,
    dtype: torch.dtype,
    order: Order,
    signs: Tensor,
) -> Tensor:
    """Records -> states; bit by bit what :func:`unpack_tiles_reference` gives with ``signs``.

    Args:
        records: ``[M, record_words]`` int32.
        fmt: the layout.
        table: ``[entries, vector_dim]`` fp32, or None without a table.
        mean: ``[M, D]`` fp32 that was removed, or None.
        dtype: of the result.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of the rotation.

    Returns:
        ``[M, 128, D]`` in ``dtype``.
    """
    records = records.contiguous()
    tiles, dim = len(records), len(signs)
    states = torch.empty(tiles, TILE_TOKENS, dim, dtype=dtype, device=records.device)
    table = None if table is None else table.float().contiguous()
    mean = None if mean is None else mean.float().contiguous()
    pointers = (records, mean, signs, table, states)
    units = 2 * tiles
    params = struct.pack("<6Q", *(0 if tensor is None else tensor.data_ptr() for tensor in pointers), units)
    kernel, most, warps = _unpack_kernel(records.device.index, dim, fmt, order, dtype, mean is not None)
    stream = torch.cuda.current_stream(records.device).cuda_stream
    kernel.launch((min(most, -(-units // warps)), 1, 1), params, stream)
    return states
