"""Linear layers of a few tokens: ``reference.py`` defines them, ``small_linear.cu`` streams their weights on a GPU."""

from collections.abc import Sequence

from torch import Tensor

from subbyte_kernels.small_linear.cuda_kernel import linear_obstacle, small_linear_cuda
from subbyte_kernels.small_linear.reference import MAX_LINEAR_TOKENS, small_linear_reference


__all__ = ["MAX_LINEAR_TOKENS", "linear_obstacle", "small_linear", "small_linear_cuda", "small_linear_reference"]


def small_linear(hidden: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """The kernel where it can, else the reference; arguments as theirs."""
    if linear_obstacle(hidden, weights) is None:
        return small_linear_cuda(hidden, weights)
    return small_linear_reference(hidden, weights)
