"""What foretells the next layer's experts.

``previous``: the experts that the layer chose for the token before. ``gate``: the next layer's norm and router on the
state that enters this layer's experts; it is stale by what this layer's experts and the next attention add. ``head``:
a trained linear map from what this layer's experts read to the next layer's choice; see ``calibration.py``. The gate
asks the model's own router, so scores, biases and groups are the model's. Asked about a layer's own state it must say
what the layer says: that is checked once for every layer while the model runs, and a gate that fails is not used.

A prediction is enqueued before a layer's experts are computed, and comes to the host with the layer's own choice.

Gives up: the first MoE layer of a token, which only ``previous`` foretells; routers that take more than hidden states.

Source: stale gate, arXiv 2312.17238 and 2502.12224; trained heads, arXiv 2511.10676.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_subbyte_moe.routing.families import RouterPlace, as_triple
from hf_subbyte_moe.routing.router import follows_tokens, own_class, unsteered_trail


logger = logging.getLogger(__name__)

PREVIOUS, GATE, HEAD, ORACLE = "previous", "gate", "head", "oracle"
FEW_TOKENS = 16  # more are a prompt, which prediction does not serve
_NORMS = ("pre_mlp_layernorm", "ffn_norm", "pre_feedforward_layernorm", "post_attention_layernorm")


class Predictor(Protocol):
    """Foretells the experts of a layer's successor."""

    name: str

    def enqueue(self, layer: int, hidden: Tensor) -> Tensor | None:
        """``[N, K]`` experts of layer + 1 on the device, the likeliest first; None if it has nothing to compute."""

    def known(self, layer: int) -> list[int]:
        """Experts of layer + 1 that the host knows without asking the device."""

    def saw(self, layer: int, chosen: list[int]) -> None:
        """What a layer chose."""


class PreviousToken:
    """The token before chose them.

    Args:
        layers: how many.
    """

    name = PREVIOUS

    def __init__(self, layers: int) -> None:
        self._chosen: list[list[int]] = [[] for _ in range(layers)]

    def enqueue(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Nothing to compute."""
        return None

    def known(self, layer: int) -> list[int]:
        """What layer + 1 chose last; after the last layer comes the first."""
        return self._chosen[(layer + 1) % len(self._chosen)]

    def saw(self, layer: int, chosen: list[int]) -> None:
        """Remember."""
        self._chosen[layer] = chosen


class States:
    """The state that enters each MoE layer's norm, as long as somebody wants it.

    Args:
        model: the model.
        places: its routers.
        most: tokens of a call whose states are kept; those of a longer one are not. None keeps all.

    Raises:
        ValueError: a layer's norm was not found.
    """

    def __init__(self, model: PreTrainedModel, places: list[RouterPlace], most: int | None = FEW_TOKENS) -> None:
        self._most = most
        self.norms = [_norm_before(model, place) for place in places]
        self.latest: list[Tensor | None] = [None] * len(places)
        self.routes: list[Callable[[Tensor], Tensor] | None] = [None] * len(places)
        self.wanted = False
        self._hooks = [norm.register_forward_pre_hook(self._noting(layer)) for layer, norm in enumerate(self.norms)]

    def remove(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.latest = [None] * len(self.latest)
        self.routes = [None] * len(self.routes)

    def note(self, layer: int, state: Tensor, route: Callable[[Tensor], Tensor] | None = None) -> None:
        """A layer is about to read a state.

        Args:
            layer: number of the MoE layer.
            state: ``[..., H]`` before its norm.
            route: the ``[N, K]`` experts that it chooses for states ``[N, H]``; None where norm and router do, as
                modules.
        """
        if not self.wanted:
            return
        tokens = state.shape[:-1].numel()
        self.latest[layer] = state if self._most is None or tokens <= self._most else None
        self.routes[layer] = route

    def _noting(self, layer: int) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            self.note(layer, inputs[0])

        return note


def notes_states(hook: Callable[..., Any]) -> bool:
    """Whether a forward hook is one of :class:`States`, whose ``note`` does the same where a norm is not called."""
    return getattr(hook, "__qualname__", "").startswith(f"{States.__name__}.") and hook.__module__ == __name__


class StaleGate:
    """The next layer's norm and router.

    Args:
        places: the model's routers.
        states: what enters the layers' norms.

    Raises:
        ValueError: routers take more than hidden states.
    """

    name = GATE

    def __init__(self, places: list[RouterPlace], states: States) -> None:
        for place in places:
            if len(inspect.signature(own_class(place.module).forward).parameters) != len(("self", "hidden_states")):
                raise ValueError(f"prefetch {GATE!r} does not support router {place.name}: it takes more than states")
        self.places, self.states = places, states
        self.usable = True
        self._checked = [False] * len(places)

    def ask(self, layer: int, state: Tensor) -> Tensor:
        """``[N, K]`` what a layer's router says of a state that did not pass the layer's norm."""
        place, norm, route = self.places[layer], self.states.norms[layer], self.states.routes[layer]
        with torch.no_grad(), unsteered_trail(place.module):
            if route is not None:
                return route(state.reshape(-1, state.shape[-1]))
            normed = type(norm).forward(norm, state)
            found = type(place.module).forward(place.module, normed.reshape(-1, normed.shape[-1]))
        triple = as_triple(found, place.experts, place.top_k)
        if triple is None:
            raise ValueError(f"prefetch {GATE!r} does not support router {place.name}")
        return triple[2]

    def enqueue(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Ask the next layer's router; of a layer that was not checked yet, ask that layer's own as well."""
        state = self.states.latest[layer]
        if state is None or not self.usable or layer + 1 >= len(self.places) or _is_away(self.places[layer + 1]):
            return None
        return self.ask(layer + 1, state)

    def check(self, layer: int, chosen: Tensor) -> None:
        """Once for every layer: what the gate says of the layer's true state must be what the layer chose."""
        state = self.states.latest[layer]
        place = self.places[layer]
        if self._checked[layer] or state is None or not self.usable or follows_tokens(place.module) or _is_away(place):
            return
        self._checked[layer] = True
        if not torch.equal(self.ask(layer, state).sort(-1).values, chosen.to(torch.int64).sort(-1).values):
            self.usable = False
            logger.warning("experts: layer %d's gate does not repeat its choice, so prefetch does not use it", layer)

    def usable_without_check(self) -> None:
        """Do not compare with choices: they are not the routers' own."""
        self._checked = [True] * len(self._checked)

    def known(self, layer: int) -> list[int]:
        """Nothing."""
        return []

    def saw(self, layer: int, chosen: list[int]) -> None:
        """Nothing to remember."""


class TrainedHead:
    """A linear map for every layer but the last.

    Args:
        weights: ``[L - 1, E, H]``.
        biases: ``[L - 1, E]``.
        top_k: experts that a layer chooses.
    """

    name = HEAD

    def __init__(self, weights: Tensor, biases: Tensor, top_k: int) -> None:
        self.top_k = top_k
        self._weights, self._biases = list(weights.unbind(0)), list(biases.unbind(0))

    def scores(self, layer: int, hidden: Tensor) -> Tensor:
        """``[N, E]`` of layer + 1, from ``[N, H]`` that a layer's experts read."""
        if self._weights[layer].device != hidden.device or self._weights[layer].dtype != hidden.dtype:
            self._weights[layer] = self._weights[layer].to(hidden.device, hidden.dtype)
            self._biases[layer] = self._biases[layer].to(hidden.device, hidden.dtype)
        return nn.functional.linear(hidden, self._weights[layer], self._biases[layer])

    def enqueue(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Ask the head."""
        if layer >= len(self._weights):
            return None
        return self.scores(layer, hidden).topk(self.top_k, dim=-1).indices

    def known(self, layer: int) -> list[int]:
        """Nothing."""
        return []

    def saw(self, layer: int, chosen: list[int]) -> None:
        """Nothing to remember."""


def _is_away(place: RouterPlace) -> bool:
    """Whether a router's weights are brought by somebody else, for its own forward only."""
    return any(weight is not None and weight.is_meta for weight in place.module._parameters.values())


def _norm_before(model: PreTrainedModel, place: RouterPlace) -> nn.Module:
    """The norm whose output a router's block reads.

    Raises:
        ValueError: there is none of the usual names beside the block.
    """
    name = place.name
    while "." in name:
        name = name.rpartition(".")[0]
        around = model.get_submodule(name)
        for norm in _NORMS:
            found = getattr(around, norm, None)
            if isinstance(found, nn.Module):
                return found
    raise ValueError(
        f"prefetch {GATE!r} does not support {type(model).__name__}: no norm was found before {place.name}"
    )
