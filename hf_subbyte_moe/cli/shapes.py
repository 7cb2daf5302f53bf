"""Models of real shapes with random weights, made where they are timed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.cache_utils import DynamicCache

from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.experts.fused import experts_modules
from hf_subbyte_moe.experts.quantized import layout_of, put_packed
from hf_subbyte_moe.ops_moe import ExpertLayout


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


def _mixtral_8x22b(**own: Any) -> PreTrainedConfig:
    return MixtralConfig(
        hidden_size=6144,
        intermediate_size=16384,
        num_attention_heads=48,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        vocab_size=32768,
        max_position_embeddings=131072,
        sliding_window=None,
        **{"num_hidden_layers": 56, **own},
    )


def _deepseek_v2_lite(**own: Any) -> PreTrainedConfig:
    return DeepseekV2Config(
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        topk_method="greedy",
        vocab_size=102400,
        max_position_embeddings=163840,
        **{"num_hidden_layers": 27, **own},
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
    "Mixtral-8x22B": _mixtral_8x22b,
    "DeepSeek-V2-Lite": _deepseek_v2_lite,
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


def random_packed_model(shape: str, weights: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    """A model of a real shape with packed experts, which need not fit in bf16; all layers have the same experts.

    Args:
        shape: one of :data:`SHAPES`.
        weights: "int4", "int4-g64" or "fp8".
        layers: how many of its layers; None means all.
        device: where its weights are made.
    """
    config = SHAPES[shape](**({} if layers is None else {"num_hidden_layers": layers}))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    bytes_of: tuple[torch.Tensor, torch.Tensor] | None = None
    for module in experts_modules(model):
        layout = layout_of(module, weights)
        if bytes_of is None:
            bytes_of = _random_bytes(module, layout, device)
        put_packed(module, layout, *(rows.clone() for rows in bytes_of))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                made = torch.empty_like(parameter, device=device)
                made = made.fill_(1.0) if parameter.ndim == 1 else made.normal_(std=config.initializer_range)
                module._parameters[name] = nn.Parameter(made, requires_grad=False)
    decoder: Any = model.base_model
    decoder.rotary_emb = type(decoder.rotary_emb)(config=config).to(device)
    model.eval()
    return model


def cached_widths(model: PreTrainedModel) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """What each layer caches of a token, seen by letting the model take one: a config does not tell it of latents.

    Returns:
        Layer by layer, heads and width of what stands for the keys and of what stands for the values.
    """
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(token, **{CACHE_KW: cache}, use_cache=True)
    layers: list[Any] = cache.layers
    sides = ((layer.keys.shape, layer.values.shape) for layer in layers)
    return [((keys[1], keys[3]), (values[1], values[3])) for keys, values in sides]


def _random_bytes(module: Any, layout: ExpertLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed random weights of one module, an expert at a time."""
    made = []
    for weight in (module.gate_up_proj, module.down_proj):
        rows = [
            layout.pack_matrix(torch.randn(1, *weight.shape[1:], dtype=weight.dtype, device=device) * 0.02)
            for _ in range(weight.shape[0])
        ]
        made.append(torch.cat(rows))
    return made[0], made[1]
