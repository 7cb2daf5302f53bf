"""The clusters that a model's options ask for: from a file, from the model's own groups, or from its routers' rows."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.routing.clustering import Affinity, partition
from hf_subbyte_moe.routing.clusters import ROUTING_SIDECAR_NAME, Clusters
from hf_subbyte_moe.routing.families import RouterPlace, find_routers, native_groups, native_groups_kept
from hf_subbyte_moe.tensor_files import Sidecars


logger = logging.getLogger(__name__)

DEFAULT_CLUSTERS = 8
_SIDECARS = Sidecars(ROUTING_SIDECAR_NAME)


def remember_routing_sidecar(name: str, path: Path | None) -> None:
    """Where the cluster file of a Hub repository was put; None: the revision that was loaded has none."""
    _SIDECARS.remember(name, path)


def model_facts(model: PreTrainedModel, places: list[RouterPlace]) -> dict[str, Any]:
    """What a cluster file belongs to."""
    return {
        "model_type": model.config.get_text_config(decoder=True).model_type,
        "layers": len(places),
        "experts": places[0].experts,
        "top_k": places[0].top_k,
    }


def choose_clusters(model: PreTrainedModel, config: RoutingConfig) -> Clusters | None:
    """The clusters for a model's options, checked.

    Returns:
        None where the options need none.

    Raises:
        ValueError: the model is not supported, a file belongs to another model or is damaged, or clusters and model do
            not fit.
    """
    places = find_routers(model)
    if config.keep > places[0].top_k:
        raise ValueError(f"keep={config.keep} is not possible: the model picks {places[0].top_k} experts")
    if not config.needs_clusters:
        return None
    clusters = _find(model, config, places)
    _check(clusters, config, places, model)
    return clusters


def router_rows(place: RouterPlace) -> Tensor:
    """``[E, H]`` weight of a router.

    Raises:
        ValueError: it has none of that shape, or its weights are elsewhere at the moment.
    """
    for weight in place.module.parameters():
        if weight.ndim == 2 and weight.shape[0] == place.experts and weight.device.type != "meta":
            return weight.detach()
    raise ValueError(f"router {place.name} has no weights here to cluster by: give a sidecar")


def row_affinity(places: list[RouterPlace]) -> Affinity:
    """Cosines of the routers' rows, in a layer and between neighbouring ones, negative ones cut off."""
    rows = torch.stack([nn.functional.normalize(router_rows(place).double().cpu(), dim=1) for place in places])
    within = (rows @ rows.mT).clamp(min=0)
    between = (rows[:-1] @ rows[1:].mT).clamp(min=0)
    return Affinity(within, between)


def _find(model: PreTrainedModel, config: RoutingConfig, places: list[RouterPlace]) -> Clusters:
    path = _sidecar(model, config)
    if path is not None:
        return Clusters.load(path)
    groups, experts = native_groups(places[0].module), places[0].experts
    facts = model_facts(model, places)
    none = torch.zeros(len(places), experts, dtype=torch.bool)
    if groups > 1 and config.clusters in (None, groups):
        labels = (torch.arange(experts) * groups // experts).expand(len(places), -1)
        return Clusters(labels.contiguous(), none, groups, "the model's own groups", facts)
    count = min(DEFAULT_CLUSTERS, experts) if config.clusters is None else config.clusters
    if count > experts:
        raise ValueError(f"clusters={count} is not possible: {type(model).__name__} has {experts} experts a layer")
    logger.warning("routing: no cluster file, so experts are clustered by router rows; see hf-subbyte-moe cluster")
    labels = partition(row_affinity(places), count, groups, starts=2)
    return Clusters(labels, none, count, "router rows", facts)


def _sidecar(model: PreTrainedModel, config: RoutingConfig) -> Path | None:
    if config.sidecar is not None:
        return Path(config.sidecar)
    return _SIDECARS.find(model.config.name_or_path)


def _check(clusters: Clusters, config: RoutingConfig, places: list[RouterPlace], model: PreTrainedModel) -> None:
    facts = model_facts(model, places)
    other = {key: value for key, value in clusters.model.items() if facts.get(key) != value}
    if other or clusters.labels.shape != (facts["layers"], facts["experts"]):
        theirs = ", ".join(f"{key} {value}" for key, value in clusters.model.items())
        ours = ", ".join(f"{key} {value}" for key, value in facts.items())
        raise ValueError(f"the clusters belong to another model: {theirs}; this one has {ours}")
    if config.clusters is not None and config.clusters != clusters.count:
        raise ValueError(f"clusters={config.clusters} is not possible: the cluster file has {clusters.count}")
    kept = config.clusters_kept(clusters.count)
    if kept > clusters.count:
        raise ValueError(f"top_clusters={kept} is not possible: there are {clusters.count} clusters")
    top_k, groups = facts["top_k"], native_groups(places[0].module)
    if config.mode != "hard":
        return
    if clusters.least_experts(kept) < top_k:
        raise ValueError(
            f"top_clusters={kept} is not possible: {kept} of {clusters.count} clusters may hold "
            f"{clusters.least_experts(kept)} experts, and the model picks {top_k}"
        )
    if groups > 1:
        _check_groups(clusters, kept, groups, native_groups_kept(places[0].module), top_k)


def _check_groups(clusters: Clusters, kept: int, groups: int, groups_kept: int, top_k: int) -> None:
    """Clusters must be unions or parts of the model's own groups, and leave enough experts that both allow."""
    layers, experts = clusters.labels.shape
    own = torch.arange(experts) * groups // experts
    for layer in range(layers):
        met = len(torch.unique(torch.stack([own, clusters.labels[layer].long()]), dim=1)[0])
        if met != max(groups, clusters.count):
            raise ValueError(
                f"clusters of layer {layer} are neither unions nor parts of the model's own {groups} groups of experts"
            )
    least = min(kept, groups_kept * clusters.count // groups) * (experts // clusters.count)
    if clusters.count >= groups and least < top_k:
        raise ValueError(f"top_clusters={kept} leaves {least} experts in the model's own groups, and it picks {top_k}")
