"""What importing the package does to Transformers, and how to undo it.

Registers the cache name and the attention function, and wraps two methods, because Transformers has no registry for
either: ``GenerationMixin._prepare_cache_for_generation`` builds caches, ``PreTrainedModel.from_pretrained`` takes the
``hf_subbyte_moe`` option. Both wraps pass everything through that does not name us.
"""

import copy
import functools
from pathlib import Path
from typing import Any

from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation import configuration_utils
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import sdpa_mask
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file

from hf_subbyte_moe.cache import ATTENTION_NAME, CACHE_NAME, EntropySubbyteCache, register_attention
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import AUTO, CALIBRATED, SubByteConfig
from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME, Loading, remember_predictor_sidecar
from hf_subbyte_moe.patching import CONFIG_KEY, apply, model_options, remember_cache, use_packed_attention
from hf_subbyte_moe.policy import SIDECAR_NAME, remember_sidecar
from hf_subbyte_moe.routing import ROUTING_SIDECAR_NAME, remember_routing_sidecar


_NAME_LISTS = ("DYNAMIC_CACHE_IMPLEMENTATIONS", "ALL_CACHE_IMPLEMENTATIONS")
_SUPPORTED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)
_PER_TOKEN = ("attention_mask", "position_ids", "cache_position")
_MARK = "_hf_subbyte_moe_wrap"  # of our wraps: themselves; ``functools.wraps`` copies it to the wraps around them
_generation: Any = GenerationMixin  # Any: their methods are replaced
_loading: Any = PreTrainedModel


def register() -> None:
    """Make the names known and wrap the two methods; harmless when repeated."""
    for name in _NAME_LISTS:
        known = getattr(configuration_utils, name)
        if CACHE_NAME not in known:
            setattr(configuration_utils, name, (*known, CACHE_NAME))
    register_attention()
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)
    if not hasattr(_generation._prepare_cache_for_generation, _MARK):
        _generation._prepare_cache_for_generation = _wrap_prepare_cache(_generation._prepare_cache_for_generation)
    if not hasattr(_loading.from_pretrained.__func__, _MARK):
        _loading.from_pretrained = classmethod(_wrap_from_pretrained(_loading.from_pretrained.__func__))


def unregister() -> None:
    """Undo :func:`register`. Models that were changed stay so; ``restore`` them first.

    Where somebody has wrapped a method since, our wrap stays below theirs and passes everything through.
    """
    for name in _NAME_LISTS:
        known = getattr(configuration_utils, name)
        setattr(configuration_utils, name, tuple(entry for entry in known if entry != CACHE_NAME))
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(ATTENTION_NAME, None)
    made = _generation._prepare_cache_for_generation
    if _is_ours(made):
        _generation._prepare_cache_for_generation = made.__wrapped__
    made = _loading.from_pretrained.__func__
    if _is_ours(made):
        _loading.from_pretrained = classmethod(made.__wrapped__)


def _is_ours(function: Any) -> bool:
    """Whether a method is our wrap itself, not one around it."""
    return getattr(function, _MARK, None) is function


def _is_registered() -> bool:
    return CACHE_NAME in configuration_utils.ALL_CACHE_IMPLEMENTATIONS


def _wrap_prepare_cache(original: Any) -> Any:
    @functools.wraps(original)
    def _prepare_cache_for_generation(
        self: Any,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not _is_registered():
            return original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)
        given = model_kwargs.get(CACHE_KW)
        if given is not None:
            _prepare_given(self, given, generation_config, model_kwargs, generation_mode)
        elif generation_config.use_cache is not False and _wants_ours(self, generation_config):
            model_kwargs[CACHE_KW] = _make_cache(self, generation_config, model_kwargs, generation_mode)
            return None
        return original(self, generation_config, model_kwargs, generation_mode, *args, **kwargs)

    setattr(_prepare_cache_for_generation, _MARK, _prepare_cache_for_generation)
    return _prepare_cache_for_generation


def _wants_ours(model: Any, generation_config: GenerationConfig) -> bool:
    named = generation_config.cache_implementation
    if named is not None:
        return bool(named == CACHE_NAME)
    kv_cache = model_options(model.config).kv_cache
    return kv_cache is not None and kv_cache.default


def _prepare_given(
    model: Any, given: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode
) -> None:
    """The caller brought a cache, which wins over a name that a model's own files give."""
    if generation_config.cache_implementation == CACHE_NAME:
        generation_config.cache_implementation = None
    if isinstance(given, EntropySubbyteCache):
        _check_call(generation_config, model_kwargs, mode)
        given.check_padding(model_kwargs.get("attention_mask"))
        use_packed_attention(model)
        remember_cache(model, given)


def _make_cache(
    model: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode
) -> EntropySubbyteCache:
    if not model._supports_default_dynamic_cache():
        raise ValueError(f"{type(model).__name__} does not support cache_implementation={CACHE_NAME!r}")
    _check_call(generation_config, model_kwargs, mode)
    kv_cache = model_options(model.config).kv_cache
    options = {} if kv_cache is None else kv_cache.to_dict()
    given = copy.deepcopy(generation_config.cache_config or {})
    if "policy" in given and "bits" not in given:
        options.pop("bits", None)  # a budget of the model's own belongs to its own policy
    if {"policy", "codebook"} & given.keys() and "sidecar" not in given:
        _drop_unread_sidecar(options, given)
    cache = EntropySubbyteCache(model.config, **{**options, **given})  # all of it: a part does not know its folder
    use_packed_attention(model)
    remember_cache(model, cache)
    if getattr(generation_config, "is_assistant", False):
        cache.activate_past_recording()  # type: ignore[no-untyped-call]
    return cache


def make_cache(model: PreTrainedModel, options: dict[str, Any] | None = None) -> EntropySubbyteCache:
    """The empty cache that ``generate(cache_config=options)`` would make for a model.

    Raises:
        ValueError: wrong options, or a model that is not supported.
    """
    config = GenerationConfig(cache_config=options)
    return _make_cache(model, config, {}, GenerationMode.GREEDY_SEARCH)


def _drop_unread_sidecar(options: dict[str, Any], given: dict[str, Any]) -> None:
    """A sidecar of the model's own stays only if the caller's policy or codebook reads it."""
    merged = {**options, **given}
    if merged.get("policy", AUTO) not in (AUTO, CALIBRATED) and merged.get("codebook") != CALIBRATED:
        options.pop("sidecar", None)


def _check_call(generation_config: GenerationConfig, model_kwargs: dict[str, Any], mode: GenerationMode) -> None:
    if generation_config.output_attentions:
        raise ValueError(f"cache_implementation={CACHE_NAME!r} does not return attention weights")
    if mode not in _SUPPORTED_MODES:
        raise ValueError(f"cache_implementation={CACHE_NAME!r} does not support {mode.value}")
    mask = model_kwargs.get("attention_mask")
    # the ids are not handed over, and a mask without a zero may have been dropped
    if any(model_kwargs[name].shape[-1] == 0 for name in _PER_TOKEN if model_kwargs.get(name) is not None):
        raise ValueError("the prompt is empty: give at least one token")
    if mask is not None and mask.ndim == 2 and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ValueError(
            f"cache_implementation={CACHE_NAME!r} supports left padding only: attention_mask hides tokens on the "
            "right of or between visible ones; use tokenizer.padding_side='left'"
        )


_HUB_OPTIONS = ("cache_dir", "force_download", "proxies", "token", "revision", "local_files_only", "subfolder")


def _bring_sidecars(model: Any, options: SubByteConfig, hub: dict[str, Any]) -> None:
    """Fetch a model's sidecars from the Hub, where its repository has some; a folder's own need no fetching."""
    name = model.config.name_or_path
    if not name or Path(name).is_dir():
        return
    if options.kv_cache is not None and options.kv_cache.sidecar is None:
        remember_sidecar(name, _fetch(name, SIDECAR_NAME, hub))
    if options.routing is not None and options.routing.sidecar is None and options.routing.needs_clusters:
        remember_routing_sidecar(name, _fetch(name, ROUTING_SIDECAR_NAME, hub))
    if options.experts is not None and options.experts.wants_sidecar:
        remember_predictor_sidecar(name, _fetch(name, PREDICTOR_SIDECAR_NAME, hub))


def _fetch(name: str, file: str, hub: dict[str, Any]) -> Path | None:
    """A file of a repository's revision; None where it has no such file."""
    path = cached_file(
        name,
        file,
        **{key: hub[key] for key in _HUB_OPTIONS if key in hub},
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if path is None else Path(path)


def _loading_of(
    cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: SubByteConfig | None
) -> Loading | None:
    """How a model is to be loaded whose experts will be elsewhere; None where they stay with it."""
    name = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
    config = kwargs.get("config")
    if options is None:
        own = getattr(config, CONFIG_KEY, None) if isinstance(config, PreTrainedConfig) else _options_of(name, kwargs)
        options = SubByteConfig.from_dict(own or {})
    if options.experts is None or not options.experts.loads_in_host_memory:
        return None
    if not isinstance(config, PreTrainedConfig):
        config = cls.config_class.from_pretrained(name, **{key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs})
    return Loading(cls, config, options.experts, kwargs)


def _options_of(name: Any, kwargs: dict[str, Any]) -> Any:
    """Our key in a model's config.json; None where there is no such file."""
    hub = {key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs}
    if name is None or not cached_file(
        name,
        CONFIG_NAME,
        **hub,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    ):
        return None
    return PreTrainedConfig.get_config_dict(name, **hub)[0].get(CONFIG_KEY)


def _wrap_from_pretrained(original: Any) -> Any:
    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_registered():
            return original(cls, *args, **kwargs)
        options = kwargs.pop(CONFIG_KEY, None)
        if options is not None:
            options = SubByteConfig.from_dict(options)
        loading = _loading_of(cls, args, kwargs, options)
        loaded = original(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if loading is not None:
            loading.finish(model)
        if options is not None or getattr(model.config, CONFIG_KEY, None):
            _bring_sidecars(model, options or model_options(model.config), kwargs)
            apply(model, options, loading)
        return loaded

    setattr(from_pretrained, _MARK, from_pretrained)
    return from_pretrained
