"""Operations on packed sub-byte KV tiles: byte layout, packing, decode attention, statistics.

Each operation is a folder with a plain PyTorch ``reference.py`` that defines it. This package knows tensors and
formats only; policies, caches and models live in ``hf_subbyte_moe``, whose ``ops.py`` is the one importer.
"""

from subbyte_kernels.formats import (
    NO_PAGE,
    TILE_TOKENS,
    Encoding,
    PackedTiles,
    TileFormat,
    make_page,
    page_slots,
    page_tiers,
)
from subbyte_kernels.lanes import Order


__all__ = [
    "NO_PAGE",
    "TILE_TOKENS",
    "Encoding",
    "Order",
    "PackedTiles",
    "TileFormat",
    "make_page",
    "page_slots",
    "page_tiers",
]
