"""In which form experts are and what computes them: packed or not, our function or the model's own."""

import logging

import torch
from transformers import PreTrainedModel

from hf_subbyte_moe.config import MODEL_WEIGHTS, ExpertsConfig
from hf_subbyte_moe.experts.experts import SLOT_READERS
from hf_subbyte_moe.experts.fused import FUSED_NAME, release_fused_experts, use_fused_experts
from hf_subbyte_moe.experts.loading import Loading
from hf_subbyte_moe.experts.modules import PlacedExperts
from hf_subbyte_moe.experts.placing import bring_back, device_of, target_of
from hf_subbyte_moe.experts.quantized import PackedExperts, pack_experts, refuse_unpackable, unpack_experts


logger = logging.getLogger(__name__)
SLOT_READERS.add(FUSED_NAME)


def check_form(model: PreTrainedModel, config: ExpertsConfig) -> None:
    """Check whether a model's experts can have the form that the options ask for; changes nothing.

    Raises:
        ValueError: they cannot; says why.
    """
    if config.weights != MODEL_WEIGHTS:
        refuse_unpackable(model, config.weights)


def set_form(model: PreTrainedModel, config: ExpertsConfig, loading: Loading | None) -> None:
    """Give a model's experts the form that the options ask for, before they are placed.

    Args:
        model: that :func:`check_form` lets through.
        config: the options.
        loading: how the model was loaded, where it was loaded for that; it then goes where the caller wanted it.
    """
    if config.weights == MODEL_WEIGHTS:
        _unpack(model)
    else:
        if any(
            isinstance(module, PlacedExperts) and not isinstance(module, PackedExperts) for module in model.modules()
        ):
            bring_back(model, torch.device("cpu"))
        target = target_of(model) if loading is None or loading.device is None else loading.device
        stays = loading is None or config.moves
        if loading is not None:
            loading.pack(model, config.weights, target)
        pack_experts(model, config.weights, through=target, to=device_of(model) if stays else target)
        if not stays:
            model.to(target)  # type: ignore[arg-type]
    if config.is_fused:
        use_fused_experts(model)
    else:
        release_fused_experts(model)


def own_form(model: PreTrainedModel) -> None:
    """Give a model's experts their own form and function back, after they were brought back."""
    _unpack(model)
    release_fused_experts(model)


def _unpack(model: PreTrainedModel) -> None:
    if not any(isinstance(module, PackedExperts) for module in model.modules()):
        return
    bring_back(model)
    if unpack_experts(model):
        logger.warning("experts were packed: their weights are now those that the bytes stand for, not the original's")
