"""Hierarchical token routing: experts in clusters, tokens to clusters first; see ``router.py``, ``clustering.py``."""

from hf_subbyte_moe.routing.choice import choose_clusters, remember_routing_sidecar
from hf_subbyte_moe.routing.clusters import ROUTING_SIDECAR_NAME, Clusters
from hf_subbyte_moe.routing.families import FAMILIES, find_routers
from hf_subbyte_moe.routing.router import SteeredRouter, release, steer


__all__ = [
    "FAMILIES",
    "ROUTING_SIDECAR_NAME",
    "Clusters",
    "SteeredRouter",
    "choose_clusters",
    "find_routers",
    "release",
    "remember_routing_sidecar",
    "steer",
]
