# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806
"""The Triton kernels of decode attention: one part of the tokens a program, and the merge of all parts.

A program owns one (row, KV head, block of at most 32 queries) and one *part* of the tokens. The parts are runs of
tiles whose values lie in the rotated space, then runs of tiles whose values lie in the model's own space (where a tier
stores them so), then the exact tokens. The program keeps a running softmax in base 2 and leaves maximum, sum and
weighted values in scratch; the merge adds up each space. A part that saw no token has sum 0, and its values in scratch
are not read.

Keys have one or two neighbouring halves (latent attention: the latent, and the rotary rest), each with tiles of its
own; the values may be the first half, which is then decoded once.

Rounding: queries, weights and decoded tiles of fp16 and bf16 models are multiplied in fp16 with fp32 sums; those of
fp32 models, or with an fp32 codebook, in fp32 without TF32. A query row, and a row of a block's weights times the
values' scales (which may be of any size), are first divided by the power of two below their largest, so that fp16
neither overflows nor loses what matters. Exact tokens are multiplied in the model's dtype.
"""

from __future__ import annotations

import contextlib

from subbyte_kernels.decode_attention.triton_decoding import decode, jit, power_of_two


with contextlib.suppress(ImportError):
    import triton.language as tl


@jit()
def _capped(scores, softcap, CAPPED: tl.constexpr):
    """Scores in base 2, from scores in base e."""
    if CAPPED:
        scores = softcap * (2 * tl.sigmoid(2 * (scores / softcap)) - 1)
    return scores * 1.4426950408889634


@jit()
def _step(maximum, scores):
    """New maximum, factor of what was summed before, and weights."""
    reached = tl.maximum(maximum, tl.max(scores, axis=1))
    base = tl.where(reached == float("-inf"), 0.0, reached)
    return reached, tl.exp2(maximum - base), tl.exp2(scores - base[:, None])


@jit()
def _load_rows(rows, row, is_row, D: tl.constexpr, D_PAD: tl.constexpr):
    """``[ROWS, D_PAD]`` of a dense ``[any, D]``."""
    channel = tl.arange(0, D_PAD)
    mask = is_row[:, None] & (channel < D)[None, :]
    return tl.load(rows + row[:, None] * D + channel[None, :], mask=mask, other=0.0)


@jit()
def _exact_part(
    queries,
    row,
    is_row,
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
    DIMS: tl.constexpr,
    PADS: tl.constexpr,
    HALVES: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Maximum, sum and weighted values over a head's exact tokens, for query rows ``row`` of each half's queries.

    ``visible_row`` ``[ROWS]``: where the mask of each query begins.
    """
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DV_PAD], tl.float32)
    column = tl.arange(0, DV_PAD)
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK).to(tl.int64)
        place = visible_row[:, None] + token[None, :] * visible_stride
        sees = tl.load(visible + place, mask=(token < count)[None, :], other=0) != 0
        by_any = tl.max(sees.to(tl.int32), axis=0) != 0  # what nobody sees may be NaN, and 0 * NaN is NaN
        scores = tl.zeros([ROWS, BLOCK], tl.float32)
        for half in tl.static_range(HALVES):
            channel = tl.arange(0, PADS[half])
            held = by_any[:, None] & (channel < DIMS[half])[None, :]
            begin = keys + (DIMS[0] if half > 0 else 0)
            key = tl.load(begin + token[:, None] * key_stride + channel[None, :], mask=held, other=0.0)
            query = _load_rows(queries[half], row, is_row, DIMS[half], PADS[half]).to(DOT)
            scores += tl.dot(query, tl.trans(key.to(DOT)), input_precision="ieee")
        scores = tl.where(sees, _capped(scores * scaling, softcap, CAPPED), float("-inf"))
        held = by_any[:, None] & (column < DV)[None, :]
        value = tl.load(values + token[:, None] * value_stride + column[None, :], mask=held, other=0.0)
        maximum, keep, weights = _step(maximum, scores)
        total = total * keep + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(DOT), value.to(DOT), input_precision="ieee")
        summed = summed * keep[:, None] + product
    return maximum, total, summed


@jit()
def _unit_rows(rows, row, is_row, D: tl.constexpr, D_PAD: tl.constexpr, DOT: tl.constexpr):
    """Query rows in units of a power of two, and these."""
    loaded = _load_rows(rows, row, is_row, D, D_PAD).to(tl.float32)
    size = power_of_two(loaded)
    return (loaded / size[:, None]).to(DOT), size


@jit()
def _half_scores(
    query,
    size,
    plain_query,
    plain_size,
    batch,
    head,
    tile,
    token,
    pages,
    page_strides,
    pools,
    tables,
    strides,
    mean_score,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TIERS: tl.constexpr,
    COUNT: tl.constexpr,
    DOT: tl.constexpr,
):
    """Products ``[ROWS, BLOCK]`` of queries with one half of a tile's keys; raw ones hold their mean."""
    scores = tl.zeros([ROWS, BLOCK], tl.float32)
    page = tl.load(pages + batch * page_strides[0] + head * page_strides[1] + tile * page_strides[2])
    named = page >> 24
    place = (page & 0xFFFFFF).to(tl.int64)
    for slot in tl.static_range(COUNT):
        if named == TIERS[slot][0]:
            record = pools[slot] + place * strides[slot][0]
            table = tables[slot] + batch * strides[slot][1] + head * strides[slot][2]
            key, scale = decode(record, table, table, token, TIERS, slot, D, D_PAD, BLOCK, True, False, DOT)
            if TIERS[slot][7] > 0:
                scores = tl.dot(query, tl.trans(key), input_precision="ieee") * (size[:, None] * scale[None, :])
            else:
                product = tl.dot(plain_query, tl.trans(key), input_precision="ieee")
                scores = product * (plain_size[:, None] * scale[None, :])
            if TIERS[slot][8] == 0:
                scores += mean_score[:, None]
    return scores


@jit()
def _tiles_part(
    queries,
    plain_queries,
    mean_scores,
    row,
    is_row,
    batch,
    head,
    heads,
    key_pages,
    key_page_strides,
    key_pools,
    key_tables,
    key_strides,
    value_pages,
    value_page_stride,
    value_pools,
    value_tables,
    value_strides,
    value_mean,
    first,
    last,
    scaling,
    softcap,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
    PADS: tl.constexpr,
    HALVES: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    FIRST_TIERS: tl.constexpr,
    SECOND_TIERS: tl.constexpr,
    KEY_COUNTS: tl.constexpr,
    PLAIN_KEYS: tl.constexpr,
    VALUE_TIERS: tl.constexpr,
    FIRST_SLOT: tl.constexpr,
    LAST_SLOT: tl.constexpr,
    VALUES_CENTRED: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
):
    """Maximum, sum and weighted values over tiles ``first`` to ``last - 1``, of value tiers in some slots alone."""
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DV_PAD], tl.float32)
    mean_score = tl.load(mean_scores[0] + row, mask=is_row, other=0.0)
    query, size = _unit_rows(queries[0], row, is_row, DIMS[0], PADS[0], DOT)
    plain_query, plain_size = query, size
    if PLAIN_KEYS[0]:
        plain_query, plain_size = _unit_rows(plain_queries[0], row, is_row, DIMS[0], PADS[0], DOT)
    if HALVES > 1:
        second_mean_score = tl.load(mean_scores[1] + row, mask=is_row, other=0.0)
        second, second_size = _unit_rows(queries[1], row, is_row, DIMS[1], PADS[1], DOT)
        plain_second, plain_second_size = second, second_size
        if PLAIN_KEYS[1]:
            plain_second, plain_second_size = _unit_rows(plain_queries[1], row, is_row, DIMS[1], PADS[1], DOT)
    unit = batch * heads + head
    for tile in range(first, last):
        value_page = tl.load(value_pages + tile * value_page_stride)
        value_tier = value_page >> 24
        value_place = (value_page & 0xFFFFFF).to(tl.int64)
        holds = value_page < -1
        for slot in tl.static_range(FIRST_SLOT, LAST_SLOT):
            holds = holds | (value_tier == VALUE_TIERS[slot][0])
        if holds:
            for start in range(0, 128, BLOCK):
                token = start + tl.arange(0, BLOCK)
                value = tl.zeros([BLOCK, DV_PAD], DOT)
                value_scale = tl.zeros([BLOCK], tl.float32)
                for slot in tl.static_range(FIRST_SLOT, LAST_SLOT):
                    if value_tier == VALUE_TIERS[slot][0]:
                        record = value_pools[slot] + value_place * value_strides[slot][0]
                        table = value_tables[slot] + batch * value_strides[slot][1] + head * value_strides[slot][2]
                        mean = value_mean + unit * DV
                        value, value_scale = decode(
                            record,
                            table,
                            mean,
                            token,
                            VALUE_TIERS,
                            slot,
                            DV,
                            DV_PAD,
                            BLOCK,
                            SHARED,
                            VALUES_CENTRED,
                            DOT,
                        )
                if SHARED:
                    if VALUE_TIERS[FIRST_SLOT][7] > 0:
                        scores = tl.dot(query, tl.trans(value), input_precision="ieee") * size[:, None]
                    else:
                        scores = tl.dot(plain_query, tl.trans(value), input_precision="ieee") * plain_size[:, None]
                    scores = scores * value_scale[None, :] + mean_score[:, None]
                else:
                    scores = _half_scores(
                        query,
                        size,
                        plain_query,
                        plain_size,
                        batch,
                        head,
                        tile,
                        token,
                        key_pages[0],
                        key_page_strides[0],
                        key_pools[0],
                        key_tables[0],
                        key_strides[0],
                        mean_score,
                        ROWS,
                        BLOCK,
                        DIMS[0],
                        PADS[0],
                        FIRST_TIERS,
                        KEY_COUNTS[0],
                        DOT,
                    )
                if HALVES > 1:
                    scores += _half_scores(
                        second,
                        second_size,
                        plain_second,
                        plain_second_size,
                        batch,
                        head,
                        tile,
                        token,
                        key_pages[1],
                        key_page_strides[1],
                        key_pools[1],
                        key_tables[1],
                        key_strides[1],
                        second_mean_score,
                        ROWS,
                        BLOCK,
                        DIMS[1],
                        PADS[1],
                        SECOND_TIERS,
                        KEY_COUNTS[1],
                        DOT,
                    )
                scores = _capped(scores * scaling, softcap, CAPPED)
                maximum, keep, weights = _step(maximum, scores)
                total = total * keep + tl.sum(weights, axis=1)
                weights *= value_scale[None, :]
                unit_of_row = power_of_two(weights)
                product = tl.dot((weights / unit_of_row[:, None]).to(DOT), value, input_precision="ieee")
                summed = summed * keep[:, None] + product * unit_of_row[:, None]
    return maximum, total, summed


@jit(
    "visible_strides",
    "key_page_strides",
    "value_page_strides",
    "exact_count",
    "tile_count",
    "tiles_per_part",
    "tile_parts",
    "units",
)
def decode_attention_kernel(
    model_queries,
    queries,
    plain_queries,
    mean_scores,
    exact_keys,
    exact_values,
    visible,
    exact_strides,
    visible_strides,
    key_pages,
    key_page_strides,
    key_pools,
    key_tables,
    key_strides,
    value_pages,
    value_page_strides,
    value_pools,
    value_tables,
    value_strides,
    value_mean,
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
    DIMS: tl.constexpr,
    PADS: tl.constexpr,
    HALVES: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    FIRST_TIERS: tl.constexpr,
    SECOND_TIERS: tl.constexpr,
    KEY_COUNTS: tl.constexpr,
    PLAIN_KEYS: tl.constexpr,
    VALUE_TIERS: tl.constexpr,
    ROTATED_COUNT: tl.constexpr,
    VALUE_COUNT: tl.constexpr,
    VALUES_CENTRED: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    DOT: tl.constexpr,
    EXACT_DOT: tl.constexpr,
):
    """One part of the tokens for a block of a KV head's ``GROUP`` queries; a head's new tokens are neighbours."""
    ROW_BLOCKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    SPACES: tl.constexpr = (1 if ROTATED_COUNT > 0 else 0) + (1 if ROTATED_COUNT < VALUE_COUNT else 0)
    unit = (tl.program_id(0) // ROW_BLOCKS).to(tl.int64)
    part = tl.program_id(1)
    batch = unit // heads
    head = unit % heads
    member = tl.program_id(0) % ROW_BLOCKS * ROWS + tl.arange(0, ROWS)
    row = unit * GROUP + member
    is_row = member < GROUP
    if part == SPACES * tile_parts:
        maximum, total, summed = _exact_part(
            model_queries,
            row,
            is_row,
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
            DIMS,
            PADS,
            HALVES,
            DV,
            DV_PAD,
            CAPPED,
            EXACT_DOT,
        )
    else:
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DV_PAD], tl.float32)
        first = (part % tile_parts).to(tl.int64) * tiles_per_part
        last = tl.minimum(first + tiles_per_part, tile_count)
        for space in tl.static_range(SPACES):
            if part // tile_parts == space:
                maximum, total, summed = _tiles_part(
                    queries,
                    plain_queries,
                    mean_scores,
                    row,
                    is_row,
                    batch,
                    head,
                    heads,
                    key_pages,
                    key_page_strides,
                    key_pools,
                    key_tables,
                    key_strides,
                    value_pages + batch * value_page_strides[0] + head * value_page_strides[1],
                    value_page_strides[2],
                    value_pools,
                    value_tables,
                    value_strides,
                    value_mean,
                    first,
                    last,
                    scaling,
                    softcap,
                    ROWS,
                    BLOCK,
                    DIMS,
                    PADS,
                    HALVES,
                    DV,
                    DV_PAD,
                    FIRST_TIERS,
                    SECOND_TIERS,
                    KEY_COUNTS,
                    PLAIN_KEYS,
                    VALUE_TIERS,
                    0 if ROTATED_COUNT > 0 and space == 0 else ROTATED_COUNT,
                    ROTATED_COUNT if ROTATED_COUNT > 0 and space == 0 else VALUE_COUNT,
                    VALUES_CENTRED,
                    SHARED,
                    CAPPED,
                    DOT,
                )
    out = part.to(tl.int64) * units * GROUP + row
    column = tl.arange(0, DV_PAD)
    tl.store(maxima + out, maximum, mask=is_row)
    tl.store(totals + out, total, mask=is_row)
    tl.store(sums + out[:, None] * DV + column[None, :], summed, mask=is_row[:, None] & (column < DV)[None, :])


@jit()
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


@jit("rows", "rotated_parts", "plain_parts", "tokens")
def merge_parts_kernel(
    maxima,
    totals,
    sums,
    sinks,
    rotated_output,
    output,
    packed_share,
    lse,
    rows,
    rotated_parts,
    plain_parts,
    query_heads,
    tokens,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    HAS_SINK: tl.constexpr,
):
    """One query row's sums in both spaces, the share of packed tokens in its softmax, and its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    place = part.to(tl.int64) * rows + row
    packed_parts = rotated_parts + plain_parts
    weight = tl.load(totals + place, mask=part <= packed_parts, other=0.0)
    maximum = tl.load(maxima + place, mask=weight > 0, other=float("-inf"))
    base = tl.max(maximum, axis=0)
    if HAS_SINK:
        sink = tl.load(sinks + row // tokens % query_heads) * 1.4426950408889634
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    rotated, total = _merged_sum(maxima, totals, sums, row, rows, base, 0, rotated_parts, D, D_PAD, PARTS_AT_ONCE)
    plain, plain_total = _merged_sum(
        maxima, totals, sums, row, rows, base, rotated_parts, packed_parts, D, D_PAD, PARTS_AT_ONCE
    )
    packed_total = total + plain_total
    exact, exact_total = _merged_sum(
        maxima, totals, sums, row, rows, base, packed_parts, packed_parts + 1, D, D_PAD, 1
    )
    total = packed_total + exact_total
    if HAS_SINK:
        total += tl.exp2(sink - base)
    inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), 0.0)
    channel = tl.arange(0, D_PAD)
    tl.store(rotated_output + row * D + channel, rotated * inverse, mask=channel < D)
    tl.store(output + row * D + channel, (plain + exact) * inverse, mask=channel < D)
    seen = tl.where(total > 0, base * 0.6931471805599453 + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(packed_share + row + tl.arange(0, 1), packed_total * inverse)
    tl.store(lse + row + tl.arange(0, 1), seen)
