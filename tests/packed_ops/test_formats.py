"""Record sizes of every tier, the bits that the design promises, and pages."""

import math

import pytest
import torch

from hf_subbyte_moe.codecs import get_codec
from subbyte_kernels.bitpack import codes_per_block
from subbyte_kernels.formats import NO_PAGE, TILE_TOKENS, Encoding, make_page, page_slots, page_tiers
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles import pack_tiles_reference
from support.packing import TIERS, gaussian, pack_table, rotation


HEAD_DIMS = (64, 72, 80, 96, 128, 256)

# tier -> bits of codes for a value, bytes of scales and outliers for a tile beside them
CODE_BITS = {"exact": 16, "fp8": 8, "fp6": 6, "vq4": 4, "vq3o": 3, "vq3": 3, "nuq2": 2, "vq2": 2, "vq175": 1.75}

# bits of a whole record at head dim 64 and 128
DESIGN_BITS = {
    "exact": (16, 16),
    "fp8": (8.25, 8.125),
    "fp6": (6.25, 6.125),
    "vq4": (4.25, 4.125),
    "vq3o": (3.75, 3.375),
    "vq3": (3.25, 3.125),
    "vq2": (2.25, 2.125),
    "vq175": (2.0, 1.875),
}


def extra_bytes(tier: str, head_dim: int) -> int:
    """Bytes of a record beside its codes."""
    if tier == "exact":
        return 0
    scales = TILE_TOKENS * 2
    if tier == "vq3o":
        return scales + TILE_TOKENS * 2 * (1 + 1)  # two registers of a channel and a value
    if tier == "nuq2":
        capacity = math.ceil(0.01 * TILE_TOKENS * head_dim)
        return scales + 4 + math.ceil(capacity * 3 / 4) * 4  # count, positions and values
    return scales


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tier", TIERS)
def test_a_record_is_codes_and_scales_and_outliers_and_nothing_else(tier: str, head_dim: int) -> None:
    codes = CODE_BITS[tier] * TILE_TOKENS * head_dim / 8
    assert codes == int(codes)
    assert 4 * get_codec(tier).format.record_words(head_dim) == codes + extra_bytes(tier, head_dim)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tier", TIERS)
def test_packing_makes_records_of_the_stated_size(tier: str, head_dim: int) -> None:
    codec = get_codec(tier)
    tiles = gaussian(2, TILE_TOKENS, head_dim, seed=1, dtype=torch.bfloat16)
    records = pack_tiles_reference(tiles, codec.format, pack_table(codec, tiles), rotation(head_dim), None, Order.KEYS)
    assert records.shape == (2, codec.format.record_words(head_dim))
    assert records.dtype == torch.int32


@pytest.mark.parametrize("tier", sorted(DESIGN_BITS))
def test_bits_a_value_are_those_of_the_design(tier: str) -> None:
    fmt = get_codec(tier).format
    assert (fmt.bits_per_value(64), fmt.bits_per_value(128)) == DESIGN_BITS[tier]


def test_nuq2_stays_within_its_promised_bits() -> None:
    fmt = get_codec("nuq2").format
    assert 2.25 < fmt.bits_per_value(64) <= 2.5
    assert 2.125 < fmt.bits_per_value(128) <= 2.4


def test_vq175_has_exactly_seven_bits_for_four_values() -> None:
    assert get_codec("vq175").format.code_bits_per_value() == 1.75


@pytest.mark.parametrize("tier", TIERS)
def test_code_bits_leave_scales_and_outliers_out(tier: str) -> None:
    fmt = get_codec(tier).format
    assert fmt.code_bits_per_value() == CODE_BITS[tier]
    assert fmt.bits_per_value(128) >= fmt.code_bits_per_value()


def test_raw_records_follow_the_width_of_the_dtype() -> None:
    fmt = get_codec("exact").format
    assert fmt.record_words(80, itemsize=4) == 2 * fmt.record_words(80, itemsize=2) == TILE_TOKENS * 80
    assert fmt.bits_per_value(80, itemsize=4) == 32
    assert fmt.code_bits_per_value(itemsize=4) == 32


@pytest.mark.parametrize("tier", [tier for tier in TIERS if tier not in ("exact", "fp8")])
def test_a_tile_is_a_whole_number_of_blocks_at_every_head_dim(tier: str) -> None:
    fmt = get_codec(tier).format
    for head_dim in range(8, 513, 8):
        codes = TILE_TOKENS * head_dim // fmt.vector_dim
        assert codes % codes_per_block(fmt.code_bits) == 0
        assert fmt.code_words(head_dim) * 32 == codes * fmt.code_bits


@pytest.mark.parametrize("tier", TIERS)
def test_tables_have_an_entry_for_every_code(tier: str) -> None:
    fmt = get_codec(tier).format
    has_table = fmt.encoding in (Encoding.VECTOR, Encoding.SCALAR)
    assert fmt.entries == (1 << fmt.code_bits if has_table else 0)


def test_outlier_capacity_is_one_percent_of_a_tile_rounded_up() -> None:
    fmt = get_codec("nuq2").format
    assert [fmt.tile_outliers(dim) for dim in (64, 80, 128)] == [82, 103, 164]
    assert get_codec("vq3").format.tile_outliers(128) == 0


@pytest.mark.parametrize("slot", [0, 1, 12345, (1 << 24) - 1])
def test_pages_give_back_tier_and_slot(slot: int) -> None:
    tiers = torch.arange(128)
    pages = torch.tensor([make_page(int(tier), slot) for tier in tiers], dtype=torch.int32)
    assert (pages >= 0).all()
    assert torch.equal(page_tiers(pages), tiers.to(torch.int32))
    assert torch.equal(page_slots(pages), torch.full((128,), slot, dtype=torch.int32))


def test_no_page_belongs_to_no_tier() -> None:
    pages = torch.tensor([NO_PAGE, make_page(0, 0), NO_PAGE], dtype=torch.int32)
    assert page_tiers(pages).tolist() == [-1, 0, -1]


@pytest.mark.parametrize("slot", [-1, 1 << 24])
def test_slots_that_do_not_fit_a_page_are_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} does not fit a page: a pool holds at most 16777216 tiles"):
        make_page(3, slot)
