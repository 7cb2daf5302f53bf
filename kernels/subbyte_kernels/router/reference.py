"""A router in plain PyTorch: hidden states -> logits, weights and experts of every token.

A :class:`RouterSpec` says what a family's router does between its logits and its weights; :func:`router_reference`
does that with the same PyTorch calls as the families do, so on the same device it chooses as they do, ties included.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


MAX_ROUTER_TOKENS = 16
SCORES = ("logits", "softmax", "sigmoid")
GROUP_SCORES = ("best", "top2")
NORMS = ("none", "sum", "sum_eps", "clamped_sum", "softmax")


@dataclass(frozen=True)
class RouterSpec:
    """What a router does with its logits.

    Attributes:
        top_k: K, experts of a token.
        score: what logits become: a key of :data:`SCORES`.
        float_logits: logits are computed from fp32 copies of states and matrix and stay fp32; otherwise they are
            rounded to the states' dtype.
        return_float_logits: they are returned in fp32, though rounded.
        groups: neighbouring experts in so many groups; 1 without.
        groups_kept: groups that a token may use.
        group_score: a group's score: its best expert's or the sum of the two best.
        masked: what experts of the other groups score, -inf or 0.
        norm: what weights are divided by: a key of :data:`NORMS`; "softmax" is a softmax over the chosen.
        eps: added to the sum, or the least sum, for the norms that say so.
        scale: factor of the weights.
        sorted: experts come by falling score; otherwise in the order in which ``topk(sorted=False)`` brings them.
        float_weights: weights are returned in fp32, otherwise in the states' dtype.
    """

    top_k: int
    score: str = "softmax"
    float_logits: bool = False
    return_float_logits: bool = False
    groups: int = 1
    groups_kept: int = 1
    group_score: str = "best"
    masked: float = float("-inf")
    norm: str = "sum"
    eps: float = 0.0
    scale: float = 1.0
    sorted: bool = True
    float_weights: bool = False

    def __post_init__(self) -> None:
        for key, allowed in (("score", SCORES), ("group_score", GROUP_SCORES), ("norm", NORMS)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"{key}={getattr(self, key)!r} is not possible: one of {list(allowed)}")


@dataclass(frozen=True)
class RouterMatrix:
    """Weights of one router.

    Attributes:
        weight: ``[E, H]``.
        bias: ``[E]`` added to logits, or None.
        correction: ``[E]`` fp32 added to scores for the choice alone, or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None


@dataclass(frozen=True)
class Routed:
    """Where tokens go.

    Attributes:
        logits: ``[T, E]``.
        weights: ``[T, K]``.
        index: ``[T, K]`` int64.
        predicted: ``[T, K']`` int64 experts that the next router would choose for the same states, or None.
    """

    logits: Tensor
    weights: Tensor
    index: Tensor
    predicted: Tensor | None = None


def router_reference(
    hidden: Tensor,
    matrix: RouterMatrix,
    spec: RouterSpec,
    following: RouterMatrix | None = None,
    following_top_k: int = 0,
) -> Routed:
    """Logits, weights and experts.

    Args:
        hidden: ``[T, H]``.
        matrix: the router's weights.
        spec: what it does.
        following: weights of a router with the same ``spec`` whose choice for these states is wanted too, or None.
        following_top_k: experts of that choice.

    Returns:
        Logits, weights, experts, and the other router's experts.
    """
    logits, weights, index = _route(hidden, matrix, spec, spec.top_k)
    predicted = None if following is None else _route(hidden, following, spec, following_top_k)[2]
    return Routed(logits, weights, index, predicted)


def _route(hidden: Tensor, matrix: RouterMatrix, spec: RouterSpec, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    weight, bias = matrix.weight, matrix.bias
    if spec.float_logits:
        hidden_states, weight, bias = hidden.float(), weight.float(), None if bias is None else bias.float()
    else:
        hidden_states = hidden
    logits = torch.nn.functional.linear(hidden_states, weight, bias)
    if spec.return_float_logits:
        logits = logits.float()
    scores = logits.float() if spec.score != "logits" else logits
    if spec.score == "softmax":
        scores = scores.softmax(-1)
    elif spec.score == "sigmoid":
        scores = scores.sigmoid()
    choice = scores if matrix.correction is None else scores + matrix.correction
    if spec.groups > 1:
        choice = _keep_groups(choice, spec)
    index = torch.topk(choice, top_k, dim=-1, sorted=spec.sorted).indices
    weights = (choice if matrix.correction is None else scores).gather(-1, index)
    if spec.norm == "softmax":
        weights = torch.softmax(weights, dim=-1, dtype=torch.float32)
    elif spec.norm != "none":
        total = weights.sum(dim=-1, keepdim=True)
        if spec.norm == "sum_eps":
            total = total + spec.eps
        elif spec.norm == "clamped_sum":
            total = total.clamp(min=spec.eps)
        weights = weights / total
    weights = weights * spec.scale if spec.scale != 1.0 else weights
    return logits, weights.to(torch.float32 if spec.float_weights else hidden.dtype), index


def _keep_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    grouped = choice.unflatten(-1, (spec.groups, -1))
    best = spec.group_score == "best"
    scores = grouped.max(dim=-1).values if best else grouped.topk(2, dim=-1)[0].sum(dim=-1)
    kept = torch.topk(scores, k=spec.groups_kept, dim=-1, sorted=False).indices
    mask = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, kept, False)
    made: Tensor = grouped.masked_fill(mask[..., None], spec.masked).flatten(-2)
    return made
