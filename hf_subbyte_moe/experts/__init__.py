"""Experts that do not fit the GPU: slots, prediction, prefetch; see ``experts.py`` and ``prefetcher.py``."""

from hf_subbyte_moe.experts.counters import Counters, LayerCounts
from hf_subbyte_moe.experts.experts import SLOT_READERS, Engine, PlacedExperts
from hf_subbyte_moe.experts.heads import PREDICTOR_SIDECAR_NAME, Heads, remember_predictor_sidecar
from hf_subbyte_moe.experts.loading import Loading
from hf_subbyte_moe.experts.placing import Plan, bring_back, engine_of, place, plan


__all__ = [
    "PREDICTOR_SIDECAR_NAME",
    "SLOT_READERS",
    "Counters",
    "Engine",
    "Heads",
    "LayerCounts",
    "Loading",
    "PlacedExperts",
    "Plan",
    "bring_back",
    "engine_of",
    "place",
    "plan",
    "remember_predictor_sidecar",
]
