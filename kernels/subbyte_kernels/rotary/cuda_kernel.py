"""Norms, rotary positions and storing of a token in CUDA C++ (``rotary.cu``), one launch."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.rotary.reference import HeadNorms, TokenPlace


_SOURCE = Path(__file__).with_name("rotary.cu")
_HEAD_DIMS = (64, 128)
_WARPS = 4


def rotary_obstacle(projected: Tensor, cos: Tensor, norms: HeadNorms | None, place: TokenPlace) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone."""
    if not projected.is_cuda:
        return f"the tensors lie on {projected.device}, not on a CUDA device"
    missing = nvrtc.obstacle(projected.device.index)
    if missing is not None:
        return missing
    weights = () if norms is None else (norms.query, norms.key)
    dtypes = {tensor.dtype for tensor in (projected, cos, place.keys, place.values, *weights)}
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return f"it takes fp16 and bf16 throughout, not {dtypes}"
    if place.keys.shape[-1] not in _HEAD_DIMS or place.keys.shape != place.values.shape:
        return f"it takes keys and values of {_HEAD_DIMS} channels"
    if not place.keys.is_contiguous() or not place.values.is_contiguous():
        return "keys or values are not contiguous"
    return None


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for."""

    device: int
    head_dim: int
    query_heads: int
    heads: int
    norms: bool
    bf16: bool
    one_angle: bool

    def defined(self) -> dict[str, object]:
        """What the kernel's text wants to know."""
        return {
            "HEAD_DIM": self.head_dim,
            "QUERY_HEADS": self.query_heads,
            "HEADS": self.heads,
            "NORMS": int(self.norms),
            "MODEL_BF16": int(self.bf16),
            "ROWS_OF_ANGLES": 1 if self.one_angle else 2,
        }


@lru_cache(maxsize=64)
def _kernel(variant: Variant) -> nvrtc.Kernel:
    return nvrtc.Kernel(_SOURCE, "rotary", variant.defined(), variant.device, 32 * _WARPS, 0, waits=True)


def rotary_cuda(projected: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, place: TokenPlace) -> Tensor:
    """Arguments and result as :func:`rotary_reference`."""
    projected, cos, sin = projected.contiguous(), cos.contiguous(), sin.contiguous()
    rows, heads, slots, dim = place.keys.shape
    query_heads = projected.shape[1] // dim - 2 * heads
    device = projected.device.index
    bf16 = projected.dtype == torch.bfloat16
    variant = Variant(device, dim, query_heads, heads, norms is not None, bf16, cos.shape[0] == 1)
    query = projected.new_empty(rows, query_heads, 1, dim)
    weights = (None, None) if norms is None else (norms.query, norms.key)
    tensors = (projected, cos, sin, *weights, query, place.keys, place.values, place.slots)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    eps = 0.0 if norms is None else norms.eps
    params = struct.pack("<11Qf4x", *addresses, heads * slots * dim, slots * dim, eps)
    grid = (-(-(query_heads + 2 * heads) // _WARPS), rows, 1)
    _kernel(variant).launch(grid, params, torch._C._cuda_getCurrentRawStream(device))
    return query
