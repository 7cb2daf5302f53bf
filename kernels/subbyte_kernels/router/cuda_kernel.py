"""The router in CUDA C++ (``router.cu``): one launch, compiled by NVRTC for a model's router."""

import math
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.router.reference import (
    GROUP_SCORES,
    MAX_ROUTER_TOKENS,
    NORMS,
    SCORES,
    Routed,
    RouterMatrix,
    RouterSpec,
)


_SOURCE = Path(__file__).with_name("router.cu")
_MIN_CAPABILITY = (8, 0)
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_WARPS = 8
_MAX_LOADS = 8  # 16-byte loads of a lane, that stay in registers
_MAX_K, _MAX_GROUPS, _MAX_EXPERTS = 32, 32, 1024


def cuda_obstacle(
    hidden: Tensor, matrix: RouterMatrix, spec: RouterSpec, following: RouterMatrix | None, following_top_k: int
) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone."""
    if not hidden.is_cuda:
        return f"the tensors lie on {hidden.device}, not on a CUDA device"
    missing = nvrtc.obstacle(hidden.device.index)
    if missing is not None:
        return missing
    if nvrtc.capability(hidden.device.index) < _MIN_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    if not 1 <= hidden.shape[0] <= MAX_ROUTER_TOKENS:
        return f"it takes 1 to {MAX_ROUTER_TOKENS} tokens, not {hidden.shape[0]}"
    experts, width = matrix.weight.shape
    if hidden.dtype not in _DTYPES or matrix.weight.dtype not in _DTYPES or width % 8 or experts > _MAX_EXPERTS:
        return f"it has no path for {hidden.dtype} states and a {matrix.weight.dtype} matrix of {experts} x {width}"
    if max(spec.top_k, following_top_k) > _MAX_K or spec.groups > _MAX_GROUPS:
        return f"it chooses at most {_MAX_K} experts, from at most {_MAX_GROUPS} groups"
    if not all(part.weight.is_contiguous() for part in (matrix, following) if part is not None):
        return "the matrix is not contiguous"
    return None


@dataclass(frozen=True)
class _Variant:
    """What the kernel is compiled for."""

    device: int
    width: int
    experts: int
    spec: RouterSpec
    following_top_k: int
    states: torch.dtype
    matrix: torch.dtype
    weights: torch.dtype

    @property
    def logits(self) -> torch.dtype:
        """What logits are rounded to."""
        return torch.float32 if self.spec.float_logits else self.states

    @property
    def rows(self) -> int:
        """Experts of a block."""
        length = 16 // self.matrix.itemsize
        for rows in (4, 2, 1):
            if self.experts % rows == 0 and self.width <= _MAX_LOADS * 32 * length * _WARPS // rows:
                return rows
        return 1

    def defined(self) -> dict[str, object]:
        """What the kernel's text wants to know."""
        spec = self.spec
        return {
            "HIDDEN": self.width,
            "EXPERTS": self.experts,
            "TOP_K": spec.top_k,
            "NEXT_TOP_K": self.following_top_k,
            "MAX_TOKENS": MAX_ROUTER_TOKENS,
            "ROWS": self.rows,
            "WARPS": _WARPS,
            "STATES": _DTYPES[self.states],
            "MATRIX": _DTYPES[self.matrix],
            "LOGITS": _DTYPES[self.logits],
            "LOGITS_OUT": 0 if self.spec.return_float_logits else _DTYPES[self.logits],
            "WEIGHTS": _DTYPES[self.weights],
            "SCORE": SCORES.index(spec.score),
            "GROUPS": spec.groups,
            "GROUPS_KEPT": spec.groups_kept,
            "GROUP_SCORE": 1 + GROUP_SCORES.index(spec.group_score),
            "MASKED": "NEVER" if math.isinf(spec.masked) else f"{spec.masked:.9e}f",
            "NORM": NORMS.index(spec.norm),
            "NORM_EPS": f"{spec.eps:.9e}f",
            "SCALE": f"{spec.scale:.9e}f",
            "SORTED": int(spec.sorted),
        }


@lru_cache(maxsize=256)
def _kernel(variant: _Variant) -> nvrtc.Kernel:
    return nvrtc.Kernel(_SOURCE, "router", variant.defined(), variant.device, 32 * _WARPS, 0, waits=True)


# Calls of one stream follow each other, so they share memory; a graph has memory of its own.


@cache
def _room(device: int, stream: int, capture: int, experts: int) -> tuple[Tensor, Tensor]:
    """Sums of two routers, and their counters of finished blocks, which are zero between calls."""
    del stream, capture
    sums = torch.empty(2, MAX_ROUTER_TOKENS, experts, dtype=torch.float32, device=f"cuda:{device}")
    return sums, torch.zeros(2, dtype=torch.int32, device=f"cuda:{device}")


def router_cuda(
    hidden: Tensor,
    matrix: RouterMatrix,
    spec: RouterSpec,
    following: RouterMatrix | None = None,
    following_top_k: int = 0,
) -> Routed:
    """Logits, weights and experts; arguments and result as in :func:`router_reference`.

    Args:
        hidden: ``[T, H]``, T from 1 to 16.
        matrix: the router's weights.
        spec: what it does.
        following: weights of the router to predict for, or None.
        following_top_k: experts of the prediction.

    Returns:
        Logits, weights, experts and predicted experts.
    """
    hidden = hidden.contiguous()
    (tokens, width), device = hidden.shape, hidden.device
    experts = matrix.weight.shape[0]
    weights_dtype = torch.float32 if spec.float_weights else hidden.dtype
    logits_dtype = torch.float32 if spec.float_logits or spec.return_float_logits else hidden.dtype
    variant = _Variant(
        device=device.index,
        width=width,
        experts=experts,
        spec=spec,
        following_top_k=0 if following is None else following_top_k,
        states=hidden.dtype,
        matrix=matrix.weight.dtype,
        weights=weights_dtype,
    )
    kernel = _kernel(variant)
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    sums, arrived = _room(device.index, stream, nvrtc.capture_id(stream), experts)
    logits = torch.empty(tokens, experts, dtype=logits_dtype, device=device)
    weights = torch.empty(tokens, spec.top_k, dtype=weights_dtype, device=device)
    index = torch.empty(tokens, spec.top_k, dtype=torch.int64, device=device)
    made = _problem(matrix, sums[0], arrived[:1], logits, weights, index)
    predicted = None
    if following is not None:
        predicted = torch.empty(tokens, following_top_k, dtype=torch.int64, device=device)
        made += _problem(following, sums[1], arrived[1:], None, None, predicted)
    params = struct.pack("<Q", hidden.data_ptr()) + made + struct.pack("<i", tokens)
    kernel.launch((experts // variant.rows, 1 if following is None else 2, 1), params, stream)
    return Routed(logits, weights, index, predicted)


def _problem(
    matrix: RouterMatrix, sums: Tensor, arrived: Tensor, logits: Tensor | None, weights: Tensor | None, index: Tensor
) -> bytes:
    tensors = (matrix.weight, matrix.bias, matrix.correction, sums, logits, weights, index, arrived)
    return struct.pack("<8Q", *(0 if tensor is None else tensor.data_ptr() for tensor in tensors))
