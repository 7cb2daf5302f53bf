"""Linear layers of 1 to 16 tokens in CUDA C++, one launch for up to three matrices.

Weights are the model's (``small_linear.cu``) or int4 (``packed_linear.cu``).
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.small_linear.packed import PackedMatrix
from subbyte_kernels.small_linear.reference import MAX_LINEAR_TOKENS


_SOURCE = Path(__file__).with_name("small_linear.cu")
_PACKED_SOURCE = Path(__file__).with_name("packed_linear.cu")
_UNIT = 256  # channels that a warp loads at once
_ROWS = 8  # of an item
_PACKED_ROWS, _PACKED_WARPS = 16, 8
_MATRICES = 3
_MAX_WARPS = 16
_MANY_ITEMS = 16  # of a multiprocessor: from here on small blocks, which wait for fewer others at an item's end
_FEW_WARPS = 4


def linear_obstacle(hidden: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone."""
    if {weight.dtype for weight in weights} != {hidden.dtype}:
        return "states and weights differ in their dtype"
    if not all(weight.is_contiguous() for weight in weights):
        return "a matrix is not contiguous"
    return _obstacle(hidden, len(weights))


def packed_obstacle(hidden: Tensor, matrices: Sequence[PackedMatrix]) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone."""
    if any(matrix.columns != hidden.shape[1] or matrix.blocks.device != hidden.device for matrix in matrices):
        return "a matrix has other columns than the states have channels, or lies on another device"
    return _obstacle(hidden, len(matrices))


def _obstacle(hidden: Tensor, matrices: int) -> str | None:
    if not hidden.is_cuda:
        return f"the tensors lie on {hidden.device}, not on a CUDA device"
    missing = nvrtc.obstacle(hidden.device.index)
    if missing is not None:
        return missing
    tokens, width = hidden.shape
    if not 1 <= tokens <= MAX_LINEAR_TOKENS or matrices > _MATRICES:
        return f"it takes 1 to {MAX_LINEAR_TOKENS} tokens and {_MATRICES} matrices, not {tokens} and {matrices}"
    if hidden.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes fp16 and bf16, not {hidden.dtype}"
    if width % _UNIT:
        return f"it takes a multiple of {_UNIT} channels, not {width}"
    return None


def defined(width: int, tokens: int, dtype: torch.dtype, many: bool) -> dict[str, int]:
    """What the kernel's text wants to know; ``many``: there are many items for each multiprocessor."""
    units, most = width // _UNIT, _FEW_WARPS if many else _MAX_WARPS
    warps = max(part for part in range(1, most + 1) if units % part == 0)
    return {
        "WIDTH": width,
        "TOKENS": tokens,
        "WARPS": warps,
        "BLOCKS": 2 if warps <= _MAX_WARPS // 2 else 1,
        "MODEL_BF16": int(dtype == torch.bfloat16),
    }


@lru_cache(maxsize=64)
def _kernel(device: int, width: int, tokens: int, dtype: torch.dtype, many: bool) -> tuple[nvrtc.Kernel, int]:
    return _built(_SOURCE, defined(width, tokens, dtype, many), device)


def _built(source: Path, given: dict[str, int], device: int) -> tuple[nvrtc.Kernel, int]:
    """The kernel of a text, which is called as its file is, and how many of its blocks run at once."""
    kernel = nvrtc.Kernel(source, source.stem, given, device, 32 * given["WARPS"], 0, waits=True)
    return kernel, nvrtc.device_limits(device)[0] * given["BLOCKS"]


def small_linear_cuda(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Arguments and result as :func:`small_linear_reference`."""
    width, rows = hidden.shape[1], [weight.shape[0] for weight in weights]
    items = -(-sum(rows) // _ROWS)
    many = items > _MANY_ITEMS * nvrtc.device_limits(hidden.device.index)[0]
    kernel, at_once = _kernel(hidden.device.index, width, hidden.shape[0], hidden.dtype, many)
    return _launch(kernel, min(items, at_once), hidden, weights, rows)


def packed_defined(width: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """What the text of the kernel for packed matrices wants to know."""
    units = width // _UNIT
    return {
        "WIDTH": width,
        "TOKENS": tokens,
        "WARPS": max(part for part in range(1, _PACKED_WARPS + 1) if units % part == 0),
        "BLOCKS": 1,
        "ROW_BLOCKS": _PACKED_ROWS // 8,
        "MODEL_BF16": int(dtype == torch.bfloat16),
    }


@lru_cache(maxsize=64)
def _packed_kernel(device: int, width: int, tokens: int, dtype: torch.dtype) -> tuple[nvrtc.Kernel, int]:
    return _built(_PACKED_SOURCE, packed_defined(width, tokens, dtype), device)


def packed_linear_cuda(hidden: Tensor, matrices: Sequence[PackedMatrix]) -> Tensor:
    """Arguments and result as :func:`packed_linear_reference`."""
    rows = [matrix.rows for matrix in matrices]
    kernel, at_once = _packed_kernel(hidden.device.index, hidden.shape[1], hidden.shape[0], hidden.dtype)
    blocks = min(-(-sum(rows) // _PACKED_ROWS), at_once)
    return _launch(kernel, blocks, hidden, [matrix.blocks for matrix in matrices], rows)


def _launch(
    kernel: nvrtc.Kernel, blocks: int, hidden: Tensor, weights: Sequence[Tensor], rows: Sequence[int]
) -> Tensor:
    hidden = hidden.contiguous()
    ends = [sum(rows[: count + 1]) for count in range(_MATRICES)]
    output = hidden.new_empty(hidden.shape[0], ends[-1])
    addresses = [weight.data_ptr() for weight in weights]
    addresses += addresses[-1:] * (_MATRICES - len(addresses))
    params = struct.pack("<5Q3i4x", hidden.data_ptr(), *addresses, output.data_ptr(), *ends)
    kernel.launch((blocks, 1, 1), params, torch._C._cuda_getCurrentRawStream(hidden.device.index))
    return output
