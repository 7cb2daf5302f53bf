# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803
"""What a program of the Triton kernels does with its part of the tokens: exact tokens, or runs of tiles.

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
def exact_part(
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
def tiles_part(
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
