"""Models of real shapes with random weights, made where they are timed."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
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
from transformers.distributed.configuration_utils import DistributedConfig

from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.experts.fused import experts_modules
from hf_subbyte_moe.experts.quantized import layout_of, put_packed
from hf_subbyte_moe.ops_moe import ExpertLayout


TOY = "toy"  # to try a command, on a CPU too
_INITIAL_STD = 0.02

Widths = list[tuple[tuple[int, int], tuple[int, int]]]  # see cached_widths


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
    TOY: _toy,
}


def config_of(shape: str, layers: int | None) -> PreTrainedConfig:
    """The config of a real shape.

    Args:
        shape: one of :data:`SHAPES`.
        layers: how many of its layers; None means all.

    Raises:
        ValueError: no such shape.
    """
    if shape not in SHAPES:
        raise ValueError(f"there is no shape {shape!r}: one of {list(SHAPES)}")
    return SHAPES[shape](**({} if layers is None else {"num_hidden_layers": layers}))


def random_model(shape: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    """A model of a real shape in bf16.

    Args:
        shape: one of :data:`SHAPES`.
        layers: how many of its layers; None means all.
        device: where its weights are made.

    Raises:
        ValueError: no such shape.
    """
    return random_model_of(config_of(shape, layers), device)


def random_model_of(
    config: PreTrainedConfig, device: torch.device, parallel: DistributedConfig | None = None
) -> PreTrainedModel:
    """A model with random bf16 weights, made where they stay.

    Args:
        config: of a causal language model whose weights are not tied.
        device: of this process.
        parallel: how all ranks share the model; a rank makes its own shards, and whole weights are alike on all ranks.
    """
    cls: Any = AutoModelForCausalLM._model_mapping[type(config)]
    mesh = None
    if parallel is not None:
        parallel, _, mesh = cls.prepare_distribute_model(parallel)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if parallel is not None:
        model = cls.maybe_distribute_model(model, parallel, mesh)
    _make_weights(model, device)
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
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(shape, layers), dtype=torch.bfloat16)
    bytes_of: tuple[torch.Tensor, torch.Tensor] | None = None
    for module in experts_modules(model):
        layout = layout_of(module, weights)
        if bytes_of is None:
            bytes_of = _random_bytes(module, layout, device)
        put_packed(module, layout, *(rows.clone() for rows in bytes_of))
    _make_weights(model, device)
    model.eval()
    return model


def _make_weights(model: PreTrainedModel, device: torch.device) -> None:
    """Put random weights, and the buffers that a config makes, where a model has none yet."""
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type == "meta":
                module._parameters[name] = _random(f"{module_name}.{name}", parameter, device)
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            made: Any = type(module)
            fresh = made(model.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(device)
            if hasattr(fresh, "original_inv_freq"):
                module.original_inv_freq = module.inv_freq


def _random(name: str, parameter: Any, device: torch.device) -> nn.Parameter:
    """Ones for norms, else normal; a sharded parameter differs between ranks."""
    sharded = hasattr(parameter, "to_local")
    local = parameter.to_local() if sharded else parameter
    made = torch.empty(local.shape, dtype=local.dtype, device=device)
    rank = dist.get_rank() if sharded else 0
    random = torch.Generator(device).manual_seed(zlib.crc32(f"{rank} {name}".encode()))
    if "norm" in name:
        made.fill_(1)
    else:
        made.normal_(std=_INITIAL_STD, generator=random)
    if sharded:
        made = type(parameter).from_local(
            made, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    return nn.Parameter(made, requires_grad=False)


def cached_widths(model: PreTrainedModel) -> Widths:
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
