"""Every fused kernel against dense attention in fp64 over tiles that were unpacked one by one.

Accuracy: the error of a kernel is at most twice that of PyTorch's attention in bf16 over the same values. Triton's
kernel runs in the interpreter where there is no CUDA device.
"""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.codecs import get_codec
from subbyte_kernels.decode_attention import AttentionTiles, ExactTokens, cuda_kernel, cuda_plan
from subbyte_kernels.formats import NO_PAGE, TILE_TOKENS, make_page
from support import attention
from support.attention import (
    CUDA,
    DEVICE,
    MIXED_KEYS,
    MIXED_VALUES,
    PAIRS,
    Case,
    Kernel,
    assert_identical,
    supports,
)
from support.compiling import compiled
from support.packing import gaussian, generator


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("key_tier", "value_tier"), PAIRS)
def test_every_pair_of_tiers_equals_dense_attention(kernel: Kernel, key_tier: str, value_tier: str, dim: int) -> None:
    case = Case(key_tier, value_tier, dim=dim, heads=1)
    case.check(case.run(kernel, splits=2))


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_mixed_tiers_per_head_and_tile_at_every_group_size(kernel: Kernel, group: int) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, group=group, counts=(3, 1))
    assert len(case.keys.pools) == len(case.values.pools) == 3
    assert (case.keys.pages < 0).any()
    case.check(case.run(kernel))


@pytest.mark.parametrize("group", [17, 71])
def test_large_groups_fall_into_blocks_of_rows(kernel: Kernel, group: int) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, heads=1, group=group, counts=(1,))
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel))


@pytest.mark.parametrize(("group", "tokens"), [(1, 8), (5, 2), (8, 3)])
def test_several_new_tokens_have_masks_of_their_own(kernel: Kernel, group: int, tokens: int) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, group=group, counts=(1, 0), tokens=tokens)
    case.sink_logits = gaussian(2 * group, seed=8).to(DEVICE)
    if supports(case, kernel, cuda=False):
        whole = case.run(kernel)
        case.check(whole)
        case.query = case.query[:, :, -1:]
        case.exact = replace(case.exact, visible=case.exact.visible[:, -1:])
        last = case.run(kernel)
        torch.testing.assert_close(last.output[:, :, 0], whole.output[:, :, -1], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(last.lse[..., 0], whole.lse[..., -1], rtol=1e-5, atol=1e-5)


def test_new_tokens_that_see_the_same_share_a_mask(kernel: Kernel) -> None:
    case = Case(heads=1, counts=(1,), tokens=4)
    case.exact = replace(case.exact, visible=case.exact.visible[:, :1])
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel))


def test_more_new_tokens_than_a_kernel_takes_are_named(kernel: Kernel) -> None:
    reason = Case(heads=1, counts=(1,), tokens=9).obstacle(kernel)
    assert reason is not None
    assert "9" in reason


@pytest.mark.parametrize("dim", [8, 16, 24, 72, 80, 96, 112, 192, 256])
def test_head_dimensions_that_are_no_power_of_two(kernel: Kernel, dim: int) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, dim=dim, group=3, counts=(2,))
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel))


@pytest.mark.parametrize(("key_tier", "value_tier"), PAIRS)
def test_fp32_models_lose_a_few_roundings_only(kernel: Kernel, key_tier: str, value_tier: str) -> None:
    case = Case(key_tier, value_tier, dtype=torch.float32, heads=1, counts=(2, 0))
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel, splits=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3,), (1, 3)])
def test_fp16_and_bf16_models(kernel: Kernel, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    case = Case("vq4", "fp6", dtype=dtype, counts=counts, exact=40)
    case.check(case.run(kernel))


def test_rows_without_tiles_and_rows_that_see_nothing(kernel: Kernel) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, heads=1, counts=(3, 0, 1, 0, 1))
    case.exact.visible[3:] = False
    result = case.run(kernel, splits=2)
    case.check(result)
    assert not result.output[3].any()
    assert (result.lse[3] == -torch.inf).all()
    assert torch.isfinite(result.lse[:3]).all()


@pytest.mark.parametrize(
    ("poison", "splits"), [(torch.nan, 1), (torch.nan, 3), (torch.nan, 16), (torch.nan, None), (1e30, 2), (1e30, 8)]
)
def test_neither_splits_nor_leftover_memory_matter(
    kernel: Kernel, splits: int | None, poison: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads=1, counts=(3, 0))
    case.exact.visible[1] = False
    clean = case.run(kernel, splits=splits)

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **options: Any) -> Tensor:
            memory = make(*arguments, **options)
            return memory.fill_(poison if memory.is_floating_point() else 0x7F)

        return made

    cuda_plan.plans.clear()  # the CUDA kernel keeps its scratch between calls
    cuda_kernel._partial.cache_clear()
    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    result = case.run(kernel, splits=splits)
    monkeypatch.undo()
    assert_identical(result, clean)
    case.check(result)


@pytest.mark.parametrize("splits", [1, 8])
def test_a_few_exact_tokens_without_tiles(kernel: Kernel, splits: int) -> None:
    for length in range(1, 18):
        case = Case(heads=1, counts=(0,), exact=length)
        case.check(case.run(kernel, splits=splits, tiles=False), tiles=False)


@pytest.mark.parametrize("length", [0, 31, 33, 64, 65, 131])
def test_windows_of_any_length(kernel: Kernel, length: int) -> None:
    case = Case(heads=1, counts=(1,), exact=length)
    case.check(case.run(kernel))


def test_tiles_that_nobody_has_count_for_nothing(kernel: Kernel) -> None:
    case = Case()
    alone = case.run(kernel, tiles=False)
    case.check(alone, tiles=False)
    missing = torch.full_like(case.keys.pages, NO_PAGE)
    for pages in (missing, missing[..., :0]):
        case.keys, case.values = (replace(side, pages=pages) for side in (case.keys, case.values))
        assert_identical(case.run(kernel), alone)


def test_exact_tokens_that_nobody_sees_leave_the_tiles(kernel: Kernel) -> None:
    case = Case("fp6", "vq2")
    case.exact.visible.fill_(False)
    case.check(case.run(kernel, splits=3))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_what_lies_in_masked_exact_slots_changes_nothing(kernel: Kernel, poison: float) -> None:
    case = Case("vq3", "fp6", heads=1, exact=70)
    case.exact.visible[:, :, 4:70:7] = False
    clean = case.run(kernel)
    hidden = ~case.exact.visible.transpose(-1, -2).unsqueeze(1)
    case.exact = ExactTokens(
        case.exact.keys.masked_fill(hidden, poison), case.exact.values.masked_fill(hidden, poison), case.exact.visible
    )
    assert_identical(case.run(kernel), clean)
    case.check(clean)


@pytest.mark.parametrize("tier", ["vq175", "vq2", "vq3", "vq4", "fp6", "fp8"])
def test_what_lies_in_unused_slots_changes_nothing(kernel: Kernel, tier: str) -> None:
    """0xFF bytes are NaN in bf16 scales and in FP8."""
    clean = Case(tier, tier, heads=1)
    poisoned = Case(tier, tier, heads=1, spare_slots=1)
    assert int((poisoned.keys.pools[get_codec(tier).tier_id] == -1).all(1).sum()) >= 3
    assert_identical(poisoned.run(kernel), clean.run(kernel))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_each_row_and_head_reads_its_own_table(kernel: Kernel, rows: int, heads: int, dtype: torch.dtype) -> None:
    own = {
        get_codec("vq2").tier_id: gaussian(rows, heads, 256, 4, seed=8).to(dtype),
        get_codec("vq3").tier_id: gaussian(rows, heads, 64, 2, seed=9).to(dtype),
    }
    case = Case(["vq2", "vq3"], ["vq3", "vq2"], own_tables=own)
    if supports(case, kernel, cuda=dtype is torch.float16):
        case.check(case.run(kernel))


def test_value_scales_of_any_size(kernel: Kernel) -> None:
    """From token to token, and all of them: weights in fp16 would overflow or vanish."""
    sizes = 10.0 ** (8 * torch.rand(1, 1, 2, TILE_TOKENS, 1, generator=generator(10)) - 4)
    for scale in (sizes, 1e-30, 60000.0):
        case = Case("vq4", "vq4", heads=1, counts=(2,), value_scale=scale)
        case.exact.visible.fill_(False)
        result = case.run(kernel)
        assert result.output.any()
        case.check(result)


def test_queries_and_keys_of_any_size(kernel: Kernel) -> None:
    for size in (1e-4, 30.0, 3e4):
        case = Case("fp8", "vq4", heads=1, counts=(2,))
        case.query = case.query * size
        case.scaling /= size
        case.check(case.run(kernel))


def test_scores_far_apart_neither_overflow_nor_lose_the_lse(kernel: Kernel) -> None:
    case = Case("fp6", "fp6", heads=1)
    case.scaling = 40.0
    result, expected = case.run(kernel), case.softmax(torch.float64, True)
    assert float(expected.lse.abs().max()) > 500
    assert torch.isfinite(result.output).all()
    torch.testing.assert_close(result.lse.double(), expected.lse, rtol=2e-3, atol=0.1)


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap_bounds_exact_and_packed_scores_alike(kernel: Kernel, softcap: float) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, heads=1)
    case.softcap = softcap
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel))


@pytest.mark.parametrize("tiles", [True, False])
def test_sinks_in_the_softmax_take_their_share(kernel: Kernel, tiles: bool) -> None:
    case = Case("fp6", "vq2", heads=1, counts=(2, 1, 0))
    case.exact.visible[2] = False
    case.sink_logits = torch.tensor([-20.0, 0.0, 2.0, 30.0], device=DEVICE)
    result = case.run(kernel, tiles=tiles)
    case.check(result, tiles=tiles)
    assert not result.output[2].any()
    torch.testing.assert_close(result.lse[2, :, 0], case.sink_logits)


def test_strided_inputs(kernel: Kernel) -> None:
    """Tokens before heads, rows of a larger page table, a mask that was expanded."""
    case = Case(counts=(2, 2))
    case.exact.visible[1:] = case.exact.visible[:1]
    expected = case.run(kernel)
    case.query = case.query.transpose(1, 2).contiguous().transpose(1, 2)
    case.exact = ExactTokens(
        case.exact.keys.transpose(1, 2).contiguous().transpose(1, 2),
        case.exact.values.transpose(1, 2).contiguous().transpose(1, 2),
        case.exact.visible[:1].expand(2, -1, -1),
    )
    wide = [
        torch.nn.functional.pad(side.pages, (0, 3, 0, 0, 1, 1), value=NO_PAGE) for side in (case.keys, case.values)
    ]
    case.keys, case.values = (
        replace(side, pages=pages[1:-1, :, :2]) for side, pages in zip((case.keys, case.values), wide, strict=True)
    )
    assert not case.keys.pages.is_contiguous()
    assert_identical(case.run(kernel), expected)


def test_repetitions_are_bit_identical(kernel: Kernel) -> None:
    case = Case(MIXED_KEYS, MIXED_VALUES, heads=1, counts=(3, 1))
    first = case.run(kernel, splits=3)
    for _ in range(49 if CUDA else 2):
        assert_identical(case.run(kernel, splits=3), first)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_device_that_is_not_the_current_one(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "DEVICE", torch.device("cuda", 1))
    case = Case(MIXED_KEYS, MIXED_VALUES)
    assert torch.cuda.current_device() == 0
    result = case.run(kernel)
    assert result.output.device == attention.DEVICE
    case.check(result)


def test_slots_behind_two_to_the_31_words(kernel: Kernel, tmp_path: Path) -> None:
    case = Case("vq2", "vq2", heads=1, counts=(1,))
    expected = case.run(kernel)
    tier = get_codec("vq2").tier_id
    sides = []
    for name, side in (("keys", case.keys), ("values", case.values)):
        words = side.pools[tier].shape[1]
        slot = (1 << 31) // words + 2
        size = (slot + 1) * words
        if CUDA:
            pool = torch.empty(size, dtype=torch.int32, device=DEVICE)
        else:  # a sparse file takes no memory
            pool = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=torch.int32)
        pool.view(-1, words)[slot] = side.pools[tier][0]
        sides.append(
            replace(
                side,
                pools={tier: pool.view(-1, words)},
                pages=torch.full_like(side.pages, make_page(tier, slot)),
            )
        )
    case.keys, case.values = sides
    assert_identical(case.run(kernel), expected)


@pytest.mark.parametrize("tier", ["exact", "nuq2", "vq3o"])
@pytest.mark.parametrize("side", ["keys", "values"])
def test_tiers_without_a_path_are_named(kernel: Kernel, tier: str, side: str) -> None:
    case = Case(["vq3", tier] if side == "keys" else "vq3", ["vq2", tier] if side == "values" else "vq2", heads=1)
    if not supports(case, kernel, cuda=False):
        assert tier in str(case.obstacle(kernel))


def test_what_a_kernel_cannot_do_is_said(kernel: Kernel) -> None:
    case = Case(heads=1, counts=(1,))
    query, exact, tiles = case.query, case.exact, case.tiles
    double = ExactTokens(exact.keys.double(), exact.values.double(), exact.visible)
    wide = ExactTokens(exact.keys, exact.values.repeat(1, 1, 1, 2), exact.visible)
    swapped = AttentionTiles((case.values,), case.keys)
    mean = torch.zeros(1, 1, 64, device=DEVICE)
    for arguments in (
        (query.repeat(1, 1, 9, 1), exact, tiles),
        (query.double(), double, tiles),
        (query, double, tiles),
        (query, wide, tiles),
        (query, exact, AttentionTiles((case.keys, case.values), case.values)),
        (query, exact, AttentionTiles((case.keys,), replace(case.values, mean=mean))),
        (query, exact, swapped),
    ):
        assert kernel.obstacle(*arguments, None, None)
    assert kernel.obstacle(query, exact, None, None, None) is None


@pytest.fixture
def triton_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Loads a second copy of the module, as it is in the circumstances that a test has made."""

    def load() -> ModuleType:
        for part in ("triton_decoding", "triton_parts", "triton_programs"):
            name = f"subbyte_kernels.decode_attention.{part}"
            monkeypatch.setitem(sys.modules, name, sys.modules[name])  # put back afterwards
            del sys.modules[name]
        spec = importlib.util.find_spec("subbyte_kernels.decode_attention.triton_kernel")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_triton_module_loads_without_triton(
    triton_module: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(heads=1, counts=(1,))
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = triton_module().triton_obstacle(case.query, case.exact, case.tiles, None, None)
    assert reason == "triton is not installed"


def test_a_cpu_needs_the_interpreter(triton_module: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="needs triton")
    case = Case(heads=1, counts=(1,))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    reason = triton_module().triton_obstacle(case.query.cpu(), case.exact, case.tiles, None, None)
    assert reason == "the tensors lie on a CPU"


def test_triton_computes_no_gradients(kernel: Kernel) -> None:
    case = Case(heads=1, counts=(1,))
    case.query.requires_grad_()
    if kernel.name == "triton":
        assert case.obstacle(kernel) == "a gradient is wanted"
    with torch.no_grad():
        assert case.obstacle(kernel) is None


@pytest.mark.slow
def test_triton_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    every = ["vq175", "vq2", "vq3", "vq4", "fp6", "fp8"]
    cases = [
        Case(every, every, heads=1, dim=128, group=8, counts=(6,)),
        Case("fp6", "vq175", heads=1, dim=64, group=1, counts=(1,), dtype=torch.float16),
        Case("vq175", "vq3", heads=1, dim=80, group=20, counts=(1,)),
        Case("vq3", "fp6", heads=1, dim=96, group=3, counts=(1,), dtype=torch.float32),
        Case("vq3", "vq2", heads=1, dim=128, group=4, counts=(1,), tokens=5),
        Case(["vq2", "nuq2"], ["fp8", "exact"], heads=1, dim=256, rest=64, group=40, counts=(2,)),
        Case(["vq3o", "exact"], ["nuq2", "vq2"], heads=1, dim=64, value_dim=80, group=2, counts=(2,)),
    ]
    cases[1].softcap, cases[2].sink_logits = 30.0, torch.zeros(20)
    calls = [(case.query, case.exact, case.tiles, case.scaling, case.softcap, case.sink_logits, 2) for case in cases]
    calls.append((cases[0].query, cases[0].exact, None, 1.0, None, None, None))
    found = compiled(
        tmp_path,
        "subbyte_kernels.decode_attention.triton_kernel",
        [("decode_attention_triton", call) for call in calls],
        by_device=("_block_tokens", "_dot_types"),
    )
    assert found["decode_attention_kernel"] == len(calls)
