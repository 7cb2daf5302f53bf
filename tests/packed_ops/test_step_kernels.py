"""The small ops of a decode step: references against what models compute, kernels compiled, and on a GPU compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

from subbyte_kernels import nvrtc
from subbyte_kernels.add_norm import add_norm, add_norm_obstacle, add_norm_reference
from subbyte_kernels.add_norm import cuda_kernel as norm_kernel
from subbyte_kernels.rotary import HeadNorms, TokenPlace, rotary, rotary_obstacle, rotary_reference
from subbyte_kernels.rotary import cuda_kernel as rotary_kernel
from subbyte_kernels.small_linear import (
    PackedMatrix,
    linear_obstacle,
    packed_linear,
    packed_linear_reference,
    packed_obstacle,
    small_linear,
    small_linear_reference,
)
from subbyte_kernels.small_linear import cuda_kernel as linear_kernel


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def norm_module(width: int, dtype: torch.dtype) -> Any:
    norm = Qwen3MoeRMSNorm(width, eps=1e-5)
    norm.weight.data = torch.randn(width)
    return norm.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_is_what_a_model_computes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, residual = torch.randn(2, 3, 72).to(dtype)
    norm = norm_module(72, dtype)
    with torch.no_grad():
        for before in (residual, None):
            stream, normed = add_norm(hidden, before, norm.weight, norm.variance_epsilon)
            assert torch.equal(stream, hidden if before is None else residual + hidden)
            assert torch.equal(normed, norm(stream))


def rotary_inputs(
    rows: int, query_heads: int, heads: int, dim: int, dtype: torch.dtype, norms: bool, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, HeadNorms | None, Callable[[], TokenPlace]]:
    torch.manual_seed(rows + dim)
    projected = torch.randn(rows, (query_heads + 2 * heads) * dim, device=device).to(dtype)
    angles = torch.rand(rows, dim // 2, device=device) * 6
    angles = torch.cat([angles, angles], dim=-1)
    given = HeadNorms(*torch.randn(2, dim, device=device).to(dtype), 1e-6) if norms else None
    slots = torch.randint(0, 9, (rows,), device=device)

    def place() -> TokenPlace:
        buffers = torch.full((2, rows, heads, 9, dim), float("nan"), device=device).to(dtype)
        return TokenPlace(buffers[0], buffers[1], slots)

    return projected, angles.cos().to(dtype), angles.sin().to(dtype), given, place


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_what_a_model_computes(dtype: torch.dtype, norms: bool) -> None:
    rows, query_heads, heads, dim = 3, 6, 2, 16
    projected, cos, sin, given, place = rotary_inputs(rows, query_heads, heads, dim, dtype, norms)
    stored = place()
    query = rotary(projected, cos, sin, given, stored)
    states = projected.view(rows, 1, -1, dim)
    raw = list(states.split([query_heads, heads, heads], dim=2))
    if given is not None:
        for side, weight in enumerate((given.query, given.key)):
            norm = Qwen3MoeRMSNorm(dim, eps=given.eps)
            norm.weight.data = weight
            raw[side] = norm(raw[side])
    with torch.no_grad():
        turned = apply_rotary_pos_emb(raw[0].transpose(1, 2), raw[1].transpose(1, 2), cos[:, None], sin[:, None])
    assert torch.equal(query, turned[0])
    for row, slot in enumerate(stored.slots.tolist()):
        assert torch.equal(stored.keys[row, :, slot], turned[1][row, :, 0])
        assert torch.equal(stored.values[row, :, slot], raw[2][row, 0])
        for held in (stored.keys[row], stored.values[row]):
            assert int(held.isnan().all(-1).sum()) == heads * 8  # nothing else was written


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_linear_puts_products_side_by_side(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 64).to(dtype)
    weights = [torch.randn(rows, 64).to(dtype) for rows in (5, 8, 1)]
    made = small_linear(hidden, weights)
    assert torch.equal(made, torch.cat([functional.linear(hidden, weight) for weight in weights], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_linear_is_the_product_with_what_was_packed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 256).to(dtype)
    weights = [torch.randn(rows, 256).to(dtype) for rows in (16, 8)]
    matrices = [PackedMatrix.of(weight) for weight in weights]
    for weight, matrix in zip(weights, matrices, strict=True):
        assert matrix.blocks.nbytes == weight.numel() * 4.5 / 8
        assert (matrix.unpacked() - weight.float()).square().mean() < 0.01  # of values of variance 1
    made = packed_linear(hidden, matrices)
    expected = torch.cat([functional.linear(hidden.float(), matrix.unpacked()) for matrix in matrices], dim=-1)
    assert made.dtype == dtype
    torch.testing.assert_close(made, expected.to(dtype))
    for shape in ((12, 256), (16, 130)):
        with pytest.raises(ValueError, match=f"multiples of 8 rows and columns, not {shape[0]} x {shape[1]}"):
            PackedMatrix.of(torch.zeros(shape))
    assert "other columns" in str(packed_obstacle(torch.zeros(1, 128), matrices))


def test_what_kernels_cannot_do_is_said() -> None:
    hidden = torch.zeros(1, 64)
    assert "not on a CUDA device" in str(add_norm_obstacle(hidden, hidden[0]))
    assert "not on a CUDA device" in str(linear_obstacle(hidden, [hidden]))
    assert "not on a CUDA device" in str(packed_obstacle(hidden, []))
    projected, cos, _, norms, place = rotary_inputs(1, 2, 1, 16, torch.float32, norms=False)
    assert "not on a CUDA device" in str(rotary_obstacle(projected, cos, norms, place()))


def _compiler() -> str | None:
    if nvrtc.driver is None:
        return "needs cuda-bindings"
    try:
        nvrtc.checked(nvrtc.nvrtc.nvrtcVersion())
    except RuntimeError as problem:
        return f"needs NVRTC: {problem}"
    return None


@pytest.mark.skipif(_compiler() is not None, reason=str(_compiler()))
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile(architecture: str) -> None:
    bf16 = torch.bfloat16
    texts = {norm_kernel._SOURCE: [norm_kernel.defined(2048, bf16), norm_kernel.defined(72, torch.float16)]}
    variants = [
        rotary_kernel.Variant(0, 128, 32, 4, norms=True, bf16=True, one_angle=True),
        rotary_kernel.Variant(0, 64, 3, 3, norms=False, bf16=False, one_angle=False),
    ]
    texts[rotary_kernel._SOURCE] = [variant.defined() for variant in variants]
    shapes = [(2048, 1, bf16, True), (6144, 16, bf16, False), (14336, 2, torch.float16, False)]
    texts[linear_kernel._SOURCE] = [linear_kernel.defined(*shape) for shape in shapes]
    texts[linear_kernel._PACKED_SOURCE] = [linear_kernel.packed_defined(*shape[:3]) for shape in shapes]
    for source, definitions in texts.items():
        for defined in definitions:
            assert nvrtc.compile_source(nvrtc.full_text(source, defined), source.name, architecture)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [72, 2048, 4096, 6144])
@pytest.mark.parametrize("dtype", DTYPES[1:])
class TestNormOnGpu:
    pytestmark = on_gpu

    def test_add_norm(self, dtype: torch.dtype, width: int, rows: int) -> None:
        torch.manual_seed(0)
        hidden, residual = torch.randn(2, rows, width, device="cuda").to(dtype)
        weight = torch.randn(width, device="cuda").to(dtype)
        assert add_norm_obstacle(hidden, weight) is None
        for before in (residual, None):
            stream, normed = add_norm(hidden, before, weight, 1e-6)
            expected, wanted = add_norm_reference(hidden, before, weight, 1e-6)
            assert torch.equal(stream, expected)
            # the sum of squares is taken in another order: at most a rounding of the normalized value
            unit = torch.finfo(dtype).eps
            assert ((normed - wanted).float().abs() <= 2 * unit * wanted.float().abs()).all()
            assert (normed == wanted).float().mean() > 0.98


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads", [(32, 4, 128), (32, 8, 128), (3, 3, 64)])
class TestRotaryOnGpu:
    pytestmark = on_gpu

    def test_rotary(self, heads: tuple[int, int, int], norms: bool, rows: int) -> None:
        projected, cos, sin, given, place = rotary_inputs(rows, *heads, torch.bfloat16, norms, "cuda")
        made, expected = place(), place()
        assert rotary_obstacle(projected, cos, given, made) is None
        query = rotary(projected, cos, sin, given, made)
        wanted = rotary_reference(projected, cos, sin, given, expected)
        assert torch.equal(made.values.nan_to_num(), expected.values.nan_to_num())
        for left, right in ((query, wanted), (made.keys, expected.keys)):
            assert torch.equal(left.isnan(), right.isnan())
            if norms:
                torch.testing.assert_close(left.nan_to_num(), right.nan_to_num(), rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(left.nan_to_num(), right.nan_to_num())


@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
@pytest.mark.parametrize(
    "shape", [(2048, (4096, 512, 512)), (4096, (2048,)), (768, (3, 1)), (6144, (6144, 1024)), (2048, (30001,))]
)
class TestLinearOnGpu:
    pytestmark = on_gpu

    def test_small_linear(self, shape: tuple[int, tuple[int, ...]], tokens: int) -> None:
        torch.manual_seed(0)
        width, rows = shape
        hidden = torch.randn(tokens, width, device="cuda").bfloat16()
        weights = [torch.randn(count, width, device="cuda").bfloat16() for count in rows]
        assert linear_obstacle(hidden, weights) is None
        made = small_linear(hidden, weights)
        exact = small_linear_reference(hidden.double(), [weight.double() for weight in weights])
        plain = small_linear_reference(hidden, weights)
        assert (made - exact).abs().max() <= 2 * (plain - exact).abs().max()

    def test_packed_linear(self, shape: tuple[int, tuple[int, ...]], tokens: int) -> None:
        torch.manual_seed(0)
        width, rows = shape[0], [-(-count // 8) * 8 for count in shape[1]]
        for dtype in (torch.bfloat16, torch.float16):
            hidden = torch.randn(tokens, width, device="cuda").to(dtype)
            matrices = [PackedMatrix.of(torch.randn(count, width, device="cuda")) for count in rows]
            assert packed_obstacle(hidden, matrices) is None
            made = packed_linear(hidden, matrices)
            exact = torch.cat([hidden.double() @ matrix.unpacked().double().T for matrix in matrices], dim=-1)
            plain = packed_linear_reference(hidden, matrices)  # rounded once, at the end
            assert (made - exact).abs().max() <= 2 * (plain - exact).abs().max()
            assert torch.equal(packed_linear(hidden, matrices), made)
