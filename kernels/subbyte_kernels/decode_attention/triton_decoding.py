# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806, SIM108
"""Records -> values, for the Triton kernel: every tier, in any order of codes.

Where a code lies (``lanes.py``, ``bitpack.py``), for token n of a tile and code c of its C = D / vector_dim:

    unit = n // 64, and with P = 8 (keys) or 4 (values) tokens side by side, so 32 / P parts of C P / 32 codes a token
    lane = (n % P) * 4 + part           keys      with part = c // (C P / 32)
           part * 4 + n % P             values
    code = (n % 64) // P * (C P / 32) + c % (C P / 32)     its number in the lane's stream of W words
    word w of a stream, in vectors of v: 32 W unit + 32 v (w // v) + v lane + w % v
    scale of token n: half word 64 unit + 8 (n % 8) + (n % 64) // 8 behind the codes

A head dimension that is no multiple of 64 has one stream a tile: code = n C + c, word w at w, scale at n. Code j of a
block of m words lies in word j // k from bit width * (j % k) on, k = 32 // width. If that is word m, it lies in the
virtual word of spare bits, from the same bit on: r bits in the top of each of the words that this bit and its
successors fall into.

Raw tokens come in units of the power of two below their largest, those of values with a mean without the mean. A
tile's outliers are set by two products of a matrix that knows their tokens with one that knows their channels: Triton
cannot write into registers by index.

Gives up: entries are looked up in memory, where the L1 cache keeps them (Triton's gather aborts the compiler for some
shapes), and every code loads its own word, so tiles cost more instructions than they need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from subbyte_kernels.bitpack import codes_per_block
from subbyte_kernels.formats import Encoding, TileFormat


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_RAW = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}


def jit(*growing: str) -> Any:
    """Compile a kernel, once for all values of the arguments that grow from call to call."""
    return (lambda kernel: kernel) if triton is None else triton.jit(do_not_specialize=growing)


class Tier(NamedTuple):
    """What the kernel must know about a tier at compile time; it reads the fields by their numbers."""

    tier_id: int
    width: int  # bits of a code
    vector_dim: int  # 0: no table
    block_words: int
    code_words: int
    registers: int  # outliers a token
    outliers: int  # a tile has room for
    rotated: int
    raw: int  # 0, or the model's dtype: 1 fp16, 2 bf16, 3 fp32


def tier(fmt: TileFormat, head_dim: int, dtype: torch.dtype) -> Tier:
    """A layout as the kernel knows it; ``dtype`` is the model's."""
    if fmt.encoding is Encoding.RAW:
        return Tier(fmt.tier_id, 8 * dtype.itemsize, 0, 0, 0, 0, 0, int(fmt.rotated), _RAW[dtype])
    return Tier(
        fmt.tier_id,
        fmt.code_bits,
        fmt.vector_dim if fmt.entries else 0,
        codes_per_block(fmt.code_bits) * fmt.code_bits // 32,
        fmt.code_words(head_dim),
        fmt.token_outliers,
        fmt.tile_outliers(head_dim),
        int(fmt.rotated),
        0,
    )


@jit()
def power_of_two(values):
    """The power of two at or below the largest magnitude of a row, at least fp32's smallest normal number."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1.1754943508222875e-38)
    return (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@jit()
def _word_place(word, base, RUN: tl.constexpr, STEP: tl.constexpr):
    return base + word // RUN * STEP + word % RUN


@jit()
def _load_codes(
    record, token, column, inside, TIERS: tl.constexpr, SLOT: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr
):
    """Codes ``[BLOCK, columns]`` int32 of tokens ``[BLOCK, 1]``, columns ``[1, columns]`` of a record."""
    WIDTH: tl.constexpr = TIERS[SLOT][1]
    BLOCK_WORDS: tl.constexpr = TIERS[SLOT][3]
    PER_TOKEN: tl.constexpr = D // (TIERS[SLOT][2] if TIERS[SLOT][2] > 0 else 1)
    TOKENS: tl.constexpr = 8 if KEYS else 4
    PARTS: tl.constexpr = 32 // TOKENS
    OWN: tl.constexpr = PER_TOKEN // PARTS
    WORDS: tl.constexpr = 64 // TOKENS * OWN * WIDTH // 32
    IN_LANES: tl.constexpr = D % 64 == 0
    RUN: tl.constexpr = (4 if WORDS % 4 == 0 else 2 if WORDS % 2 == 0 else 1) if IN_LANES else 1
    STEP: tl.constexpr = 32 * RUN if IN_LANES else 1
    if IN_LANES:
        side = token % TOKENS
        part = column // OWN
        if KEYS:
            lane = side * PARTS + part
        else:
            lane = part * TOKENS + side
        code = token % 64 // TOKENS * OWN + column % OWN
        base = token // 64 * (32 * WORDS) + lane * RUN
    else:
        code = token * PER_TOKEN + column
        base = token * 0
    PER_WORD: tl.constexpr = 32 // WIDTH
    SPARE: tl.constexpr = 32 - PER_WORD * WIDTH
    MASK: tl.constexpr = (1 << WIDTH) - 1
    BLOCK_CODES: tl.constexpr = BLOCK_WORDS * 32 // WIDTH
    index = code % BLOCK_CODES
    shift = index % PER_WORD * WIDTH
    first = code // BLOCK_CODES * BLOCK_WORDS
    if SPARE == 0:
        word = first + index // PER_WORD
        bits = tl.load(record + _word_place(word, base, RUN, STEP), mask=inside, other=0)
        codes = bits >> shift & MASK
    else:
        spilled = index >= BLOCK_WORDS * PER_WORD
        word = first + tl.where(spilled, shift // SPARE, index // PER_WORD)
        bits = tl.load(record + _word_place(word, base, RUN, STEP), mask=inside, other=0)
        codes = bits >> shift & MASK
        spare = bits >> (32 - SPARE) & ((1 << SPARE) - 1)
        for piece in tl.static_range(1, (WIDTH + 2 * SPARE - 2) // SPARE):
            needed = inside & spilled & (shift % SPARE + WIDTH > piece * SPARE)
            more = tl.load(record + _word_place(word + piece, base, RUN, STEP), mask=needed, other=0)
            spare |= (more >> (32 - SPARE) & ((1 << SPARE) - 1)) << piece * SPARE
        codes = tl.where(spilled, spare >> shift % SPARE & MASK, codes)
    return codes


@jit()
def _float_of(codes, WIDTH: tl.constexpr):
    """fp32 values of E2M3 (6 bits) or E4M3 (8 bits): sign, exponent and mantissa are put where fp16 has them."""
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    half = (codes & SIGN) << (16 - WIDTH) | (codes & (SIGN - 1)) << 7
    number = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number * (256.0 if WIDTH == 8 else 16384.0)  # what is left is the difference of the biases


@jit()
def _byte(words, place, mask):
    """Byte ``place`` of some words."""
    return tl.load(words + place // 4, mask=mask, other=0) >> place % 4 * 8 & 0xFF


@jit()
def _raw_tokens(
    record,
    mean,
    token,
    TIERS: tl.constexpr,
    SLOT: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CENTRED: tl.constexpr,
):
    """Raw tokens ``[BLOCK, D_PAD]`` fp32 without the mean in units of a power of two, and these ``[BLOCK]``."""
    column = tl.arange(0, D_PAD)[None, :]
    inside = column < D
    place = token[:, None] * D + column
    if TIERS[SLOT][8] == 3:
        values = tl.load(record + place, mask=inside, other=0).to(tl.float32, bitcast=True)
    else:
        bits = tl.load(record + place // 2, mask=inside, other=0) >> place % 2 * 16
        if TIERS[SLOT][8] == 2:
            values = (bits << 16).to(tl.float32, bitcast=True)
        else:
            values = (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if CENTRED:
        values -= tl.load(mean + column, mask=inside, other=0.0)
    size = power_of_two(values)
    return values / size[:, None], size


@jit()
def _with_registers(values, words, token, COUNT: tl.constexpr, D_PAD: tl.constexpr):
    """Each token's own outliers in place of what its codes say."""
    column = tl.arange(0, D_PAD)[None, :]
    everywhere = token >= 0
    for index in tl.static_range(COUNT):
        place = token * (2 * COUNT) + index
        channel = _byte(words, place, everywhere)
        kept = _float_of(_byte(words, place + COUNT, everywhere), 8)
        values = tl.where(column == channel[:, None], kept[:, None], values)
    return values


@jit()
def _with_outliers(
    values, words, token, ROOM: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, AT_ONCE: tl.constexpr
):
    """A tile's outliers in place of what the codes say."""
    column = tl.arange(0, D_PAD)[None, :]
    count = tl.load(words)
    for start in range(0, count, AT_ONCE):
        index = start + tl.arange(0, AT_ONCE)
        listed = index < count
        place = tl.load(words + 1 + index // 2, mask=listed, other=0) >> index % 2 * 16 & 0xFFFF
        kept = _float_of(_byte(words + 1, 2 * ROOM + index, listed), 8)
        of_token = (token[:, None] == (place // D)[None, :]) & listed[None, :]
        of_channel = ((place % D)[:, None] == column).to(tl.float16)
        here = tl.dot(of_token.to(tl.float16), of_channel)
        there = tl.dot(tl.where(of_token, kept[None, :], 0.0).to(tl.float16), of_channel)
        values = tl.where(here > 0, there.to(values.dtype), values)
    return values


@jit()
def decode(
    record,
    table,
    mean,
    token,
    TIERS: tl.constexpr,
    SLOT: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    CENTRED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Tokens ``[BLOCK]`` of a record in units of their scale, ``[BLOCK, D_PAD]``, and their scales ``[BLOCK]``.

    ``KEYS``: the order of the codes; ``CENTRED``: raw tokens hold the ``mean`` ``[D]``, which is taken from them.
    """
    if TIERS[SLOT][8] > 0:
        raw, scales = _raw_tokens(record, mean, token, TIERS, SLOT, D, D_PAD, CENTRED)
        values = raw.to(DOT)
    else:
        VECTOR: tl.constexpr = TIERS[SLOT][2] if TIERS[SLOT][2] > 0 else 1
        column = tl.arange(0, D_PAD // VECTOR)[None, :]
        inside = column < D // VECTOR
        codes = _load_codes(record, token[:, None], column, inside, TIERS, SLOT, D, KEYS)
        if TIERS[SLOT][2] > 0:
            entry = codes[:, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
            looked_up = tl.load(table + entry, mask=inside[:, :, None], other=0.0)
            values = tl.reshape(looked_up, (BLOCK, D_PAD)).to(DOT)
        else:
            values = tl.where(inside, _float_of(codes, TIERS[SLOT][1]), 0.0).to(DOT)
        behind = record + TIERS[SLOT][4]
        if TIERS[SLOT][5] > 0:
            values = _with_registers(values, behind + 64, token, TIERS[SLOT][5], D_PAD).to(DOT)
        if TIERS[SLOT][6] > 0:
            values = _with_outliers(values, behind + 64, token, TIERS[SLOT][6], D, D_PAD, 64).to(DOT)
        if D % 64 == 0:
            place = token // 64 * 64 + token % 8 * 8 + token % 64 // 8
        else:
            place = token
        pair = tl.load(behind + place // 2)
        scales = (pair >> place % 2 * 16 << 16).to(tl.float32, bitcast=True)
    return values, scales
