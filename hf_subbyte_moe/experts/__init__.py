"""Experts that do not fit the GPU: slots, prediction, prefetch; see ``experts.py`` and ``prefetcher.py``.

Experts in two launches, and packed: ``fused.py`` and ``quantized.py``.
"""

from hf_subbyte_moe.experts.experts import Engine
from hf_subbyte_moe.experts.forms import check_form, own_form, set_form
from hf_subbyte_moe.experts.fused import FUSED_NAME
from hf_subbyte_moe.experts.heads import PREDICTOR_SIDECAR_NAME, Heads, remember_predictor_sidecar
from hf_subbyte_moe.experts.loading import Loading
from hf_subbyte_moe.experts.modules import PlacedExperts
from hf_subbyte_moe.experts.placing import bring_back, engine_of, place, plan
from hf_subbyte_moe.experts.predictor import notes_states
from hf_subbyte_moe.experts.quantized import PackedExperts


__all__ = [
    "FUSED_NAME",
    "PREDICTOR_SIDECAR_NAME",
    "Engine",
    "Heads",
    "Loading",
    "PackedExperts",
    "PlacedExperts",
    "bring_back",
    "check_form",
    "engine_of",
    "notes_states",
    "own_form",
    "place",
    "plan",
    "remember_predictor_sidecar",
    "set_form",
]
