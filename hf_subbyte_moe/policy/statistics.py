"""Measure, on sampled queries of a prompt, how each head attends and what each tier would cost its output.

No attention matrix is formed. Of a prompt's queries ``SAMPLED_QUERIES`` are taken: half are the last ones, which look
like what will be asked next, half are spread over its second half. They attend to everything once, block by block,
which gives entropy and the log-sum-exp. A second pass over the chunk's keys gives each token's weight in the output
error, the sum of p^2. The tokens with the largest weights, ``PROBE_TOKENS`` a head, are then really quantized in every
candidate tier, and the error of the head's output is measured with keys or values replaced; what the other tokens add
is extrapolated from their share of the weight, since independent errors add up in proportion to it.

Errors pass through the output projection where the module has a plain one, and are relative to the energy of the
layer's whole attention output, so they compare between heads, sides and layers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.codecs import Codec, Table
from hf_subbyte_moe.codecs.shaping import Shaping, pack_shaped, shapes
from hf_subbyte_moe.distributed.heads import HeadRanks, local_columns
from hf_subbyte_moe.ops import (
    TILE_TOKENS,
    Encoding,
    ExactTokens,
    Order,
    attention_statistics,
    pack_tiles,
    probe_attention,
    unpack_tiles,
)
from hf_subbyte_moe.policy.policies import KEYS, VALUES, Measured, Needs, prior_errors, side_codec
from hf_subbyte_moe.transfers import Answers


SAMPLED_QUERIES = 64
PROBE_TOKENS = 1024
_ENTROPY_BLOCK = 4096  # keys looked at together
_PLAIN_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MAX_LOGIT = 60.0  # of a misquantized key over the log-sum-exp; exp stays finite


class AttentionForm(NamedTuple):
    """How a module turns scores into probabilities.

    Attributes:
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)``, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.
    """

    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    def cap(self, scores: Tensor) -> Tensor:
        """Scaled scores, capped."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)


def attention_states(first: Tensor, second: Tensor, latent: bool) -> tuple[Tensor, Tensor]:
    """The two stored sides ``[..., D]`` as keys and values; of a latent cache: latent, and rotary part of the key."""
    return (torch.cat([first, second], dim=-1), first) if latent else (first, second)


@dataclass(frozen=True)
class SideCodec:
    """How one side of one row is quantized, or of rows that are alike: their heads then count as those of one row.

    Attributes:
        rotation: ``[D, D]`` fp32.
        mean: ``[H, D]`` fp32, or None for values.
        tables: tier id -> ``[entries, vector_dim]`` or, for centroids, ``[H, entries]``, fp32.
        order: which lanes own the codes.
        signs: ``[D]`` fp32, the signs in the rotation.
        shaping: by what codes are chosen; None means the nearest entry.
    """

    rotation: Tensor
    mean: Tensor | None
    tables: dict[int, Tensor]
    order: Order
    signs: Tensor
    shaping: Shaping | None = None

    def pack(self, tiles: Tensor, heads: Tensor, codec: Codec, numbers: Tensor | None = None) -> Tensor:
        """``[m, 128, D]`` tiles of the given ``[m]`` heads -> ``[m, record_words]`` records.

        With ``[m]`` ``numbers``, those tiles of the heads out of ``[H, n, 128, D]``, which are read where they lie.
        """
        places = None if numbers is None else (heads, numbers)
        table = self.tables.get(codec.tier_id)
        if codec.table is Table.CENTROIDS and table is not None:
            table = table[heads]
        mean = None if self.mean is None else self.mean[heads]
        if self.shaping is not None and shapes(codec):
            return pack_shaped(
                *(tiles, heads, codec, self.tables[codec.tier_id], self.rotation, mean, self.order),
                *(self.shaping, self.signs, places),
            )
        return pack_tiles(tiles, codec.format, table, self.rotation, mean, self.order, self.signs, places)

    def unpack(self, records: Tensor, heads: Tensor, codec: Codec, dtype: torch.dtype) -> Tensor:
        """Inverse of :meth:`pack`: ``[m, 128, D]`` in ``dtype``."""
        table, rows = self.tables.get(codec.tier_id), None
        if table is not None:
            if codec.table is Table.CENTROIDS:
                table, rows = table.unsqueeze(-1), heads
            else:
                table = table.unsqueeze(0)
        mean = None if self.mean is None else self.mean[heads]
        return unpack_tiles(records, codec.format, table, rows, self.rotation, mean, dtype, self.order, self.signs)

    def round_trip(self, states: Tensor, codec: Codec, heads: Tensor | None = None) -> Tensor:
        """``[H, N, D]`` states (N a multiple of 128) as they come back from a tier, fp32.

        ``heads``: what :func:`tile_heads` says of them, where it is known.
        """
        if codec.format.encoding is Encoding.RAW:
            return states.float()
        if heads is None:
            heads = tile_heads(states)
        records = self.pack(states.reshape(-1, TILE_TOKENS, states.shape[-1]), heads, codec)
        return self.unpack(records, heads, codec, torch.float32).view(states.shape)


def tile_heads(states: Tensor) -> Tensor:
    """``[H * N / 128]`` int64 head of each tile of states ``[H, N, D]``."""
    heads, tokens = states.shape[:2]
    return torch.arange(heads, device=states.device).repeat_interleave(tokens // TILE_TOKENS)


def sample_positions(queries: int) -> Tensor:
    """Sorted positions of at most ``SAMPLED_QUERIES`` queries among ``queries`` new ones."""
    last = min(queries, SAMPLED_QUERIES // 2)
    edges = (queries // 2, max(queries // 2, queries - last - 1))
    spread = torch.linspace(*edges, SAMPLED_QUERIES // 2, dtype=torch.float32).long()
    positions: Tensor = torch.cat([spread, torch.arange(queries - last, queries)]).unique()
    return positions


@lru_cache(maxsize=256)
@torch.inference_mode(False)
def positions_on(queries: int, device: torch.device) -> Tensor:
    """:func:`sample_positions` on a device, uploaded once for all layers; never write to it."""
    return sample_positions(queries).to(device)  # waits: other streams use it too


def plain_weight(linear: object, like: Tensor) -> Tensor | None:
    """``[out, in]`` weight of a linear layer that can be multiplied with ``like``, or None.

    Quantized layers, adapters around a layer and offloaded weights are not plain: reading ``.weight`` would skip what
    their forward does. Of a weight that tensor parallelism sharded by its inputs, this rank's part is.
    """
    if type(linear) is not torch.nn.Linear:
        return None
    weight = local_columns(linear.weight)
    if weight is None:
        weight = linear.weight
    plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.dtype in _PLAIN_DTYPES
    return weight.detach() if plain and weight.device == like.device else None


def output_weight(module: torch.nn.Module | None, output: Tensor) -> Tensor | None:
    """The attention module's output projection ``[hidden, HQ * Dv]``, or None where it has no plain one.

    Args:
        module: the attention module.
        output: ``[B, Sq, HQ, Dv]`` what goes into the projection.
    """
    for name in ("o_proj", "out_proj", "dense"):
        weight = plain_weight(getattr(module, name, None), output)
        if weight is not None and weight.shape[1] == output.shape[2] * output.shape[3]:
            return weight
    return None


class RowProbe:
    """Sampled queries of rows that are alike and what they see; measures chunks of the rows against them.

    Every row is measured by itself: its heads do not know that there are others.
    """

    def __init__(
        self,
        query: Tensor,
        query_index: Tensor,
        exact: ExactTokens,
        form: AttentionForm,
        weight: Tensor | None,
        latent: bool = False,
        ranks: HeadRanks | None = None,
    ) -> None:
        """Attend once.

        Args:
            query: ``[B, HQ, S, D]`` sampled queries.
            query_index: ``[S]`` their positions in each row.
            exact: all tokens of the rows ``[B, H, E, D]`` with the mask ``[1, S, E]`` of these queries.
            form: scores to probabilities.
            weight: ``[hidden, HQ * Dv]`` output projection, or None.
            latent: the sides are a latent, which is value and part of the key, and the rest of the key.
            ranks: who holds the layer's other heads; None where these are all.
        """
        self.rows, self._row_heads = exact.keys.shape[:2]
        heads = ExactTokens(exact.keys.flatten(0, 1)[None], exact.values.flatten(0, 1)[None], exact.visible)
        sinks = None if form.sink_logits is None else form.sink_logits.repeat(self.rows)
        attended = probe_attention(query.flatten(0, 1), heads, form.scaling, form.softcap, sinks)
        self.output, self.lse, self.entropy = attended.output, attended.lse, attended.entropy
        self.query, self.query_index, self._form, self._latent = query.flatten(0, 1), query_index, form, latent
        self._heads, self._ranks = self.rows * self._row_heads, ranks
        self._weight = None
        if weight is not None:  # [H, G * Dv, hidden]
            # bf16 is enough for the length of a difference, and read as it lies; elsewhere it would be slower
            precise = weight if weight.is_cuda and weight.dtype is torch.bfloat16 else weight.float()
            self._weight = precise.t().unflatten(0, (self._row_heads, -1))
        self._energy = self._total_energy().clamp(min=torch.finfo(torch.float32).tiny)

    def _projected(self, output: Tensor) -> Tensor:
        """``[..., B, H, S, hidden]``: what ``[..., B * HQ, S, Dv]`` outputs of a KV head's queries add up to."""
        assert self._weight is not None
        grouped = (
            output.unflatten(-3, (self.rows, self._row_heads, -1)).movedim(-4, 0).movedim(-3, -2).flatten(-2)
        )  # [H, ..., B, S, G * Dv]
        flat = (
            grouped.to(self._weight.dtype).flatten(1, -2) @ self._weight
        )  # the weight once, whatever the leading axes
        projected: Tensor = flat.float().unflatten(1, grouped.shape[1:-1]).movedim(0, -3)
        return projected

    def _total_energy(self) -> Tensor:
        """``[B]`` mean squared length of the layer's attention output in each row."""
        if self._weight is None:
            squared = self.output.unflatten(0, (self.rows, -1)).square().sum((1, 3))
            return (squared if self._ranks is None else self._ranks.sum(squared)).mean(-1)
        output = self._projected(self.output).sum(1)
        return (output if self._ranks is None else self._ranks.sum(output)).square().sum(-1).mean(-1)

    def _error(self, difference: Tensor) -> Tensor:
        """``[..., B * H]`` mean squared length of ``[..., B * HQ, S, Dv]`` differences, relative to the output."""
        if self._weight is not None:
            # the projection adds up the query heads that share a KV head, errors and all
            squared = self._projected(difference).square().sum(-1).mean(-1)
        else:
            squared = difference.square().sum(-1).mean(-1)
            squared = squared.unflatten(-1, (self.rows, self._row_heads, -1)).sum(-1)
        error: Tensor = (squared / self._energy[:, None]).flatten(-2)
        return error

    def measure(
        self,
        states: tuple[Tensor, Tensor],
        first_index: int,
        sides: tuple[SideCodec, SideCodec],
        first_tile: int,
        tiles: int,
        candidates: Sequence[Codec],
        answers: Answers,
        needs: Needs | None = None,
    ) -> Callable[[], list[Measured]]:
        """Entropy, mass and the error of every candidate tier for one chunk of each row.

        Args:
            states: ``[B * H, N, D]`` the chunk's exact states of both sides, neighbours in the row; N at least 1.
            first_index: position of the first token in the row.
            sides: how the sides of these rows are quantized.
            first_tile: the chunk's first tile.
            tiles: its tiles.
            candidates: tiers to measure.
            answers: to ask for what is measured.
            needs: what the policy wants to know; everything if None.

        Returns:
            What gives it for each row, once the answers were sent.
        """
        needs, shape = needs or Needs(), (self.rows, self._row_heads)
        keys, _ = attention_states(*states, self._latent)
        stats = attention_statistics(
            self.query, self.query_index, self.lse, keys, first_index, self._form.scaling, self._form.softcap
        )
        entropy = self._chunk_entropy(keys, first_index) if needs.residual else self._seen_entropy(keys, first_index)
        if needs.errors:
            probed = self._probe_tokens(stats.weight)
            total = stats.weight.sum(-1)
            covered = stats.weight.gather(1, probed).sum(-1)
            # [B * H]: everything's weight over that of the probed tokens
            share = torch.where(covered > 0, total / covered.clamp(min=torch.finfo(torch.float32).tiny), 0)
            measured = self._tier_errors(states, probed, first_index, sides, candidates) * share[:, None, None]
            numbers = answers.ask(entropy, stats.mass, measured)
        else:
            numbers = answers.ask(entropy, stats.mass)

        def found() -> list[Measured]:
            known = prior_errors(candidates, shape[1]) if needs.known is None else needs.known
            told = numbers() if needs.errors else [*numbers(), np.tile(known, (shape[0], 1, 1))]
            by_row = (part.reshape(*shape, *part.shape[1:]) for part in told)
            return [
                Measured(first_tile, tiles, seen, mass, errors, candidates)
                for seen, mass, errors in zip(*by_row, strict=True)
            ]

        return found

    def _seen_entropy(self, keys: Tensor, first_index: int) -> Tensor:
        """``[B * H]`` entropy of the chunk's own queries, or of all if it has none, over everything that they see."""
        inside = (self.query_index >= first_index) & (self.query_index < first_index + keys.shape[1])
        chosen = (inside | ~inside.any()).float()  # without asking the device
        return ((self.entropy * chosen).sum(-1) / chosen.sum()).view(self._heads, -1).mean(-1)

    def _chunk_entropy(self, keys: Tensor, first_index: int) -> Tensor:
        """``[H]`` entropy of the sampled queries over the chunk alone, as if they saw nothing else."""
        query = self._group_queries()
        index = self.query_index.repeat(query.shape[1] // len(self.query_index))
        normaliser = query.new_full(query.shape[:2], -torch.inf)  # [H, G * S]
        weighted = torch.zeros_like(normaliser)  # sum of exp(score - normaliser) * score
        for low in range(0, keys.shape[1], _ENTROPY_BLOCK):
            part = keys[:, low : low + _ENTROPY_BLOCK].float()
            position = torch.arange(first_index + low, first_index + low + part.shape[1], device=keys.device)
            scores = self._form.cap(query @ part.transpose(-1, -2))
            hidden = position > index[:, None]
            lse = torch.logaddexp(normaliser, scores.masked_fill(hidden, -torch.inf).logsumexp(-1))
            old = (normaliser - lse).exp().nan_to_num(0.0)  # nothing was seen so far: minus infinity twice
            share = (scores - lse.unsqueeze(-1)).exp().masked_fill(hidden, 0).nan_to_num(0.0)
            weighted = weighted * old + (share * scores).sum(-1)
            normaliser = lse
        seen = torch.isfinite(normaliser)
        entropy = torch.where(seen, normaliser - weighted, 0) / math.log(2)
        return entropy.sum(-1) / seen.sum(-1).clamp(min=1)

    @staticmethod
    def _probe_tokens(weight: Tensor) -> Tensor:
        """``[H, J]`` the tokens that weigh most; all of them in a short chunk."""
        tokens = weight.shape[1]
        if tokens > PROBE_TOKENS:
            return weight.topk(PROBE_TOKENS, dim=1).indices.sort(dim=1).values
        return torch.arange(tokens, device=weight.device).expand(weight.shape[0], tokens)

    def _tier_errors(
        self,
        states: tuple[Tensor, Tensor],
        probed: Tensor,
        first_index: int,
        sides: tuple[SideCodec, SideCodec],
        candidates: Sequence[Codec],
    ) -> Tensor:
        """``[H, 2, C]`` errors with only the probed tokens of one side quantized."""
        heads, count = probed.shape
        taken = [_take(side, probed) for side in states]
        query, lse = self._group_queries(), self.lse.reshape(heads, -1, 1)
        output = self.output.reshape(heads, -1, self.output.shape[-1])
        seen = (probed + first_index).unsqueeze(1) <= self.query_index.unsqueeze(-1)  # [H, S, J]
        unseen = ~seen.repeat(1, query.shape[1] // seen.shape[1], 1)

        def weights_of(key: Tensor) -> Tensor:
            logits = self._form.cap(query @ key.transpose(-1, -2)) - lse
            return torch.exp(logits.clamp(max=_MAX_LOGIT)).masked_fill(unseen, 0)

        exact = [part.float() for part in taken]
        key, value = attention_states(exact[KEYS], exact[VALUES], self._latent)
        weights = weights_of(key)
        rest = output - weights @ value  # what the tokens that stay exact contribute
        rest_mass = 1 - weights.sum(-1, keepdim=True)
        heads_of = tile_heads(_filled(taken[KEYS]))
        errors = torch.empty(heads, 2, len(candidates), dtype=torch.float32, device=key.device)
        for side in (KEYS, VALUES):
            whole = _filled(taken[side])
            tiers = [side_codec(codec, side, self._latent) for codec in candidates]
            restored = [sides[side].round_trip(whole, tier, heads_of)[:, :count] for tier in tiers]
            changed = [part.expand(len(candidates), -1, -1, -1) for part in exact]
            changed[side] = torch.stack(restored)  # [C, H, J, D]
            new_key, new_value = attention_states(changed[KEYS], changed[VALUES], self._latent)
            new_weights = weights if side == VALUES and not self._latent else weights_of(new_key)
            mass = (rest_mass + new_weights.sum(-1, keepdim=True)).clamp(min=torch.finfo(torch.float32).eps)
            difference = (rest + new_weights @ new_value) / mass - output
            errors[:, side] = self._error(difference.unflatten(-2, (-1, self.output.shape[1])).flatten(-4, -3)).t()
        return errors

    def _group_queries(self) -> Tensor:
        """``[H, G * S, D]`` scaled queries, fp32."""
        return self.query.float().reshape(self._heads, -1, self.query.shape[-1]) * self._form.scaling


def _take(states: Tensor, index: Tensor) -> Tensor:
    return states.gather(1, index.unsqueeze(-1).expand(-1, -1, states.shape[-1]))


def _filled(states: Tensor) -> Tensor:
    """``[H, J, D]`` tokens, filled up to whole tiles with copies of the last one."""
    missing = -states.shape[1] % TILE_TOKENS
    return torch.cat([states, states[:, -1:].expand(-1, missing, -1)], dim=1) if missing else states
