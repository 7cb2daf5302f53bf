"""Every implementation of the experts op against the reference in fp32.

Accuracy: the error of a kernel is at most twice that of PyTorch's products in the same dtype. Triton's kernels run in
the interpreter where there is no CUDA device.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.ops_moe import expert_mlp
from subbyte_kernels import nvrtc
from subbyte_kernels.expert_mlp import (
    ExpertCall,
    ExpertFormat,
    SharedExpert,
    cuda_kernel,
    expert_mlp_reference,
    select,
    triton_kernel,
    workspace_bytes,
)
from subbyte_kernels.expert_mlp.config import CudaConfig
from subbyte_kernels.expert_mlp.reference import ACTIVATIONS
from support.compiling import compiled
from support.experts_mlp import CUDA, DEVICE, LAYOUTS, expert_call, layout


pytest.importorskip("triton", reason="needs triton")
DTYPES = [torch.float16, torch.bfloat16]
FIXED = CudaConfig(4, 4, 1, 4, 8, 2, fixed=True)


def integers(call: ExpertCall, *given: Any) -> Tensor:
    """The CUDA kernel by products of integers."""
    if call.hidden.shape[0] > 1 or call.layout.format is not ExpertFormat.INT4:
        pytest.skip("integers are for one token and int4")
    return cuda_kernel.expert_mlp_cuda(call, *given, configs=(FIXED, FIXED))


KERNELS = {
    "cuda": (cuda_kernel.cuda_obstacle, cuda_kernel.expert_mlp_cuda),
    "integers": (cuda_kernel.cuda_obstacle, integers),
    "triton": (triton_kernel.triton_obstacle, triton_kernel.expert_mlp_triton),
}


@pytest.fixture(params=["triton", *(pytest.param(name, marks=[pytest.mark.gpu]) for name in ("cuda", "integers"))])
def kernel(request: pytest.FixtureRequest) -> Any:
    if request.param != "triton" and not CUDA:
        pytest.skip("needs a CUDA device")
    return KERNELS[request.param]


def exact(call: ExpertCall) -> Tensor:
    residual = None if call.residual is None else call.residual.float()
    return expert_mlp_reference(replace(call, hidden=call.hidden.float(), residual=residual))


def plain(call: ExpertCall) -> Tensor:
    """The same with every product rounded to the model's dtype."""
    gate_up, down = (weight.to(call.hidden.dtype) for weight in call.layout.unpack(call.gate_up, call.down))
    output = torch.zeros_like(call.hidden)
    for token, (ids, weights) in enumerate(zip(call.expert_ids.tolist(), call.expert_weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = torch.nn.functional.linear(call.hidden[token], gate_up[expert]).chunk(2)
            made = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[expert])
            output[token] += made * weight.to(made.dtype)
    return output


def error(found: Tensor, right: Tensor) -> float:
    assert found.isfinite().all()
    return float((found.float() - right).norm() / right.norm().clamp(min=1e-20))


def check(kernel: Any, call: ExpertCall, allowed: float) -> None:
    obstacle, launch = kernel
    assert obstacle(call) is None
    size = workspace_bytes(call)
    found = launch(
        call,
        torch.full_like(call.hidden, torch.nan),
        torch.full((size,), 255, dtype=torch.uint8, device=DEVICE),
    )
    assert found.dtype == call.hidden.dtype
    assert error(found, exact(call)) <= allowed


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_layouts(kernel: Any, name: str, tokens: int) -> None:
    dtype = DTYPES[tokens % 2]
    call = expert_call(layout(name, 32, 32, dtype), tokens=tokens)
    check(kernel, call, 2 * error(plain(call), exact(call)))


@pytest.mark.parametrize(("hidden", "intermediate"), [(16, 144), (144, 16)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_more_than_one_block(kernel: Any, hidden: int, intermediate: int, tokens: int) -> None:
    call = expert_call(layout("int4", hidden, intermediate, torch.bfloat16), experts=3, tokens=tokens)
    check(kernel, call, 2 * error(plain(call), exact(call)))


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["model", "int4"])
def test_slots_strangers_shared_and_residual(kernel: Any, name: str, tokens: int) -> None:
    packing = layout(name, 32, 32, torch.float16)
    shared = expert_call(layout(name, 32, 64, torch.float16), experts=1, seed=3)
    call = expert_call(
        packing,
        tokens=tokens,
        slots=torch.tensor([2, 0, -1, 3, 1], dtype=torch.int32, device=DEVICE),
        shared=SharedExpert(shared.gate_up[0], shared.down[0], 64, torch.rand(tokens, device=DEVICE)),
        residual=torch.randn(tokens, 32, device=DEVICE, dtype=torch.float16),
    )
    ids = call.expert_ids.int()
    ids[0] = torch.tensor([5, 4])  # nobody's, and one in a slot
    if tokens > 1:
        ids[1] = torch.tensor([-1, 2])  # nobody's, and one without a slot
    check(kernel, replace(call, expert_ids=ids, expert_weights=call.expert_weights.half()), 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    "config", [CudaConfig(8, 4, 2, 2, 4), CudaConfig(4, 1, 2, 4, 2), CudaConfig(2, 2, 1, 1, 8, 2), FIXED]
)
@pytest.mark.parametrize("name", ["model", "int4"])
@pytest.mark.parametrize("tokens", [1, 9])
def test_many_more_stages_than_the_ring_holds(config: CudaConfig, name: str, tokens: int) -> None:
    if config.fixed and (name, tokens) != ("int4", 1):
        pytest.skip("integers are for one token and int4")
    call = expert_call(layout(name, 2048, 1024, torch.bfloat16), experts=8, top_k=4, tokens=tokens)
    right = exact(call)
    for _ in range(5):
        out = torch.full_like(call.hidden, torch.nan)
        assert error(cuda_kernel.expert_mlp_cuda(call, out, configs=(config, config)), right) <= 1e-2


def test_a_place_in_the_ring_belongs_to_one_team() -> None:
    for warps, split, producers, stages in ((7, 1, 1, 10), (8, 3, 1, 4), (8, 4, 4, 6)):
        with pytest.raises(ValueError, match="teams and producers must divide the stages"):
            CudaConfig(warps, split, producers, stages, 8)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(kernel: Any, activation: str) -> None:
    call = expert_call(layout("model", 32, 32, torch.float16), activation=activation)
    check(kernel, call, 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_a_device_that_is_not_the_current_one(backend: str) -> None:
    call = expert_call(layout("model", 32, 32, torch.float16))
    there = {field.name: getattr(call, field.name) for field in fields(call)}
    moved = ExpertCall(
        **{key: value.to("cuda:1") if isinstance(value, Tensor) else value for key, value in there.items()}
    )
    assert torch.cuda.current_device() == 0
    assert error(select.expert_mlp(moved, backend=backend).to(DEVICE), exact(call)) <= 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, 1e-38])
def test_integers_of_extreme_tokens(value: float) -> None:
    """What is not finite is not hidden, and nothing comes of nothing."""
    call = expert_call(layout("int4", 256, 144, torch.bfloat16))
    call.hidden[0, 3:11] = value
    found = integers(call, None, None)
    if value != value or value == torch.inf:
        assert not found.isfinite().any()
    else:
        assert error(found, exact(call)) <= 1e-2


def test_a_workspace_that_is_too_small_is_refused() -> None:
    call = expert_call(layout("int4", 64, 48, torch.bfloat16))
    cut = CudaConfig(4, 4, 1, 4, 8, 2)
    with pytest.raises(ValueError, match="workspace has 639 bytes, the call needs 640"):
        cuda_kernel.expert_mlp_cuda(call, None, torch.empty(639, dtype=torch.uint8, device=DEVICE), (cut, cut))


def test_nothing_to_compute(kernel: Any) -> None:
    call = expert_call(layout("model", 32, 32, torch.float16), tokens=2)
    call.expert_ids.fill_(99)
    found = kernel[1](call, None, None)
    assert not found.any()


def test_a_token_of_weight_zero_takes_nothing_over(kernel: Any) -> None:
    """What another token's expert makes of it may be infinite."""
    call = expert_call(layout("model", 32, 32, torch.float16), experts=4, tokens=2)
    ids = torch.tensor([[0, 1], [2, 3]], device=DEVICE)
    call = replace(call, expert_ids=ids)
    right = exact(call)
    call.gate_up[2:] = 60000.0
    found = kernel[1](call, None, None)
    assert error(found[0], right[0]) <= 1e-3


def test_the_order_of_choices_does_not_matter(kernel: Any) -> None:
    call = expert_call(layout("model", 32, 32, torch.float16), experts=6, top_k=3, tokens=4)
    right = exact(call)
    turned = replace(call, expert_ids=call.expert_ids.flip(1), expert_weights=call.expert_weights.flip(1))
    assert error(kernel[1](turned, None, None), right) <= 1e-3


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["auto", "triton", "torch"])
def test_where_experts_lie_does_not_matter(name: str, tokens: int) -> None:
    call = expert_call(layout("model", 64, 64, torch.float16), experts=8, top_k=3, tokens=tokens)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = (call.gate_up[order].contiguous(), call.down[order].contiguous())
    given = (call.hidden, call.expert_ids, call.expert_weights)
    slots = order.argsort().int()
    expected = expert_mlp(*given, call.gate_up, call.down, backend=name)
    assert torch.equal(expert_mlp(*given, *moved, slots=slots, backend=name), expected)


def test_a_token_does_not_know_its_neighbours() -> None:
    call = expert_call(layout("model", 64, 64, torch.float16), experts=8, top_k=3, tokens=6)
    given = (call.hidden, call.expert_ids, call.expert_weights)
    together = expert_mlp(*given, call.gate_up, call.down, backend="torch")
    for order in (torch.arange(5, -1, -1), torch.tensor([3, 0, 5, 1, 4, 2])):
        moved = expert_mlp(*(part[order.to(DEVICE)] for part in given), call.gate_up, call.down, backend="torch")
        assert torch.equal(moved, together[order.to(DEVICE)])


def test_fp32_states_have_the_portable_kernel() -> None:
    call = expert_call(layout("model", 24, 16, torch.float32), tokens=2)
    check(KERNELS["triton"], call, 1e-6)


def test_strided_slabs_and_the_seam() -> None:
    """Experts that lie apart, as slots of a pool do."""
    packing = layout("model", 32, 32, torch.float16)
    call = expert_call(packing)
    wide = torch.full((8, packing.slab_bytes), 255, dtype=torch.uint8, device=DEVICE)
    slabs = torch.cat([view.flatten(1).view(torch.uint8) for view in (call.gate_up, call.down)], dim=1)
    wide[1::2] = slabs
    gate_up, down = packing.views(wide)
    ids = 2 * call.expert_ids + 1
    for backend in ("auto", "torch", "triton"):
        found = expert_mlp(call.hidden, ids, call.expert_weights, gate_up, down, backend=backend)
        assert error(found, exact(call)) <= 1e-3
    out = torch.empty_like(call.hidden)
    assert expert_mlp(call.hidden, ids, call.expert_weights, gate_up, down, out=out) is out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"expert_weights": torch.rand(2, 2)}, "do not fit 1 tokens"),
        ({"activation": "swish"}, "activation='swish' is not possible"),
        ({"gate_up": torch.zeros(4, 60, 32)}, "do not fit states of 32"),
        ({"gate_up": torch.zeros(4, 64, 32, dtype=torch.float64)}, "packed ones need a layout"),
        ({"gate_up": torch.zeros(4, 32, 64).mT}, "must be contiguous"),
        ({"backend": "triton", "hidden": torch.zeros(17, 32)}, "it takes 1 to 16 tokens, not 17"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    hidden = change.get("hidden", torch.zeros(1, 32))
    given: dict[str, Any] = {
        "hidden": hidden,
        "expert_ids": torch.zeros(len(hidden), 2, dtype=torch.int64),
        "expert_weights": torch.rand(len(hidden), 2),
        "gate_up": torch.zeros(4, 64, 32),
        "down": torch.zeros(4, 32, 32),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        expert_mlp(**given)


def test_the_cuda_kernel_says_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    call = expert_call(layout("model", 32, 32, torch.float16))
    if not CUDA:
        assert "not on a CUDA device" in str(cuda_kernel.cuda_obstacle(call))
        monkeypatch.setattr(Tensor, "is_cuda", True)
        monkeypatch.setattr(nvrtc, "obstacle", lambda device: None)
        monkeypatch.setattr(nvrtc, "capability", lambda device: (9, 0))
    assert cuda_kernel.cuda_obstacle(call) is None
    assert "multiples of 32" in str(cuda_kernel.cuda_obstacle(expert_call(layout("model", 40, 32, torch.float16))))
    assert "fp16 and bf16" in str(cuda_kernel.cuda_obstacle(expert_call(layout("model", 32, 32, torch.float32))))
    many = expert_call(layout("model", 32, 32, torch.float16), experts=64, top_k=40, tokens=16)
    assert "at most 512" in str(cuda_kernel.cuda_obstacle(many))
    monkeypatch.setattr(nvrtc, "capability", lambda device: (8, 0))
    assert "older than compute capability 9.0" in str(cuda_kernel.cuda_obstacle(call))


@pytest.mark.skipif(nvrtc.driver is None, reason="needs cuda-bindings")
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("down", "bucket"), [(False, 1), (True, 16)])
def test_it_compiles(name: str, down: bool, bucket: int) -> None:
    variant = cuda_kernel.Variant(
        device=0,
        down=down,
        layout=layout(name, 2048, 768, torch.bfloat16 if down else torch.float16),
        shared=768 if down else 0,
        activation="silu",
        top_k=8,
        bucket=bucket,
        index_dtype=torch.int64,
        weight_dtype=torch.float32,
        config=CudaConfig(8, 4, 2, 4, 8),
    )
    assert nvrtc.compile_source(nvrtc.full_text(cuda_kernel.SOURCE, variant.defined()), "expert_mlp.cu", "sm_90")


def every_kind() -> Iterator[ExpertCall]:
    """Calls of one and of several tokens with every layout, dtype and activation; slots and shared experts in turn."""
    slots = torch.arange(8, dtype=torch.int32)
    kinds = [(name, torch.bfloat16) for name in LAYOUTS] + [("model", torch.float16), ("model", torch.float32)]
    for number, (name, dtype) in enumerate(kinds):
        apart = expert_call(layout(name, 256, 48, dtype), experts=1, top_k=1)
        for tokens in (1, 2 + 2 * number):
            call = expert_call(
                layout(name, 256, 144, dtype),
                experts=8,
                top_k=1 + number,
                tokens=tokens,
                activation=list(ACTIVATIONS)[(number + tokens) % 4],
            )
            if number % 2 == (tokens > 1):
                call = replace(call, slots=slots, expert_ids=call.expert_ids.int())
            else:
                scale = None if number < 2 else call.expert_weights[:, 0].contiguous()
                shared = SharedExpert(apart.gate_up[0], apart.down[0], 48, scale)
                call = replace(call, shared=shared, residual=call.hidden)
            yield call


@pytest.mark.slow
def test_triton_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    calls = list(every_kind())
    found = compiled(
        tmp_path,
        "subbyte_kernels.expert_mlp.triton_kernel",
        [("expert_mlp_triton", (call,)) for call in calls],
        by_device=("_dot_type",),
    )
    launches = len(calls) + sum(call.shared is not None for call in calls)
    lists = sum(len(call.hidden) > 1 for call in calls)
    assert found == {"_gate_up_kernel": launches, "_down_kernel": launches, "_list_kernel": lists}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_call_reads_what_is_there_when_it_is_replayed() -> None:
    packing = layout("model", 64, 96, torch.bfloat16)
    call = expert_call(packing, experts=8, tokens=2, slots=torch.arange(8, dtype=torch.int32, device=DEVICE))
    out, workspace = (
        torch.empty_like(call.hidden),
        torch.empty(workspace_bytes(call), dtype=torch.uint8, device=DEVICE),
    )
    cuda_kernel.expert_mlp_cuda(call, out, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            cuda_kernel.expert_mlp_cuda(call, out, workspace)
    assert call.slots is not None
    for turn in range(4):
        call.hidden.normal_()
        call.expert_ids.copy_(torch.randperm(8, device=DEVICE)[:4].view(2, 2))
        call.slots.copy_(torch.roll(call.slots, turn))
        graph.replay()
        assert error(out, exact(call)) <= 1e-2
