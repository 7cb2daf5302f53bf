"""Tiles <-> records: mean, rotation, scale, lookup, outliers and packing.

``reference.py`` defines both directions; ``pack_tiles.cu`` with ``cuda_kernel.py`` packs on a GPU.
"""

import logging

from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.formats import TileFormat
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles.cuda_kernel import pack_obstacle, pack_tiles_cuda
from subbyte_kernels.pack_tiles.reference import pack_tiles_reference, unpack_tiles_reference


_log = logging.getLogger("subbyte_kernels")

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
        try:
            return pack_tiles_cuda(states, fmt, table, mean, order, signs)
        except nvrtc.BuildError as problem:
            _log.warning("packing runs in plain PyTorch, which is slow (%s)", problem)
    return pack_tiles_reference(states, fmt, table, rotation, mean, order)
