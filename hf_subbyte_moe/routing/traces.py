"""What routing costs between domains: which experts tokens used, and what of it stays inside one domain.

A trace is ``[N, L, K]``: the experts that every token used in every layer. A *transition* is a pair of an expert used
at a layer and one used at the next by the same token; a *pair* is two experts of one token and layer. A replicated
expert is in every domain, but a token meets it in one: where most of its experts of the layer before and of this layer
are.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_subbyte_moe.routing.clustering import Affinity
from hf_subbyte_moe.routing.clusters import Clusters
from hf_subbyte_moe.routing.families import as_triple, find_routers


_BEFORE_FIRST = 1.01  # where the token was outweighs where its other experts are


@dataclass(frozen=True)
class Locality:
    """Shares from 0 to 1.

    Attributes:
        transitions: of all transitions that stay in one domain.
        pairs: of all pairs.
        load: most used expert of a layer over the mean, the worst layer.
        domain_load: the same of domains.
    """

    transitions: float
    pairs: float
    load: float
    domain_load: float


class Trace:
    """Experts that tokens used, as long as the recording lasts."""

    def __init__(self, layers: int) -> None:
        self.steps: list[list[Tensor]] = [[] for _ in range(layers)]

    def indices(self) -> Tensor:
        """``[N, L, K]`` on the CPU."""
        return torch.stack([torch.cat(steps) for steps in self.steps], dim=1)


@contextmanager
def recorded(model: PreTrainedModel) -> Iterator[Trace]:
    """Record what a model's routers choose, steered or not."""
    places = find_routers(model)
    trace = Trace(len(places))
    hooks = []
    for layer, place in enumerate(places):

        def note(_: Any, __: Any, found: Any, layer: int = layer, experts: int = place.experts) -> None:
            triple = as_triple(found, experts, places[layer].top_k)
            assert triple is not None
            trace.steps[layer].append(triple[2].detach().cpu())

        hooks.append(place.module.register_forward_hook(note))
    try:
        yield trace
    finally:
        for hook in hooks:
            hook.remove()


def count_affinity(indices: Tensor, experts: int) -> Affinity:
    """How often two experts served one token, and a token passed from one to the other, as shares of tokens."""
    tokens, layers, _ = indices.shape
    used = torch.zeros(tokens, layers, experts).scatter_(2, indices, 1.0)
    within = torch.einsum("nle,nlf->lef", used, used) / tokens
    within.diagonal(dim1=1, dim2=2).zero_()
    between = torch.einsum("nle,nlf->lef", used[:, :-1], used[:, 1:]) / tokens
    return Affinity(within, between, used.sum(0) / used.sum((0, 2))[:, None])


def domains_of(indices: Tensor, clusters: Clusters) -> Tensor:
    """``[N, L, K]`` the domain that each token's expert is met in."""
    found = torch.empty_like(indices)
    before = torch.zeros(len(indices), clusters.count)
    for layer in range(indices.shape[1]):
        chosen = indices[:, layer]
        domain = clusters.labels[layer].long()[chosen]
        shared = clusters.replicated[layer][chosen]
        beside = torch.nn.functional.one_hot(domain, clusters.count).float() * ~shared[..., None]
        meeting = (_BEFORE_FIRST * before + beside.sum(1)).argmax(1, keepdim=True)
        found[:, layer] = torch.where(shared, meeting, domain)
        before = torch.nn.functional.one_hot(found[:, layer], clusters.count).float().sum(1)
    return found


def locality(indices: Tensor, clusters: Clusters) -> Locality:
    """What stays inside domains.

    Args:
        indices: ``[N, L, K]``.
        clusters: of the same model.
    """
    domains = domains_of(indices, clusters)
    stays = domains[:, :-1, :, None] == domains[:, 1:, None, :]
    same = domains[..., :, None] == domains[..., None, :]
    first, second = torch.triu_indices(indices.shape[2], indices.shape[2], offset=1)
    pairs = same[..., first, second]
    return Locality(
        transitions=float(stays.float().mean()),
        pairs=float(pairs.float().mean()) if pairs.numel() else 1.0,
        load=_worst_load(indices, clusters.labels.shape[1]),
        domain_load=_worst_load(domains, clusters.count),
    )


def crossings(indices: Tensor, clusters: Clusters, bytes_per_state: int) -> float:
    """Bytes per token that cross domains: a hidden state to every other domain that a layer's experts lie in, and a
    partial sum back from each. A token lives in the domain where most of its experts of the layer before were.

    Args:
        indices: ``[N, L, K]``.
        clusters: domains.
        bytes_per_state: hidden size times bytes an element.
    """
    domains = domains_of(indices, clusters)
    crossed = torch.zeros(len(indices))
    home = domains[:, 0].mode(dim=1).values
    for layer in range(indices.shape[1]):
        touched = torch.nn.functional.one_hot(domains[:, layer], clusters.count).sum(1)
        away = (touched > 0).float()
        away.scatter_(1, home[:, None], 0.0)
        crossed += 2 * away.sum(1)
        home = (touched + 0.5 * torch.nn.functional.one_hot(home, clusters.count)).argmax(1)
    return float(crossed.mean()) * bytes_per_state


def distinct_experts(indices: Tensor, batch: int) -> float:
    """Mean number of different experts of a layer in steps of ``batch`` tokens, ``[N, L, K]`` with N a multiple."""
    steps = indices.reshape(-1, batch, *indices.shape[1:])
    experts = int(indices.max()) + 1
    used = torch.zeros(len(steps), indices.shape[1], experts, dtype=torch.bool)
    used.scatter_(2, steps.transpose(1, 2).flatten(2), True)
    return float(used.sum(-1).float().mean())


def _worst_load(choices: Tensor, count: int) -> float:
    tokens, layers, width = choices.shape
    counts = torch.stack([torch.bincount(choices[:, layer].flatten(), minlength=count) for layer in range(layers)])
    return float(counts.max()) * count / (tokens * width)
