"""Codes <-> words: the layout by worked examples and by a bit-by-bit oracle, and the way back; case A11."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from subbyte_kernels.bitpack import WIDTHS, codes_per_block, pack_codes, unpack_codes


BLOCKS = {2: (1, 16), 6: (3, 16), 7: (7, 32), 8: (1, 4)}  # width -> words and codes of a block


def signed(words: list[int]) -> Tensor:
    """Unsigned 32-bit words as the int32 that tensors hold."""
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)


def pack_bit_by_bit(codes: list[int], width: int) -> list[int]:
    """The layout of the module's docstring, one bit at a time."""
    words_of_block, codes_of_block = BLOCKS[width]
    per_word = 32 // width
    spare = 32 - per_word * width
    packed = []
    for start in range(0, len(codes), codes_of_block):
        words = [0] * words_of_block
        for place, code in enumerate(codes[start : start + codes_of_block]):
            for bit in range(width):
                if place < words_of_block * per_word:
                    word, position = place // per_word, place % per_word * width + bit
                else:
                    stream = (place - words_of_block * per_word) * width + bit
                    word, position = stream // spare, 32 - spare + stream % spare
                words[word] |= (code >> bit & 1) << position
        packed += words
    return packed


def test_two_bit_codes_fill_a_word_from_its_low_bits_up() -> None:
    codes = torch.tensor([0, 1, 2, 3] * 4)
    # a byte holds 0, 1, 2, 3 from its low bits: 0b11_10_01_00
    assert torch.equal(pack_codes(codes, 2), signed([0xE4E4E4E4]))


def test_eight_bit_codes_are_little_endian_bytes() -> None:
    assert torch.equal(pack_codes(torch.tensor([1, 2, 3, 255]), 8), signed([0xFF030201]))
    assert pack_codes(torch.tensor([1, 2, 3, 4]), 8).view(torch.uint8).tolist() == [1, 2, 3, 4]


def test_six_bit_codes_put_the_sixteenth_into_three_pairs_of_spare_bits() -> None:
    # 1..5 | 6..10 | 11..15 in 30 bits of a word; 0b11_10_01 = 57 gives 01, 10, 11 to the tops of the three words
    codes = torch.tensor([*range(1, 16), 0b111001])
    low = [1 | 2 << 6 | 3 << 12 | 4 << 18 | 5 << 24, 0x0A2481C6, 0x0F38D30B]
    assert low[0] == 0x05103081
    words = signed([0x05103081 | 1 << 30, 0x0A2481C6 | 2 << 30, 0x0F38D30B | 3 << 30])
    assert torch.equal(pack_codes(codes, 6), words)
    assert torch.equal(unpack_codes(words, 6), codes.to(torch.int32))


def test_seven_bit_codes_put_four_codes_into_seven_spare_nibbles() -> None:
    # 1..28 four a word; the last four codes are the 28 bits 0x7654321, a nibble on top of each word
    codes = torch.tensor([*range(1, 29), 0x21, 0x06, 0x15, 0x3B])
    assert 0x21 | 0x06 << 7 | 0x15 << 14 | 0x3B << 21 == 0x7654321
    words = signed([0x1080C101, 0x2101C305, 0x3182C509, 0x4203C70D, 0x5284C911, 0x6305CB15, 0x7386CD19])
    assert torch.equal(pack_codes(codes, 7), words)
    assert torch.equal(unpack_codes(words, 7), codes.to(torch.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_blocks_waste_no_bit(width: int) -> None:
    words, codes = BLOCKS[width]
    assert codes_per_block(width) == codes
    assert codes * width == words * 32


@pytest.mark.parametrize("width", WIDTHS)
def test_a11_all_ones_codes_set_every_bit(width: int) -> None:
    codes = torch.full((128 * 4,), (1 << width) - 1)
    words = pack_codes(codes, width)
    assert torch.equal(words, torch.full((128 * 4 * width // 32,), -1, dtype=torch.int32))
    assert torch.equal(unpack_codes(words, width), codes.to(torch.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_code_value_comes_back_from_every_place_of_a_block(width: int) -> None:
    block = codes_per_block(width)
    values = torch.arange(1 << width)
    codes = (values[:, None] + torch.arange(block)) % (1 << width)
    alone = torch.zeros(block, block, dtype=torch.int64)
    alone[torch.arange(block), torch.arange(block)] = (1 << width) - 1
    for rows in (codes, alone):
        assert torch.equal(unpack_codes(pack_codes(rows, width), width), rows.to(torch.int32))


@settings(max_examples=60, deadline=None)
@given(width=st.sampled_from(WIDTHS), blocks=st.integers(1, 9), data=st.data())
def test_a11_words_are_those_of_the_bit_by_bit_layout(width: int, blocks: int, data: st.DataObject) -> None:
    count = blocks * codes_per_block(width)
    codes = data.draw(st.lists(st.integers(0, (1 << width) - 1), min_size=count, max_size=count))
    words = pack_codes(torch.tensor(codes), width)
    assert torch.equal(words, signed(pack_bit_by_bit(codes, width)))
    assert unpack_codes(words, width).tolist() == codes


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_leading_dimensions_and_integer_types_do_not_matter(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    codes = torch.randint(0, 1 << width, (3, 2, 2 * codes_per_block(width)), generator=generator).to(dtype)
    words = pack_codes(codes, width)
    assert words.shape == (3, 2, 2 * BLOCKS[width][0])
    assert words.dtype == torch.int32
    one_by_one = torch.stack([torch.stack([pack_codes(stream, width) for stream in row]) for row in codes])
    assert torch.equal(words, one_by_one)
    assert torch.equal(unpack_codes(words, width), codes.to(torch.int32))


@pytest.mark.parametrize("width", WIDTHS)
def test_every_word_survives_unpack_and_pack(width: int) -> None:
    """The layout is a bijection: no bit pattern is out of reach, so none is lost."""
    generator = torch.Generator().manual_seed(width)
    words = torch.randint(-(1 << 31), 1 << 31, (50, BLOCKS[width][0]), generator=generator).to(torch.int32)
    assert torch.equal(pack_codes(unpack_codes(words, width), width), words)


def test_codes_that_are_not_contiguous_pack_alike() -> None:
    codes = torch.arange(64).view(32, 2).t()
    assert not codes.is_contiguous()
    assert torch.equal(pack_codes(codes, 7), pack_codes(codes.contiguous(), 7))


@pytest.mark.parametrize("width", [0, 1, 3, 4, 5, 9, 32])
def test_widths_without_a_layout_are_refused(width: int) -> None:
    message = rf"no bit layout for codes of {width} bits; there is one for \[2, 6, 7, 8\]"
    with pytest.raises(ValueError, match=message):
        pack_codes(torch.zeros(64, dtype=torch.int64), width)
    with pytest.raises(ValueError, match=message):
        unpack_codes(torch.zeros(21, dtype=torch.int32), width)


@pytest.mark.parametrize(("width", "count"), [(2, 15), (2, 17), (6, 15), (7, 28), (7, 33), (8, 5)])
def test_streams_that_are_no_whole_blocks_are_refused(width: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} codes are no whole number of blocks of {BLOCKS[width][1]} codes"):
        pack_codes(torch.zeros(count, dtype=torch.int64), width)


@pytest.mark.parametrize(("width", "count"), [(6, 1), (6, 4), (7, 6), (7, 8)])
def test_words_that_are_no_whole_blocks_are_refused(width: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} words are no whole number of blocks of {BLOCKS[width][0]} words"):
        unpack_codes(torch.zeros(count, dtype=torch.int32), width)
