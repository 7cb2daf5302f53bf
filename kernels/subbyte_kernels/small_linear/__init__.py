"""Linear layers of a few tokens: ``reference.py`` and ``packed.py`` define them, CUDA streams the weights."""

from collections.abc import Sequence

from torch import Tensor

from subbyte_kernels.small_linear.cuda_kernel import (
    linear_obstacle,
    packed_linear_cuda,
    packed_obstacle,
    small_linear_cuda,
)
from subbyte_kernels.small_linear.packed import PackedMatrix, packed_linear_reference
from subbyte_kernels.small_linear.reference import MAX_LINEAR_TOKENS, small_linear_reference


__all__ = [
    "MAX_LINEAR_TOKENS",
    "PackedMatrix",
    "linear_obstacle",
    "packed_linear",
    "packed_linear_cuda",
    "packed_linear_reference",
    "packed_obstacle",
    "small_linear",
    "small_linear_cuda",
    "small_linear_reference",
]


def small_linear(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The kernel where it can, else the reference; arguments as theirs."""
    if linear_obstacle(hidden, weights) is None:
        return small_linear_cuda(hidden, weights)
    return small_linear_reference(hidden, weights)


def packed_linear(hidden: Tensor, matrices: Sequence[PackedMatrix]) -> Tensor:
    """The kernel where it can, else the reference; arguments as theirs."""
    if packed_obstacle(hidden, matrices) is None:
        return packed_linear_cuda(hidden, matrices)
    return packed_linear_reference(hidden, matrices)
