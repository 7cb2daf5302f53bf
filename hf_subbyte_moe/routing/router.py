"""A model's own routers, steered: each becomes an instance of a subclass of its class, and can go back.

State dicts, ``isinstance``, hooks and ``output_router_logits`` see the router that they know. In mode ``native`` the
subclass calls the model's forward and does nothing else; for a few tokens on a GPU one launch does what that forward
does (``fused.py``). Routers of one model share a :class:`Trail`, so that a layer
knows where the layer before sent each token.

Gives up: a token's place is followed within one forward pass only, and where layers see the same tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.routing.clusters import Clusters
from hf_subbyte_moe.routing.families import activation_dtype, as_triple, find_routers
from hf_subbyte_moe.routing.fused import FusedRouter, fused_router
from hf_subbyte_moe.routing.modes import (
    allowed_scores,
    best_clusters,
    cluster_scores,
    experts_of,
    keep_best,
    needed_experts,
    with_bonus,
)
from hf_subbyte_moe.routing.selection import LOGIT, ChooseExperts, Scores
from hf_subbyte_moe.routing.sparsemixer import NAME as SPARSEMIXER
from hf_subbyte_moe.routing.sparsemixer import sparsemixer_weights


_STATE = "_hf_subbyte_moe_routing"
_ACCELERATE_FORWARD = "_old_forward"
_BATCH_TOKENS = range(2, 33)  # below there is nothing to share, above every expert is needed anyway


@dataclass
class Trail:
    """Where the last router sent its tokens.

    Attributes:
        layer: that router's number; -1 before the first.
        place: ``[N, C]`` share of each token's weight in each cluster; None before the first.
    """

    layer: int = -1
    place: Tensor | None = None

    def before(self, layer: int, tokens: int) -> Tensor | None:
        """The places of the same tokens one layer before, if that is what was noted last."""
        known = self.layer == layer - 1 and self.place is not None and self.place.shape[0] == tokens
        return self.place if known else None


@dataclass
class RouterState:
    """What one steered router knows.

    Attributes:
        layer: number of the router in the model.
        experts: experts that it chooses from.
        top_k: experts that it chooses.
        config: how it chooses.
        membership: ``[C, E]`` bool; None without clusters.
        members: ``[C, M]`` experts of every cluster, filled up with E; None likewise.
        trail: shared by the model's routers.
        steps: decode steps that one call stands for; more than one where a measurement reads known tokens at once.
        fused: what stands for the router's own forward in mode ``native``; None where nothing does.
    """

    layer: int
    experts: int
    top_k: int
    config: RoutingConfig
    membership: Tensor | None
    members: Tensor | None
    trail: Trail
    steps: int = 1
    fused: FusedRouter | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Membership and members on a device; moved once."""
        assert self.membership is not None
        assert self.members is not None
        if self.membership.device != device:
            self.membership, self.members = self.membership.to(device), self.members.to(device)
        return self.membership, self.members

    def rank(self, scores: Scores) -> Tensor:
        """``[N, E]`` ranking for the configured mode."""
        config = self.config
        choice = allowed_scores(scores)
        if config.mode == "hard":
            membership, members = self.on(choice.device)
            found = cluster_scores(choice, members, config.cluster_score)
            kept = experts_of(best_clusters(found, config.clusters_kept(membership.shape[0])), membership)
            return choice.masked_fill(~kept, float("-inf"))
        bonus: Tensor | None = None
        if self.membership is not None and config.strength > 0:
            bonus = config.strength * self._favoured(scores, choice)
        if config.batch_aware > 0 and choice.shape[0] // self.steps in _BATCH_TOKENS:
            needed = config.batch_aware * needed_experts(choice, max(config.keep, 1), self.steps).float()
            bonus = needed if bonus is None else bonus + needed
        return choice if bonus is None else keep_best(choice, with_bonus(scores, choice, bonus), config.keep)

    def _favoured(self, scores: Scores, choice: Tensor) -> Tensor:
        """``[N, E]`` from 0 to 1: how much an expert's cluster is favoured."""
        membership, members = self.on(choice.device)
        shares = _cluster_shares(scores, choice, members)
        place = self.trail.before(self.layer, choice.shape[0])
        if place is not None:
            shares = (1 - self.config.follow) * shares + self.config.follow * place
        favoured = best_clusters(shares, self.config.clusters_kept(membership.shape[0]))
        return experts_of(favoured, membership).float()

    def note(self, weights: Tensor, indices: Tensor) -> None:
        """Remember where the tokens go."""
        if self.membership is None or self.config.mode != "soft":
            return
        membership, _ = self.on(indices.device)
        alone = membership & (membership.sum(0) == 1)
        inside = alone.T[indices].float()  # [N, K, C]
        place = (weights.float()[..., None] * inside).sum(1)
        self.trail.place = place / weights.float().sum(-1, keepdim=True).clamp(min=1e-20)
        self.trail.layer = self.layer


def _cluster_shares(scores: Scores, choice: Tensor, members: Tensor) -> Tensor:
    """``[N, C]`` shares of the router's probability, comparable with a token's place."""
    activation = choice.float().softmax(-1) if scores.kind == LOGIT or scores.activation is None else scores.activation
    activation = activation.float().masked_fill(choice.isinf(), 0)
    padded = torch.nn.functional.pad(activation, (0, 1))
    best = padded[:, members].topk(min(2, members.shape[1]), dim=-1).values.sum(-1)
    return best / best.sum(-1, keepdim=True).clamp(min=1e-20)


class SteeredRouter(nn.Module):
    """In front of a router's own class: its forward, with another choice of experts."""

    _hf_subbyte_moe_routing: RouterState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's own forward."""
        state = self._hf_subbyte_moe_routing
        if state.config.mode == "native":
            found = state.fused(self, *args) if state.fused is not None and len(args) == 1 and not kwargs else None
            return super().forward(*args, **kwargs) if found is None else found
        triple: tuple[Tensor, Tensor, Tensor] | None
        if isinstance_of_sparsemixer(self):
            found = triple = self._sparsemixer(state, *args, **kwargs)
        else:
            chooser = ChooseExperts(state.experts, state.top_k, state.rank)
            with chooser:
                found = super().forward(*args, **kwargs)
            triple = as_triple(found, state.experts, state.top_k)
            if chooser.picked is None or triple is None:
                raise ValueError(
                    f"routing does not support {type(self).__mro__[2].__name__}: it does not pick with topk and "
                    "return (logits, weights, indices)"
                )
        state.note(*triple[1:])
        return found

    def _sparsemixer(self, state: RouterState, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        if self.training:
            raise ValueError("routing: PhiMoE samples its experts in training; call model.eval() or restore(model)")
        logits = super().forward(*args, **kwargs)[0]
        ranking = state.rank(Scores(logits, None, LOGIT))
        indices = ranking.sort(dim=-1, descending=True, stable=True).indices[:, : state.top_k]  # ties as arg-max does
        jitter: Any = self.router_jitter_noise
        return logits, sparsemixer_weights(logits, indices, jitter), indices


def own_class(router: nn.Module) -> type[nn.Module]:
    """The class that the model gave a router."""
    return type(router).__mro__[2] if isinstance(router, SteeredRouter) else type(router)


def follows_tokens(router: nn.Module) -> bool:
    """Whether a router's choice depends on where the layer before sent each token."""
    return isinstance(router, SteeredRouter) and router._hf_subbyte_moe_routing.config.mode == "soft"


@contextmanager
def unsteered_trail(router: nn.Module) -> Iterator[None]:
    """Ask a router out of its turn: where tokens are remembered to be stays as it is."""
    if not isinstance(router, SteeredRouter):
        yield
        return
    trail = router._hf_subbyte_moe_routing.trail
    before = (trail.layer, trail.place)
    try:
        yield
    finally:
        trail.layer, trail.place = before


def isinstance_of_sparsemixer(router: nn.Module) -> bool:
    """Whether a router is PhiMoE's."""
    return any(cls.__name__ == SPARSEMIXER for cls in type(router).__mro__)


def steer(model: PreTrainedModel, config: RoutingConfig, clusters: Clusters | None) -> None:
    """Put the options in front of every router of a model.

    Args:
        model: with routers that :func:`find_routers` finds.
        config: the options.
        clusters: checked against the model; None where the options need none.
    """
    places = find_routers(model)
    trail = Trail()
    wanted = config.fused and config.mode == "native"
    fused = fused_router(places[0].module, activation_dtype(model)) if wanted else None
    for layer, place in enumerate(places):
        membership = None if clusters is None else clusters.membership(layer)
        members = None if clusters is None else clusters.members(layer)
        state = RouterState(layer, place.experts, place.top_k, config, membership, members, trail, fused=fused)
        _swap(place.module, state)


def release(model: PreTrainedModel) -> None:
    """Give every router its own class back."""
    for module in model.modules():
        if isinstance(module, SteeredRouter):
            delattr(module, _STATE)
            module.__class__ = type(module).__mro__[2]
            _rebind(module)


_SUBCLASSES: dict[type, type] = {}


def _swap(router: nn.Module, state: RouterState) -> None:
    if not isinstance(router, SteeredRouter):
        own = type(router)
        if own not in _SUBCLASSES:
            _SUBCLASSES[own] = type(f"Steered{own.__name__}", (SteeredRouter, own), {"__module__": __name__})
        router.__class__ = _SUBCLASSES[own]
        _rebind(router)
    object.__setattr__(router, _STATE, state)


def _rebind(router: nn.Module) -> None:
    """A router whose weights accelerate brings and takes away keeps its forward in an attribute."""
    if _ACCELERATE_FORWARD in vars(router):
        setattr(router, _ACCELERATE_FORWARD, MethodType(type(router).forward, router))
