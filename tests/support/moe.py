"""Tiny random MoE models: those of ``models.py`` and families that only the routing tests need."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    Dots1Config,
    Ernie4_5_MoeConfig,
    FlexOlmoConfig,
    Glm4MoeConfig,
    Lfm2MoeConfig,
    MiniMaxConfig,
    PhimoeConfig,
    PreTrainedModel,
)

from support.models import _EXPERTS, _LATENT, _MOE, CONFIGS, _make


EXPERTS, TOP_K = 8, 2
_GROUPED: dict[str, Any] = {
    key: value for key, value in _LATENT.items() if not key.endswith(("rank", "head_dim", "value_heads"))
}
MOE_CONFIGS: dict[str, Callable[..., Any]] = {
    **{
        family: CONFIGS[family]
        for family in (
            "mixtral",
            "qwen2_moe",
            "qwen3_moe",
            "olmoe",
            "deepseek_v2",
            "deepseek_v3",
            "gpt_oss",
            "granitemoe",
        )
    },
    "glm4_moe": _make(Glm4MoeConfig, **_GROUPED),
    "phimoe": _make(PhimoeConfig, **_MOE),
    "ernie4_5_moe": _make(
        Ernie4_5_MoeConfig,
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=32,
        moe_layer_start_index=0,
        moe_num_shared_experts=1,
    ),
    "minimax": _make(MiniMaxConfig, **_MOE),
    # not named anywhere in the package: their routers return the triple
    "dots1": _make(Dots1Config, **_GROUPED, moe_layer_freq=1),
    "flex_olmo": _make(FlexOlmoConfig, **_EXPERTS),
    "lfm2_moe": _make(Lfm2MoeConfig, **_EXPERTS, num_dense_layers=0, layer_types=["full_attention", "full_attention"]),
    "afmoe": _make(AfmoeConfig, **_EXPERTS, num_dense_layers=0, num_shared_experts=1, sliding_window=64),
}
LAYERS = {"deepseek_v2": 3, "deepseek_v3": 3, "glm4_moe": 3, "dots1": 3}  # the first is dense


def tiny_moe(family: str, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model with two MoE layers whose routers prefer some experts clearly and whose corrections are not zero."""
    torch.manual_seed(seed)
    config = MOE_CONFIGS[family](**{"num_hidden_layers": LAYERS.get(family, 2), **options})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name or "expert_bias" in name:
                tensor.uniform_(-0.2, 0.2)
            elif tensor.ndim == 2 and tensor.shape[0] == EXPERTS:
                tensor.normal_(std=0.3)
            elif "embed_tokens" in name or "lm_head" in name:
                tensor.mul_(20)
    return model.eval()
