# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806, SIM108
"""Decode attention in Triton: the portable kernel.

A program owns one (row, KV head, block of at most 32 queries) and one *part* of the tokens: a run of tiles, or the
exact tokens. The queries of a KV head are its query heads' new tokens; all see every tile, and each has a mask of its
own over the exact tokens. The program keeps a running softmax in base 2 and leaves maximum, sum and weighted values in
scratch; a second kernel merges the parts. Queries are rotated before and the sum over tiles is rotated back after, by
PyTorch. A part that saw no token has sum 0, and its values in scratch are not read.

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

Rounding: queries, weights and decoded tiles of fp16 and bf16 models are multiplied in fp16 with fp32 sums; those of
fp32 models, or with an fp32 table, in fp32 without TF32. A query row, and a row of a block's weights times the values'
scales (which may be of any size), are first divided by the power of two below their largest, so that fp16 neither
overflows nor loses what matters. Exact tokens are multiplied in the model's dtype.

Gives up: entries are looked up in memory, where the L1 cache keeps them (Triton's gather aborts the compiler for some
shapes), and every code loads its own word, so tiles cost more instructions than they need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subbyte_kernels.bitpack import WIDTHS, codes_per_block
from subbyte_kernels.decode_attention.reference import AttentionResult, AttentionTiles, ExactTokens
from subbyte_kernels.formats import Encoding, PackedTiles, TileFormat
from subbyte_kernels.lanes import Order


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


MAX_TOKENS = 8  # new tokens of a row; many make a prompt, which decodes tiles once and not for each 32 queries
_MAX_HEAD_DIM = 256
_MAX_ROWS = 32  # from 64 on, Hopper's instructions want another layout of keys, and the compiler fails
_MERGED_PARTS = 16  # partial sums that the merge reads at once
_PROGRAMS_PER_PROCESSOR = 4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ENCODINGS = (Encoding.VECTOR, Encoding.FLOAT8, Encoding.FLOAT6)


def _jit(*growing: str) -> Any:
    """Compile a kernel, once for all values of the arguments that grow from call to call."""
    return (lambda kernel: kernel) if triton is None else triton.jit(do_not_specialize=growing)


class _Tier(NamedTuple):
    """What the kernel must know about a tier at compile time."""

    tier_id: int
    width: int
    vector_dim: int  # 0: FLOAT6 and FLOAT8
    block_words: int
    code_words: int


# ---------------------------------------------------------------------- kernels


@_jit()
def _word_place(word, base, RUN: tl.constexpr, STEP: tl.constexpr):
    return base + word // RUN * STEP + word % RUN


@_jit()
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


@_jit()
def _decode(
    record,
    table,
    token,
    TIERS: tl.constexpr,
    SLOT: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    DOT: tl.constexpr,
):
    """Tokens ``[BLOCK]`` of a record in units of their scale, ``[BLOCK, D_PAD]``, and their scales ``[BLOCK]``."""
    VECTOR: tl.constexpr = TIERS[SLOT][2] if TIERS[SLOT][2] > 0 else 1
    column = tl.arange(0, D_PAD // VECTOR)[None, :]
    inside = column < D // VECTOR
    codes = _load_codes(record, token[:, None], column, inside, TIERS, SLOT, D, KEYS)
    if TIERS[SLOT][2] > 0:
        entry = codes[:, :, None] * VECTOR + tl.arange(0, VECTOR)[None, None, :]
        looked_up = tl.load(table + entry, mask=inside[:, :, None], other=0.0)
        values = tl.reshape(looked_up, (BLOCK, D_PAD)).to(DOT)
    else:
        # the code's sign, exponent and mantissa where fp16 has them; what is left is the difference of the biases
        SIGN: tl.constexpr = 1 << (TIERS[SLOT][1] - 1)
        half = (codes & SIGN) << (16 - TIERS[SLOT][1]) | (codes & (SIGN - 1)) << 7
        number = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        values = tl.where(inside, number * (256.0 if TIERS[SLOT][1] == 8 else 16384.0), 0.0).to(DOT)
    if D % 64 == 0:
        place = token // 64 * 64 + token % 8 * 8 + token % 64 // 8
    else:
        place = token
    pair = tl.load(record + TIERS[SLOT][4] + place // 2)
    scales = (pair >> place % 2 * 16 << 16).to(tl.float32, bitcast=True)
    return values, scales


@_jit()
def _power_of_two(values):
    """The power of two at or below the largest magnitude of a row, at least fp32's smallest normal number."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), 1.1754943508222875e-38)
    return (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@_jit()
def _capped(scores, softcap, CAPPED: tl.constexpr):
    """Scores in base 2, from scores in base e."""
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * (scores / softcap)) - 1)
    return scores * 1.4426950408889634


@_jit()
def _step(maximum, scores):
    """New maximum, factor of what was summed before, and weights."""
    reached = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(reached == float("-inf"), 0.0, reached)
    return reached, tl.exp2(maximum - base), tl.exp2(scores - base[:, None])


@_jit()
def _exact_part(
    query,
    keys,
    values,
    visible,
    key_stride,
    value_stride,
    visible_row,
    visible_stride,
    count,
    scaling,
    softcap,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Maximum, sum and weighted values over a head's exact tokens, for queries ``[ROWS, D_PAD]``.

    ``visible_row`` ``[ROWS]``: where the mask of each query begins.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, D_PAD], tl.float32)
    channel = tl.arange(0, D_PAD)
    query = query.to(DOT)
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK).to(tl.int64)
        place = visible_row[:, None] + token[None, :] * visible_stride
        sees = tl.load(visible + place, mask=(token < count)[None, :], other=0) != 0
        by_any = tl.max(sees.to(tl.int32), axis=0) != 0
        held = by_any[:, None] & (channel < D)[None, :]  # what nobody sees may be NaN, and 0 * NaN is NaN
        key = tl.load(keys + token[:, None] * key_stride + channel[None, :], mask=held, other=0.0)
        value = tl.load(values + token[:, None] * value_stride + channel[None, :], mask=held, other=0.0)
        scores = tl.dot(query, tl.trans(key.to(DOT)), input_precision="ieee")
        scores = tl.where(sees, _capped(scores * scaling, softcap, CAPPED), float("-inf"))
        maximum, keep, weights = _step(maximum, scores)
        total = total * keep + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(DOT), value.to(DOT), input_precision="ieee")
        summed = summed * keep[:, None] + product
    return maximum, total, summed


@_jit()
def _tiles_part(
    query,
    mean_score,
    batch,
    head,
    key_pages,
    value_pages,
    key_page_stride,
    value_page_stride,
    key_pools,
    value_pools,
    key_tables,
    value_tables,
    key_strides,
    value_strides,
    first,
    last,
    scaling,
    softcap,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KEY_TIERS: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    VALUE_TIERS: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Maximum, sum and weighted values over tiles ``first`` to ``last - 1``, for rotated queries ``[ROWS, D_PAD]``."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, D_PAD], tl.float32)
    query_size = _power_of_two(query)
    query = (query / query_size[:, None]).to(DOT)
    for tile in range(first, last):
        value_page = tl.load(value_pages + tile * value_page_stride)
        if value_page >= 0:
            key_page = tl.load(key_pages + tile * key_page_stride)
            key_tier = key_page >> 24
            key_slot = (key_page & 0xFFFFFF).to(tl.int64)
            value_tier = value_page >> 24
            value_slot = (value_page & 0xFFFFFF).to(tl.int64)
            for start in range(0, 128, BLOCK):
                token = start + tl.arange(0, BLOCK)
                scores = tl.zeros([ROWS, BLOCK], tl.float32)
                for slot in tl.static_range(KEY_COUNT):
                    if key_tier == KEY_TIERS[slot][0]:
                        record = key_pools[slot] + key_slot * key_strides[slot][0]
                        table = key_tables[slot] + batch * key_strides[slot][1] + head * key_strides[slot][2]
                        key, scale = _decode(record, table, token, KEY_TIERS, slot, D, D_PAD, BLOCK, True, DOT)
                        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
                        scores = scores * (query_size[:, None] * scale[None, :]) + mean_score[:, None]
                value = tl.zeros([BLOCK, D_PAD], DOT)
                value_scale = tl.zeros([BLOCK], tl.float32)
                for slot in tl.static_range(VALUE_COUNT):
                    if value_tier == VALUE_TIERS[slot][0]:
                        record = value_pools[slot] + value_slot * value_strides[slot][0]
                        table = value_tables[slot] + batch * value_strides[slot][1] + head * value_strides[slot][2]
                        value, value_scale = _decode(
                            record, table, token, VALUE_TIERS, slot, D, D_PAD, BLOCK, False, DOT
                        )
                maximum, keep, weights = _step(maximum, _capped(scores * scaling, softcap, CAPPED))
                total = total * keep + tl.sum(weights, axis=1)
                weights *= value_scale[None, :]
                size = _power_of_two(weights)
                product = tl.dot((weights / size[:, None]).to(DOT), value, input_precision="ieee")
                summed = summed * keep[:, None] + product * size[:, None]
    return maximum, total, summed


@_jit(
    "visible_strides",
    "key_page_strides",
    "value_page_strides",
    "exact_count",
    "tile_count",
    "tiles_per_part",
    "tile_parts",
    "units",
)
def _decode_attention_kernel(
    query,
    rotated_query,
    mean_scores,
    exact_keys,
    exact_values,
    visible,
    exact_strides,
    visible_strides,
    key_pages,
    value_pages,
    key_page_strides,
    value_page_strides,
    key_pools,
    value_pools,
    key_tables,
    value_tables,
    key_strides,
    value_strides,
    maxima,
    totals,
    sums,
    scaling,
    softcap,
    exact_count,
    tile_count,
    tiles_per_part,
    tile_parts,
    units,
    heads,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    KEY_TIERS: tl.constexpr,
    KEY_COUNT: tl.constexpr,
    VALUE_TIERS: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    EXACT_DOT: tl.constexpr,
):
    """One part of the tokens for a block of a KV head's ``GROUP`` queries; a head's new tokens are neighbours."""
    ROW_BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    unit = (tl.program_id(0) // ROW_BLOCKS).to(tl.int64)
    part = tl.program_id(1)
    batch = unit // heads
    head = unit % heads
    member = tl.program_id(0) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    row = unit * GROUP + member
    channel = tl.arange(0, D_PAD)
    is_query = (member < GROUP)[:, None] & (channel < D)[None, :]
    places = row[:, None] * D + channel[None, :]
    if part == tile_parts:
        maximum, total, summed = _exact_part(
            tl.load(query + places, mask=is_query, other=0.0),
            exact_keys + batch * exact_strides[0][0] + head * exact_strides[0][1],
            exact_values + batch * exact_strides[1][0] + head * exact_strides[1][1],
            visible + batch * visible_strides[0],
            exact_strides[0][2],
            exact_strides[1][2],
            (member % TOKENS).to(tl.int64) * visible_strides[1],
            visible_strides[2],
            exact_count,
            scaling,
            softcap,
            ROWS,
            BLOCK,
            D,
            D_PAD,
            CAPPED,
            EXACT_DOT,
        )
    else:
        first = part.to(tl.int64) * tiles_per_part
        maximum, total, summed = _tiles_part(
            tl.load(rotated_query + places, mask=is_query, other=0.0),
            tl.load(mean_scores + row, mask=member < GROUP, other=0.0),
            batch,
            head,
            key_pages + batch * key_page_strides[0] + head * key_page_strides[1],
            value_pages + batch * value_page_strides[0] + head * value_page_strides[1],
            key_page_strides[2],
            value_page_strides[2],
            key_pools,
            value_pools,
            key_tables,
            value_tables,
            key_strides,
            value_strides,
            first,
            tl.minimum(first + tiles_per_part, tile_count),
            scaling,
            softcap,
            ROWS,
            BLOCK,
            D,
            D_PAD,
            KEY_TIERS,
            KEY_COUNT,
            VALUE_TIERS,
            VALUE_COUNT,
            CAPPED,
            DOT,
        )
    out = part.to(tl.int64) * units * GROUP + row
    tl.store(maxima + out, maximum, mask=member < GROUP)
    tl.store(totals + out, total, mask=member < GROUP)
    tl.store(sums + out[:, None] * D + channel[None, :], summed, mask=is_query)


@_jit()
def _merged_sum(
    maxima, totals, sums, row, rows, base, first, last, D: tl.constexpr, D_PAD: tl.constexpr, PARTS: tl.constexpr
):
    """``[D_PAD]`` weighted values and their weight over parts ``first`` to ``last - 1`` of a query row."""
    channel = tl.arange(0, D_PAD)
    summed = tl.zeros([D_PAD], tl.float32)
    total = tl.zeros([1], tl.float32)
    for start in range(first, last, PARTS):
        part = start + tl.arange(0, PARTS)
        place = part.to(tl.int64) * rows + row
        weight = tl.load(totals + place, mask=part < last, other=0.0)
        holds = weight > 0
        maximum = tl.load(maxima + place, mask=holds, other=0.0)
        factor = tl.where(holds, tl.exp2(tl.where(holds, maximum - base, 0.0)), 0.0)
        values = tl.load(
            sums + place[:, None] * D + channel[None, :], mask=holds[:, None] & (channel < D)[None, :], other=0.0
        )
        summed += tl.sum(values * factor[:, None], axis=0)
        total += tl.sum(weight * factor, axis=0)
    return summed, total


@_jit("rows", "tile_parts", "tokens")
def _merge_parts_kernel(
    maxima,
    totals,
    sums,
    sinks,
    rotated_output,
    exact_output,
    lse,
    rows,
    tile_parts,
    query_heads,
    tokens,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One query row's outputs from tiles (rotated) and exact tokens, and its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    place = part.to(tl.int64) * rows + row
    weight = tl.load(totals + place, mask=part <= tile_parts, other=0.0)
    maximum = tl.load(maxima + place, mask=weight > 0, other=float("-inf"))
    base = tl.max(maximum, axis=0)
    if HAS_SINK:
        sink = tl.load(sinks + row // tokens % query_heads) * 1.4426950408889634
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    rotated, total = _merged_sum(maxima, totals, sums, row, rows, base, 0, tile_parts, D, D_PAD, PARTS_AT_ONCE)
    exact, exact_total = _merged_sum(maxima, totals, sums, row, rows, base, tile_parts, tile_parts + 1, D, D_PAD, 1)
    total += exact_total
    if HAS_SINK:
        total += tl.exp2(sink - base)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    channel = tl.arange(0, D_PAD)
    tl.store(rotated_output + row * D + channel, rotated * inverse, mask=channel < D)
    tl.store(exact_output + row * D + channel, exact * inverse, mask=channel < D)
    seen = tl.where(total > 0, base * 0.6931471805599453 + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse + row + tl.arange(0, 1), seen)


# ---------------------------------------------------------------------- launcher


def _side_obstacle(side: PackedTiles, order: Order) -> str | None:
    name = order.value
    for tier_id in side.pools:
        fmt = side.formats[tier_id]
        if (
            fmt.encoding not in _ENCODINGS
            or not (fmt.rotated and fmt.centred)
            or fmt.token_outliers
            or fmt.tile_outlier_share
        ):
            return f"the kernel does not decode {name} of tier {fmt.name}"
        if fmt.code_bits not in WIDTHS or fmt.vector_dim not in (1, 2, 4, 8):
            return f"the kernel has no code of {fmt.code_bits} bits for {fmt.vector_dim} values (tier {fmt.name})"
        if fmt.encoding is Encoding.VECTOR and side.tables[tier_id].dtype not in (torch.float16, torch.float32):
            return f"the table of tier {fmt.name} is in {side.tables[tier_id].dtype}"
    if side.order is not order:
        return f"the {name} were packed in the order of {side.order.value}"
    return None


def _device_obstacle(device: torch.device) -> str | None:
    if triton is None:
        return "triton is not installed"
    interpreted = not isinstance(_decode_attention_kernel, triton.runtime.JITFunction)
    if device.type == "cpu" and not interpreted:
        return "the tensors lie on a CPU"
    return None if device.type in ("cpu", "cuda") else f"the tensors lie on a device of type {device.type}"


def triton_obstacle(
    query: Tensor, exact: ExactTokens, tiles: AttentionTiles | None, softcap: float | None, sink_logits: Tensor | None
) -> str | None:
    """Why the kernel cannot compute a call, or None; looks at shapes and types alone.

    Args:
        query: ``[B, HQ, Sq, D]``.
        exact: tokens held exactly, with their mask.
        tiles: packed tokens, or None.
        softcap: bound of the scores, or None; any will do.
        sink_logits: ``[HQ]`` or None; any will do.
    """
    device = _device_obstacle(query.device)
    if device is not None:
        return device
    dim = query.shape[-1]
    if query.shape[2] > MAX_TOKENS:
        return f"there are {query.shape[2]} new tokens a row, more than {MAX_TOKENS}"
    if torch.is_grad_enabled() and query.requires_grad:
        return "a gradient is wanted"
    if exact.keys.shape[-1] != exact.values.shape[-1] or (tiles is not None and len(tiles.keys) != 1):
        return "keys and values differ in width"
    if dim % 8 or dim > _MAX_HEAD_DIM:
        return f"head_dim {dim} is no multiple of 8 up to {_MAX_HEAD_DIM}"
    if query.dtype not in _DTYPES or {exact.keys.dtype, exact.values.dtype} != {query.dtype}:
        return f"queries in {query.dtype} with exact tokens in {exact.keys.dtype} and {exact.values.dtype}"
    if tiles is None:
        return None
    if tiles.values.mean is not None:
        return "the values have a mean"
    return _side_obstacle(tiles.keys[0], Order.KEYS) or _side_obstacle(tiles.values, Order.VALUES)


class _Side(NamedTuple):
    """One side's tiles as the kernel takes them."""

    tiers: tuple[_Tier, ...]
    pages: Tensor
    pools: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    strides: tuple[tuple[int, int, int], ...]  # of a slot, and of a row and a head of the table


def _tier(fmt: TileFormat, head_dim: int) -> _Tier:
    return _Tier(
        fmt.tier_id,
        fmt.code_bits,
        fmt.vector_dim if fmt.encoding is Encoding.VECTOR else 0,
        codes_per_block(fmt.code_bits) * fmt.code_bits // 32,
        fmt.code_words(head_dim),
    )


def _side(side: PackedTiles | None, device: torch.device) -> _Side:
    """A side's pools in the order of their tiers; without tiles something of the right types that is never read."""
    if side is None:
        nothing = torch.empty(1, 1, 0, dtype=torch.int32, device=device)
        return _Side((), nothing, (nothing,), (nothing,), ((0, 0, 0),))
    tiers, pools, tables, strides = [], [], [], []
    for tier_id, pool in sorted(side.pools.items()):
        tier = _tier(side.formats[tier_id], side.head_dim)
        table, row, head = pool, 0, 0  # without a table none is read
        if tier.vector_dim:
            table = side.tables[tier_id]
            table = table if table[0, 0].is_contiguous() else table.contiguous()
            row, head = (table.stride(axis) if table.shape[axis] > 1 else 0 for axis in (0, 1))
        tiers.append(tier)
        pools.append(pool)
        tables.append(table)
        strides.append((pool.stride(0), row, head))
    return _Side(tuple(tiers), side.pages, tuple(pools), tuple(tables), tuple(strides))


def _default_splits(device: torch.device, programs: int, tiles: int) -> int:
    """Parts into which a call's tiles fall: enough programs to fill the device."""
    if device.type == "cpu":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(tiles, _PROGRAMS_PER_PROCESSOR * processors // programs))


def _block_tokens(padded: int, dot: Any, device: torch.device) -> int:
    """Tokens that are decoded at once: what registers hold, as far as the compiler tells."""
    if device.type == "cpu":
        return 64
    return 32 if padded <= 128 and dot is tl.float16 else 16


def _dense(tensor: Tensor) -> Tensor:
    """The tensor with neighbouring channels side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _dot_types(dtype: torch.dtype, tables: tuple[Tensor, ...], device: torch.device) -> tuple[Any, Any]:
    """Types in which packed and exact tokens are multiplied."""
    if dtype is torch.float32 or any(table.dtype is torch.float32 for table in tables):
        packed = tl.float32
    else:
        packed = tl.float16
    if dtype is torch.float16:
        return packed, tl.float16
    # the interpreter holds bf16 as integers
    return packed, tl.bfloat16 if dtype is torch.bfloat16 and device.type == "cuda" else tl.float32


def _rotated(query: Tensor, side: PackedTiles | None, heads: int) -> tuple[Tensor, Tensor]:
    """Queries ``[B, HQ, Sq, D]`` in the rotated space, and their products with the mean that keys lack."""
    if side is None:
        nothing = torch.empty(0, device=query.device)
        return nothing, nothing
    rows = query.float().reshape(len(query), heads, -1, side.head_dim)
    if side.mean is None:
        products = torch.zeros(rows.shape[:3], device=query.device)
    else:
        products = rows @ side.mean.unsqueeze(-1)
    return (rows @ side.rotation.t()).contiguous(), products.contiguous()


class _Parts(NamedTuple):
    """What the first kernel leaves of each part; the exact tokens' part is the last."""

    maxima: Tensor  # [parts, B * HQ * Sq] in base 2
    totals: Tensor  # [parts, B * HQ * Sq]
    sums: Tensor  # [parts, B * HQ * Sq, D]


def _attend(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None,
    splits: int | None,
) -> _Parts:
    batch, query_heads, tokens, dim = query.shape
    heads, device = exact.keys.shape[1], query.device
    group, rows = query_heads // heads * tokens, batch * query_heads * tokens
    key_side, value_side = (None, None) if tiles is None else (tiles.keys[0], tiles.values)
    rotated_query, mean_scores = _rotated(query, key_side, heads)
    keys, values = _side(key_side, device), _side(value_side, device)
    exact_keys, exact_values, visible = _dense(exact.keys), _dense(exact.values), exact.visible.view(torch.uint8)

    tile_count = values.pages.shape[-1]
    block_rows = min(_MAX_ROWS, max(16, triton.next_power_of_2(group)))
    programs = batch * heads * triton.cdiv(group, block_rows)
    wanted = _default_splits(device, programs, tile_count) if splits is None else splits
    tile_parts = wanted if tile_count else 0
    scratch = _Parts(
        torch.empty(tile_parts + 1, rows, device=device),
        torch.empty(tile_parts + 1, rows, device=device),
        torch.empty(tile_parts + 1, rows, dim, device=device),
    )
    padded = max(16, triton.next_power_of_2(dim))
    dot, exact_dot = _dot_types(query.dtype, keys.tables + values.tables, device)
    _decode_attention_kernel[(programs, tile_parts + 1)](
        query.reshape(rows, dim).contiguous(),
        rotated_query,
        mean_scores,
        exact_keys,
        exact_values,
        visible,
        (exact_keys.stride()[:3], exact_values.stride()[:3]),
        (visible.stride(0), visible.stride(1) if visible.shape[1] > 1 else 0, visible.stride(2)),
        keys.pages,
        values.pages,
        keys.pages.stride(),
        values.pages.stride(),
        keys.pools,
        values.pools,
        keys.tables,
        values.tables,
        keys.strides,
        values.strides,
        *scratch,
        scaling,
        0.0 if softcap is None else softcap,
        exact_keys.shape[2],
        tile_count,
        triton.cdiv(tile_count, max(1, tile_parts)),
        tile_parts,
        batch * heads,
        heads,
        TOKENS=tokens,
        GROUP=group,
        ROWS=block_rows,
        BLOCK=_block_tokens(padded, dot, device),
        D=dim,
        D_PAD=padded,
        KEY_TIERS=keys.tiers,
        KEY_COUNT=len(keys.tiers),
        VALUE_TIERS=values.tiers,
        VALUE_COUNT=len(values.tiers),
        CAPPED=softcap is not None,
        DOT=dot,
        EXACT_DOT=exact_dot,
        num_warps=4 if dot is tl.float16 else 8,
        num_stages=1,  # more would keep exact tokens in shared memory that tiles need
    )
    return scratch


def _merge(
    scratch: _Parts, sink_logits: Tensor | None, query_heads: int, tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``[B * HQ * Sq, D]`` outputs from tiles, rotated, and from exact tokens; ``[B * HQ * Sq]`` log-sum-exp."""
    parts, rows, dim = scratch.sums.shape
    rotated, output = torch.empty_like(scratch.sums[0]), torch.empty_like(scratch.sums[0])
    lse = torch.empty_like(scratch.totals[0])
    _merge_parts_kernel[(rows,)](
        *scratch,
        scratch.totals if sink_logits is None else sink_logits.float().contiguous(),
        rotated,
        output,
        lse,
        rows,
        parts - 1,
        query_heads,
        tokens,
        D=dim,
        D_PAD=max(16, triton.next_power_of_2(dim)),
        PARTS_AT_ONCE=_MERGED_PARTS,
        PARTS_PAD=max(_MERGED_PARTS, triton.next_power_of_2(parts)),
        HAS_SINK=sink_logits is not None,
    )
    return rotated, output, lse


def decode_attention_triton(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    splits: int | None = None,
) -> AttentionResult:
    """Attention of a few new tokens, for calls without a :func:`triton_obstacle`.

    Args:
        query: ``[B, HQ, Sq, D]`` fp16, bf16 or fp32; HQ a multiple of H, Sq up to ``MAX_TOKENS``, D a multiple of 8 up
            to 256.
        exact: tokens held exactly, in the query's dtype, with their mask.
        tiles: packed tokens, or None.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.
        splits: parts into which the tiles of a row fall; None lets the device's size decide.

    Returns:
        Output ``[B, HQ, Sq, D]`` and log-sum-exp ``[B, HQ, Sq]`` fp32, no entropy.
    """
    if tiles is not None and not tiles.values.pages.shape[-1]:
        tiles = None
    with torch.cuda.device_of(query):  # Triton launches on the current device
        scratch = _attend(query, exact, tiles, scaling, softcap, splits)
        rotated, output, lse = _merge(scratch, sink_logits, *query.shape[1:3])
    if tiles is not None:
        output = torch.addmm(output, rotated, tiles.values.rotation)
    return AttentionResult(output.view_as(query), lse.view(query.shape[:3]), None)
