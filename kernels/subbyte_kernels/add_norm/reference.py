"""Residual and RMSNorm in plain PyTorch, rounded where Llama's kind of models round."""

import torch
from torch import Tensor


def add_norm_reference(hidden: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalize it.

    Args:
        hidden: ``[T, H]`` what a block made.
        residual: ``[T, H]``, or None where the stream begins.
        weight: ``[H]`` of the norm.
        eps: added to the mean square.

    Returns:
        The stream ``[T, H]``, and what the norm makes of it, both in the dtype of ``hidden``.
    """
    stream = hidden if residual is None else residual + hidden
    wide = stream.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return stream, weight * wide.to(stream.dtype)
