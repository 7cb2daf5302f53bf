"""Tiny random models of real types: fixed seed, fp32, no download."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedModel, Qwen3MoeConfig


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
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **options: LlamaConfig(**{**_COMMON, **options}),
    "mixtral": lambda **options: MixtralConfig(**{**_COMMON, **_MOE, "sliding_window": None, **options}),
    "qwen3_moe": lambda **options: Qwen3MoeConfig(
        **{**_COMMON, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, **options}
    ),
}
KINDS = tuple(CONFIGS)


def tiny_model(kind: str = "llama", seed: int = 0, **options: Any) -> PreTrainedModel:
    """A model whose keys and values differ in size, so that a mix-up cannot hide, and whose attention is not flat."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**options), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(4)
            layer.self_attn.v_proj.weight.mul_(3)
        model.model.embed_tokens.weight.mul_(20)
        model.lm_head.weight.mul_(20)
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
