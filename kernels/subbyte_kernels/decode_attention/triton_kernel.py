"""Decode attention in Triton: the portable kernel, its checks and its launch.

``triton_decoding.py`` turns records into values, ``triton_programs.py`` holds the kernels. Queries are rotated before,
and the sum over tiles is rotated back after, by PyTorch. The queries of a KV head are its query heads' new tokens; all
see every tile, and each has a mask of its own over the exact tokens.

It takes every tier, keys and values of different width, and latent caches, whose keys come in two parts of which the
first is the values, too.

Gives up: many query heads of one KV head are cut into blocks of 32, each of which decodes all tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from subbyte_kernels.bitpack import WIDTHS
from subbyte_kernels.decode_attention.reference import AttentionResult, AttentionTiles, ExactTokens
from subbyte_kernels.decode_attention.triton_decoding import Tier, tier
from subbyte_kernels.decode_attention.triton_programs import decode_attention_kernel, merge_parts_kernel
from subbyte_kernels.formats import Encoding, PackedTiles
from subbyte_kernels.lanes import Order


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


MAX_TOKENS = 8  # new tokens of a row; many make a prompt, which decodes tiles once and not for each 32 queries
_MAX_HEAD_DIM = 512
_MAX_REGISTER_DIM = 256  # registers of a token name channels by bytes
_MAX_ROWS = 32  # from 64 on, Hopper's instructions want another layout of keys, and the compiler fails
_MERGED_PARTS, _MERGED_VALUES = 16, 1 << 12  # partial sums that the merge reads at once
_PROGRAMS_PER_PROCESSOR = 4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _side_obstacle(side: PackedTiles, order: Order, name: str) -> str | None:
    for tier_id in side.pools:
        fmt = side.formats[tier_id]
        if fmt.encoding is not Encoding.RAW and (
            fmt.code_bits not in WIDTHS or fmt.vector_dim not in (1, 2, 4, 8) or not fmt.centred
        ):
            return f"the kernel has no code of {fmt.code_bits} bits for {fmt.vector_dim} values (tier {fmt.name})"
        if fmt.token_outliers and side.head_dim > _MAX_REGISTER_DIM:
            return f"registers of tier {fmt.name} have no room for {side.head_dim} channels"
        if fmt.entries and side.tables[tier_id].dtype not in (torch.float16, torch.float32):
            return f"the table of tier {fmt.name} is in {side.tables[tier_id].dtype}"
    if side.order is not order:
        return f"the {name} were packed in the order of {side.order.value}"
    return None


def _device_obstacle(device: torch.device) -> str | None:
    if triton is None:
        return "triton is not installed"
    interpreted = not isinstance(decode_attention_kernel, triton.runtime.JITFunction)
    if device.type == "cpu" and not interpreted:
        return "the tensors lie on a CPU"
    return None if device.type in ("cpu", "cuda") else f"the tensors lie on a device of type {device.type}"


def _shape_obstacle(query: Tensor, exact: ExactTokens, tiles: AttentionTiles | None) -> str | None:
    if query.shape[2] > MAX_TOKENS:
        return f"there are {query.shape[2]} new tokens a row, more than {MAX_TOKENS}"
    dims = _half_dims(exact, tiles)
    if sum(dims) != query.shape[-1] or exact.keys.shape[-1] != query.shape[-1]:
        return f"queries are {query.shape[-1]} wide, keys {exact.keys.shape[-1]} and tiles {sum(dims)}"
    if tiles is not None and tiles.values.head_dim != exact.values.shape[-1]:
        return f"values are {exact.values.shape[-1]} wide, their tiles {tiles.values.head_dim}"
    if len(dims) > 2:
        return f"keys have {len(dims)} parts, more than 2"
    for dim in (*dims, exact.values.shape[-1]):
        if dim % 8 or dim > _MAX_HEAD_DIM:
            return f"head_dim {dim} is no multiple of 8 up to {_MAX_HEAD_DIM}"
    if query.dtype not in _DTYPES or {exact.keys.dtype, exact.values.dtype} != {query.dtype}:
        return f"queries in {query.dtype} with exact tokens in {exact.keys.dtype} and {exact.values.dtype}"
    return None


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
    if torch.is_grad_enabled() and query.requires_grad:
        return "a gradient is wanted"
    shapes = _shape_obstacle(query, exact, tiles)
    if shapes is not None or tiles is None:
        return shapes
    shared = tiles.values is tiles.keys[0]
    if tiles.values.mean is not None and not shared:
        return "the values have a mean"
    for part in tiles.keys:
        reason = _side_obstacle(part, Order.KEYS, "keys")
        if reason is not None:
            return reason
    return None if shared else _side_obstacle(tiles.values, Order.VALUES, "values")


def _half_dims(exact: ExactTokens, tiles: AttentionTiles | None) -> list[int]:
    """Widths of the parts of keys. Exact keys alone are cut where values end, so that either part pads to little."""
    if tiles is not None:
        return [part.head_dim for part in tiles.keys]
    width, first = exact.keys.shape[-1], exact.values.shape[-1]
    return [first, width - first] if first < width else [width]


class _Side(NamedTuple):
    """One side's tiles as the kernel takes them; tiers that lie in the rotated space come first."""

    tiers: tuple[Tier, ...]
    pages: Tensor
    pools: tuple[Tensor, ...]
    tables: tuple[Tensor, ...]
    strides: tuple[tuple[int, int, int], ...]  # of a slot, and of a row and a head of the table
    mean: Tensor  # [B, H, D], or nothing
    centred: bool


def _nothing(device: torch.device) -> _Side:
    """Something of the right types that is never read."""
    nothing = torch.empty(1, 1, 0, dtype=torch.int32, device=device)
    mean = torch.empty(0, dtype=torch.float32, device=device)
    return _Side((), nothing, (nothing,), (nothing,), ((0, 0, 0),), mean, False)


def _side(side: PackedTiles, dtype: torch.dtype) -> _Side:
    """A side's pools, rotated tiers first, then in the order of their numbers."""
    tiers, pools, tables, strides = [], [], [], []
    for tier_id in sorted(side.pools, key=lambda tier_id: (not side.formats[tier_id].rotated, tier_id)):
        fmt, pool = side.formats[tier_id], side.pools[tier_id]
        table, row, head = pool, 0, 0  # without a table none is read
        if fmt.entries:
            table = side.tables[tier_id]
            table = table if table[0, 0].is_contiguous() else table.contiguous()
            row, head = (table.stride(axis) if table.shape[axis] > 1 else 0 for axis in (0, 1))
        tiers.append(tier(fmt, side.head_dim, dtype))
        pools.append(pool)
        tables.append(table)
        strides.append((pool.stride(0), row, head))
    mean = (
        torch.empty(0, dtype=torch.float32, device=side.pages.device) if side.mean is None else side.mean.contiguous()
    )
    return _Side(tuple(tiers), side.pages, tuple(pools), tuple(tables), tuple(strides), mean, side.mean is not None)


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


def _dot_types(dtype: torch.dtype, fp32_codebook: bool, device: torch.device) -> tuple[Any, Any]:
    """Types in which packed and exact tokens are multiplied."""
    packed = tl.float32 if dtype is torch.float32 or fp32_codebook else tl.float16
    if dtype is torch.float16:
        return packed, tl.float16
    # the interpreter holds bf16 as integers
    return packed, tl.bfloat16 if dtype is torch.bfloat16 and device.type == "cuda" else tl.float32


def _has_fp32_codebook(tiles: AttentionTiles | None) -> bool:
    """Whether a table of vectors has entries that fp16 may not hold; centroids are near 1."""
    sides = () if tiles is None else (*tiles.keys, tiles.values)
    return any(
        side.formats[tier_id].encoding is Encoding.VECTOR and table.dtype is torch.float32
        for side in sides
        for tier_id, table in side.tables.items()
        if tier_id in side.pools
    )


class _Queries(NamedTuple):
    """Queries by parts of the keys, ``[B * HQ * Sq, D]`` each."""

    model: tuple[Tensor, ...]  # as they came
    rotated: tuple[Tensor, ...]
    mean_scores: tuple[Tensor, ...]  # [B * HQ * Sq] their products with the mean that packed keys lack


def _queries(query: Tensor, dims: list[int], parts: tuple[PackedTiles, ...], heads: int) -> _Queries:
    pieces = tuple(piece.reshape(-1, piece.shape[-1]).contiguous() for piece in query.split(dims, dim=-1))
    if not parts:
        nothing = (torch.empty(0, dtype=torch.float32, device=query.device),) * len(pieces)
        return _Queries(pieces, nothing, nothing)
    rotated, products = [], []
    for piece, part in zip(pieces, parts, strict=True):
        rows = piece.float().view(len(query), heads, -1, part.head_dim)
        if part.mean is None:
            products.append(torch.zeros(rows.shape[:3], dtype=torch.float32, device=query.device))
        else:
            products.append((rows @ part.mean.unsqueeze(-1)).contiguous())
        rotated.append((rows @ part.rotation.t()).contiguous())
    return _Queries(pieces, tuple(rotated), tuple(products))


class _Parts(NamedTuple):
    """What the first kernel leaves of each part; the exact tokens' part is the last."""

    maxima: Tensor  # [parts, B * HQ * Sq] in base 2
    totals: Tensor  # [parts, B * HQ * Sq]
    sums: Tensor  # [parts, B * HQ * Sq, Dv]
    rotated: int  # parts whose sums lie in the rotated space, the first ones


def _padded(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def _attend(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None,
    splits: int | None,
) -> _Parts:
    batch, query_heads, tokens, _ = query.shape
    heads, device, width = exact.keys.shape[1], query.device, exact.values.shape[-1]
    group, rows = query_heads // heads * tokens, batch * query_heads * tokens
    dims = _half_dims(exact, tiles)
    parts = () if tiles is None else tiles.keys
    queries = _queries(query, dims, parts, heads)
    keys = [_side(part, query.dtype) for part in parts] or [_nothing(device)] * len(dims)
    shared = tiles is not None and tiles.values is tiles.keys[0]
    values = _nothing(device) if tiles is None else keys[0] if shared else _side(tiles.values, query.dtype)
    exact_keys, exact_values, visible = _dense(exact.keys), _dense(exact.values), exact.visible.view(torch.uint8)

    tile_count, rotated_tiers = values.pages.shape[-1], sum(one.rotated for one in values.tiers)
    block_rows = min(_MAX_ROWS, max(16, int(triton.next_power_of_2(group))))
    programs = batch * heads * triton.cdiv(group, block_rows)
    wanted = _default_splits(device, programs, tile_count) if splits is None else splits
    tile_parts = wanted if tile_count else 0
    plain_parts = tile_parts * (rotated_tiers < len(values.tiers))
    rotated_parts = tile_parts * (rotated_tiers > 0)
    count = rotated_parts + plain_parts + 1
    scratch = _Parts(
        torch.empty(count, rows, dtype=torch.float32, device=device),
        torch.empty(count, rows, dtype=torch.float32, device=device),
        torch.empty(count, rows, width, dtype=torch.float32, device=device),
        rotated_parts,
    )
    pads = tuple(_padded(dim) for dim in dims)
    dot, exact_dot = _dot_types(query.dtype, _has_fp32_codebook(tiles), device)
    padded = max(*pads, _padded(width))
    decode_attention_kernel[(programs, count)](
        queries.model,
        queries.rotated,
        queries.model,
        queries.mean_scores,
        exact_keys,
        exact_values,
        visible,
        (exact_keys.stride()[:3], exact_values.stride()[:3]),
        (visible.stride(0), visible.stride(1) if visible.shape[1] > 1 else 0, visible.stride(2)),
        tuple(side.pages for side in keys),
        tuple(side.pages.stride() for side in keys),
        tuple(side.pools for side in keys),
        tuple(side.tables for side in keys),
        tuple(side.strides for side in keys),
        values.pages,
        values.pages.stride(),
        values.pools,
        values.tables,
        values.strides,
        values.mean,
        *scratch[:3],
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
        DIMS=tuple(dims),
        PADS=pads,
        HALVES=len(dims),
        DV=width,
        DV_PAD=_padded(width),
        FIRST_TIERS=keys[0].tiers,
        SECOND_TIERS=keys[-1].tiers,
        KEY_COUNTS=tuple(len(side.tiers) for side in keys),
        PLAIN_KEYS=tuple(any(not one.rotated for one in side.tiers) for side in keys),
        VALUE_TIERS=values.tiers,
        ROTATED_COUNT=rotated_tiers,
        VALUE_COUNT=len(values.tiers),
        VALUES_CENTRED=values.centred,
        SHARED=shared,
        CAPPED=softcap is not None,
        DOT=dot,
        EXACT_DOT=exact_dot,
        num_warps=4 if dot is tl.float16 and padded <= 256 else 8,
        num_stages=1,  # more would keep exact tokens in shared memory that tiles need
    )
    return scratch


class _Merged(NamedTuple):
    """Outputs of all query rows."""

    rotated: Tensor  # [B * HQ * Sq, Dv] the share that lies in the rotated space
    output: Tensor  # [B * HQ * Sq, Dv] the rest
    packed_share: Tensor  # [B * HQ * Sq] of packed tokens in the softmax
    lse: Tensor  # [B * HQ * Sq]


def _merge(scratch: _Parts, sink_logits: Tensor | None, query_heads: int, tokens: int) -> _Merged:
    parts, rows, dim = scratch.sums.shape
    outputs = (torch.empty_like(scratch.sums[0]) for _ in range(2))
    merged = _Merged(*outputs, *(torch.empty_like(scratch.totals[0]) for _ in range(2)))
    merge_parts_kernel[(rows,)](
        *scratch[:3],
        scratch.totals if sink_logits is None else sink_logits.float().contiguous(),
        *merged,
        rows,
        scratch.rotated,
        parts - 1 - scratch.rotated,
        query_heads,
        tokens,
        D=dim,
        D_PAD=_padded(dim),
        PARTS_AT_ONCE=max(2, min(_MERGED_PARTS, _MERGED_VALUES // _padded(dim))),
        PARTS_PAD=max(16, int(triton.next_power_of_2(parts))),
        HAS_SINK=sink_logits is not None,
    )
    return merged


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
        query: ``[B, HQ, Sq, D]`` fp16, bf16 or fp32; HQ a multiple of H, Sq up to ``MAX_TOKENS``; D is the width of
            one part of the keys or the sum of two, each a multiple of 8 up to 512.
        exact: tokens held exactly, in the query's dtype, with their mask.
        tiles: packed tokens, or None.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.
        splits: parts into which the tiles of a row fall; None lets the device's size decide.

    Returns:
        Output ``[B, HQ, Sq, Dv]`` and log-sum-exp ``[B, HQ, Sq]`` fp32, no entropy.
    """
    if tiles is not None and not tiles.values.pages.shape[-1]:
        tiles = None
    with torch.cuda.device_of(query):  # Triton launches on the current device
        scratch = _attend(query, exact, tiles, scaling, softcap, splits)
        merged = _merge(scratch, sink_logits, *query.shape[1:3])
    output = merged.output
    if scratch.rotated and tiles is not None:
        output = torch.addmm(output, merged.rotated, tiles.values.rotation)
    output = output.view(*query.shape[:3], -1)
    if tiles is not None and tiles.values.mean is not None:
        batch, heads, width = tiles.values.mean.shape
        share = merged.packed_share.view(batch, heads, -1, 1) * tiles.values.mean.unsqueeze(2)
        output = output + share.view(*output.shape[:3], width)
    return AttentionResult(output, merged.lse.view(query.shape[:3]), None)
