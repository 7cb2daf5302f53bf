"""Linear layers of a few tokens in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


MAX_LINEAR_TOKENS = 16


def small_linear_reference(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """What matrices make of the same states, side by side.

    Args:
        hidden: ``[T, K]``.
        weights: ``[N_i, K]`` each.

    Returns:
        ``[T, sum of N_i]`` in the dtype of ``hidden``.
    """
    return torch.cat([functional.linear(hidden, weight) for weight in weights], dim=-1)
