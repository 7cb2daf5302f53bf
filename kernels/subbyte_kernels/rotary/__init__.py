"""A token's queries, keys and values on their way from the projections into attention and window.

``reference.py`` defines it, ``rotary.cu`` computes it on a GPU.
"""

from torch import Tensor

from subbyte_kernels.rotary.cuda_kernel import rotary_cuda, rotary_obstacle
from subbyte_kernels.rotary.reference import HeadNorms, TokenPlace, rotary_reference


__all__ = ["HeadNorms", "TokenPlace", "rotary", "rotary_cuda", "rotary_obstacle", "rotary_reference"]


def rotary(projected: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None, place: TokenPlace) -> Tensor:
    """The kernel where it can, else the reference; arguments as theirs."""
    if rotary_obstacle(projected, cos, norms, place) is None:
        return rotary_cuda(projected, cos, sin, norms, place)
    return rotary_reference(projected, cos, sin, norms, place)
