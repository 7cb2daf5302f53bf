"""Traces of expert choices, and models that are made to follow them.

A model with random weights routes at random, so its routers are overruled: at every token each layer is told the
experts of a trace, and predictors the ones that they would have named. A trace is drawn so that it has a real model's
statistics: how popular experts are, how often a token's experts are those of the token before, how often each
predictor is right. Routers and predictors still compute, so their time counts.

Gives up: dependence between layers beyond what predictors see of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_subbyte_moe.experts.predictor import ORACLE, Predictor
from hf_subbyte_moe.routing.families import find_routers


UNIFORM = "uniform"
_TINY = 1e-9
_FIRST = 1e6  # before everything that is drawn
_TRIALS, _TRIAL_TOKENS = 6, 64


@dataclass(frozen=True)
class Statistics:
    """What a trace is drawn from.

    Attributes:
        popularity: share of the choices that the most, the second most, ... popular expert gets.
        repeat: share of a token's experts that the token before used in the same layer.
        recall: share of a token's experts that each predictor names with k.
        source: where these come from.
    """

    popularity: tuple[float, ...]
    repeat: float
    recall: dict[str, float]
    source: str

    def flattened(self) -> "Statistics":
        """The same predictors on choices that have no favourites and no memory."""
        return Statistics((1.0,), 0.0, self.recall, UNIFORM)


def statistics_of(chosen: Tensor, experts: int, tokens: int, recall: dict[str, float], source: str) -> Statistics:
    """Statistics of choices ``[N, L, K]``; ``tokens`` of each text lie side by side."""
    counts = torch.zeros(chosen.shape[1], experts)
    counts.scatter_add_(1, chosen.permute(1, 0, 2).flatten(1), torch.ones(chosen.shape[1], chosen[:, 0].numel()))
    popularity = (counts.sort(dim=1, descending=True).values / counts.sum(1, keepdim=True)).mean(0)
    repeat = _repeat_of(chosen.unflatten(0, (-1, tokens)))
    return Statistics(tuple(popularity.tolist()), repeat, recall, source)


@dataclass(frozen=True)
class ExpertTrace:
    """Choices, and what predictors say of them.

    Attributes:
        name: of the statistics.
        chosen: ``[N, L, K]``.
        foretold: by predictor ``[N, L, K]``, the likeliest first.
    """

    name: str
    chosen: Tensor
    foretold: dict[str, Tensor]


def draw_trace(
    statistics: Statistics, name: str, tokens: int, layers: int, experts: int, top_k: int, seed: int = 0
) -> ExpertTrace:
    """Draw a trace for a model of another size.

    Args:
        statistics: of choices and predictors.
        name: of the trace.
        tokens: N.
        layers: L.
        experts: E.
        top_k: K.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    known = torch.tensor(statistics.popularity, dtype=torch.float64)[None, None]
    popularity = torch.nn.functional.interpolate(known, experts, mode="linear", align_corners=False)[0, 0]
    order = torch.rand(layers, experts, generator=generator).argsort(1)
    weight = popularity.log().float()[order]  # [L, E]
    stay = statistics.repeat
    for trial in range(_TRIALS):  # experts are also met again by chance, popular ones often
        found = _repeat_of(_draw(weight, stay, _TRIAL_TOKENS, top_k, torch.Generator().manual_seed(trial)))
        stay = min(1.0, max(0.0, stay + statistics.repeat - found))
    chosen = _draw(weight, stay, tokens, top_k, generator)
    foretold = {
        predictor: _with_mistakes(chosen, weight, recall, generator) for predictor, recall in statistics.recall.items()
    }
    return ExpertTrace(name, chosen, foretold)


def _gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return -(-torch.rand(shape, generator=generator).clamp(min=_TINY).log()).log()


def _draw(weight: Tensor, stay: float, tokens: int, top_k: int, generator: torch.Generator) -> Tensor:
    """``[N, L, K]``: each expert of the token before stays with a probability, the rest is drawn by popularity."""
    layers, experts = weight.shape
    chosen = torch.empty(tokens, layers, top_k, dtype=torch.int64)
    before: Tensor | None = None
    for token in range(tokens):
        rank = weight + _gumbel((layers, experts), generator)
        if before is not None:
            kept = torch.rand(layers, top_k, generator=generator) < stay
            rank = rank + torch.zeros(layers, experts).scatter_(1, before, kept.float() * _FIRST)
        before = rank.topk(top_k, dim=1).indices
        chosen[token] = before
    return chosen


def _repeat_of(chosen: Tensor) -> float:
    """Share of experts that the token before used, ``[N, L, K]`` or ``[W, N, L, K]``."""
    again = (chosen[..., 1:, :, :, None] == chosen[..., :-1, :, None, :]).any(-1)
    return float(again.float().mean())


def _with_mistakes(chosen: Tensor, weight: Tensor, recall: float, generator: torch.Generator) -> Tensor:
    """``[N, L, K]`` the choices, each right with probability ``recall``, else another expert by popularity."""
    tokens, _, top_k = chosen.shape
    right = torch.rand(chosen.shape, generator=generator) < recall
    rank = weight + _gumbel((tokens, *weight.shape), generator)
    rank.scatter_(2, chosen, float("-inf"))
    others = rank.topk(min(top_k, rank.shape[2] - top_k), dim=2).indices
    if others.shape[2] < top_k:
        others = torch.nn.functional.pad(others, (0, top_k - others.shape[2]), mode="replicate")
    return torch.where(right, chosen, others)


class Playback:
    """Where in a trace a model is.

    Args:
        trace: the trace.
        device: of the model.
    """

    def __init__(self, trace: ExpertTrace, device: torch.device) -> None:
        self.trace = trace
        self.token = -1
        self._chosen = trace.chosen.to(device)
        self._foretold = {name: named.to(device) for name, named in trace.foretold.items()}

    def choice(self, layer: int) -> Tensor:
        """``[1, K]`` of the token that is computed."""
        return self._chosen[self.token % len(self._chosen), layer][None]

    def foretold(self, predictor: str, layer: int) -> Tensor:
        """``[1, K]`` what a predictor says of a layer for this token."""
        named = self._foretold[predictor]
        return named[self.token % len(named), layer][None]

    def truth(self, layer: int) -> list[int]:
        """What a layer will choose for this token."""
        found: list[int] = self.trace.chosen[self.token % len(self.trace.chosen), layer].tolist()
        return found


@contextmanager
def played(model: PreTrainedModel, playback: Playback) -> Iterator[None]:
    """Overrule a model's routers, one token a call, as long as this lasts."""
    hooks = []
    for layer, place in enumerate(find_routers(model)):

        def overrule(_: Any, __: Any, found: Any, layer: int = layer) -> Any:
            if layer == 0:
                playback.token += 1
            logits, weights, _index = found
            return logits, weights, playback.choice(layer)

        hooks.append(place.module.register_forward_hook(overrule))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class ReplayedPredictor:
    """A predictor that computes as always and says what the trace says.

    Args:
        inner: what computes.
        playback: of the trace.
    """

    def __init__(self, inner: Predictor, playback: Playback) -> None:
        self.name = inner.name
        self._inner, self._playback = inner, playback

    def enqueue(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Compute; then the trace's."""
        if self._inner.enqueue(layer, hidden) is None:
            return None
        return self._playback.foretold(self.name, layer + 1)

    def known(self, layer: int) -> list[int]:
        """What the predictor knows."""
        return self._inner.known(layer)

    def saw(self, layer: int, chosen: list[int]) -> None:
        """Hand on."""
        self._inner.saw(layer, chosen)


class Oracle:
    """Knows the trace: the limit of every predictor.

    Args:
        playback: of the trace.
        layers: of the model.
    """

    name = ORACLE

    def __init__(self, playback: Playback, layers: int) -> None:
        self._playback, self._layers = playback, layers

    def enqueue(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Nothing to compute."""
        return None

    def known(self, layer: int) -> list[int]:
        """The next layer's choice for the same token."""
        return self._playback.truth(layer + 1) if layer + 1 < self._layers else []

    def saw(self, layer: int, chosen: list[int]) -> None:
        """Nothing to learn."""
