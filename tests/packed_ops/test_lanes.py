"""Which word of a record holds which value: the owners that ``lanes.py`` states, checked one by one."""

import pytest
import torch

from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.codecs.rotation import rotation_signs
from subbyte_kernels.bitpack import WIDTHS, unpack_codes
from subbyte_kernels.formats import TILE_TOKENS
from subbyte_kernels.lanes import (
    UNIT_TOKENS,
    Order,
    in_lanes,
    pack_tile_codes,
    transpose_scales,
    unpack_tile_codes,
    vector_words,
)
from support.packing import CPU, TIERS, generator, rotation


VECTOR_DIMS = {2: 1, 6: 2, 7: 4, 8: 4}


def codes_of(width: int, head_dim: int) -> torch.Tensor:
    shape = (3, TILE_TOKENS, head_dim // VECTOR_DIMS[width])
    return torch.randint(0, 1 << width, shape, generator=generator(width), dtype=torch.int32)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 192, 256])
def test_codes_come_back(width: int, head_dim: int, order: Order) -> None:
    codes = codes_of(width, head_dim)
    words = pack_tile_codes(codes, width, order, head_dim)
    assert words.shape == (3, codes[0].numel() * width // 32)
    assert torch.equal(unpack_tile_codes(words, width, order, head_dim), codes)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_lane_owns_the_tokens_and_channels_of_its_operand(width: int, head_dim: int) -> None:
    codes = codes_of(width, head_dim)
    size = codes[0].numel() * width // 32 // (2 * 32)
    vector = vector_words(size)
    for order in Order:
        words = pack_tile_codes(codes, width, order, head_dim).view(3, 2, size // vector, 32, vector)
        for unit in range(2):
            for lane in range(32):
                g, t = divmod(lane, 4)
                stream = unpack_codes(words[:, unit, :, lane].flatten(1), width)
                tile = codes[:, unit * UNIT_TOKENS : (unit + 1) * UNIT_TOKENS]
                part = codes.shape[-1] // (4 if order is Order.KEYS else 8)
                if order is Order.KEYS:
                    owned = tile[:, g::8, t * part : (t + 1) * part]
                else:
                    owned = tile[:, t::4, g * part : (g + 1) * part]
                assert torch.equal(stream, owned.flatten(1))


def test_scales_of_a_lane_are_neighbours() -> None:
    scales = torch.arange(TILE_TOKENS)[None]
    placed = transpose_scales(scales, 64).view(2, 8, 8)
    for unit in range(2):
        for g in range(8):
            assert placed[unit, g].tolist() == [unit * UNIT_TOKENS + 8 * i + g for i in range(8)]
    assert torch.equal(transpose_scales(placed.view(1, -1), 64), scales)
    assert torch.equal(transpose_scales(scales, 80), scales)


@pytest.mark.parametrize("tier", TIERS)
def test_every_lane_has_whole_words(tier: str) -> None:
    fmt = get_codec(tier).format
    for head_dim in range(8, 513, 8):
        if in_lanes(head_dim):
            assert fmt.code_words(head_dim) % 64 == 0


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_the_rotation_is_hadamard_blocks_behind_its_signs(head_dim: int) -> None:
    block = head_dim & -head_dim
    index = torch.arange(block)
    bits = torch.tensor([[(int(a) & int(b)).bit_count() for b in index] for a in index])
    hadamard = torch.block_diag(*[(1.0 - 2.0 * (bits % 2)) / block**0.5] * (head_dim // block))
    assert torch.allclose(rotation(head_dim), hadamard * rotation_signs(head_dim, CPU))
