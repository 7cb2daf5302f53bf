"""How experts lie in memory: worked examples byte for byte, round trips, and what the codes lose."""

import pytest
import torch

from subbyte_kernels.expert_mlp import ExpertFormat, ExpertLayout
from support.experts_mlp import LAYOUTS, layout


def test_int4_byte_by_byte() -> None:
    """Column c of row r holds code (c + r) % 16, at scale 2."""
    packing = layout("int4", 128, 8, torch.float32)
    codes = (torch.arange(128) + torch.arange(8)[:, None]) % 16
    packed = packing.pack_matrix(((codes - 8) * 2.0)[None])
    assert packed.shape == (1, 512 + 64) == (1, packing.block_bytes)
    # row 0, word 4 t + q holds columns 32 q + 8 t ..: even columns in the low half, odd ones in the high half
    first = 0 | 2 << 4 | 4 << 8 | 6 << 12 | 1 << 16 | 3 << 20 | 5 << 24 | 7 << 28
    second = 8 | 10 << 4 | 12 << 8 | 14 << 12 | 9 << 16 | 11 << 20 | 13 << 24 | 15 << 28
    row = [first] * 4 + [second] * 4 + [first] * 4 + [second] * 4
    words = packed[0, :64].contiguous().view(torch.int32).tolist()
    assert [word % (1 << 32) for word in words] == row
    assert packed[0, 512:].contiguous().view(torch.bfloat16).tolist() == [2.0] * 32


def test_fp8_byte_by_byte() -> None:
    """Column c of row r holds 448, but column 5 holds 1.5 and column 70 holds -2, at scale 1."""
    packing = layout("fp8", 128, 8, torch.float32)
    values = torch.full((1, 8, 128), 448.0)
    values[0, 3, 5], values[0, 3, 70] = 1.5, -2.0
    packed = packing.pack_matrix(values)
    assert packed.shape == (1, 1024 + 16)
    expected = torch.full((1024,), 0x7E, dtype=torch.uint8)
    expected[64 * 3 + 6] = 0x3C  # column 5 is in the middle of its word, and changes places with column 6
    expected[512 + 64 * 3 + 5] = 0xC0  # column 70 = 64 + 6
    assert torch.equal(packed[0, :1024], expected)
    assert packed[0, 1024:].contiguous().view(torch.bfloat16).tolist() == [1.0] * 8


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 128), (40, 24), (136, 256)])
def test_round_trip(name: str, hidden: int, intermediate: int) -> None:
    packing = layout(name, hidden, intermediate, torch.float32)
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(3, 2 * intermediate, hidden, generator=generator)
    down = torch.randn(3, hidden, intermediate, generator=generator)
    slabs = packing.pack(gate_up, down)
    assert slabs.shape == (3, packing.slab_bytes)
    assert packing.slab_bytes % 16 == 0
    views = packing.views(slabs)
    assert all(view.untyped_storage().data_ptr() == slabs.untyped_storage().data_ptr() for view in views)
    floor = {"model": float("inf"), "int4": 20.5, "int4-g64": 19.5, "fp8": 31.0}[name]
    for given, found in zip((gate_up, down), packing.unpack(*views), strict=True):
        noise = (found - given).square().sum()
        assert 10 * torch.log10(given.square().sum() / noise) >= floor
    again = packing.pack(*packing.unpack(*views))
    for one, other in zip(packing.unpack(*packing.views(again)), packing.unpack(*views), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["int4", "int4-g64", "fp8"])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-30, 6e4])
def test_constant_groups_are_kept(name: str, value: float) -> None:
    packing = layout(name, 128, 8, torch.float32)
    found = packing.unpack_matrix(packing.pack_matrix(torch.full((1, 8, 128), value)), 8, 128)
    torch.testing.assert_close(found, torch.full_like(found, value), rtol=2**-8, atol=0)


def test_every_code_of_a_byte_comes_back() -> None:
    packing = layout("fp8", 128, 8, torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).repeat(4)
    codes[(codes & 127) == 127] = 0  # NaN
    values = codes.view(torch.float8_e4m3fn).float().view(1, 8, 128)
    values[..., 0] = 448.0
    assert torch.equal(packing.unpack_matrix(packing.pack_matrix(values), 8, 128), values)


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ValueError, match=r"groups of \(32, 64\), not 48"):
        ExpertLayout(ExpertFormat.INT4, 64, 64, torch.float32, 48)
    with pytest.raises(ValueError, match="multiples of 8 rows, not 20 and 64"):
        layout("fp8", 64, 20, torch.float32)
