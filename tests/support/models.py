"""Tiny random models of real types: fixed seed, fp32, no download."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)


VOCABULARY = 128
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
_MOE: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SLIDING: dict[str, Any] = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}


def _make(cls: Callable[..., Any], **own: Any) -> Callable[..., Any]:
    return lambda **options: cls(**{**_COMMON, **own, **options})


# a new family is one line here: the conformance test of tests/cache/test_families.py does the rest
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": _make(LlamaConfig),
    "mistral": _make(MistralConfig, sliding_window=None),
    "qwen2": _make(Qwen2Config, head_dim=16),
    "qwen3": _make(Qwen3Config),
    "gemma2": _make(Gemma2Config, **_SLIDING, query_pre_attn_scalar=16),
    "gemma3": _make(Gemma3TextConfig, **_SLIDING, query_pre_attn_scalar=16),
    "phi": _make(PhiConfig),
    "mixtral": _make(MixtralConfig, **_MOE, sliding_window=None),
    "qwen2_moe": _make(Qwen2MoeConfig, **_EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_moe": _make(Qwen3MoeConfig, **_EXPERTS),
    "olmoe": _make(OlmoeConfig, **_EXPERTS),
    "gpt_oss": _make(GptOssConfig, **_MOE, **_SLIDING),
    "granitemoe": _make(GraniteMoeConfig, **_MOE),
    "deepseek_v2": _make(DeepseekV2Config, **_LATENT, topk_method="group_limited_greedy"),
    "deepseek_v3": _make(DeepseekV3Config, **_LATENT, head_dim=8),
}
FAMILIES = tuple(CONFIGS)
KINDS = ("llama", "mixtral", "qwen3_moe")  # where one of each kind is enough


def tiny_model(kind: str = "llama", seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model whose keys and values differ in size, so that a mix-up cannot hide, and whose attention is not flat."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**options), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "q_b_proj" in name:
                weight.mul_(4)
            elif "v_proj" in name or "kv_b_proj" in name:
                weight.mul_(3)
            elif "embed_tokens" in name or "lm_head" in name:
                weight.mul_(20)
            elif name.endswith("sinks"):
                weight.normal_()
    return model.eval()


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    """``[rows, tokens]`` random ids without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)


def left_padded(prompts: list[torch.Tensor], extra: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[1, n]`` of different length as one left-padded batch, and its attention mask."""
    longest = max(ids.shape[1] for ids in prompts) + extra
    batch = torch.full((len(prompts), longest), 1)
    mask = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, ids in enumerate(prompts):
        batch[row, longest - ids.shape[1] :] = ids[0]
        mask[row, longest - ids.shape[1] :] = 1
    return batch, mask


def linear_attention_model(*layer_types: str) -> PreTrainedModel:
    """A model of such layers, "linear_attention" or "full_attention"."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        **{**_COMMON, **_EXPERTS, "num_experts": 4, "num_hidden_layers": len(layer_types)},
        layer_types=list(layer_types),
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        shared_expert_intermediate_size=32,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
