"""Norms of queries and keys, rotary positions, and the token's way into the window, in plain PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorms over each head.

    Attributes:
        query: ``[D]`` weight for queries.
        key: ``[D]`` weight for keys.
        eps: added to the mean square.
    """

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True)
class TokenPlace:
    """Where each row's token is stored.

    Attributes:
        keys: ``[B, H, slots, D]``, written.
        values: ``[B, H, slots, D]``, written.
        slots: ``[B]`` int64 slot of each row's token.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor


def rotary_reference(
    projected: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, place: TokenPlace
) -> Tensor:
    """Turn queries and keys, and store keys and values.

    Args:
        projected: ``[B, (HQ + 2 H) D]`` queries, keys and values of a token a row.
        cos: ``[B or 1, D]``.
        sin: likewise.
        norms: of queries and keys before they are turned, or None.
        place: where keys and values go.

    Returns:
        ``[B, HQ, 1, D]`` queries.
    """
    rows, heads, _, dim = place.keys.shape
    states = projected.view(rows, -1, dim)
    query, key, value = states.split([states.shape[1] - 2 * heads, heads, heads], dim=1)
    if norms is not None:
        query, key = _norm(query, norms.query, norms.eps), _norm(key, norms.key, norms.eps)
    query, key = _turn(query, cos, sin), _turn(key, cos, sin)
    row = torch.arange(rows, device=projected.device)
    place.keys[row, :, place.slots] = key
    place.values[row, :, place.slots] = value
    return query[:, :, None]


def _norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


def _turn(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return states * cos[:, None] + turned * sin[:, None]
