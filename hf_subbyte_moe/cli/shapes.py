"""Models of real shapes with random weights, made where they are timed."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig


def _mixtral_8x7b(**own: Any) -> PreTrainedConfig:
    return MixtralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32000,
        max_position_embeddings=131072,
        sliding_window=None,
        **{"num_hidden_layers": 32, **own},
    )


def _qwen3_30b_a3b(**own: Any) -> PreTrainedConfig:
    make: Any = Qwen3MoeConfig
    return make(  # type: ignore[no-any-return]
        hidden_size=2048,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151936,
        max_position_embeddings=131072,
        **{"num_hidden_layers": 48, **own},
    )


def _toy(**own: Any) -> PreTrainedConfig:
    return MixtralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=128,
        sliding_window=None,
        **{"num_hidden_layers": 4, **own},
    )


SHAPES: dict[str, Callable[..., PreTrainedConfig]] = {
    "Mixtral-8x7B": _mixtral_8x7b,
    "Qwen3-30B-A3B": _qwen3_30b_a3b,
    "toy": _toy,  # to try a command
}


def random_model(shape: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    """A model of a real shape in bf16.

    Args:
        shape: one of :data:`SHAPES`.
        layers: how many of its layers; None means all.
        device: where its weights are made.

    Raises:
        ValueError: no such shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}: one of {list(SHAPES)}")
    config = SHAPES[shape](**({} if layers is None else {"num_hidden_layers": layers}))
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval()
    return model
