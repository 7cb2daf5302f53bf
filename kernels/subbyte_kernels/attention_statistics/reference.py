"""What sampled queries say about the tokens that are about to be packed, in plain PyTorch.

First the queries attend to everything that they see, which gives entropy and log-sum-exp. Then one pass over the keys
of a row, block by block; a block of probabilities is the largest thing that exists.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from subbyte_kernels.decode_attention.reference import ExactTokens, decode_attention_reference


_BLOCK_TOKENS = 4096


@dataclass(frozen=True)
class TokenStatistics:
    """How sampled queries attend to the tokens of one row.

    Attributes:
        mass: ``[H]`` share of the attention that falls on these tokens, mean over the group's sampled queries.
        weight: ``[H, N]`` sum of p^2 over the group's sampled queries: what a token's error weighs in the output.
    """

    mass: Tensor
    weight: Tensor


@dataclass(frozen=True)
class ProbeResult:
    """Attention of sampled queries of one row.

    Attributes:
        output: ``[HQ, S, Dv]`` fp32.
        lse: ``[HQ, S]`` fp32, natural logarithm of the softmax denominator; -inf where a query sees nothing.
        entropy: ``[HQ, S]`` fp32 in bits; a sink in the softmax counts as one more token.
    """

    output: Tensor
    lse: Tensor
    entropy: Tensor


def probe_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> ProbeResult:
    """Attention of sampled queries over the tokens that they see.

    Args:
        query: ``[HQ, S, D]`` sampled queries of one row.
        keys: ``[H, N, D]``.
        values: ``[H, N, Dv]``.
        visible: ``[S, N]`` bool.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.

    Returns:
        Outputs, log-sum-exps and entropies.
    """
    exact = ExactTokens(keys[None], values[None], visible[None])
    found = decode_attention_reference(query[None], exact, None, scaling, softcap, sink_logits)
    assert found.entropy is not None
    return ProbeResult(found.output[0], found.lse[0], found.entropy[0])


def attention_statistics_reference(
    query: Tensor,
    query_index: Tensor,
    lse: Tensor,
    keys: Tensor,
    first_index: int,
    scaling: float,
    softcap: float | None = None,
) -> TokenStatistics:
    """Attention mass and squared weight of each token.

    Args:
        query: ``[HQ, S, D]`` sampled queries of one row.
        query_index: ``[S]`` int64, their positions in the row.
        lse: ``[HQ, S]`` fp32, log-sum-exp over everything that they see.
        keys: ``[H, N, D]`` the tokens in question, neighbours in the row.
        first_index: position in the row of the first of them.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)``, or None.

    Returns:
        Mass and weights; tokens after a query count for nothing.
    """
    heads, tokens, dim = keys.shape
    samples = query.shape[1]
    rows = query.float().reshape(heads, -1, dim) * scaling
    rows_lse = lse.reshape(heads, -1, 1)
    mass = torch.zeros(heads, dtype=torch.float32, device=keys.device)
    weight = torch.empty(heads, tokens, dtype=torch.float32, device=keys.device)
    group = rows.shape[1] // samples
    for start in range(0, tokens, _BLOCK_TOKENS):
        part = keys[:, start : start + _BLOCK_TOKENS]
        index = torch.arange(first_index + start, first_index + start + part.shape[1], device=keys.device)
        seen = (index <= query_index.unsqueeze(-1)).repeat(group, 1)
        scores = rows @ part.float().transpose(-1, -2)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = torch.exp(scores - rows_lse).masked_fill(~seen, 0)
        mass += weights.sum((1, 2))
        weight[:, start : start + part.shape[1]] = weights.square_().sum(1)
    return TokenStatistics(mass / rows.shape[1], weight)
