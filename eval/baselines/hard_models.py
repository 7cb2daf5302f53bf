"""Models whose keys break low-bit caches, made from any Llama-like model without training it anew.

``key_offset``: a constant is added to the keys' slowest rotary channels, as the biases of Qwen's ``k_proj`` do. These
channels turn so little within the context that every key of a head gets about the same score from it, which a softmax
ignores: the loss stays, and a code whose scale follows the largest channel loses all the others.
``heavy_tail``: the keys' rotary channels are multiplied by factors with heavy tails, and the queries' divided by them,
which changes no score at all: a few channels dominate every key.

Gives up: models with norms between projection and rotation (Qwen3), or with other rotary layouts than Llama's halves.

Source: the symptom, https://github.com/huggingface/transformers/issues/35185.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


_OFFSET_PAIRS = 2  # slowest rotary pairs that get an offset
_TAIL_SHARE = 8  # one pair in so many is large


def _attentions(model: PreTrainedModel) -> Iterator[Any]:
    for module in model.modules():
        if hasattr(module, "k_proj") and hasattr(module, "q_proj"):
            if hasattr(module, "k_norm"):
                raise ValueError(f"{type(module).__name__} has norms behind its projections")
            yield module


def _heads(projection: Any, head_dim: int) -> int:
    return int(projection.weight.shape[0]) // head_dim


def add_key_offset(model: PreTrainedModel, size: float) -> None:
    """Add ``size`` or its negative to the slowest channels of every head's keys."""
    generator = torch.Generator().manual_seed(0)
    for module in _attentions(model):
        half, heads = module.head_dim // 2, _heads(module.k_proj, module.head_dim)
        offset = torch.zeros(heads, 2, half)
        signs = torch.randint(2, (heads, 2, _OFFSET_PAIRS), generator=generator) * 2 - 1
        offset[:, :, half - _OFFSET_PAIRS :] = size * signs
        weight, held = module.k_proj.weight, module.k_proj.bias
        bias = offset.flatten().to(weight) + (0 if held is None else held.detach())
        module.k_proj.bias = torch.nn.Parameter(bias, requires_grad=False)


def widen_key_tails(model: PreTrainedModel, size: float) -> None:
    """Multiply one rotary pair of eight of every head's keys by up to ``size``, and divide the queries by it."""
    generator = torch.Generator().manual_seed(0)
    for module in _attentions(model):
        half, heads = module.head_dim // 2, _heads(module.k_proj, module.head_dim)
        order = torch.rand(heads, half, generator=generator).argsort(-1)
        ramp = torch.ones(half)
        large = half // _TAIL_SHARE
        ramp[:large] = size ** (torch.arange(large, 0, -1) / large)
        factor = ramp[order].repeat(1, 2)  # both halves of a pair alike, or the rotation would mix them
        groups = _heads(module.q_proj, module.head_dim) // heads
        _scale(module.k_proj, factor.flatten())
        _scale(module.q_proj, 1 / factor.repeat_interleave(groups, dim=0).flatten())


def _scale(projection: Any, factor: Tensor) -> None:
    with torch.no_grad():
        factor = factor.to(projection.weight)
        projection.weight.mul_(factor[:, None])
        if projection.bias is not None:
            projection.bias.mul_(factor)


CHANGES: dict[str, Callable[[PreTrainedModel, float], None]] = {
    "key_offset": add_key_offset,
    "heavy_tail": widen_key_tails,
}
