"""The only file that knows Transformers versions.

5.24 renamed the cache argument of models and ``generate`` from ``past_key_values`` to ``cache``; everything else that
this package uses is the same from 5.17 on.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from transformers.generation.utils import GenerationMixin


CACHE_KW: str = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


def cache_of(output: Mapping[str, Any]) -> Any:
    """The cache that a model or ``generate(return_dict_in_generate=True)`` returned."""
    return output[CACHE_KW]
