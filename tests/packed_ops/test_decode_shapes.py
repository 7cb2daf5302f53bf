"""Decode attention beyond heads of one width: latent caches, values of another width, tiers that are stored unrotated.

Triton's kernel takes all of them, in the interpreter where there is no CUDA device.
"""

from dataclasses import replace

import pytest
import torch

from hf_subbyte_moe.codecs import get_codec
from subbyte_kernels.decode_attention import decode_attention_reference
from subbyte_kernels.formats import TILE_TOKENS
from support.attention import DEVICE, Case, Kernel, assert_identical, supports
from support.packing import gaussian


PLAIN = ["exact", "nuq2"]  # tiers whose tiles are stored as the model made them


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 128), (256, 64), (80, 96)])
def test_values_of_another_width(kernel: Kernel, dim: int, value_dim: int) -> None:
    case = Case("vq3", "vq2", dim=dim, value_dim=value_dim, heads=1, group=3, counts=(2, 1))
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel, splits=2))
        case.check(case.run(kernel, tiles=False), tiles=False)


@pytest.mark.parametrize(("dim", "rest", "group"), [(64, 16, 40), (512, 64, 16)])
def test_a_latent_is_key_and_value_at_once(kernel: Kernel, dim: int, rest: int, group: int) -> None:
    case = Case("vq3", "vq4", dim=dim, rest=rest, heads=1, group=group, counts=(2,))
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel, splits=2))
        case.check(case.run(kernel, tiles=False), tiles=False)


@pytest.mark.parametrize("tokens", [1, 3])
def test_latents_of_every_tier(kernel: Kernel, tokens: int) -> None:
    tiers = ["vq2", "exact", "fp6", "nuq2"]
    case = Case(tiers, ["vq4", "exact"], dim=64, rest=32, heads=1, group=8, counts=(4, 2), tokens=tokens)
    case.sink_logits = gaussian(8, seed=8).to(DEVICE)
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel, splits=2))


@pytest.mark.parametrize(("key_tier", "value_tier"), [("nuq2", "vq3o"), ("exact", "nuq2"), ("vq3o", "exact")])
@pytest.mark.parametrize("dim", [64, 80])
def test_tiers_that_keep_outliers_or_everything(kernel: Kernel, key_tier: str, value_tier: str, dim: int) -> None:
    """With heavy tails, so that outliers are many."""
    case = Case(key_tier, value_tier, dim=dim, heads=1, counts=(2, 1), tail=2.0)
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel, splits=2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_both_spaces_in_one_call(kernel: Kernel, dtype: torch.dtype) -> None:
    case = Case(["vq2", *PLAIN], ["exact", "vq3", "nuq2"], heads=1, counts=(3, 1, 0), dtype=dtype, tail=2.0)
    if supports(case, kernel, cuda=False):
        case.check(case.run(kernel, splits=3))


def test_a_tile_has_no_more_outliers_than_it_says(kernel: Kernel) -> None:
    """What lies behind a tile's count of outliers is whatever was there before."""
    case = Case("nuq2", "nuq2", heads=1, counts=(1,), tail=2.0)
    if not supports(case, kernel, cuda=False):
        return
    clean = case.run(kernel)
    fmt = get_codec("nuq2").format
    start = fmt.code_words(64) + TILE_TOKENS // 2
    for side in (case.keys, case.values):
        pool = side.pools[fmt.tier_id]
        listed = pool[:, start + 1 :].view(torch.uint8)
        count, room = int(pool[0, start]), fmt.tile_outliers(64)
        assert 0 < count <= room
        listed[:, 2 * count : 2 * room] = 0xFF
        listed[:, 2 * room + count :] = 0x7F
    assert_identical(case.run(kernel), clean)


def test_the_kernel_and_the_reference_agree_on_a_latent(kernel: Kernel) -> None:
    case = Case("vq3", "vq4", dim=64, rest=32, heads=1, group=4, counts=(2, 1), dtype=torch.float32)
    if supports(case, kernel, cuda=False):
        result = case.run(kernel)
        expected = decode_attention_reference(case.query, case.exact, case.tiles, case.scaling)
        torch.testing.assert_close(result.output, expected.output, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result.lse, expected.lse, rtol=1e-5, atol=1e-5)


def test_left_padding_hides_what_lies_there(kernel: Kernel) -> None:
    """Rows start at tokens of their own: what was padded is neither in a tile nor seen in the window."""
    case = Case("vq3", "vq2", heads=1, counts=(2, 0, 1), exact=20, tokens=2)
    case.exact.visible[:] = True
    case.exact.visible[1, :, :7] = False
    hidden = ~case.exact.visible[:, :1].transpose(-1, -2).unsqueeze(1)
    if supports(case, kernel, cuda=False):
        clean = case.run(kernel)
        case.check(clean)
        case.exact = replace(case.exact, keys=case.exact.keys.masked_fill(hidden, torch.nan))
        assert_identical(case.run(kernel), clean)
