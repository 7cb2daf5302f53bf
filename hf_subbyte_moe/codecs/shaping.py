"""Codes chosen by what their errors cost, where errors do not cost the same in all directions.

A key's error e changes the score of a query q by q . e, so over all queries it costs e' M e, with their second moment
M = E[q q']. The nearest entry minimizes e' e instead. Here a token's groups of channels are coded one after the other,
and each makes up for the errors of those before it, as far as M lets it (the exact minimum over what is still open, if
that were continuous); then every group is coded once more with all others fixed. The scale keeps the token's length in
the metric M, not in the plain one. Bytes and decoding are those of any tile.

On a GPU a kernel does the same (``subbyte_kernels/pack_tiles/shape_tiles.cu``).

Gives up: packing takes about three times as long; values gain nothing (their errors average out over tokens instead).

Source: the feedback, GPTQ (arXiv 2210.17323) and LDLQ in QuIP (arXiv 2307.13304); keys by the queries' moments, HeadQ
(arXiv 2605.03562).
"""

from functools import cached_property

import torch
from torch import Tensor

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import (
    Encoding,
    MetricTerms,
    Order,
    Places,
    metric_terms,
    normalize_tokens,
    pack_codes,
    shape_obstacle,
    shape_tiles_cuda,
)


_DAMPING = 0.2  # of the metric's mean eigenvalue: a direction that no sampled query took is not free
_TILES_AT_ONCE = {"cpu": 16}  # scores that stay in a core's cache
_DEVICE_TILES_AT_ONCE = 256
_TINY = torch.finfo(torch.float32).tiny


def shapes(codec: Codec) -> bool:
    """Whether a tier's codes can be chosen this way: vectors from a codebook, without registers."""
    fmt = codec.format
    return codec.table is Table.CODEBOOK and fmt.encoding is Encoding.VECTOR and not fmt.token_outliers


def second_moment(vectors: Tensor) -> Tensor:
    """``[H, N, D]`` -> ``[H, D, D]`` fp32 second moments with a mean diagonal of 1; the identity for zero vectors."""
    vectors = vectors.float()
    vectors = vectors / vectors.abs().amax((1, 2), keepdim=True).clamp(min=_TINY)
    return normalized(vectors.transpose(-1, -2) @ vectors)


def normalized(metric: Tensor) -> Tensor:
    """``[H, D, D]`` with a mean diagonal of 1; the identity where it was zero."""
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    identity = torch.eye(metric.shape[-1], dtype=torch.float32, device=metric.device).expand_as(metric)
    return torch.where(size > 0, metric / size.clamp(min=_TINY), identity)


class Shaping:
    """A metric for each head, ready for choosing codes."""

    def __init__(self, moment: Tensor) -> None:
        """Damp and factor ``[H, D, D]`` second moments in the space of the codes (rotated)."""
        self._moment = moment
        self._terms: dict[str, MetricTerms] = {}

    @cached_property
    def metric(self) -> Tensor:
        """``[H, D, D]`` fp32, symmetric, positive definite."""
        identity = torch.eye(self._moment.shape[-1], dtype=torch.float32, device=self._moment.device)
        return normalized(self._moment.float()) + _DAMPING * identity

    @cached_property
    def _factor(self) -> Tensor:
        """Lower triangular, ``metric = factor' factor``: a channel's row names those before it alone."""
        lower = torch.linalg.cholesky_ex(self.metric.flip(-1, -2)).L  # damped: it exists, and nobody waits to know
        factor: Tensor = lower.flip(-1, -2).transpose(-1, -2)
        return factor

    def terms(self, codec: Codec, table: Tensor) -> MetricTerms:
        """What the kernel wants to know of the metric for a tier; the table of a tier is always the same here."""
        if codec.name not in self._terms:
            self._terms[codec.name] = metric_terms(self.metric, self._factor, table)
        return self._terms[codec.name]

    def encode(self, unit: Tensor, heads: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Choose codes.

        Args:
            unit: ``[M, 128, D]`` fp32 rotated tokens with a root mean square of 1.
            heads: ``[M]`` int64 head of each tile.
            table: ``[entries, vector_dim]`` fp32.

        Returns:
            Codes ``[M, 128, D / vector_dim]`` int64, and ``[M, 128, 1]`` the scale that keeps the token's length.
        """
        size = _TILES_AT_ONCE.get(unit.device.type, _DEVICE_TILES_AT_ONCE)
        parts = [self._encode(*part, table) for part in zip(unit.split(size), heads.split(size), strict=True)]
        codes, scales = zip(*parts, strict=True)
        return torch.cat(codes), torch.cat(scales)

    def _encode(self, unit: Tensor, heads: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        metric, factor = self.metric[heads], self._factor[heads]
        width = table.shape[1]
        groups = [slice(low, low + width) for low in range(0, unit.shape[-1], width)]
        codes = torch.empty(*unit.shape[:2], len(groups), dtype=torch.int64, device=unit.device)
        error = torch.zeros_like(unit)
        for number, group in enumerate(groups):  # with what is still open at its best
            own, before = factor[:, group, group], slice(0, group.start)
            pull = error[..., before] @ factor[:, group, before].transpose(-1, -2) @ own
            codes[..., number] = _best(unit[..., group], own.transpose(-1, -2) @ own, pull, table)
            error[..., group] = table[codes[..., number]] - unit[..., group]
        for number, group in enumerate(groups):  # with all others as they are
            own = metric[:, group, group]
            pull = error @ metric[:, :, group] - error[..., group] @ own
            codes[..., number] = _best(unit[..., group], own, pull, table)
            error[..., group] = table[codes[..., number]] - unit[..., group]
        decoded = unit + error
        lengths = [((states @ metric) * states).sum(-1, keepdim=True) for states in (unit, decoded)]
        return codes, (lengths[0] / lengths[1].clamp(min=_TINY)).sqrt()


def _best(target: Tensor, metric: Tensor, pull: Tensor, table: Tensor) -> Tensor:
    """``[M, N]`` entries c that minimize ``(c - target)' metric (c - target) + 2 pull . c``.

    Args:
        target: ``[M, N, d]``.
        metric: ``[M, d, d]``.
        pull: ``[M, N, d]``.
        table: ``[entries, d]``.
    """
    halves = 0.5 * ((table @ metric) * table).sum(-1, keepdim=True)  # [M, entries, 1]
    # entries before tokens: on a CPU the search for the maximum then runs over neighbouring tokens at once
    scores = table @ (target @ metric - pull).transpose(-1, -2) - halves
    best: Tensor = scores.max(1).indices
    return best


def pack_shaped(
    tiles: Tensor,
    heads: Tensor,
    codec: Codec,
    table: Tensor,
    rotation: Tensor,
    mean: Tensor | None,
    order: Order,
    shaping: Shaping,
    signs: Tensor | None = None,
    places: Places | None = None,
) -> Tensor:
    """Quantize whole tiles under a metric and pack their codes.

    Args:
        tiles: ``[M, 128, D]`` finite; ``[H, n, 128, D]`` with ``places``.
        heads: ``[M]`` int64 head of each tile.
        codec: a tier that :func:`shapes`.
        table: ``[entries, vector_dim]`` fp32.
        rotation: ``[D, D]`` fp32 orthonormal.
        mean: ``[M, D]`` fp32 to remove first, or None.
        order: which lanes own the codes.
        shaping: the heads' metrics in the rotated space.
        signs: ``[D]`` fp32 of a rotation that is Hadamard blocks behind signs, which a kernel can do; or None.
        places: ``[M]`` int64 heads and tiles of what is packed.

    Returns:
        ``[M, record_words]`` int32 as :func:`hf_subbyte_moe.ops.pack_tiles` lays them out.
    """
    if signs is not None and shape_obstacle(tiles, codec.format, signs) is None:
        terms = shaping.terms(codec, table)
        return shape_tiles_cuda(tiles, heads, codec.format, table, mean, order, signs, terms, places)
    values = (tiles if places is None else tiles[places]).float()
    if codec.format.centred and mean is not None:
        values = values - mean.unsqueeze(-2)
    unit, rms = normalize_tokens(values @ rotation.t())
    codes, scale = shaping.encode(unit, heads, table)
    return pack_codes(codes, rms * scale, codec.format, order, tiles.shape[-1])
