"""The packed cache and its attention function."""

from hf_subbyte_moe.cache.attention import (
    ATTENTION_NAME,
    PREVIOUS_ATTRIBUTE,
    PackedReads,
    count_packed_reads,
    register_attention,
)
from hf_subbyte_moe.cache.cache import CACHE_NAME, EntropySubbyteCache, refuse_unsupported
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.cache.mla import expand_again, pass_latents_on
from hf_subbyte_moe.cache.prompts import LayerStatistics


__all__ = [
    "ATTENTION_NAME",
    "CACHE_NAME",
    "PREVIOUS_ATTRIBUTE",
    "EntropySubbyteCache",
    "EntropySubbyteLayer",
    "LayerStatistics",
    "PackedReads",
    "count_packed_reads",
    "expand_again",
    "pass_latents_on",
    "refuse_unsupported",
    "register_attention",
]
