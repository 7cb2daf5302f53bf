"""The experts in CUDA C++ (``expert_mlp.cu``): two launches, compiled by NVRTC for a model's shape.

A kernel is made once for each shape, format, dtype and bucket of tokens (1, 8, 16). A call allocates what is not
passed in, reads nothing back and can be captured in a CUDA graph. It needs bulk copies: compute capability 9.0.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.expert_mlp.config import CudaConfig, choose_config
from subbyte_kernels.expert_mlp.layout import ExpertFormat, ExpertLayout
from subbyte_kernels.expert_mlp.reference import MAX_EXPERT_TOKENS, ExpertCall


SOURCE = Path(__file__).with_name("expert_mlp.cu")
_MIN_CAPABILITY = (9, 0)
_BUCKETS = (1, 8, MAX_EXPERT_TOKENS)
_MAX_PAIRS = 512
_FORMATS = {ExpertFormat.MODEL: 0, ExpertFormat.INT4: 1, ExpertFormat.FP8: 2}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_WEIGHT_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_INDEX_BYTES = {torch.int32: 4, torch.int64: 8}
_ROWS, _COLUMNS = 16, 32  # what a model's rows and, unpacked, its columns are multiples of


def cuda_obstacle(call: ExpertCall) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes alone."""
    hidden, layout = call.hidden, call.layout
    if not hidden.is_cuda:
        return f"the tensors lie on {hidden.device}, not on a CUDA device"
    missing = nvrtc.obstacle(hidden.device.index)
    if missing is not None:
        return missing
    if nvrtc.capability(hidden.device.index) < _MIN_CAPABILITY:
        return "the GPU is older than compute capability 9.0"
    if hidden.dtype not in (torch.float16, torch.bfloat16) or hidden.dtype != layout.dtype:
        return f"it takes fp16 and bf16, not {hidden.dtype}"
    if not 1 <= hidden.shape[0] <= MAX_EXPERT_TOKENS:
        return f"it takes 1 to {MAX_EXPERT_TOKENS} tokens, not {hidden.shape[0]}"
    widths = [layout.intermediate, *([] if call.shared is None else [call.shared.intermediate])]
    unit = _ROWS if layout.packed else _COLUMNS
    if layout.hidden % unit or any(width % unit for width in widths):
        return f"it takes multiples of {unit}, not {layout.hidden} and {widths}"
    if call.expert_ids.numel() > _MAX_PAIRS:
        return f"it takes at most {_MAX_PAIRS} experts a step, not {call.expert_ids.numel()}"
    return None


def workspace_bytes(call: ExpertCall) -> int:
    """Bytes that a call needs between its launches."""
    tokens, top_k = call.expert_ids.shape
    shared = 0 if call.shared is None else call.shared.intermediate
    if tokens == 1 and call.layout.format is ExpertFormat.INT4:  # enough for integers and for the model's dtype
        return top_k * _fixed_bytes(call.layout.intermediate) + _fixed_bytes(shared)
    return 2 * tokens * (bucket_of(tokens) * top_k * call.layout.intermediate + shared)


def _fixed_bytes(width: int) -> int:
    """Of one token's values as integers: 320 for each 128 values."""
    return -(-width // 128) * 320


@dataclass(frozen=True)
class Variant:
    """What a launch is compiled for."""

    device: int | None
    down: bool
    layout: ExpertLayout
    shared: int
    activation: str
    top_k: int
    bucket: int
    index_dtype: torch.dtype
    weight_dtype: torch.dtype
    config: CudaConfig

    def defined(self) -> dict[str, object]:
        """What the kernel's text wants to know."""
        layout = self.layout
        return {
            "DOWN": int(self.down),
            "FORMAT": _FORMATS[layout.format],
            "GROUP": layout.scale_columns,
            "FIXED": int(self.config.fixed),
            "MODEL_BF16": int(layout.dtype == torch.bfloat16),
            "ACTIVATION": _ACTIVATIONS[self.activation],
            "HIDDEN": layout.hidden,
            "INTERMEDIATE": layout.intermediate,
            "SHARED_INTERMEDIATE": self.shared,
            "TOP_K": self.top_k,
            "MAX_TOKENS": self.bucket,
            "INDEX_BYTES": _INDEX_BYTES[self.index_dtype],
            "WEIGHT_KIND": _WEIGHT_KINDS[self.weight_dtype],
            "WARPS": self.config.warps,
            "SPLIT": self.config.split,
            "PRODUCERS": self.config.producers,
            "STAGES": self.config.stages,
            "STEP": self.config.step,
            "MIN_BLOCKS": max(1 if self.bucket > 8 else 2, self.config.blocks_per_sm),  # 2: down beside gate_up
        }

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        columns = 16 if self.bucket > 8 else 8
        token = _fixed_bytes(self.layout.hidden) + 32 if self.config.fixed and not self.down else 0
        return self.config.stages * self.stage_bytes + 2 * self.config.warps * 16 * columns * 4 + token

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the ring."""
        if self.layout.packed:
            return 2 * self.config.step * self.layout.block_bytes
        row = 64 * self.config.step
        width = self.layout.intermediate if self.down else self.layout.hidden
        whole = row == 2 * width and not (self.down and self.shared)
        return 16 * (row if whole or row % 128 else row + 64)

    @property
    def items(self) -> int:
        """At most so many blocks find something to do."""
        if self.down:
            return self.layout.hidden // 16
        return (self.bucket * self.top_k * self.layout.intermediate + self.shared) // 8


def bucket_of(tokens: int) -> int:
    """A kernel is made for so many tokens or fewer."""
    return next(size for size in _BUCKETS if size >= tokens)


_Shape = tuple[int | None, ExpertLayout, int, str, int, int, torch.dtype, torch.dtype]


def _shape_of(call: ExpertCall) -> _Shape:
    """What decides on both launches: device, layout, I of the shared expert, activation, K, T, two dtypes."""
    (tokens, top_k), shared = call.expert_ids.shape, call.shared
    width = 0 if shared is None else shared.intermediate
    dtypes = (call.expert_ids.dtype, call.expert_weights.dtype)
    return (call.hidden.device.index, call.layout, width, call.activation, top_k, tokens, *dtypes)


def variant_of(call: ExpertCall, down: bool, config: CudaConfig) -> Variant:
    """What one of a call's launches is compiled for; looks at shapes and types alone."""
    return _variant(_shape_of(call), down, config)


def _variant(shape: _Shape, down: bool, config: CudaConfig) -> Variant:
    device, layout, shared, activation, top_k, tokens, index_dtype, weight_dtype = shape
    bucket = bucket_of(tokens)
    return Variant(device, down, layout, shared, activation, top_k, bucket, index_dtype, weight_dtype, config)


@lru_cache(maxsize=256)
def _kernel(variant: Variant) -> nvrtc.Kernel:
    assert variant.device is not None  # obstacle: on a CPU
    threads = 32 * (variant.config.warps + variant.config.producers)
    early = not variant.down or variant.bucket == 1  # down of several tokens: see benchmarks/NOTES.md, "Whole steps"
    return nvrtc.Kernel(
        SOURCE, "expert_mlp", variant.defined(), variant.device, threads, variant.shared_bytes, waits=early
    )


@lru_cache(maxsize=256)
def _launches(
    shape: _Shape, configs: tuple[CudaConfig, CudaConfig]
) -> list[tuple[nvrtc.Kernel, tuple[int, int, int]]]:
    """The kernels and grids of gate_up and down, looked up once: finding them takes longer than launching them.

    Raises:
        ValueError: one configuration is for integers and the other is not, or the call is not for them.
    """
    device, layout, tokens = shape[0], shape[1], shape[5]
    if any(config.fixed for config in configs):
        fits = tokens == 1 and layout.format is ExpertFormat.INT4
        if not fits or not all(config.fixed for config in configs):
            raise ValueError(f"integers are for one token and int4, in both launches: {configs}")
    assert device is not None
    made = []
    for down, config in zip((False, True), configs, strict=True):
        variant = _variant(shape, down, config)
        blocks = min(variant.items, nvrtc.device_limits(device)[0] * config.blocks_per_sm)
        made.append((_kernel(variant), (blocks, 1, 1)))
    return made


def expert_mlp_cuda(
    call: ExpertCall,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    configs: tuple[CudaConfig, CudaConfig] | None = None,
) -> Tensor:
    """Experts of 1 to 16 tokens; result as from :func:`expert_mlp_reference`.

    Args:
        call: what is to be computed.
        out: ``[T, H]`` in the tokens' dtype, written; allocated if None.
        workspace: uint8, at least :func:`workspace_bytes`; calls that follow each other may share it. None: allocated.
        configs: how the two launches are cut; tuned if None.

    Returns:
        ``out``.

    Raises:
        ValueError: one configuration is for integers and the other is not, or the call is not for them; or
            ``workspace`` is too small.
    """
    hidden, shared = call.hidden.contiguous(), call.shared
    device, tokens = hidden.device.index, hidden.shape[0]
    out = torch.empty_like(hidden) if out is None else out
    size = workspace_bytes(call)
    if workspace is None:
        workspace = torch.empty(size, dtype=torch.uint8, device=hidden.device)
    if workspace.nbytes < size:
        raise ValueError(f"workspace has {workspace.nbytes:,} bytes, the call needs {size:,}")
    if configs is None:
        bucket = bucket_of(tokens)
        configs = choose_config(device, call.layout, bucket, False), choose_config(device, call.layout, bucket, True)
    launches = _launches(_shape_of(call), configs)
    ids, weights = call.expert_ids.contiguous(), call.expert_weights.contiguous()
    residual = None if call.residual is None else call.residual.contiguous()
    stream = torch._C._cuda_getCurrentRawStream(device)
    inputs = [_address(tensor) for tensor in (hidden, ids, weights, call.slots)]
    outputs = [_address(tensor) for tensor in (workspace, out, residual)]
    scale = _address(None if shared is None else shared.scale)
    for down, (kernel, grid) in enumerate(launches):
        weight = call.down if down else call.gate_up
        shared_weight = None if shared is None else shared.down if down else shared.gate_up
        place = (weight.data_ptr(), weight.stride(0) * weight.itemsize)
        params = struct.pack("<11Q2i", *inputs, *place, _address(shared_weight), scale, *outputs, tokens, call.experts)
        kernel.launch(grid, params, stream)
    return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
