"""From scores to a ranking: which experts a token should go to, given clusters of experts.

- ``hard``: the clusters with the best scores, then only experts inside them. A cluster's score is the sum of its two
  best experts, or its best one; with DeepSeek-V3's groups as clusters this is DeepSeek-V3's router.
- ``soft``: the router's best ``keep`` experts untouched; the others compete with a bonus for the favoured clusters,
  those with the best scores plus where the token was one layer before.
- ``batch_aware``: the same bonus for experts that the batch needs anyway.

A bonus is in units of the router's logits, whatever the router makes of them. Tensors only: no loop over tokens, no
value read back to the host, rejected experts at minus infinity (a biased score may be negative).

Source: groups, DeepSeek-V3 (arXiv 2412.19437); experts that a batch needs anyway, OEA (arXiv 2511.02237).
"""

import torch
from torch import Tensor

from hf_subbyte_moe.routing.selection import PROBABILITY, SIGMOID, Scores


MAXIMUM = "max"
_NEVER = float("-inf")


def allowed_scores(scores: Scores) -> Tensor:
    """``[N, E]`` what may be picked; experts that the router's own groups exclude are at minus infinity.

    DeepSeek-V2 marks them by a probability of zero.
    """
    if scores.kind != PROBABILITY or scores.activation is None:
        return scores.choice
    return scores.choice.masked_fill((scores.choice == 0) & (scores.activation > 0), _NEVER)


def cluster_scores(choice: Tensor, members: Tensor, how: str) -> Tensor:
    """``[N, C]`` score of every cluster.

    Args:
        choice: ``[N, E]``; minus infinity for experts that cannot be picked.
        members: ``[C, M]`` experts of every cluster; a short cluster is filled up with E.
        how: "top2" or "max".
    """
    padded = torch.nn.functional.pad(choice, (0, 1), value=_NEVER)
    inside = padded[:, members]  # [N, C, M]
    if how == MAXIMUM or members.shape[1] == 1:
        return inside.amax(dim=-1)
    best = inside.topk(2, dim=-1).values
    return torch.where(best[..., 1].isinf(), best[..., 0], best.sum(dim=-1))


def best_clusters(scores: Tensor, count: int) -> Tensor:
    """``[N, C]`` bool: the ``count`` clusters with the best scores."""
    kept = torch.topk(scores, k=count, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, kept, True)


def experts_of(clusters: Tensor, membership: Tensor) -> Tensor:
    """``[N, E]`` bool: experts in at least one of a token's clusters.

    Args:
        clusters: ``[N, C]`` bool.
        membership: ``[C, E]`` bool; a replicated expert is in every cluster.
    """
    return (clusters.float() @ membership.float()) > 0


def with_bonus(scores: Scores, choice: Tensor, bonus: Tensor) -> Tensor:
    """``[N, E]`` what the choice would be if the logits were larger by ``bonus``.

    Args:
        scores: the router's.
        choice: ``[N, E]`` its scores, what is excluded at minus infinity.
        bonus: ``[N, E]`` or ``[E]``, not negative.
    """
    if scores.activation is None:
        return choice + bonus.to(choice.dtype)
    activation = scores.activation
    if scores.kind == SIGMOID:
        raised = torch.sigmoid(torch.logit(activation.float()) + bonus)
    else:
        raised = activation.float() * bonus.exp()
    return choice.float() + (raised - activation.float())


def keep_best(choice: Tensor, ranking: Tensor, keep: int) -> Tensor:
    """``[N, E]`` the ranking, with the router's best ``keep`` experts ahead of everything."""
    if keep == 0:
        return ranking
    best = choice.topk(keep, dim=-1).indices
    order = torch.arange(keep + 1, 1, -1, device=ranking.device, dtype=ranking.dtype)  # each step is above rounding
    return ranking.scatter(-1, best, (ranking.amax(dim=-1, keepdim=True).abs() + 1) * order)


def needed_experts(choice: Tensor, keep: int, steps: int = 1) -> Tensor:
    """``[N, E]`` bool: experts among the best ``keep`` of some token of the same step.

    Args:
        choice: ``[N, E]``.
        keep: experts of a token that are needed in any case.
        steps: the tokens are those of N / steps rows, and token t of every row is of step t. A decode step is one.
    """
    best = choice.topk(keep, dim=-1).indices
    own = torch.zeros_like(choice, dtype=torch.bool).scatter_(1, best, True)
    return own.view(-1, steps, own.shape[1]).any(0).repeat(own.shape[0] // steps, 1)
