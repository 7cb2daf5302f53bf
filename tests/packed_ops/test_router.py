"""Every implementation of the router op against the reference, with ties, for what each family's router does.

States and matrices whose sums are exact in any order have equal logits everywhere, and then the choice is equal too.
Triton's kernels run in the interpreter where there is no CUDA device.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.ops_moe import router
from subbyte_kernels import nvrtc
from subbyte_kernels.router import Routed, RouterMatrix, RouterSpec, cuda_kernel, router_reference, triton_kernel
from support.compiling import compiled


pytest.importorskip("triton", reason="needs triton")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
KERNELS = {
    "cuda": (cuda_kernel.cuda_obstacle, cuda_kernel.router_cuda),
    "triton": (triton_kernel.triton_obstacle, triton_kernel.router_triton),
}
V3 = RouterSpec(
    4,
    score="sigmoid",
    float_logits=True,
    groups=4,
    groups_kept=2,
    group_score="top2",
    norm="sum_eps",
    eps=1e-20,
    scale=2.5,
    sorted=False,
    float_weights=True,
)
SPECS = {
    "mixtral": RouterSpec(2, float_weights=True),
    "qwen3_moe": RouterSpec(4),
    "qwen2_moe": RouterSpec(4, norm="none"),
    "deepseek_v2": RouterSpec(3, float_logits=True, norm="none", scale=16.0, sorted=False, float_weights=True),
    "deepseek_v2 groups": replace(V3, score="softmax", group_score="best", masked=0.0, norm="none", eps=0.0),
    "deepseek_v3": V3,
    "gpt_oss": RouterSpec(4, score="logits", norm="softmax"),
    "granitemoe": RouterSpec(4, score="logits", return_float_logits=True, norm="softmax"),
    "ernie4_5_moe": RouterSpec(3, float_logits=True, norm="clamped_sum", eps=1e-12),
}
CORRECTED = ("deepseek_v3", "ernie4_5_moe")


@pytest.fixture(params=["triton", pytest.param("cuda", marks=[pytest.mark.gpu])])
def kernel(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda" and not CUDA:
        pytest.skip("needs a CUDA device")
    return KERNELS[request.param]


def given(name: str, tokens: int, experts: int, exact: bool = True, width: int = 64) -> tuple[Tensor, RouterMatrix]:
    """States and a router; ``exact``: small integers over powers of two, so that many scores are equal."""
    generator = torch.Generator().manual_seed(experts + tokens)
    spec = SPECS[name]
    dtype = torch.float32 if spec.float_logits else torch.bfloat16
    if exact:
        hidden = torch.randint(-2, 3, (tokens, width), generator=generator).float()
        hidden[:, 8:] = 0
        weight = torch.randint(-1, 2, (experts, width), generator=generator) / 4
        correction = torch.randint(-2, 3, (experts,), generator=generator) / 8
        bias = torch.randint(-2, 3, (experts,), generator=generator) / 2
    else:
        hidden = torch.randn(tokens, width, generator=generator)
        weight = torch.randn(experts, width, generator=generator) / 8
        correction = torch.rand(experts, generator=generator) / 5 - 0.1
        bias = torch.randn(experts, generator=generator)
    matrix = RouterMatrix(
        weight.to(DEVICE, dtype),
        bias.to(DEVICE, dtype) if name == "gpt_oss" else None,
        correction.to(DEVICE) if name in CORRECTED else None,
    )
    return hidden.to(DEVICE, torch.bfloat16), matrix


def by_hand(choice: Tensor, spec: RouterSpec) -> Tensor:
    """The choice as ``topk`` makes it on a GPU: of equal values the smallest experts."""
    if spec.groups > 1:
        grouped = choice.unflatten(-1, (spec.groups, -1))
        best = grouped.max(-1).values if spec.group_score == "best" else grouped.topk(2, -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.groups_kept]
        mask = torch.ones_like(best, dtype=torch.bool).scatter_(-1, kept, False)
        choice = grouped.masked_fill(mask[..., None], spec.masked).flatten(-2)
    index = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    if spec.sorted:
        return index
    values = choice.gather(-1, index)
    rows = []
    for row, value in zip(index.tolist(), values.tolist(), strict=True):
        rows.append(sorted(row, key=lambda expert: (value[row.index(expert)] == min(value), expert)))
    return torch.tensor(rows, device=choice.device)


def scores_of(logits: Tensor, matrix: RouterMatrix, spec: RouterSpec) -> Tensor:
    scores = logits.float()
    scores = {"logits": scores, "softmax": scores.softmax(-1), "sigmoid": scores.sigmoid()}[spec.score]
    return scores if matrix.correction is None else scores + matrix.correction


@pytest.mark.parametrize(("experts", "tokens"), [(8, 1), (60, 2), *([(128, 1), (128, 16), (256, 5)] if CUDA else [])])
@pytest.mark.parametrize("name", SPECS)
def test_ties(kernel: Any, name: str, experts: int, tokens: int) -> None:
    spec = SPECS[name]
    hidden, matrix = given(name, tokens, experts)
    obstacle, launch = kernel
    assert obstacle(hidden, matrix, spec, None, 0) is None
    found: Routed = launch(hidden, matrix, spec)
    right = router_reference(hidden, matrix, spec)
    assert torch.equal(found.logits, right.logits)
    assert found.logits.dtype == right.logits.dtype
    expected = by_hand(scores_of(found.logits, matrix, spec), spec)
    assert torch.equal(found.index, expected)
    assert found.weights.dtype == right.weights.dtype
    scores = scores_of(right.logits, replace(matrix, correction=None), spec).gather(-1, expected)
    if spec.norm == "softmax":
        scores = scores.softmax(-1)
    elif spec.norm != "none":
        scores = scores / scores.sum(-1, keepdim=True)
    kept = expected >= 0
    if spec.masked == 0:  # an expert of another group weighs nothing
        kept = right.weights.sort(-1).values > 0
    close = {"rtol": 1e-5, "atol": 1e-6} if spec.float_weights else {"rtol": 8e-3, "atol": 1e-6}
    if bool(kept.all()):
        torch.testing.assert_close(found.weights.float(), spec.scale * scores, **close)
    if CUDA:  # where torch.topk chooses so too
        assert torch.equal(found.index.sort(-1).values, right.index.sort(-1).values)


@pytest.mark.parametrize("name", SPECS)
def test_random_states(kernel: Any, name: str) -> None:
    """Logits differ by a rounding at most; where they do not, neither does the choice."""
    spec = SPECS[name]
    hidden, matrix = given(name, 3, 40, exact=False)
    found, right = kernel[1](hidden, matrix, spec), router_reference(hidden, matrix, spec)
    torch.testing.assert_close(found.logits, right.logits, rtol=1e-5 if spec.float_logits else 8e-3, atol=1e-5)
    chosen = scores_of(found.logits, matrix, spec)
    assert torch.equal(found.index, by_hand(chosen, spec))
    same = (found.logits == right.logits).all(-1)
    assert torch.equal(found.index[same].sort(-1).values, right.index[same].sort(-1).values)
    torch.testing.assert_close(
        found.weights.sort(-1).values, right.weights.sort(-1).values, rtol=2e-2, atol=1e-4 * spec.scale
    )


def test_all_scores_of_the_kept_group_below_zero(kernel: Any) -> None:
    """An expert outside the chosen groups is never chosen, whatever the sign (huggingface/transformers#45440)."""
    hidden, matrix = given("deepseek_v3", 16 if CUDA else 3, 32)
    matrix = replace(matrix, correction=torch.full((32,), -2.0, device=DEVICE))
    found = kernel[1](hidden, matrix, V3)
    assert torch.equal(found.index, by_hand(scores_of(found.logits, matrix, V3), V3))
    assert ((found.index // 8).sort(-1).values.diff(dim=-1) != 0).sum(-1).max() < V3.groups_kept


def test_the_next_router_in_the_same_call(kernel: Any) -> None:
    spec = SPECS["qwen3_moe"]
    hidden, matrix = given("qwen3_moe", 2, 20)
    following = RouterMatrix(matrix.weight.flip(0).contiguous())
    found = kernel[1](hidden, matrix, spec, following, 6)
    alone = kernel[1](hidden, following, replace(spec, top_k=6))
    assert found.predicted is not None
    assert torch.equal(found.predicted, alone.index)
    assert torch.equal(found.index, kernel[1](hidden, matrix, spec).index)


def test_zeros_of_both_signs(kernel: Any) -> None:
    """Minus zero is below zero, as for ``topk`` on a GPU."""
    weight = torch.zeros(8, 64, device=DEVICE)
    bias = torch.tensor([-0.0, 0.0] * 4, device=DEVICE)
    hidden = torch.full((1, 64), -0.0, device=DEVICE)
    found = kernel[1](hidden, RouterMatrix(weight, bias), RouterSpec(4, score="logits", norm="softmax"))
    logits = found.logits[0]
    signs = torch.signbit(logits)
    assert found.index[0].tolist() == sorted(range(8), key=lambda expert: (bool(signs[expert]), expert))[:4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_of_states(kernel: Any, dtype: torch.dtype) -> None:
    hidden, matrix = given("mixtral", 2, 8)
    hidden, matrix = hidden.to(dtype), RouterMatrix(matrix.weight.to(dtype))
    found, right = (launch(hidden, matrix, SPECS["mixtral"]) for launch in (kernel[1], router_reference))
    assert torch.equal(found.logits, right.logits)
    torch.testing.assert_close(found.weights, right.weights)


def test_errors() -> None:
    matrix = RouterMatrix(torch.zeros(8, 16))
    spec = RouterSpec(2)
    with pytest.raises(ValueError, match=r"states \[1, 17\] do not fit a router of 8 x 16"):
        router(torch.zeros(1, 17), matrix, spec)
    with pytest.raises(ValueError, match="does not fit 8 experts"):
        router(torch.zeros(1, 16), matrix, replace(spec, top_k=9))
    with pytest.raises(ValueError, match="does not fit 8 experts"):
        router(torch.zeros(1, 16), matrix, replace(spec, groups=3))
    with pytest.raises(ValueError, match="must have the same shape"):
        router(torch.zeros(1, 16), matrix, spec, RouterMatrix(torch.zeros(9, 16)), 2)
    with pytest.raises(ValueError, match="1 to 16 tokens, not 17"):
        router(torch.zeros(17, 16), matrix, spec, backend="triton")
    with pytest.raises(ValueError, match="score='relu' is not possible"):
        RouterSpec(2, score="relu")
    if not CUDA:
        with pytest.raises(ValueError, match="the cuda kernel cannot compute this router"):
            router(torch.zeros(1, 16), matrix, spec, backend="cuda")
    assert torch.equal(router(torch.zeros(17, 16), matrix, spec).weights, torch.full((17, 2), 0.5))


@pytest.mark.skipif(nvrtc.driver is None, reason="needs cuda-bindings")
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_it_compiles(name: str) -> None:
    spec = SPECS[name]
    variant = cuda_kernel._Variant(
        device=0,
        width=7168 if spec.float_logits else 2048,
        experts=256,
        spec=spec,
        following_top_k=6 if name == "qwen3_moe" else 0,
        states=torch.bfloat16,
        matrix=torch.float32 if spec.float_logits else torch.bfloat16,
        weights=torch.float32,
    )
    assert nvrtc.compile_source(nvrtc.full_text(cuda_kernel._SOURCE, variant.defined()), "router.cu", "sm_90")


@pytest.mark.slow
def test_triton_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = [(*given(name, 2, 60), spec) for name, spec in SPECS.items()]
    hidden, matrix = given("qwen3_moe", 16, 128, width=2048)
    calls.append((hidden, matrix, SPECS["qwen3_moe"], RouterMatrix(matrix.weight.flip(0)), 6))
    calls.append((*given("deepseek_v3", 1, 256, width=7168), replace(V3, top_k=8, groups=8, groups_kept=4)))
    calls.append((hidden.half(), RouterMatrix(matrix.weight.half()), SPECS["mixtral"]))
    calls.append((hidden.float(), RouterMatrix(matrix.weight.float()), SPECS["mixtral"]))
    found = compiled(tmp_path, "subbyte_kernels.router.triton_kernel", [("router_triton", call) for call in calls])
    assert found == {"_logits_kernel": len(calls) + 1, "_choose_kernel": len(calls) + 1}


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_call_reads_what_is_there_when_it_is_replayed() -> None:
    spec = SPECS["qwen3_moe"]
    hidden, matrix = given("qwen3_moe", 2, 128)
    cuda_kernel.router_cuda(hidden, matrix, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [cuda_kernel.router_cuda(hidden, matrix, spec) for _ in range(3)]
    for seed in range(4):
        hidden.copy_(given("qwen3_moe", 2, 128 + seed)[0])
        graph.replay()
        right = by_hand(scores_of(router_reference(hidden, matrix, spec).logits, matrix, spec), spec)
        assert all(torch.equal(routed.index, right) for routed in found)
