"""``model.generate(custom_generate=..., trust_remote_code=True)``: generate out of the packed KV cache."""

from typing import Any

import hf_subbyte_moe


def generate(model: Any, cache_config: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """What ``generate`` of the model's class gives, with ``cache_implementation="entropy_subbyte"``.

    Args:
        model: a causal language model of Transformers.
        cache_config: options of the cache, such as ``{"bits": 2.5}``; without them the model's own, or the defaults.
        **kwargs: everything that ``generate`` takes.
    """
    hf_subbyte_moe.register()
    kwargs.pop("cache_implementation", None)
    return type(model).generate(model, cache_implementation="entropy_subbyte", cache_config=cache_config, **kwargs)
