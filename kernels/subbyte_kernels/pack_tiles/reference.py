"""Tiles of keys or values <-> records, in plain PyTorch. Layout: ``subbyte_kernels/formats.py``.

``VECTOR`` (Gaussian after rotation): each token is divided by its root mean square, every ``vector_dim`` neighbours
are replaced by the nearest table entry, and the scale is chosen so that the decoded vector has the original's norm; a
nearest entry is shorter than what it stands for, and attention logits would shrink with it. Nearest is meant on a
lattice: coordinates are rounded to 1/32 (which costs 1 % of ``vq4``'s error and less of the others'), entries to 1/256
or, in four dimensions, to 1/32. Scores are then whole numbers below 2^24, exact in fp32 in whatever order they are
summed, and ties go to the lower code: every device and kernel finds the same code.
``FLOAT6``/``FLOAT8``: the scale maps the token's largest value to the format's largest; it is rounded to bf16 before
the codes are chosen, so that its rounding costs nothing.
``SCALAR``: unrotated; values beyond ``OUTLIER_SIGMA`` of their token go to the outlier list (the largest first, up to
its capacity), the rest are divided by the root mean square of what is left.

Everything is computed in fp32, in an order that kernels can keep: with ``signs`` the rotation is a Walsh-Hadamard
transform from neighbours up, a token's squares are summed likewise, and every step is rounded by itself. Tokens whose
squares would overflow or vanish are scaled by a power of two first. Constants are multiplied with, since devices
differ in how they divide by a number. So records are the same bit by bit everywhere.

Source: rotation and scalar codes, TurboQuant (arXiv 2504.19874); coupled codes, CQ (arXiv 2405.03917); outliers,
KVQuant (arXiv 2401.18079).
"""

import torch
from torch import Tensor

from subbyte_kernels.formats import TILE_TOKENS, Encoding, TileFormat
from subbyte_kernels.lanes import Order, pack_tile_codes, transpose_scales, unpack_tile_codes


OUTLIER_SIGMA = 3.5
_FP6_MAX = 7.5
_FP8_MAX = 448.0
_BF16_MAX = torch.finfo(torch.bfloat16).max
_TINY = torch.finfo(torch.float32).tiny
_STEPS = 32  # lattice points in a root mean square
_MOST_STEPS = 127
_ENTRY_STEPS = {2: (256, 2047), 4: (32, 127)}  # vector_dim -> steps of an entry's coordinates in 1, and at most
_MOST_OFFSET = {2: 1 << 22, 4: 16383}
_NORM_STEPS = 1024  # of an entry's squared norm
_SEARCH_CHUNK = 2048  # vectors whose scores stay in a core's cache
_DEVICE_SEARCH_CHUNK = 1 << 17


def nearest_entries(vectors: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest table entry in the Euclidean sense.

    Args:
        vectors: ``[n, d]`` fp32.
        table: ``[entries, d]`` fp32.

    Returns:
        ``[n]`` int64.
    """
    half_norms = table.square().sum(-1, keepdim=True).mul(-0.5)
    chunk = _SEARCH_CHUNK if vectors.device.type == "cpu" else _DEVICE_SEARCH_CHUNK
    # entries along the first axis: on a CPU the search for the maximum then runs over neighbouring vectors at once
    pieces = [torch.addmm(half_norms, table, part.t()).max(0).indices for part in vectors.split(chunk)]
    return torch.cat(pieces) if pieces else vectors.new_zeros(0, dtype=torch.int64)


def lattice_entries(unit: Tensor, table: Tensor) -> Tensor:
    """Code of each vector: the entry nearest to its point of the lattice; the lower one of two equally near.

    Args:
        unit: ``[n, d]`` fp32 in units of a root mean square.
        table: ``[entries, d]`` fp32.

    Returns:
        ``[n]`` int64.
    """
    steps, most = _ENTRY_STEPS[table.shape[1]]
    entries = (table * steps).clamp(-most, most).round()
    squares = entries.to(torch.int64).square().sum(-1, keepdim=True)
    offsets = (squares * (_STEPS // 2) // steps).clamp(max=_MOST_OFFSET[table.shape[1]])  # half the squared norm
    points = (unit * _STEPS).half().float().clamp(-_MOST_STEPS, _MOST_STEPS).round()
    chunk = _SEARCH_CHUNK if unit.device.type == "cpu" else _DEVICE_SEARCH_CHUNK
    pieces = [torch.addmm(-offsets.float(), entries, part.t()).max(0).indices for part in points.split(chunk)]
    return torch.cat(pieces) if pieces else unit.new_zeros(0, dtype=torch.int64)


def e2m3_codes(values: Tensor) -> Tensor:
    """6-bit E2M3 codes (sign, 2 exponent bits, 3 mantissa bits), round to nearest even, saturating at 7.5."""
    magnitude = values.abs().clamp(max=_FP6_MAX)
    coarse = torch.where(magnitude < 4, 8 + (magnitude * 4).round(), 16 + (magnitude * 2).round())
    code = torch.where(magnitude < 2, (magnitude * 8).round(), coarse).to(torch.int32)
    return code | torch.signbit(values).to(torch.int32) << 5


def e2m3_table() -> Tensor:
    """``[64, 1]`` fp32: the value of every E2M3 code."""
    code = torch.arange(32)
    exponent, mantissa = code >> 3, (code & 7).float()
    magnitude = torch.where(exponent == 0, mantissa / 8, (1 + mantissa / 8) * 2.0 ** (exponent - 1))
    return torch.cat([magnitude, -magnitude]).unsqueeze(-1)


def normalize_tokens(states: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens divided by their root mean square.

    Returns:
        The tokens, and ``[..., 1]`` root mean squares; both zero for a zero token.
    """
    largest = states.abs().amax(-1, keepdim=True)
    scaled = states / largest.clamp(min=_TINY)
    rms = scaled.square().mean(-1, keepdim=True).sqrt()
    return scaled / rms.clamp(min=_TINY), largest * rms


def hadamard_transform(values: Tensor, block: int) -> Tensor:
    """Walsh-Hadamard transform of blocks of neighbours, without its factor; from neighbours up."""
    width = 1
    while width < block:
        first, second = values.unflatten(-1, (-1, 2, width)).unbind(-2)
        values = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        width *= 2
    return values


def sum_in_order(values: Tensor) -> Tensor:
    """``[..., 1]`` sums: pairs of neighbours while their number is even, then from the left."""
    while values.shape[-1] % 2 == 0:
        values = values[..., 0::2] + values[..., 1::2]
    total = values[..., :1]
    for index in range(1, values.shape[-1]):
        total = total + values[..., index : index + 1]
    return total


def unit_tokens(values: Tensor) -> tuple[Tensor, Tensor]:
    """As :func:`normalize_tokens`, in the order of operations that records are defined by."""
    squares = sum_in_order(values.square())
    largest = values.abs().amax(-1, keepdim=True)
    exponent = (largest.view(torch.int32) >> 23).clamp(max=253)
    shift = ((254 - exponent) << 23).view(torch.float32)  # a power of two that brings the largest to 1
    shift = torch.where((squares > 2.0**-60) & (squares < 2.0**100), 1.0, shift)
    values = values * shift
    rms = (sum_in_order(values.square()) * (1 / values.shape[-1])).sqrt()
    return values * (1 / rms.clamp(min=_TINY)), rms / shift


def rotate_tokens(values: Tensor, rotation: Tensor, signs: Tensor | None) -> tuple[Tensor, float]:
    """Rotated values, and the factor that is still to be multiplied with them."""
    if signs is None:
        return values @ rotation.t(), 1.0
    block = values.shape[-1] & -values.shape[-1]
    return hadamard_transform(values * signs, block), block**-0.5


def _to_bf16(scale: Tensor) -> Tensor:
    return scale.clamp(max=_BF16_MAX).to(torch.bfloat16)


def _round_up_bf16(scale: Tensor) -> Tensor:
    """The nearest bf16 that is not below ``scale``."""
    rounded = _to_bf16(scale)
    low = rounded.float() < scale
    bumped = (rounded.view(torch.int16) + low.to(torch.int16)).view(torch.bfloat16)
    return torch.where(torch.isfinite(bumped), bumped, rounded)


def _words(*sections: Tensor) -> Tensor:
    """Join ``[M, ...]`` sections of any element size into ``[M, words]`` int32."""
    return torch.cat([part.flatten(1).contiguous().view(torch.int32) for part in sections], dim=1)


def _codes_and_scales(codes: Tensor, scale: Tensor, fmt: TileFormat, order: Order) -> tuple[Tensor, Tensor]:
    """``[M, 128, C]`` codes and ``[M, 128, 1]`` bf16 scales as they lie in a record."""
    head_dim = codes.shape[-1] * fmt.vector_dim
    return pack_tile_codes(codes, fmt.code_bits, order, head_dim), transpose_scales(scale.squeeze(-1), head_dim)


def _divide(states: Tensor, scale: Tensor) -> Tensor:
    """``states / scale`` for bf16 scales that may be zero (then the states are zero too)."""
    return states / scale.float().clamp(min=_TINY)


def _encode_vector(states: Tensor, factor: float, fmt: TileFormat, table: Tensor, order: Order) -> Tensor:
    unit, rms = unit_tokens(states)
    rms = rms * factor
    codes = lattice_entries(unit.reshape(-1, fmt.vector_dim), table).view(len(states), TILE_TOKENS, -1)
    if not fmt.token_outliers:
        return _words(*_codes_and_scales(codes, _norm_keeping_scale_of(codes, rms, table, unit.shape[-1]), fmt, order))
    states, decoded = states * factor, table[codes].view_as(unit)
    # the registers hold what the first guess of the scale misses most; the codes then keep the norm of the rest
    guess = _divide(states, _norm_keeping_scale(unit, decoded, rms))
    channels = (guess - decoded).abs().topk(fmt.token_outliers, dim=-1).indices
    coded = torch.ones_like(unit).scatter_(-1, channels, 0)
    scale = _norm_keeping_scale(unit * coded, decoded * coded, rms)
    kept = _divide(states, scale).gather(-1, channels).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    registers = torch.cat([channels.to(torch.uint8), kept.view(torch.uint8)], dim=-1)
    return _words(*_codes_and_scales(codes, scale, fmt, order), registers)


def _norm_keeping_scale_of(codes: Tensor, rms: Tensor, table: Tensor, head_dim: int) -> Tensor:
    """``[..., 1]`` bf16: decoded ``[..., C]`` codes have the root mean square ``rms``; whole numbers, in any order."""
    norms = table[:, :1].square()
    for channel in range(1, table.shape[1]):
        norms = norms + table[:, channel : channel + 1].square()
    steps = (norms.squeeze(-1) * _NORM_STEPS).round().to(torch.int64)
    decoded = (steps[codes].sum(-1, keepdim=True).float() * (1 / (_NORM_STEPS * head_dim))).sqrt()
    return _to_bf16(rms / decoded.clamp(min=_TINY))


def _norm_keeping_scale(unit: Tensor, decoded: Tensor, rms: Tensor) -> Tensor:
    """``[..., 1]`` bf16: ``scale * decoded`` is as long as ``rms * unit``."""
    return _to_bf16(rms * unit.norm(dim=-1, keepdim=True) / decoded.norm(dim=-1, keepdim=True).clamp(min=_TINY))


def _encode_float(states: Tensor, factor: float, fmt: TileFormat, order: Order) -> Tensor:
    eight = fmt.encoding is Encoding.FLOAT8
    largest = _FP8_MAX if eight else _FP6_MAX
    scale = _round_up_bf16(states.abs().amax(-1, keepdim=True) * (factor / largest))
    inverse = torch.full_like(scale, factor, dtype=torch.float32) / scale.float().clamp(min=_TINY)
    scaled = (states * inverse).clamp(-largest, largest)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8) if eight else e2m3_codes(scaled)
    return _words(*_codes_and_scales(codes, scale, fmt, order))


def split_outliers(states: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """The outliers of tiles: values beyond ``OUTLIER_SIGMA`` of their token, the largest first.

    Args:
        states: ``[M, 128, D]`` fp32.
        capacity: outliers a tile at most.

    Returns:
        ``[M, capacity]`` flat positions, ``[M]`` counts, ``[M, 128, D]`` states with the outliers set to zero.
    """
    unit, _ = normalize_tokens(states)
    size = unit.abs().flatten(1)
    ranked = size.topk(capacity, dim=1)
    is_outlier = ranked.values > OUTLIER_SIGMA
    keep = torch.ones_like(size).scatter_(1, ranked.indices, (~is_outlier).to(size.dtype))
    return ranked.indices, is_outlier.sum(1), states * keep.view_as(states)


def _encode_scalar(states: Tensor, fmt: TileFormat, centroids: Tensor, order: Order) -> Tensor:
    tiles, _, head_dim = states.shape
    positions, counts, inliers = split_outliers(states, fmt.tile_outliers(head_dim))
    share = (inliers != 0).sum(-1, keepdim=True) / head_dim
    _, rms = normalize_tokens(inliers)
    largest = (states - inliers).abs().amax(-1, keepdim=True)  # outlier, which must fit FP8 in units of the scale
    scale = _round_up_bf16(torch.maximum(rms / share.clamp(min=1 / head_dim).sqrt(), largest / _FP8_MAX))
    scaled = _divide(inliers, scale)
    codes = (scaled.unsqueeze(-1) - centroids[:, None, None, :]).abs().argmin(-1)
    kept = _divide(states, scale).flatten(1).gather(1, positions).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
    listed = torch.zeros(tiles, 4 * ((3 * positions.shape[1] + 3) // 4), dtype=torch.uint8, device=states.device)
    listed[:, : 2 * positions.shape[1]] = positions.to(torch.uint16).view(torch.uint8)
    listed[:, 2 * positions.shape[1] : 3 * positions.shape[1]] = kept.view(torch.uint8)
    return _words(*_codes_and_scales(codes, scale, fmt, order), counts.to(torch.int32).unsqueeze(1), listed)


def pack_tiles_reference(
    states: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    rotation: Tensor,
    mean: Tensor | None,
    order: Order,
    signs: Tensor | None = None,
) -> Tensor:
    """Quantize whole tiles and pack their codes.

    Args:
        states: ``[M, 128, D]`` fp16, bf16 or fp32, finite.
        fmt: the layout.
        table: ``[entries, vector_dim]`` fp32 for ``VECTOR``, ``[M, entries]`` fp32 for ``SCALAR``, else unused.
        rotation: ``[D, D]`` fp32 orthonormal.
        mean: ``[M, D]`` fp32 to remove first, or None.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of a rotation that is Hadamard blocks behind signs; None multiplies with ``rotation``,
            which rounds in an order of its own.

    Returns:
        ``[M, record_words]`` int32.
    """
    if fmt.encoding is Encoding.RAW:
        return states.flatten(1).contiguous().view(torch.int32)
    values = states.float()
    if fmt.centred and mean is not None:
        values = values - mean.unsqueeze(-2)
    factor = 1.0
    if fmt.rotated:
        values, factor = rotate_tokens(values, rotation, signs)
    if fmt.encoding is Encoding.VECTOR:
        assert table is not None
        return _encode_vector(values, factor, fmt, table, order)
    if fmt.encoding is Encoding.SCALAR:
        assert table is not None
        return _encode_scalar(values, fmt, table, order)
    return _encode_float(values, factor, fmt, order)


def _scales(records: Tensor, fmt: TileFormat, head_dim: int) -> Tensor:
    start = fmt.code_words(head_dim)
    placed = records[:, start : start + TILE_TOKENS // 2].contiguous().view(torch.bfloat16)
    return transpose_scales(placed, head_dim).float()


def _restore_registers(decoded: Tensor, records: Tensor, fmt: TileFormat, head_dim: int) -> Tensor:
    start = fmt.code_words(head_dim) + TILE_TOKENS // 2
    registers = records[:, start:].contiguous().view(torch.uint8).view(-1, TILE_TOKENS, 2 * fmt.token_outliers)
    channels, kept = registers.split(fmt.token_outliers, dim=-1)
    return decoded.scatter(-1, channels.long(), kept.contiguous().view(torch.float8_e4m3fn).float())


def _restore_outliers(decoded: Tensor, records: Tensor, fmt: TileFormat, head_dim: int) -> Tensor:
    start = fmt.code_words(head_dim) + TILE_TOKENS // 2
    capacity = fmt.tile_outliers(head_dim)
    counts = records[:, start : start + 1]
    listed = records[:, start + 1 :].contiguous().view(torch.uint8)
    positions = listed[:, : 2 * capacity].contiguous().view(torch.uint16).to(torch.int64)
    kept = listed[:, 2 * capacity : 3 * capacity].contiguous().view(torch.float8_e4m3fn).float()
    flat = decoded.flatten(1)
    used = torch.arange(capacity, device=records.device) < counts
    positions = torch.where(used, positions, 0)
    kept = torch.where(used, kept - flat.gather(1, positions), 0)
    return flat.scatter_add(1, positions, kept).view_as(decoded)


def decode_codes(
    records: Tensor,
    fmt: TileFormat,
    head_dim: int,
    table: Tensor | None,
    table_rows: Tensor | None,
    dtype: torch.dtype,
    order: Order,
) -> tuple[Tensor, Tensor | None]:
    """Records -> values in units of their token's scale, in the tier's own space, and the scales.

    Args:
        records: ``[M, record_words]`` int32.
        fmt: the layout.
        head_dim: D.
        table: ``[R, entries, vector_dim]`` fp32, or None without a table.
        table_rows: ``[M]`` int64 row of ``table`` for each record; None means row 0.
        dtype: the model's dtype, for ``RAW``.
        order: which lanes own the codes.

    Returns:
        ``[M, 128, D]`` fp32, and ``[M, 128]`` fp32 scales or None.
    """
    shape = (records.shape[0], TILE_TOKENS, head_dim)
    words = fmt.code_words(head_dim, dtype.itemsize)
    if fmt.encoding is Encoding.RAW:
        return records[:, :words].contiguous().view(dtype).view(shape).float(), None
    scales = _scales(records, fmt, head_dim)
    codes = unpack_tile_codes(records[:, :words], fmt.code_bits, order, head_dim)
    if fmt.encoding is Encoding.FLOAT8:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float(), scales
    if fmt.encoding is Encoding.FLOAT6:
        table, table_rows = e2m3_table().to(records.device).unsqueeze(0), None
    assert table is not None
    if table_rows is not None:
        codes = codes + (table_rows * table.shape[1]).to(torch.int32)[:, None, None]
    decoded = torch.nn.functional.embedding(codes, table.flatten(0, 1)).view(shape)
    if fmt.token_outliers:
        decoded = _restore_registers(decoded, records, fmt, head_dim)
    if fmt.tile_outlier_share:
        decoded = _restore_outliers(decoded, records, fmt, head_dim)
    return decoded, scales


def unpack_tiles_reference(
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
        fmt: the layout.
        table: ``[R, entries, vector_dim]`` fp32, or None without a table.
        table_rows: ``[M]`` int64 row of ``table`` for each record; None means row 0.
        rotation: ``[D, D]`` fp32 orthonormal.
        mean: ``[M, D]`` fp32 that was removed, or None.
        dtype: the model's dtype.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of the rotation, as in :func:`pack_tiles_reference`.

    Returns:
        ``[M, 128, D]`` in ``dtype``.
    """
    values, scales = decode_codes(records, fmt, rotation.shape[-1], table, table_rows, dtype, order)
    if scales is not None:
        values = values * scales.unsqueeze(-1)
    if fmt.rotated and signs is not None:
        block = rotation.shape[-1] & -rotation.shape[-1]
        values = hadamard_transform(values, block) * block**-0.5 * signs
    elif fmt.rotated:
        values = values @ rotation
    if fmt.centred and mean is not None:
        values = values + mean.unsqueeze(-2)
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)
