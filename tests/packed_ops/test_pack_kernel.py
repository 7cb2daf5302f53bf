"""The CUDA packing kernel against the reference: what it cannot do, and on a GPU the records themselves."""

import pytest
import torch

from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.codecs.rotation import rotation_signs
from subbyte_kernels import nvrtc
from subbyte_kernels import pack_tiles as pack_module
from subbyte_kernels.formats import TILE_TOKENS, kernel_kind
from subbyte_kernels.lanes import Order, pack_tile_codes, unpack_tile_codes
from subbyte_kernels.pack_tiles import (
    pack_obstacle,
    pack_tiles,
    pack_tiles_cuda,
    pack_tiles_reference,
    unpack_tiles_reference,
)
from support.packing import CPU, gaussian, pack_table, rotation, unpack_table


KERNEL_TIERS = ["fp8", "fp6", "vq4", "vq3", "vq2", "vq175"]


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def test_every_tier_but_three_has_a_kernel() -> None:
    assert sorted(codec.name for codec in codecs() if kernel_kind(codec.format)) == sorted(KERNEL_TIERS)


def test_tensors_on_a_cpu_are_refused() -> None:
    tiles = gaussian(1, TILE_TOKENS, 64, seed=1)
    assert pack_obstacle(tiles, get_codec("vq2").format, rotation_signs(64, CPU)) == (
        "the tensors lie on cpu, not on a CUDA device"
    )


def kernel_words(codes: torch.Tensor, bits: int, order: Order) -> torch.Tensor:
    """What ``pack_tiles.cu`` computes in ``code_of`` and ``word_of``, for one tile's codes ``[128, C]``."""
    each = codes.shape[1] // (4 if order is Order.KEYS else 8)
    stream = codes.numel() * bits // 32 // 64
    vector = next(size for size in (4, 2, 1) if stream % size == 0)
    whole, block_words = 32 // bits, {7: 7, 6: 3, 8: 1}[bits]
    spare, block_codes = 32 - whole * bits, block_words * 32 // bits
    table = codes.tolist()

    def code_of(unit: int, lane: int, place: int) -> int:
        (g, t), (owned, within) = divmod(lane, 4), divmod(place, each)
        token = unit * 64 + (8 * owned + g if order is Order.KEYS else 4 * owned + t)
        return int(table[token][(t if order is Order.KEYS else g) * each + within])

    def word_of(unit: int, lane: int, word: int) -> int:
        block, within = divmod(word, block_words)
        first, packed = block * block_codes, 0
        for i in range(whole):
            packed |= code_of(unit, lane, first + within * whole + i) << (i * bits)
        extra = sum(
            code_of(unit, lane, first + block_words * whole + i) << (i * bits)
            for i in range(block_codes - block_words * whole)
        )
        return (packed | extra >> (within * spare) << (32 - spare)) & 0xFFFFFFFF if spare else packed

    words = []
    for i in range(64 * stream):
        unit, rest = divmod(i, 32 * stream)
        words.append(word_of(unit, rest // vector % 32, rest // (32 * vector) * vector + rest % vector))
    return torch.tensor(words)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(("bits", "vector_dim"), [(7, 4), (8, 4), (6, 2), (8, 2), (6, 1)])
def test_the_kernel_places_words_as_the_layout_says(bits: int, vector_dim: int, order: Order) -> None:
    codes = torch.randint(0, 1 << bits, (1, TILE_TOKENS, 64 // vector_dim), dtype=torch.int32)
    expected = pack_tile_codes(codes, bits, order, 64)[0].to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(kernel_words(codes[0], bits, order), expected)


def test_where_the_kernel_cannot_be_built_the_reference_packs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise nvrtc.BuildError("no compiler here")

    monkeypatch.setattr(pack_module, "pack_obstacle", lambda *arguments: None)
    monkeypatch.setattr(pack_module, "pack_tiles_cuda", broken)
    codec, tiles = get_codec("vq2"), gaussian(1, TILE_TOKENS, 64, seed=5)
    given = (tiles, codec.format, pack_table(codec, tiles), rotation(64), None, Order.KEYS)
    assert torch.equal(pack_tiles(*given, rotation_signs(64, CPU)), pack_tiles_reference(*given))
    assert "no compiler here" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tier", KERNEL_TIERS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_are_those_of_the_reference(tier: str, head_dim: int, order: Order, dtype: torch.dtype) -> None:
    codec = get_codec(tier)
    fmt = codec.format
    tiles = gaussian(9, TILE_TOKENS, head_dim, seed=2)
    tiles[1] *= torch.logspace(-30, 4, TILE_TOKENS)[:, None] if dtype == torch.float32 else 100
    tiles[2, 5] = 0
    tiles[3, :, 7] += 50
    tiles, mean = tiles.to(dtype), gaussian(9, head_dim, seed=3)
    table, turn = pack_table(codec, tiles), rotation(head_dim)
    signs = rotation_signs(head_dim, CPU)
    expected = pack_tiles_reference(tiles, fmt, table, turn, mean, order)
    moved = on_gpu(tiles, table, mean, signs)
    assert moved[0] is not None
    assert moved[3] is not None
    assert pack_obstacle(moved[0], fmt, moved[3]) is None
    found = pack_tiles_cuda(moved[0], fmt, moved[1], moved[2], order, moved[3]).cpu()
    words = fmt.code_words(head_dim)
    codes = [unpack_tile_codes(record[:, :words], fmt.code_bits, order, head_dim) for record in (expected, found)]
    # an element on the border between two codes may fall to either side
    assert (codes[0] == codes[1]).float().mean() >= 0.9995
    scales = [record[:, words:].contiguous().view(torch.bfloat16).float() for record in (expected, found)]
    close = (scales[1] - scales[0]).abs() <= 2**-7 * scales[0]
    assert close.float().mean() >= 0.998  # a token's scale follows its codes
    tables = unpack_table(codec, table)
    decoded = [unpack_tiles_reference(r, fmt, *tables, turn, mean, torch.float32, order) for r in (expected, found)]
    errors = [float((states - tiles.float()).square().mean()) for states in decoded]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
