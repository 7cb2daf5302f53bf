"""Keys whose channels differ by far are divided by factors, and queries multiplied by them.

A rotation spreads a channel that is far larger than the others over all of them, and its error with it: with tails of
16 times, keys of 2.5 bits lose 4 % of the loss. Dividing each channel by the root of its size before, and multiplying
the queries' channel by it, shares the error out between the two and changes no score. Factors are powers of two, so
exact tokens stay exact, and they are 1 in every head whose channels are of like size: most models never see them.
A head's largest factor is 1, so queries only become smaller, and keys only larger, up to the size of their largest
channel: fp16 has room for both.

Everything that a layer stores of a balanced row is divided, exact tokens too; what leaves the layer is multiplied.
A row's factors come from the keys that it packs first and stay.

Gives up: latents, whose channels are values as well.

Source: the root as the even split of an error, SmoothQuant (arXiv 2211.10438).
"""

from dataclasses import replace

import torch
from torch import Tensor

from hf_subbyte_moe.cache.groups import RowGroup
from hf_subbyte_moe.cache.prompts import SampledQueries


_LEAST = 8.0  # a channel that is so many times the middle one makes its head worth balancing
_MOST_EXPONENT = 4
_SPARE = 4.0  # times the largest key that chose the factors, a later one still fits


def channel_factors(key: Tensor) -> Tensor:
    """``[H, D]`` fp32 factors of keys ``[H, N, D]``: powers of two, 1/256 to 1; all 1 in heads of like channels."""
    return _factors(key, _shares(key))


def _shares(key: Tensor) -> Tensor:
    """``[H, D]`` fp32 how many times the middle one of its head a channel is."""
    states = key.float()
    size = (states - states.mean(1, keepdim=True)).square().mean(1).sqrt()
    return size / size.median(-1, keepdim=True).values.clamp_min(torch.finfo(torch.float32).tiny)


def _wide(share: Tensor) -> Tensor:
    return (share > _LEAST).any()


def _factors(key: Tensor, share: Tensor) -> Tensor:
    exponent = (0.5 * share.log2()).round().clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    exponent = exponent - exponent.amax(-1, keepdim=True)
    # a channel that hardly differs between tokens may still be large
    room = (torch.finfo(key.dtype).max / _SPARE / key.abs().amax(1).float()).log2().floor()
    exponent = exponent.maximum(-room.clamp_min(0))
    wide = share.amax(-1, keepdim=True) > _LEAST
    return torch.where(wide, exponent.exp2(), torch.ones_like(share))


def divide_keys(key: Tensor, factors: Tensor) -> Tensor:
    """Keys ``[..., N, D]`` by factors ``[..., D]``, in the keys' dtype."""
    return (key / factors[..., None, :]).to(key.dtype)


class KeyBalance:
    """The factors of a layer's rows.

    Attributes:
        factors: ``[B, H, D]`` fp32; None while all are 1.
    """

    def __init__(self, shape: tuple[int, int, int], possible: bool) -> None:
        """Start with nothing to balance.

        Args:
            shape: B, H, D.
            possible: False for latents, which are never balanced.
        """
        self._shape, self._possible = shape, possible
        self.factors: Tensor | None = None

    def needed(self, key: Tensor) -> Tensor | None:
        """Whether some head of keys ``[b * H, N, D]`` needs factors, as a tensor; None where none ever does."""
        return _wide(_shares(key)) if self._possible and not key.is_meta else None

    def fit(self, rows: RowGroup, key: Tensor) -> tuple[Tensor, list[int]] | None:
        """Choose factors of rows that have none by their keys.

        Args:
            rows: which.
            key: ``[b * H, N, D]``.

        Returns:
            ``[b, H, D]`` what to divide keys by that are stored already, and the rows for which that is not 1; None if
            it is none.
        """
        if not self._possible or key.is_meta:  # keys without values need nothing
            return None
        share = _shares(key)
        if not bool(_wide(share)):  # the only question to the device, but for unusual keys
            return None
        factors = _factors(key, share).unflatten(0, (len(rows), -1))
        if self.factors is not None:
            has_none = (self.factors[rows.index] == 1).flatten(1).all(1)
            factors = torch.where(has_none[:, None, None], factors, 1.0)
        changed = (factors != 1).flatten(1).any(1).tolist()
        if not any(changed):
            return None
        with torch.inference_mode(False):
            old = self.factors  # a snapshot may hold them
            new = torch.ones(self._shape, dtype=torch.float32, device=key.device) if old is None else old.clone()
        new[rows.index] = new[rows.index] * factors
        self.factors = new
        return factors, [row for row, differs in zip(rows.rows, changed, strict=True) if differs]

    @torch.inference_mode(False)
    def go_back(self, factors: Tensor | None, stored: Tensor) -> Tensor:
        """Take earlier factors; what the stored keys ``[B, H, N, D]`` are by them."""
        if self.factors is factors:
            return stored
        new, self.factors = self.factors, factors
        assert new is not None  # factors are only ever added
        ratio = new if factors is None else new / factors
        return (stored * ratio[..., None, :]).to(stored.dtype)

    def divided(self, key: Tensor, rows: RowGroup | None = None) -> Tensor:
        """Keys ``[B, H, N, D]``, or those of some rows ``[b * H, N, D]``, as they are stored."""
        if self.factors is None:
            return key
        return divide_keys(key, self.factors if rows is None else self.factors[rows.index].flatten(0, 1))

    def multiplied(self, key: Tensor) -> Tensor:
        """Stored keys ``[B, H, N, D]`` as the model knows them."""
        return key if self.factors is None else (key * self.factors[..., None, :]).to(key.dtype)

    def of_query(self, query: Tensor) -> Tensor:
        """Queries ``[B, HQ, q, D]`` for stored keys."""
        if self.factors is None:
            return query
        grouped: Tensor = query.unflatten(1, (self.factors.shape[1], -1)) * self.factors[:, :, None, None]
        return grouped.flatten(1, 2).to(query.dtype)

    def of_prompt(self, queries: SampledQueries, rows: RowGroup) -> SampledQueries:
        """Queries of some rows, ``probe`` ``[b, HQ, S, D]`` and ``moment`` ``[b, HQ, M, D]``, for stored keys."""
        if self.factors is None:
            return queries
        alone = KeyBalance(self._shape, self._possible)
        alone.factors = self.factors[rows.index]
        moment = None if queries.moment is None else alone.of_query(queries.moment)
        return replace(queries, probe=alone.of_query(queries.probe), moment=moment)

    def of_metric(self, metric: Tensor, rows: RowGroup) -> Tensor:
        """What errors of stored keys cost, ``[b * H, D, D]``, from what errors of any keys cost, ``[H, D, D]``."""
        if self.factors is None:
            return metric.repeat(len(rows), 1, 1)
        factors = self.factors[rows.index]
        return (metric * factors[..., :, None] * factors[..., None, :]).flatten(0, 1)

    @torch.inference_mode(False)
    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows."""
        self._shape = (len(rows), *self._shape[1:])
        if self.factors is not None:
            self.factors = self.factors.index_select(0, rows)

    def nbytes(self) -> int:
        """Bytes of the factors."""
        return 0 if self.factors is None else self.factors.nbytes
