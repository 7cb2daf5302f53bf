"""Experts that do not fit the GPU: slots, prediction, prefetch; see ``experts.py`` and ``prefetcher.py``.

Experts in two launches, and packed: ``fused.py`` and ``quantized.py``.
"""

from hf_subbyte_moe.experts.counters import Counters, LayerCounts
from hf_subbyte_moe.experts.experts import SLOT_READERS, Engine
from hf_subbyte_moe.experts.forms import check_form, own_form, set_form
from hf_subbyte_moe.experts.fused import FUSED_NAME, fused_activation
from hf_subbyte_moe.experts.heads import PREDICTOR_SIDECAR_NAME, Heads, remember_predictor_sidecar
from hf_subbyte_moe.experts.loading import Loading
from hf_subbyte_moe.experts.modules import PlacedExperts
from hf_subbyte_moe.experts.placing import Plan, bring_back, engine_of, place, plan
from hf_subbyte_moe.experts.quantized import PackedExperts, layout_of, pack_experts, put_packed


__all__ = [
    "FUSED_NAME",
    "PREDICTOR_SIDECAR_NAME",
    "SLOT_READERS",
    "Counters",
    "Engine",
    "Heads",
    "LayerCounts",
    "Loading",
    "PackedExperts",
    "PlacedExperts",
    "Plan",
    "bring_back",
    "check_form",
    "engine_of",
    "fused_activation",
    "layout_of",
    "own_form",
    "pack_experts",
    "place",
    "plan",
    "put_packed",
    "remember_predictor_sidecar",
    "set_form",
]
