"""Packing in CUDA C++ (``pack_tiles.cu``): one launch for any number of tiles of one tier."""

import struct
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.formats import TILE_TOKENS, Encoding, TileFormat, kernel_kind
from subbyte_kernels.lanes import Order


_HEAD_DIMS = (64, 128)
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_SOURCE = Path(__file__).with_name("pack_tiles.cu")
_THREADS = 256
_MIN_CAPABILITY = {Encoding.FLOAT8: (8, 9)}  # the conversion to E4M3


def pack_obstacle(states: Tensor, fmt: TileFormat, signs: Tensor | None) -> str | None:
    """Why the kernel cannot pack these tiles, or None; looks at shapes alone.

    Args:
        states: ``[M, 128, D]``.
        fmt: the layout.
        signs: of the rotation, None for one that is not Hadamard blocks behind signs.
    """
    if not states.is_cuda:
        return f"the tensors lie on {states.device}, not on a CUDA device"
    missing = nvrtc.obstacle(states.device.index)
    if missing is not None:
        return missing
    least = _MIN_CAPABILITY.get(fmt.encoding, (8, 0))
    if nvrtc.capability(states.device.index) < least:
        return f"the GPU is older than compute capability {least[0]}.{least[1]}"
    if states.shape[-1] not in _HEAD_DIMS:
        return f"it packs head dimensions {_HEAD_DIMS}, not {states.shape[-1]}"
    if states.dtype not in _DTYPES:
        return f"it packs fp32, fp16 and bf16, not {states.dtype}"
    if signs is None:
        return "the rotation is not known to be Hadamard blocks behind signs"
    return None if kernel_kind(fmt) else f"it has no path for tier {fmt.name!r}"


def _defined(head_dim: int, fmt: TileFormat, order: Order, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel's text wants to know."""
    return {
        "HEAD_DIM": head_dim,
        "KIND": kernel_kind(fmt),
        "ENTRIES": fmt.entries,
        "ORDER_KEYS": int(order is Order.KEYS),
        "DTYPE": _DTYPES[dtype],
    }


@lru_cache(maxsize=128)
def _kernel(device: int, head_dim: int, fmt: TileFormat, order: Order, dtype: torch.dtype) -> nvrtc.Kernel:
    return nvrtc.Kernel(_SOURCE, "pack_tiles", _defined(head_dim, fmt, order, dtype), device, _THREADS, 0)


def pack_tiles_cuda(
    states: Tensor, fmt: TileFormat, table: Tensor | None, mean: Tensor | None, order: Order, signs: Tensor
) -> Tensor:
    """Quantize whole tiles and pack their codes; result as from :func:`pack_tiles_reference`.

    A code may differ from the reference's where two entries are equally near to within rounding.

    Args:
        states: ``[M, 128, D]`` fp16, bf16 or fp32, finite.
        fmt: the layout.
        table: ``[entries, vector_dim]`` fp32, or None without a table.
        mean: ``[M, D]`` fp32 to remove first, or None.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of the rotation.

    Returns:
        ``[M, record_words]`` int32.
    """
    states = states.contiguous()
    tiles, _, dim = states.shape
    records = torch.empty(tiles, fmt.record_words(dim), dtype=torch.int32, device=states.device)
    table = None if table is None else table.float().contiguous()
    mean = None if mean is None else mean.float().contiguous()
    assert states.shape[1] == TILE_TOKENS
    pointers = (states, mean, signs, table, records)
    params = struct.pack("<5Q", *(0 if tensor is None else tensor.data_ptr() for tensor in pointers))
    stream = torch.cuda.current_stream(states.device).cuda_stream
    _kernel(states.device.index, dim, fmt, order, states.dtype).launch((tiles, 1, 1), params, stream)
    return records
