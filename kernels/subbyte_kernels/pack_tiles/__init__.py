"""Tiles <-> records: mean, rotation, scale, lookup, outliers and packing.

``reference.py`` defines both directions; ``pack_tiles.cu`` and ``unpack_tiles.cu`` with ``cuda_kernel.py`` do them on
a GPU, and ``shape_tiles.cu`` with ``shaped.py`` packs under a metric there.
"""

import logging

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.formats import TileFormat
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles.cuda_kernel import (
    Places,
    pack_obstacle,
    pack_tiles_cuda,
    unpack_obstacle,
    unpack_tiles_cuda,
)
from subbyte_kernels.pack_tiles.reference import pack_tiles_reference, unpack_tiles_reference
from subbyte_kernels.pack_tiles.shaped import MetricTerms, metric_terms, shape_obstacle, shape_tiles_cuda


_log = logging.getLogger("subbyte_kernels")

__all__ = [
    "MetricTerms",
    "Places",
    "metric_terms",
    "pack_obstacle",
    "pack_tiles",
    "pack_tiles_cuda",
    "pack_tiles_reference",
    "shape_obstacle",
    "shape_tiles_cuda",
    "unpack_obstacle",
    "unpack_tiles",
    "unpack_tiles_cuda",
    "unpack_tiles_reference",
]


def pack_tiles(
    states: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    rotation: Tensor,
    mean: Tensor | None,
    order: Order,
    signs: Tensor | None,
    places: Places | None = None,
) -> Tensor:
    """Pack with the kernel where it can, else with the reference; arguments as theirs."""
    if pack_obstacle(states, fmt, signs) is None and signs is not None:
        try:
            return pack_tiles_cuda(states, fmt, table, mean, order, signs, places)
        except nvrtc.BuildError as problem:
            _log.warning("packing runs in plain PyTorch, which is slow (%s)", problem)
    tiles = states if places is None else states[places]
    return pack_tiles_reference(tiles, fmt, table, rotation, mean, order, signs)


def unpack_tiles(
    records: Tensor,
    fmt: TileFormat,
    table: Tensor | None,
    table_rows: Tensor | None,
    rotation: Tensor,
    mean: Tensor | None,
    dtype: torch.dtype,
    order: Order,
    signs: Tensor | None,
) -> Tensor:
    """Unpack with the kernel where it can, else with the reference; arguments as theirs."""
    one_table = table is None or (table_rows is None and len(table) == 1)
    if one_table and unpack_obstacle(records, fmt, dtype, signs) is None and signs is not None:
        try:
            return unpack_tiles_cuda(records, fmt, None if table is None else table[0], mean, dtype, order, signs)
        except nvrtc.BuildError as problem:
            _log.warning("unpacking runs in plain PyTorch, which is slow (%s)", problem)
    return unpack_tiles_reference(records, fmt, table, table_rows, rotation, mean, dtype, order, signs)
