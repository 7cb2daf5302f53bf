"""The rotation that makes low bits work: signs, then Hadamard blocks.

Channels of keys and values differ widely in size. After an orthonormal mixing every channel looks Gaussian with the
token's own variance, so one codebook serves all heads and layers without data. The signs come first because a Hadamard
transform alone would put a constant vector, or one that alternates regularly, into a single channel. They are a bent
function, which by definition spreads all of these evenly (to within a factor of sqrt(2) where a block's size is an odd
power of two); and they are the same everywhere, unlike a random generator's.

Gives up: where the head dimension is no power of two the blocks are as large as its power-of-two factor (80: 16), and
mixing ends at a block's border.

Source: QuaRot (arXiv 2404.00456), TurboQuant (arXiv 2504.19874).
"""

from functools import lru_cache

import torch
from torch import Tensor


_MIN_BLOCK = 8


def rotation_block(head_dim: int) -> int:
    """The size of the Hadamard blocks: the largest power of two that divides ``head_dim``.

    Raises:
        ValueError: it is below 8.
    """
    block = head_dim & -head_dim
    if block < _MIN_BLOCK:
        raise ValueError(
            f"head_dim {head_dim} cannot be packed: it must be a multiple of {_MIN_BLOCK}, "
            f"and its largest power-of-two factor is {block}"
        )
    return block


def _sign(channel: int, block: int) -> float:
    """The sign of a channel: -1 to the inner product of the low and the high half of its bits (a bent function)."""
    half = (block.bit_length() - 1) // 2
    low, high = channel & ((1 << half) - 1), channel >> half
    return -1.0 if (low & high).bit_count() % 2 else 1.0


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def rotation_signs(head_dim: int, device: torch.device) -> Tensor:
    """``[D]`` fp32, +1 or -1: what the rotation does before its Hadamard blocks.

    Raises:
        ValueError: no block of 8 divides ``head_dim``.
    """
    block = rotation_block(head_dim)
    signs = [_sign(channel % block, block) for channel in range(head_dim)]
    return torch.tensor(signs, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def rotation_matrix(head_dim: int, device: torch.device) -> Tensor:
    """``[D, D]`` fp32 orthonormal; ``rotated = states @ matrix.T``. The same on every machine and version.

    Raises:
        ValueError: no block of 8 divides ``head_dim``.
    """
    block = rotation_block(head_dim)
    hadamard = torch.ones(1, 1, dtype=torch.float32)
    while hadamard.shape[0] < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], dim=1), torch.cat([hadamard, -hadamard], dim=1)], dim=0)
    matrix = torch.block_diag(*[hadamard / block**0.5] * (head_dim // block))
    rotation: Tensor = matrix.to(device) * rotation_signs(head_dim, device)
    return rotation
