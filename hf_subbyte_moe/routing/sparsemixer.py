"""PhiMoE's router, which picks by two masked arg-maxes instead of ``topk``.

The ranking decides who is picked; weights are the model's own: each from the softmax over the experts near the picked
one, as if those that were passed over did not exist. Picking the largest twice gives the model's own result.

Source: SparseMixer (arXiv 2409.12136), as in Transformers' ``phimoe``.
"""

import torch
from torch import Tensor


NAME = "PhimoeTopKRouter"


def sparsemixer_weights(logits: Tensor, indices: Tensor, jitter: float) -> Tensor:
    """Weights of picked experts.

    Args:
        logits: ``[N, E]``.
        indices: ``[N, K]`` the picked experts, first pick first.
        jitter: experts farther from a pick than twice this, relatively, do not count beside it.

    Returns:
        ``[N, K]`` in the logits' dtype.
    """
    weights = []
    remaining = logits
    for pick in indices.unbind(-1):
        index = pick[:, None]
        chosen = logits.gather(-1, index)
        far = ((chosen - logits) / logits.abs().clamp(min=chosen)) > 2 * jitter
        gates = remaining.masked_fill((remaining > chosen) | far, float("-inf"))
        weights.append(torch.softmax(gates, dim=-1).gather(-1, index))
        remaining = remaining.scatter(-1, index, float("-inf"))
    return torch.cat(weights, dim=-1)
