"""Tiles <-> records: mean, rotation, scale, lookup, outliers and packing.

``reference.py`` defines both directions; ``pack_tiles.cu`` with ``cuda_kernel.py`` packs on a GPU.
"""

from torch import Tensor

from subbyte_kernels.formats import TileFormat
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles.cuda_kernel import pack_obstacle, pack_tiles_cuda
from subbyte_kernels.pack_tiles.reference import pack_tiles_reference, unpack_tiles_reference


__all__ = ["pack_obstacle", "pack_tiles", "pack_tiles_cuda", "pack_tiles_reference", "unpack_tiles_reference"]


def pack_tiles(
    states: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    rotation: Tensor,
    mean: Tensor | None,
    order: Order,
    signs: Tensor | None,
) -> Tensor:
    """Pack with the kernel where it can, else with the reference; arguments as theirs."""
    if pack_obstacle(states, fmt, signs) is None and signs is not None:
        return pack_tiles_cuda(states, fmt, table, mean, order, signs)
    return pack_tiles_reference(states, fmt, table, rotation, mean, order)
