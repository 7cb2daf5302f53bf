"""Tiles in the model's own space, and attention over them, beside the reference that reads codes block by block."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from subbyte_kernels.decode_attention import decode_attention_reference, unpack_pages
from support.attention import DEVICE, Case
from support.scripts import EVAL, scripts_of


TIERS = ["vq175", "vq2", "vq3", "vq4", "fp6", "fp8", "nuq2", "vq3o", "exact"]


@pytest.fixture(scope="module")
def attention() -> Iterator[Any]:
    with scripts_of(EVAL, "quality.unpacked") as found:
        yield found.unpacked.UnpackedAttention


def dense(case: Case) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Packed sides and what their tiles stand for."""
    return [(case.keys, case.dense_keys[..., : case.keys.head_dim]), (case.values, case.dense_values)]


@pytest.mark.parametrize("known", [True, False], ids=["pages on the host", "read back"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tile_comes_back_at_its_place(dtype: torch.dtype, known: bool) -> None:
    case = Case(TIERS, TIERS[::-1], counts=(5, 2, 0), dtype=dtype)
    for side, wanted in dense(case):
        pages = side.pages.cpu().numpy() if known else None
        made = unpack_pages(dataclasses.replace(side, host_pages=pages), dtype)
        assert made.dtype == dtype
        assert made.shape == (3, 2, 5 * 128, side.head_dim)
        torch.testing.assert_close(made.float(), wanted.to(DEVICE).float().view_as(made), atol=0.03, rtol=0.02)
        assert not made[1, :, 2 * 128 :].any()
        assert not made[2].any()


def test_pieces_of_what_is_unpacked_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("vq2", "vq3", counts=(5, 3), dtype=torch.float32)
    whole = [unpack_pages(side, torch.float32) for side, _ in dense(case)]
    monkeypatch.setattr("subbyte_kernels.decode_attention.unpacked._AT_ONCE", 1)
    for (side, _), made in zip(dense(case), whole, strict=True):
        assert torch.equal(unpack_pages(side, torch.float32), made)


@pytest.mark.parametrize(
    "case",
    [
        Case(TIERS, TIERS[::-1], counts=(5, 2, 0), dtype=torch.float32),
        Case("vq3", "fp6", counts=(2, 1), tokens=3, dtype=torch.float32),
        Case("fp8", "exact", heads=1, group=5, dim=64, rest=64, counts=(2, 1), dtype=torch.float32),
        Case("vq4", "vq4", value_dim=128, counts=(1, 3), dtype=torch.float32),
    ],
    ids=["every tier", "three tokens", "a latent", "wider values"],
)
@pytest.mark.parametrize("special", [False, True], ids=["plain", "cap and sinks"])
def test_attention_over_what_tiles_stand_for_is_the_reference_s(attention: Any, case: Case, special: bool) -> None:
    form: tuple[Any, ...] = (case.scaling,)
    if special:
        form = (case.scaling, 20.0, torch.linspace(-1, 3, case.query.shape[1], device=DEVICE))
    attend = attention()
    for tiles in (case.tiles, None):
        for _ in range(2):  # the second time from memory
            made = attend(case.query, case.exact, tiles, *form)
            wanted = decode_attention_reference(case.query, case.exact, tiles, *form)
            torch.testing.assert_close(made.output, wanted.output, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(made.lse, wanted.lse, atol=2e-4, rtol=2e-4)


def test_what_nobody_reads_any_more_is_forgotten(attention: Any) -> None:
    attend, case = attention(), Case(counts=(1,), dtype=torch.float32)
    tiles = case.tiles
    attend(case.query, case.exact, tiles, case.scaling)
    assert len(attend._held) == 1
    del tiles
    assert not attend._held
