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
"""

from __future__ import annotations

import contextlib

from subbyte_kernels.decode_attention.triton_decoding import jit
from subbyte_kernels.decode_attention.triton_parts import exact_part, tiles_part


with contextlib.suppress(ImportError):
    import triton.language as tl


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
        maximum, total, summed = exact_part(
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
                maximum, total, summed = tiles_part(
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
