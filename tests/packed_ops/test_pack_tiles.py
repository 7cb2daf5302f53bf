"""Tiles <-> records: how much each tier loses, on Gaussian data and on the data that breaks quantizers."""

import math

import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.codecs import get_codec
from subbyte_kernels.formats import TILE_TOKENS, Encoding
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles import pack_tiles_reference, unpack_tiles_reference
from subbyte_kernels.pack_tiles.reference import (
    OUTLIER_SIGMA,
    e2m3_codes,
    e2m3_table,
    nearest_entries,
    normalize_tokens,
    split_outliers,
)
from support.packing import (
    TIERS,
    gaussian,
    generator,
    pack_table,
    relative_error,
    rotation,
    round_trip,
    unpack,
    unpack_table,
)


HEAD_DIMS = (64, 72, 80, 96, 128)
FEW_HEAD_DIMS = (64, 80, 128)  # blocks of the rotation: 64, 16, 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOSSY = [tier for tier in TIERS if tier != "exact"]
VECTOR = [tier for tier in TIERS if get_codec(tier).format.encoding is Encoding.VECTOR]
CENTRED = [tier for tier in LOSSY if get_codec(tier).format.centred]
BF16_HALF_STEP = 2.0**-8  # relative
FP8_HALF_STEP = 2.0**-4  # relative, of a normal E4M3 number


def e2m3_value(code: int) -> float:
    """An E2M3 code by its bits: sign, two exponent bits (bias 1), three mantissa bits."""
    sign = -1.0 if code >> 5 & 1 else 1.0
    exponent = (code >> 4 & 1) * 2 + (code >> 3 & 1)
    mantissa = (code >> 2 & 1) / 2 + (code >> 1 & 1) / 4 + (code & 1) / 8
    return sign * (mantissa if exponent == 0 else (1 + mantissa) * 2.0 ** (exponent - 1))


def pack(tier: str, tiles: Tensor) -> Tensor:
    codec = get_codec(tier)
    return pack_tiles_reference(
        tiles, codec.format, pack_table(codec, tiles), rotation(tiles.shape[-1]), None, Order.KEYS
    )


def test_e2m3_table_is_right_for_all_codes() -> None:
    assert e2m3_table().squeeze(-1).tolist() == [e2m3_value(code) for code in range(64)]


def test_e2m3_codes_are_the_nearest_and_ties_go_to_the_even_code() -> None:
    values = torch.linspace(-9, 9, 18 * 64 + 1)  # steps of 1/64: every tie of every binade is among them
    magnitudes = torch.tensor([e2m3_value(code) for code in range(32)])
    distance = (values.abs().unsqueeze(-1) - magnitudes).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    ties = nearest.sum(-1) == 2
    assert int(ties.sum()) == 2 * 31
    even = torch.arange(32) % 2 == 0
    expected = torch.where(ties.unsqueeze(-1), nearest & even, nearest).to(torch.int32).argmax(-1)
    codes = e2m3_codes(values)
    assert torch.equal(codes & 31, expected.to(torch.int32))
    assert torch.equal(codes >> 5, (values < 0).to(torch.int32))


def test_e2m3_codes_come_back_from_their_own_values() -> None:
    codes = torch.tensor([code for code in range(64) if code != 32])  # 32 is -0
    assert torch.equal(e2m3_codes(e2m3_table()[codes, 0]), codes.to(torch.int32))


def test_nearest_entries_are_those_of_a_plain_search() -> None:
    vectors, table = gaussian(9000, 4, seed=1), gaussian(50, 4, seed=2)
    distance = (vectors.unsqueeze(1) - table).square().sum(-1)
    found = distance.gather(1, nearest_entries(vectors, table).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(found, distance.amin(1), rtol=1e-4, atol=1e-5)
    assert nearest_entries(vectors[:0], table).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tier", LOSSY)
def test_gaussian_error_is_the_stated_one(tier: str, head_dim: int, dtype: torch.dtype) -> None:
    """A floor of signal to noise, and a ceiling: a prior that promises too little misleads a policy as well.

    2 % above is what 1024 tokens scatter and what keeping the norm costs. Below, short tokens have smaller peaks and
    flatter tails than a Gaussian: 21 % at 64 channels where a peak sets the scale (fp6), 10 % elsewhere. Two registers
    are a larger share of a short token.
    """
    tiles = gaussian(8, TILE_TOKENS, head_dim, seed=head_dim, dtype=dtype)
    decoded = round_trip(tier, tiles)
    assert decoded.dtype == dtype
    stated = get_codec(tier).relative_error
    measured = relative_error(decoded, tiles)
    floor_db = -10 * math.log10(1.02 * stated)
    assert -10 * math.log10(measured) >= floor_db
    assert measured >= {"fp6": 0.78, "vq3o": 0.88}.get(tier, 0.90) * stated


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_exact_loses_nothing(head_dim: int, dtype: torch.dtype) -> None:
    tiles = gaussian(2, TILE_TOKENS, head_dim, seed=1, dtype=dtype)
    assert torch.equal(round_trip("exact", tiles, mean=gaussian(2, head_dim, seed=2)), tiles)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tier", VECTOR)
def test_decoded_vectors_keep_their_norm(tier: str, head_dim: int) -> None:
    sizes = 10.0 ** torch.linspace(-6, 6, TILE_TOKENS).unsqueeze(-1)
    tiles = gaussian(2, TILE_TOKENS, head_dim, seed=3) * sizes
    norms = round_trip(tier, tiles).norm(dim=-1) / tiles.norm(dim=-1)
    # two registers hold less than a quarter of a token's energy, and FP8 rounds them
    registers = FP8_HALF_STEP / 4 if get_codec(tier).format.token_outliers else 0
    assert float((norms - 1).abs().max()) <= BF16_HALF_STEP + registers + 1e-5


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_registers_of_vq3o_lower_the_error(head_dim: int) -> None:
    tiles = gaussian(4, TILE_TOKENS, head_dim, seed=4)
    # two of D values have no error any more; they are the worst ones, so more than 10 % of the error goes
    assert relative_error(round_trip("vq3o", tiles), tiles) < 0.9 * relative_error(round_trip("vq3", tiles), tiles)


def constant(value: float, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((1, TILE_TOKENS, head_dim), value, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_zero_stays_zero(tier: str, dtype: torch.dtype) -> None:
    for head_dim in FEW_HEAD_DIMS:
        tiles = constant(0.0, head_dim, dtype)
        assert torch.equal(round_trip(tier, tiles, fit=True), tiles)
        tiles[:, 1::2] = gaussian(1, TILE_TOKENS // 2, head_dim, seed=5, dtype=dtype)
        assert torch.equal(round_trip(tier, tiles)[:, ::2], tiles[:, ::2])


@pytest.mark.parametrize("head_dim", FEW_HEAD_DIMS)
@pytest.mark.parametrize("tier", TIERS)
def test_constant_tokens_come_back_within_the_precision_of_the_tier(tier: str, head_dim: int) -> None:
    """A constant is a fixed pattern after rotation, not a Gaussian: half as much error again is allowed."""
    values = {
        torch.float32: [9.0, -9.0, 1e-30, 65504.0],
        torch.float16: [9.0, -9.0, 2.0**-24, 65504.0],  # its smallest and its largest number
        torch.bfloat16: [9.0, -9.0, 1e-30, 65280.0],
    }
    for dtype in DTYPES:
        for value in values[dtype]:
            tiles = constant(value, head_dim, dtype)
            decoded = round_trip(tier, tiles, dtype=torch.float32, fit=True)
            assert torch.isfinite(decoded).all()
            scaled = decoded.double() / tiles.double()  # squares of 1e-30 vanish
            assert float((scaled - 1).square().mean()) <= 1.5 * get_codec(tier).relative_error, (dtype, value)


@pytest.mark.parametrize("head_dim", FEW_HEAD_DIMS)
@pytest.mark.parametrize("tier", TIERS)
def test_values_near_the_end_of_fp16_stay_finite(tier: str, head_dim: int) -> None:
    signs = torch.where(gaussian(2, TILE_TOKENS, head_dim, seed=6) < 0, -1.0, 1.0)
    steps = torch.randint(0, 20, signs.shape, generator=generator(6))
    tiles = (signs * (65504 - 32 * steps)).to(torch.float16)
    decoded = round_trip(tier, tiles, fit=True)
    assert torch.isfinite(decoded).all()
    assert relative_error(decoded, tiles) <= 1.5 * get_codec(tier).relative_error


@pytest.mark.parametrize("rest", [1.0, 0.0])
@pytest.mark.parametrize("head_dim", FEW_HEAD_DIMS)
@pytest.mark.parametrize("tier", TIERS)
def test_one_outlier_among_equal_values_does_not_break_a_token(tier: str, head_dim: int, rest: float) -> None:
    """Rotation spreads the outlier over its block alone, so the token is one of few patterns: five times is allowed.

    Where outliers are kept by themselves nothing beyond the precision of FP8 may be lost of them.
    """
    tokens = torch.arange(0, TILE_TOKENS, 2)  # 64 outliers fit into nuq2's list at every head dim
    channels = tokens * 5 % head_dim
    for dtype in DTYPES:
        tiles = constant(rest, head_dim, dtype)
        tiles[:, tokens, channels] = 1000.0
        decoded = round_trip(tier, tiles, dtype=torch.float32, fit=True)
        assert torch.isfinite(decoded).all()
        token_error = (decoded - tiles).square().sum(-1) / tiles.float().square().sum(-1).clamp(min=1e-30)
        assert float(token_error[:, tokens].max()) <= 5 * get_codec(tier).relative_error
        if tier == "nuq2":
            kept = decoded[:, tokens, channels]
            assert float((kept / 1000 - 1).abs().max()) <= FP8_HALF_STEP + BF16_HALF_STEP


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tier", TIERS)
def test_memory_order_does_not_matter(tier: str, dtype: torch.dtype) -> None:
    tiles = gaussian(3, 80, TILE_TOKENS, seed=7, dtype=dtype).transpose(1, 2)
    wide = gaussian(3, TILE_TOKENS, 160, seed=8, dtype=dtype)[:, :, ::2]
    for strided in (tiles, wide):
        assert not strided.is_contiguous()
        assert torch.equal(pack(tier, strided), pack(tier, strided.contiguous()))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tier", TIERS)
def test_records_of_a_tile_do_not_depend_on_its_neighbours(tier: str, head_dim: int) -> None:
    tiles = gaussian(3, TILE_TOKENS, head_dim, seed=9)
    scaled = tiles * torch.tensor([1.0, 1000.0, 1e-6])[:, None, None]
    together, scaled_together = pack(tier, tiles), pack(tier, scaled)
    assert torch.equal(scaled_together[0], together[0])
    assert torch.equal(pack(tier, tiles[:1]), together[:1])
    assert torch.equal(pack(tier, scaled[1:2]), scaled_together[1:2])


@pytest.mark.parametrize("tier", CENTRED)
def test_a_constant_key_offset_leaves_the_error_of_centred_tiers_unchanged(tier: str) -> None:
    tiles = gaussian(4, TILE_TOKENS, 96, seed=10)
    mean = 100 * gaussian(4, 96, seed=11)
    noise = (round_trip(tier, tiles) - tiles).square().mean()
    shifted = tiles + mean.unsqueeze(1)
    with_mean = (round_trip(tier, shifted, mean=mean) - shifted).square().mean()
    assert float(with_mean / noise) == pytest.approx(1, abs=0.01)
    assert float((round_trip(tier, shifted) - shifted).square().mean() / noise) > 100


def test_the_mean_is_not_removed_from_tiers_that_are_not_centred() -> None:
    tiles = gaussian(2, TILE_TOKENS, 64, seed=12)
    mean = gaussian(2, 64, seed=13)
    assert torch.equal(round_trip("exact", tiles, mean=mean), round_trip("exact", tiles))


def heavy_tailed(count: int, head_dim: int, outliers: int) -> tuple[Tensor, Tensor]:
    """Bounded tiles with planted outliers of different size, at most one a token; also their flat positions."""
    tiles = gaussian(count, TILE_TOKENS, head_dim, seed=14).clamp(-2, 2)
    tokens = torch.arange(outliers)
    positions = tokens * head_dim + tokens * 7 % head_dim
    sizes = torch.linspace(8, 30, outliers)
    tiles.flatten(1)[:, positions] = torch.where(tokens % 2 == 0, sizes, -sizes)
    return tiles, positions


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nuq2_keeps_outliers_within_the_precision_of_fp8(head_dim: int) -> None:
    tiles, positions = heavy_tailed(2, head_dim, outliers=60)
    planted = tiles.flatten(1)[:, positions]
    unit = normalize_tokens(tiles)[0].flatten(1)
    assert torch.equal((unit.abs() > OUTLIER_SIGMA).sum(1), torch.tensor([60, 60]))
    decoded = round_trip("nuq2", tiles).flatten(1)[:, positions]
    # the scale is rounded before the outliers are divided by it, so its rounding costs nothing
    assert float((decoded / planted - 1).abs().max()) <= FP8_HALF_STEP + 1e-5
    assert float((round_trip("vq2", tiles).flatten(1)[:, positions] / planted - 1).abs().max()) > FP8_HALF_STEP


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_nuq2_keeps_at_most_one_percent_and_the_largest_first(head_dim: int) -> None:
    fmt = get_codec("nuq2").format
    capacity = fmt.tile_outliers(head_dim)
    tiles, positions = heavy_tailed(2, head_dim, outliers=128)
    positions_kept, counts, inliers = split_outliers(tiles, min(capacity, 100))
    assert counts.tolist() == [min(capacity, 100)] * 2
    kept = torch.zeros_like(tiles.flatten(1), dtype=torch.bool).scatter_(1, positions_kept, True)
    unit = normalize_tokens(tiles)[0].flatten(1).abs()
    for size, keep in zip(unit, kept, strict=True):
        assert float(size[keep].min()) >= float(size[positions][~keep[positions]].max())
    assert torch.equal(inliers.flatten(1)[~kept], tiles.flatten(1)[~kept])
    assert not inliers.flatten(1)[kept].any()
    stored = pack("nuq2", tiles)[:, fmt.code_words(head_dim) + TILE_TOKENS // 2]
    assert stored.tolist() == [min(capacity, 128)] * 2


def test_nuq2_lists_nothing_where_nothing_sticks_out() -> None:
    fmt = get_codec("nuq2").format
    tiles = gaussian(2, TILE_TOKENS, 64, seed=15).clamp(-2, 2)
    records = pack("nuq2", tiles)
    start = fmt.code_words(64) + TILE_TOKENS // 2
    assert records[:, start].tolist() == [0, 0]
    tables = unpack_table(get_codec("nuq2"), pack_table(get_codec("nuq2"), tiles))
    decoded = unpack(records, fmt, tables, 64, torch.float32)
    records[:, start + 1 :] = -1  # what lies in the unused list is never read
    assert torch.equal(unpack(records, fmt, tables, 64, torch.float32), decoded)


def test_each_record_uses_the_row_of_the_table_that_it_names() -> None:
    codec = get_codec("nuq2")
    tiles = gaussian(3, TILE_TOKENS, 64, seed=16) ** 3
    table = pack_table(codec, tiles, fit=True)
    assert table is not None
    records = pack_tiles_reference(tiles, codec.format, table, rotation(64), None, Order.KEYS)
    rows = torch.tensor([2, 0, 1])
    shuffled = table[rows].unsqueeze(-1)
    decoded = unpack_tiles_reference(
        records, codec.format, shuffled, rows.argsort(), rotation(64), None, torch.float32, Order.KEYS
    )
    assert torch.equal(decoded, round_trip("nuq2", tiles, fit=True))
