"""Codes <-> 32-bit words, dense and word-aligned for every width in use.

A word takes ``k = 32 // width`` codes from its low bits up, which leaves ``r = 32 - k * width`` spare bits on top.
The spare bits of ``m`` words, lowest word first, are themselves one more (virtual) word of codes:

    width   k   r   m   codes in a block of m words     bits a code
      2    16   0   1   16                              2
      6     5   2   3   15 + 1 from 3 x 2 spare bits     6
      7     4   4   7   28 + 4 from 7 x 4 spare bits     7
      8     4   0   1   4                               8

So 4 values share 7 bits without a single code crossing a word border, and no bit is wasted. A stream is the codes of
one tile, token after token; every tile holds a whole number of blocks because it has 128 tokens.
"""

import torch
from torch import Tensor


_WORDS_PER_BLOCK = {2: 1, 6: 3, 7: 7, 8: 1}
WIDTHS = tuple(_WORDS_PER_BLOCK)


def codes_per_block(width: int) -> int:
    """Codes in one block of words; raises ValueError for a width that has no layout."""
    if width not in _WORDS_PER_BLOCK:
        raise ValueError(f"no bit layout for codes of {width} bits; there is one for {list(WIDTHS)}")
    return _WORDS_PER_BLOCK[width] * 32 // width


def _arange(stop: int, step: int, device: torch.device) -> Tensor:
    return torch.arange(0, stop, step, dtype=torch.int32, device=device)


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Pack a stream of codes into 32-bit words.

    Args:
        codes: ``[..., n]`` any integer type, values in ``[0, 2**width)``; n a multiple of ``codes_per_block(width)``.
        width: bits a code: 2, 6, 7 or 8.

    Returns:
        ``[..., n * width / 32]`` int32.

    Raises:
        ValueError: unknown width, or n is no whole number of blocks.
    """
    block = codes_per_block(width)
    if codes.shape[-1] % block:
        raise ValueError(f"{codes.shape[-1]} codes are no whole number of blocks of {block} codes of {width} bits")
    per_word, words = 32 // width, _WORDS_PER_BLOCK[width]
    spare = 32 - per_word * width
    blocks = codes.to(torch.int64).unflatten(-1, (-1, block))
    shifts = torch.arange(0, per_word * width, width, device=codes.device)
    packed = (blocks[..., : words * per_word].unflatten(-1, (words, per_word)) << shifts).sum(-1)
    if spare:
        extra = blocks[..., words * per_word :]
        virtual = (extra << shifts[: extra.shape[-1]]).sum(-1, keepdim=True)
        pieces = torch.arange(0, words * spare, spare, device=codes.device)
        packed = packed | (((virtual >> pieces) & ((1 << spare) - 1)) << (32 - spare))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    words_out: Tensor = packed.flatten(-2).to(torch.int32)
    return words_out


def unpack_codes(words: Tensor, width: int) -> Tensor:
    """Inverse of :func:`pack_codes`.

    Args:
        words: ``[..., w]`` int32, a whole number of blocks.
        width: bits a code: 2, 6, 7 or 8.

    Returns:
        ``[..., w * 32 / width]`` int32.

    Raises:
        ValueError: unknown width, or w is no whole number of blocks.
    """
    block = codes_per_block(width)
    per_block, per_word = _WORDS_PER_BLOCK[width], 32 // width
    if words.shape[-1] % per_block:
        raise ValueError(f"{words.shape[-1]} words are no whole number of blocks of {per_block} words")
    spare = 32 - per_word * width
    mask = (1 << width) - 1
    blocks = words.unflatten(-1, (-1, per_block))
    shifts = _arange(per_word * width, width, words.device)
    codes = ((blocks.unsqueeze(-1) >> shifts) & mask).flatten(-2)
    if spare:
        pieces = (blocks >> (32 - spare)) & ((1 << spare) - 1)
        virtual = (pieces << _arange(per_block * spare, spare, words.device)).sum(-1, keepdim=True, dtype=torch.int32)
        extra = (virtual >> shifts[: block - per_block * per_word]) & mask
        codes = torch.cat([codes, extra], dim=-1)
    stream: Tensor = codes.flatten(-2)
    return stream
