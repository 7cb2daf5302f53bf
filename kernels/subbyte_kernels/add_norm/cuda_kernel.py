"""Residual and RMSNorm in CUDA C++ (``add_norm.cu``), one launch."""

import struct
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc


_SOURCE = Path(__file__).with_name("add_norm.cu")
_MAX_WIDTH = 8192  # 8 channels of each of 1024 threads


def add_norm_obstacle(hidden: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone."""
    if not hidden.is_cuda:
        return f"the tensors lie on {hidden.device}, not on a CUDA device"
    missing = nvrtc.obstacle(hidden.device.index)
    if missing is not None:
        return missing
    if hidden.dtype not in (torch.float16, torch.bfloat16) or weight.dtype != hidden.dtype:
        return f"it takes fp16 and bf16, not {hidden.dtype} states and {weight.dtype} weights"
    if hidden.shape[-1] % 8 or hidden.shape[-1] > _MAX_WIDTH:
        return f"it takes a multiple of 8 channels up to {_MAX_WIDTH}, not {hidden.shape[-1]}"
    return None


def defined(width: int, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel's text wants to know."""
    return {"WIDTH": width, "MODEL_BF16": int(dtype == torch.bfloat16)}


@lru_cache(maxsize=64)
def _kernel(device: int, width: int, dtype: torch.dtype) -> nvrtc.Kernel:
    threads = 32 * -(-width // 256)
    return nvrtc.Kernel(_SOURCE, "add_norm", defined(width, dtype), device, threads, 0, waits=True)


def add_norm_cuda(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Arguments and result as :func:`add_norm_reference`."""
    hidden, weight = hidden.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    stream, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    tensors = (hidden, residual, weight, stream, normed)
    params = struct.pack("<5Qf4x", *(0 if tensor is None else tensor.data_ptr() for tensor in tensors), eps)
    device = hidden.device.index
    kernel = _kernel(device, hidden.shape[1], hidden.dtype)
    kernel.launch((hidden.shape[0], 1, 1), params, torch._C._cuda_getCurrentRawStream(device))
    return stream, normed
