"""What clusters of experts can be made from, measured on a model and texts, and the clusters made from it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_subbyte_moe.routing.choice import model_facts, row_affinity
from hf_subbyte_moe.routing.clustering import MOST_LOAD, Affinity, partition_with_replicas
from hf_subbyte_moe.routing.clusters import Clusters
from hf_subbyte_moe.routing.families import find_routers, native_groups
from hf_subbyte_moe.routing.similarity import output_similarity, weight_similarity
from hf_subbyte_moe.routing.traces import count_affinity, recorded


TRACES, COACTIVATION, TRANSITIONS, OUTPUTS, WEIGHTS, ROWS = (
    "traces",
    "coactivation",
    "transitions",
    "outputs",
    "weights",
    "rows",
)
SIGNALS = (TRACES, COACTIVATION, TRANSITIONS, OUTPUTS, WEIGHTS, ROWS)
INDEX, RANDOM = "index", "random"
PLACEMENTS = (*SIGNALS, INDEX, RANDOM)
_PAIR_SHARE = 0.25  # of a pair in a layer beside a transition
_ALIGNMENT = 0.01  # of transitions beside a signal that knows one layer only
_SAMPLE = 64  # hidden states of a layer that experts are compared on


@dataclass(frozen=True)
class Measured:
    """One model on some texts.

    Attributes:
        indices: ``[N, L, K]`` experts used.
        states: for every router hidden states that it saw, ``[S, H]``.
    """

    indices: Tensor
    states: list[Tensor]


def measure(model: PreTrainedModel, windows: Tensor, progress: str | None = None) -> Measured:
    """Run texts through a model.

    Args:
        model: a MoE model.
        windows: ``[W, T]`` token ids.
        progress: what a progress bar says; None shows none.
    """
    places = find_routers(model)
    sample: list[list[Tensor]] = [[] for _ in places]
    each = max(1, -(-_SAMPLE // len(windows)))
    hooks = []
    for layer, place in enumerate(places):

        def note(_: object, inputs: tuple[Tensor, ...], layer: int = layer) -> None:
            flat = inputs[0].reshape(-1, inputs[0].shape[-1])
            sample[layer].append(flat[torch.linspace(0, len(flat) - 1, each).long()].detach())

        hooks.append(place.module.register_forward_pre_hook(note))
    decoder = model.get_decoder()
    try:
        with torch.no_grad(), recorded(model) as trace:
            for window in tqdm(windows, desc=progress, unit="text", leave=False, disable=progress is None):
                decoder(window[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return Measured(trace.indices(), [torch.cat(states) for states in sample])


def affinity_by(signal: str, model: PreTrainedModel, measured: Measured) -> Affinity:
    """What belongs together by one signal; signals of one layer are aligned by transitions.

    Raises:
        ValueError: no such signal.
    """
    counted = count_affinity(measured.indices, find_routers(model)[0].experts)
    none = torch.zeros_like(counted.within)
    if signal == TRACES:
        return Affinity(_PAIR_SHARE * counted.within, counted.between, counted.load)
    if signal == TRANSITIONS:
        return Affinity(none, counted.between, counted.load)
    if signal == COACTIVATION:
        return Affinity(counted.within, _ALIGNMENT * counted.between, counted.load)
    if signal == ROWS:
        rows = row_affinity(find_routers(model))
        return Affinity(rows.within, rows.between, counted.load)
    if signal == OUTPUTS:
        alike = output_similarity(model, measured.states)
    elif signal == WEIGHTS:
        alike = weight_similarity(model)
    else:
        raise ValueError(f"there is no signal {signal!r} to cluster by; there are {list(SIGNALS)}")
    return Affinity(alike.clamp(min=0), _ALIGNMENT * counted.between, counted.load)


def make_clusters(
    by: str,
    model: PreTrainedModel,
    measured: Measured,
    count: int,
    replicas: int = 0,
    most_load: float = MOST_LOAD,
    starts: int = 8,
    seed: int = 0,
    progress: str | None = None,
) -> Clusters:
    """Clusters of a model's experts.

    Args:
        by: a signal of ``SIGNALS``, or "index" or "random" to compare with.
        model: a MoE model.
        measured: of the model.
        count: clusters.
        replicas: experts of a layer that every cluster holds.
        most_load: what a cluster may serve, in shares of the mean.
        starts: more find better clusters.
        seed: of random starts and placements.
        progress: what a progress bar says; None shows none.

    Raises:
        ValueError: more clusters or replicas than experts, clusters that do not fit the model's own groups, no such
            signal.
    """
    places = find_routers(model)
    layers, experts = len(places), places[0].experts
    if not 1 <= count <= experts:
        raise ValueError(f"clusters={count} is not possible: {type(model).__name__} has {experts} experts a layer")
    if not 0 <= replicas <= experts - count:
        raise ValueError(f"replicas={replicas} is not possible with {experts} experts in {count} clusters")
    groups, facts = native_groups(places[0].module), model_facts(model, places)
    if by in (INDEX, RANDOM):
        generator = torch.Generator().manual_seed(seed)
        order = torch.rand(layers, experts, generator=generator).argsort(1) if by == RANDOM else torch.arange(experts)
        labels = (order * count // experts).expand(layers, -1).contiguous()
        held = torch.zeros(layers, experts, dtype=torch.bool)
        if replicas:  # the most used
            load = count_affinity(measured.indices, experts).load
            assert load is not None
            held.scatter_(1, load.topk(replicas, dim=1).indices, True)
        return Clusters(labels, held, count, by, facts)
    rounds = starts * (4 if replicas else 1)
    with tqdm(total=rounds, desc=progress, unit="start", leave=False, disable=progress is None) as bar:
        labels, held = partition_with_replicas(
            affinity_by(by, model, measured), count, replicas, groups, starts, seed, most_load, progress=bar.update
        )
    return Clusters(labels, held, count, by, facts)
