"""Change one model, and take it back.

``apply`` checks the options, keeps them in ``model.config.hf_subbyte_moe`` (so ``save_pretrained`` publishes them) and
puts our attention function in front of the model's own, which it calls for every cache that is not ours, and our
choice of experts in front of its routers', and puts experts where the options say.
"""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_subbyte_moe.cache import (
    ATTENTION_NAME,
    PREVIOUS_ATTRIBUTE,
    EntropySubbyteCache,
    expand_again,
    pass_latents_on,
    refuse_unsupported,
)
from hf_subbyte_moe.config import SubByteConfig
from hf_subbyte_moe.decode import check_forward, graph_steps, run_eagerly
from hf_subbyte_moe.experts import Loading, bring_back, check_form, own_form, place, plan, set_form
from hf_subbyte_moe.routing import choose_clusters, release, steer


CONFIG_KEY = "hf_subbyte_moe"
STATISTICS_ATTRIBUTE = "_hf_subbyte_moe_statistics"


def model_options(config: PreTrainedConfig) -> SubByteConfig:
    """The options that a model's config carries.

    Raises:
        ValueError: they are wrong.
    """
    return SubByteConfig.from_dict(getattr(config, CONFIG_KEY, None) or {})


def remember_cache(model: PreTrainedModel, cache: EntropySubbyteCache) -> None:
    """Let ``explain(model)`` find what the model's last cache measured, also after the cache is gone."""
    setattr(model, STATISTICS_ATTRIBUTE, cache.statistics)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Put our attention function in front of the model's own.

    A model whose code does not allow that keeps its own; its cache then warns that nothing is measured.
    """
    previous = model.config.get_text_config(decoder=True)._attn_implementation
    named = previous == ATTENTION_NAME  # by the caller, or by us before
    if named:
        previous = "sdpa" if model._supports_sdpa else "eager"
    if model._can_set_attn_implementation() and not (named and _is_marked(model)):
        for module in model.modules():
            if getattr(module, "layer_idx", None) is not None:
                setattr(module, PREVIOUS_ATTRIBUTE, previous)
            if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
                pass_latents_on(module)
        model.set_attn_implementation(ATTENTION_NAME)


def _is_marked(model: PreTrainedModel) -> bool:
    return any(hasattr(module, PREVIOUS_ATTRIBUTE) for module in model.modules())


def apply(
    model: PreTrainedModel,
    config: Mapping[str, Any] | SubByteConfig | None = None,
    loading: Loading | None = None,
) -> PreTrainedModel:
    """Switch this package on for one model.

    Args:
        model: any causal language model that the parts in ``config`` support.
        config: ``{"kv_cache": {...}, "routing": {...}, "experts": {...}}`` or a :class:`SubByteConfig`; None means
            the options in the model's config, or the default cache where it has none.
        loading: how ``from_pretrained`` loaded it, where experts go elsewhere.

    Returns:
        The same model.

    Raises:
        ValueError: wrong options, or a model that is not supported; the model is unchanged then.
    """
    if config is None:
        config = getattr(model.config, CONFIG_KEY, None) or {"kv_cache": {}}
    options = config if isinstance(config, SubByteConfig) else SubByteConfig.from_dict(config)
    clusters = None if options.routing is None else choose_clusters(model, options.routing)
    if options.experts is not None:
        check_form(model, options.experts)
        plan(model, options.experts, loading)
    if options.decode is not None:
        check_forward(model, options.decode)
    if options.kv_cache is not None:
        refuse_unsupported(model.config.get_text_config(decoder=True))
    _set_experts(model, options, loading)  # first: a disk or memory may be too small, and nothing else fails
    if options.kv_cache is not None:
        use_packed_attention(model)
    if options.routing is None:
        release(model)
    else:
        steer(model, options.routing, clusters)
    if options.decode is None:
        run_eagerly(model)
    else:
        graph_steps(model, options.decode)
    setattr(model.config, CONFIG_KEY, options.to_dict())
    return model


def _set_experts(model: PreTrainedModel, options: SubByteConfig, loading: Loading | None) -> None:
    """Experts in the form and in the place that the options ask for; these were checked."""
    if options.experts is None:
        bring_back(model)
        own_form(model)
        return
    set_form(model, options.experts, loading)
    placed = plan(model, options.experts, loading)
    if placed is None:
        bring_back(model)
    else:
        place(model, placed, loading)


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Take :func:`apply`, and what ``generate`` did, back: attention function, routers, experts, marks and options.

    Returns:
        The same model.
    """
    for module in model.modules():
        if hasattr(module, PREVIOUS_ATTRIBUTE):
            previous = getattr(module, PREVIOUS_ATTRIBUTE)
            delattr(module, PREVIOUS_ATTRIBUTE)
            expand_again(module)
            if model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION_NAME:
                model.set_attn_implementation(previous)
    release(model)
    bring_back(model)
    own_form(model)
    run_eagerly(model)
    for owner, attribute in ((model.config, CONFIG_KEY), (model, STATISTICS_ATTRIBUTE)):
        if attribute in vars(owner):
            delattr(owner, attribute)
    return model
