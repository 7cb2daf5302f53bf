"""Single cache layers, filled without a model."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from hf_subbyte_moe.cache import EntropySubbyteCache, EntropySubbyteLayer


def make_layer(head_dim: int = 64, **options: Any) -> EntropySubbyteLayer:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, num_hidden_layers=1)
    return EntropySubbyteCache(config, **options).layers[0]


def states(rows: int, tokens: int, head_dim: int = 64, heads: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(rows, heads, tokens, head_dim, generator=generator) for _ in range(2))
    return key + 1, 3 * value


def put(layer: EntropySubbyteLayer, key: Tensor, value: Tensor) -> None:
    """Store tokens as a model without our attention function would."""
    layer.update(key, value)
    layer.settle_without_statistics()
