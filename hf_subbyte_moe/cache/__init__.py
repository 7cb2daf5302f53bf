"""The packed cache and its attention function."""

from hf_subbyte_moe.cache.attention import (
    ATTENTION_NAME,
    PREVIOUS_ATTRIBUTE,
    PackedReads,
    count_packed_reads,
    count_step,
    register_attention,
)
from hf_subbyte_moe.cache.cache import CACHE_NAME, EntropySubbyteCache, refuse_unsupported
from hf_subbyte_moe.cache.handle import FixedAddressError
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.cache.mla import expand_again, pass_latents_on
from hf_subbyte_moe.cache.prompts import LayerStatistics
from hf_subbyte_moe.cache.steps import CacheSteps, steps_obstacle


__all__ = [
    "ATTENTION_NAME",
    "CACHE_NAME",
    "PREVIOUS_ATTRIBUTE",
    "CacheSteps",
    "EntropySubbyteCache",
    "EntropySubbyteLayer",
    "FixedAddressError",
    "LayerStatistics",
    "PackedReads",
    "count_packed_reads",
    "count_step",
    "expand_again",
    "pass_latents_on",
    "refuse_unsupported",
    "register_attention",
    "steps_obstacle",
]
