"""Sub-byte KV caches for Mixture-of-Experts models at long context, inside Hugging Face Transformers.

Importing this package makes ``model.generate(cache_implementation="entropy_subbyte")`` and
``from_pretrained(..., hf_subbyte_moe={...})`` work; ``unregister()`` takes that back.
"""

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.config import ExpertsConfig, KVCacheConfig, RoutingConfig, SubByteConfig
from hf_subbyte_moe.explain import explain
from hf_subbyte_moe.patching import apply, restore
from hf_subbyte_moe.registration import register, unregister


__version__ = "0.1.0"

__all__ = [
    "EntropySubbyteCache",
    "ExpertsConfig",
    "KVCacheConfig",
    "RoutingConfig",
    "SubByteConfig",
    "apply",
    "explain",
    "register",
    "restore",
    "unregister",
]

register()
