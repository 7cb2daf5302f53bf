"""The seam to the kernels: the only importer of ``subbyte_kernels``.

Each function checks its shapes once and calls the implementation: the fastest kernel that can do the call, or the
plain PyTorch reference. A caller does not know.
"""

import torch
from torch import Tensor

from subbyte_kernels.add_norm import add_norm
from subbyte_kernels.attention_statistics import ProbeResult, TokenStatistics
from subbyte_kernels.attention_statistics import attention_statistics as selected_statistics
from subbyte_kernels.attention_statistics import probe_attention as selected_probe
from subbyte_kernels.decode_attention import (
    BACKENDS,
    MAX_TOKENS,
    AttentionResult,
    AttentionTiles,
    ExactTokens,
    unpack_pages,
)
from subbyte_kernels.decode_attention import decode_attention as selected_attention
from subbyte_kernels.decode_attention.steady import Scratch, SteadyAttention, tiles_ahead
from subbyte_kernels.expert_mlp import MAX_EXPERT_TOKENS, ExpertCall, ExpertFormat, ExpertLayout, expert_mlp
from subbyte_kernels.formats import (
    NO_PAGE,
    TILE_TOKENS,
    Encoding,
    PackedTiles,
    TileFormat,
    make_page,
    page_slots,
    page_tiers,
)
from subbyte_kernels.lanes import Order, pack_tile_codes, transpose_scales
from subbyte_kernels.pack_tiles import MetricTerms, Places, metric_terms, shape_obstacle, shape_tiles_cuda
from subbyte_kernels.pack_tiles import pack_tiles as selected_packing
from subbyte_kernels.pack_tiles import unpack_tiles as selected_unpacking
from subbyte_kernels.pack_tiles.reference import lattice_entries, nearest_entries, normalize_tokens, split_outliers
from subbyte_kernels.rotary import HeadNorms, TokenPlace, rotary
from subbyte_kernels.router import RouterMatrix, RouterSpec, router
from subbyte_kernels.small_linear import MAX_LINEAR_TOKENS, PackedMatrix, packed_linear, packed_obstacle, small_linear


__all__ = [
    "BACKENDS",
    "MAX_EXPERT_TOKENS",
    "MAX_LINEAR_TOKENS",
    "MAX_TOKENS",
    "NO_PAGE",
    "TILE_TOKENS",
    "AttentionResult",
    "AttentionTiles",
    "Encoding",
    "ExactTokens",
    "ExpertCall",
    "ExpertFormat",
    "ExpertLayout",
    "HeadNorms",
    "MetricTerms",
    "Order",
    "PackedMatrix",
    "PackedTiles",
    "Places",
    "ProbeResult",
    "RouterMatrix",
    "RouterSpec",
    "Scratch",
    "SteadyAttention",
    "TileFormat",
    "TokenPlace",
    "TokenStatistics",
    "add_norm",
    "attention_statistics",
    "decode_attention",
    "expert_mlp",
    "lattice_entries",
    "make_page",
    "metric_terms",
    "nearest_entries",
    "normalize_tokens",
    "pack_codes",
    "pack_tiles",
    "packed_linear",
    "packed_obstacle",
    "page_slots",
    "page_tiers",
    "probe_attention",
    "rotary",
    "router",
    "shape_obstacle",
    "shape_tiles_cuda",
    "small_linear",
    "split_outliers",
    "tiles_ahead",
    "unpack_pages",
    "unpack_tiles",
]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def pack_tiles(
    states: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    rotation: Tensor,
    mean: Tensor | None,
    order: Order,
    signs: Tensor | None,
    places: Places | None = None,
) -> Tensor:
    """Quantize whole tiles and pack their codes.

    Args:
        states: ``[M, 128, D]`` fp16, bf16 or fp32, finite (the cache refuses NaN and Inf on entry); M at least 1. With
            ``places``, ``[H, n, 128, D]``.
        fmt: the tier's layout.
        table: ``[entries, vector_dim]`` for codebooks, ``[M, entries]`` for centroids, None without a table.
        rotation: ``[D, D]`` fp32 orthonormal.
        mean: ``[M, D]`` fp32 to remove first, or None.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of a rotation that is Hadamard blocks behind signs; None for any other, which is slower.
        places: ``[M]`` int64 heads and tiles of what is packed; a kernel reads it where it lies.

    Returns:
        ``[M, record_words]`` int32; layout in ``subbyte_kernels/formats.py``.

    Raises:
        ValueError: shapes that do not belong together.
    """
    lead = 1 if places is None else 2
    _check(
        states.ndim == lead + 2 and states.shape[0] > 0 and states.shape[lead] == TILE_TOKENS,
        f"tiles must be [{'M' if places is None else 'H, n'}, {TILE_TOKENS}, D], not {list(states.shape)}",
    )
    dim = states.shape[-1]
    _check(rotation.shape == (dim, dim), f"rotation {list(rotation.shape)} does not fit head_dim {dim}")
    _check((table is None) == (fmt.entries == 0), f"tier {fmt.name!r} has {fmt.entries} table entries")
    table = None if table is None else table.float()
    return selected_packing(states, fmt, table, rotation, mean, order, signs, places)


def pack_codes(codes: Tensor, scales: Tensor, fmt: TileFormat, order: Order, head_dim: int) -> Tensor:
    """Records from codes that were chosen elsewhere.

    Args:
        codes: ``[M, 128, C]`` any integer type, C codes a token.
        scales: ``[M, 128, 1]`` fp32; rounded to bf16.
        fmt: a layout of codes and scales alone.
        order: which lanes own the codes.
        head_dim: D.

    Returns:
        ``[M, record_words]`` int32.

    Raises:
        ValueError: shapes that do not belong together, or a layout that stores more than codes and scales.
    """
    plain = fmt.encoding is Encoding.VECTOR and not fmt.token_outliers and not fmt.tile_outlier_share
    _check(plain, f"tier {fmt.name!r} stores more than codes and scales")
    shape = [len(codes), TILE_TOKENS, head_dim // fmt.vector_dim]
    _check(list(codes.shape) == shape, f"codes must be {shape}, not {list(codes.shape)}")
    rounded = scales.squeeze(-1).clamp(max=torch.finfo(torch.bfloat16).max).to(torch.bfloat16)
    words = pack_tile_codes(codes, fmt.code_bits, order, head_dim)
    return torch.cat([words, transpose_scales(rounded, head_dim).contiguous().view(torch.int32)], dim=1)


def unpack_tiles(
    records: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    table_rows: Tensor | None,
    rotation: Tensor,
    mean: Tensor | None,
    dtype: torch.dtype,
    order: Order,
    signs: Tensor | None = None,
) -> Tensor:
    """Records -> the keys or values that they stand for.

    Args:
        records: ``[M, record_words]`` int32.
        fmt: the tier's layout.
        table: ``[R, entries, vector_dim]``, or None without a table.
        table_rows: ``[M]`` int64 row of ``table`` of each record; None means row 0.
        rotation: ``[D, D]`` fp32 orthonormal.
        mean: ``[M, D]`` fp32 that was removed, or None.
        dtype: the model's dtype.
        order: which lanes own the codes.
        signs: ``[D]`` fp32, as in :func:`pack_tiles`.

    Returns:
        ``[M, 128, D]`` in ``dtype``.

    Raises:
        ValueError: the records have another length than the layout says.
    """
    words = fmt.record_words(rotation.shape[-1], dtype.itemsize)
    _check(records.shape[-1] == words, f"tier {fmt.name!r} has records of {words} words, not {records.shape[-1]}")
    table = None if table is None else table.float()
    return selected_unpacking(records, fmt, table, table_rows, rotation, mean, dtype, order, signs)


def decode_attention(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
) -> AttentionResult:
    """Attention over exact tokens and packed tiles; see the reference for the layout of both.

    Args:
        query: ``[B, HQ, Sq, D]``; HQ a multiple of the KV heads H.
        exact: sinks, window and new tokens with their mask.
        tiles: packed keys and values, or None.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.
        backend: one of ``BACKENDS``.

    Returns:
        Output ``[B, HQ, Sq, Dv]`` fp32 ("cuda": in the query's dtype), log-sum-exp and entropy (bits; from "torch"
        alone) ``[B, HQ, Sq]``.

    Raises:
        ValueError: shapes that do not belong together, or the named backend cannot do this call.
    """
    # written out, because a decode step should not spend its time on messages that nobody sees
    batch, heads, tokens, dim = exact.keys.shape
    rows, query_heads, queries, query_dim = query.shape if query.ndim == 4 else (-1, 1, 1, 1)
    if rows != batch or query_heads % heads or query_dim != dim:
        raise ValueError(f"query {list(query.shape)} does not fit keys {list(exact.keys.shape)}")
    mask_rows, mask_queries, mask_tokens = exact.visible.shape
    if mask_rows != batch or mask_queries not in (1, queries) or mask_tokens != tokens:
        raise ValueError(
            f"mask {list(exact.visible.shape)} does not fit query {list(query.shape)} and {tokens} exact tokens"
        )
    if tiles is not None:
        width = 0
        for part in tiles.keys:
            width += part.head_dim
            if part is not tiles.values and part.pages.shape != tiles.values.pages.shape:
                raise ValueError("packed keys and values hold different tiles")
        if width != dim:
            raise ValueError(f"packed keys are not {dim} wide")
    if sink_logits is not None and sink_logits.shape != query.shape[1:2]:
        raise ValueError(f"there must be one sink for each of {query_heads} heads")
    return selected_attention(query, exact, tiles, scaling, softcap, sink_logits, backend)


def probe_attention(
    query: Tensor,
    exact: ExactTokens,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> ProbeResult:
    """Attention of sampled queries of one row over its exact tokens, with the entropy of each.

    Args:
        query: ``[HQ, S, D]``.
        exact: tokens of one row, with the mask of these queries.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.

    Returns:
        Output ``[HQ, S, Dv]`` fp32, log-sum-exp and entropy (bits) ``[HQ, S]``.

    Raises:
        ValueError: shapes that do not belong together.
    """
    keys, values, visible = exact.keys[0], exact.values[0], exact.visible[0]
    _check(
        query.shape[0] % keys.shape[0] == 0 and query.shape[-1] == keys.shape[-1],
        f"queries {list(query.shape)} do not fit keys {list(keys.shape)}",
    )
    _check(
        visible.shape == (query.shape[1], keys.shape[1]),
        f"mask {list(visible.shape)} does not fit {query.shape[1]} queries and {keys.shape[1]} tokens",
    )
    return selected_probe(query, keys, values, visible, scaling, softcap, sink_logits)


def attention_statistics(
    query: Tensor,
    query_index: Tensor,
    lse: Tensor,
    keys: Tensor,
    first_index: int,
    scaling: float,
    softcap: float | None = None,
) -> TokenStatistics:
    """How sampled queries of one row attend to neighbouring tokens of it.

    Args:
        query: ``[HQ, S, D]``.
        query_index: ``[S]`` int64 positions in the row.
        lse: ``[HQ, S]`` fp32 log-sum-exp over everything that the queries see.
        keys: ``[H, N, D]``.
        first_index: position of the first key in the row.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)``, or None.

    Returns:
        Attention mass ``[H]`` and the sum of p^2 of each token ``[H, N]``.

    Raises:
        ValueError: shapes that do not belong together.
    """
    _check(
        query.shape[0] % keys.shape[0] == 0 and query.shape[-1] == keys.shape[-1],
        f"queries {list(query.shape)} do not fit keys {list(keys.shape)}",
    )
    _check(lse.shape == query.shape[:2], f"log-sum-exp {list(lse.shape)} does not fit queries {list(query.shape)}")
    return selected_statistics(query, query_index, lse, keys, first_index, scaling, softcap)
