"""Change which experts a router picks, and nothing else.

Every family scores, normalises and scales in its own way, but all of them pick with one ``topk`` over the experts.
While a router's own forward runs, that one call is answered with another choice; scores and weights stay the model's
own code, so a chosen expert gets the weight that the true router gives it, and a choice that changes nothing changes
no bit.

Gives up: models that pick without ``topk`` need a function of their own (``sparsemixer.py``).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


PROBABILITY, SIGMOID, LOGIT = "probability", "sigmoid", "logit"
_SOFTMAX_CALLS = (torch.softmax, torch.Tensor.softmax, torch.nn.functional.softmax, torch.special.softmax)
_SIGMOID_CALLS = (torch.sigmoid, torch.Tensor.sigmoid, torch.nn.functional.sigmoid, torch.special.expit)
_TOPK_CALLS = (torch.topk, torch.Tensor.topk)
_ARGUMENTS = ("input", "k", "dim", "largest", "sorted")


class Scores(NamedTuple):
    """What a router is about to pick from.

    Attributes:
        choice: ``[N, E]`` what it would pick the largest of: biased for balance, rejected groups masked.
        activation: ``[N, E]`` what the logits became first; None where the logits themselves are picked from.
        kind: what made ``activation``: "probability", "sigmoid" or "logit".
    """

    choice: Tensor
    activation: Tensor | None
    kind: str


class Picked(NamedTuple):
    """What ``topk`` returns."""

    values: Tensor
    indices: Tensor


class ChooseExperts(TorchFunctionMode):
    """While active, answers the ``topk`` over all experts with the largest entries of another ranking.

    Args:
        experts: how many experts there are.
        top_k: how many are picked.
        rank: from the scores to the ranking, ``[N, E]``; -inf is never picked while anything else is left.
    """

    def __init__(self, experts: int, top_k: int, rank: Callable[[Scores], Tensor]) -> None:
        super().__init__()
        self.experts = experts
        self.top_k = top_k
        self.rank = rank
        self.activation: Tensor | None = None
        self.kind = LOGIT
        self.picked: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Watch how scores are made, and answer the choice."""
        given = dict(kwargs or {})
        if func in _TOPK_CALLS:
            given.update(zip(_ARGUMENTS, args, strict=False))
            if self._is_the_choice(given):
                return self._choose(given)
            return func(**given) if func is torch.topk else func(given.pop("input"), **given)
        found = func(*args, **given)
        scores = func in _SOFTMAX_CALLS or func in _SIGMOID_CALLS
        if scores and self.picked is None and found.ndim == 2 and found.shape[-1] == self.experts:
            self.activation, self.kind = found, PROBABILITY if func in _SOFTMAX_CALLS else SIGMOID
        return found

    def _is_the_choice(self, given: dict[str, Any]) -> bool:
        scores = given["input"]
        return self.picked is None and scores.ndim == 2 and (scores.shape[1], given["k"]) == (self.experts, self.top_k)

    def _choose(self, given: dict[str, Any]) -> Picked:
        scores: Tensor = given.pop("input")
        ranking = self.rank(Scores(scores, self.activation, self.kind))
        self.picked = torch.topk(ranking, **given).indices
        return Picked(scores.gather(-1, self.picked), self.picked)
