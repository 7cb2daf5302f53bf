"""The byte layout of a packed tile: what every reference, kernel and pool agrees on.

A tile is 128 tokens of one KV head and one side (keys or values). Its record is one row of int32 words in a pool:

    codes      128 * head_dim / vector_dim codes of ``code_bits`` bits (``lanes.py``; ``RAW``: token after token)
    scales     128 bf16, one a token (not in ``RAW``). bf16, not fp16: with fp32's range nothing overflows or vanishes
    registers  ``VECTOR`` with ``token_outliers``: 128 x [channels u8..., values e4m3...] in units of the scale
    outliers   ``SCALAR`` with ``tile_outliers``: count i32, positions u16[cap], values e4m3[cap], padded to 4 bytes

A page names a tile's place: ``tier_id << 24 | slot``, or ``NO_PAGE``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from subbyte_kernels.lanes import Order


TILE_TOKENS = 128
NO_PAGE = -1
_SLOT_BITS = 24


class Encoding(Enum):
    """How values become codes."""

    RAW = "raw"  # the model's own bytes
    FLOAT8 = "float8"  # E4M3 times the token's scale
    FLOAT6 = "float6"  # E2M3 times the token's scale
    VECTOR = "vector"  # nearest table entry times the token's norm-keeping scale
    SCALAR = "scalar"  # nearest of a head's own centroids, outliers of the tile kept in E4M3


@dataclass(frozen=True)
class TileFormat:
    """One tier's layout, independent of the head dimension.

    Attributes:
        name: the tier's name.
        tier_id: number in pages, 0 to 127; never reused for another layout.
        encoding: how values become codes.
        code_bits: bits of one code (``RAW``: bits follow the model's dtype).
        vector_dim: neighbouring values that one code stands for.
        entries: table entries; 0 without a table.
        rotated: codes live in the rotated space.
        centred: the key's channel mean is removed first.
        token_outliers: registers a token (``VECTOR``).
        tile_outlier_share: outliers at most, as a share of a tile's values (``SCALAR``).
    """

    name: str
    tier_id: int
    encoding: Encoding
    code_bits: int
    vector_dim: int = 1
    entries: int = 0
    rotated: bool = True
    centred: bool = True
    token_outliers: int = 0
    tile_outlier_share: float = 0.0

    def code_words(self, head_dim: int, itemsize: int = 2) -> int:
        """32-bit words of codes in a record; ``itemsize`` in bytes matters to ``RAW`` alone."""
        bits = 8 * itemsize if self.encoding is Encoding.RAW else self.code_bits
        return TILE_TOKENS * (head_dim // self.vector_dim) * bits // 32

    def tile_outliers(self, head_dim: int) -> int:
        """Outliers that a record has room for."""
        return math.ceil(self.tile_outlier_share * TILE_TOKENS * head_dim)

    def record_words(self, head_dim: int, itemsize: int = 2) -> int:
        """32-bit words of a whole record."""
        words = self.code_words(head_dim, itemsize)
        if self.encoding is not Encoding.RAW:
            words += TILE_TOKENS // 2
        words += TILE_TOKENS * self.token_outliers * 2 // 4
        if self.tile_outlier_share:
            words += 1 + math.ceil(3 * self.tile_outliers(head_dim) / 4)
        return words

    def code_bits_per_value(self, itemsize: int = 2) -> float:
        """Bits of codes for each value."""
        return 8.0 * itemsize if self.encoding is Encoding.RAW else self.code_bits / self.vector_dim

    def bits_per_value(self, head_dim: int, itemsize: int = 2) -> float:
        """Bits of the whole record for each value: what ``bits`` means in a budget."""
        return 32 * self.record_words(head_dim, itemsize) / (TILE_TOKENS * head_dim)


@dataclass(frozen=True)
class PackedTiles:
    """One side (keys or values) of one layer's packed tiles.

    Attributes:
        pages: ``[B, H, T]`` int32 pages, ``NO_PAGE`` where a row has fewer tiles. Tile t of a row holds its tokens
            ``first + 128 * t`` to ``first + 128 * t + 127``.
        pools: tier id -> ``[capacity, record_words]`` int32.
        formats: tier id -> layout.
        tables: tier id -> ``[B or 1, H or 1, entries, vector_dim]``, fp16 or fp32.
        rotation: ``[D, D]`` fp32 orthonormal, ``rotated = values @ rotation.T``.
        mean: ``[B, H, D]`` fp32, removed before rotation; None for values.
        order: which lanes own the codes.
        host_pages: the pages on the host, where somebody has them: saves reading them back.
        signs: ``[D]`` fp32 if the rotation is ``hadamard @ diag(signs)``, with Hadamard blocks (Sylvester's order,
            over the square root of their size) as large as the power of two in D; None for any other rotation.
    """

    pages: Tensor
    pools: Mapping[int, Tensor]
    formats: Mapping[int, TileFormat]
    tables: Mapping[int, Tensor]
    rotation: Tensor
    mean: Tensor | None
    order: Order
    signs: Tensor | None = None
    host_pages: NDArray[np.int32] | None = None

    @property
    def head_dim(self) -> int:
        return self.rotation.shape[-1]

    def table_rows(self, tier_id: int, unit: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """A tier's table ``[R, entries, d]`` fp32, if any, and its row for ``[m]`` units (row * heads + head)."""
        table = self.tables.get(tier_id)
        if table is None:
            return None, None
        flat = table.float().flatten(0, 1)
        if flat.shape[0] == 1:
            return flat, None
        heads = self.pages.shape[1]
        return flat, (unit // heads % table.shape[0]) * table.shape[1] + unit % heads % table.shape[1]


# (encoding, bits of a code, values of a code) -> what the CUDA kernels call it
_KERNEL_KINDS = {
    (Encoding.VECTOR, 7, 4): "VQ175",
    (Encoding.VECTOR, 8, 4): "VQ2",
    (Encoding.VECTOR, 6, 2): "VQ3",
    (Encoding.VECTOR, 8, 2): "VQ4",
    (Encoding.FLOAT6, 6, 1): "FP6",
    (Encoding.FLOAT8, 8, 1): "FP8",
}


def kernel_kind(fmt: TileFormat) -> str | None:
    """The CUDA kernels' name for a layout, None if they have no path for it."""
    if not (fmt.rotated and fmt.centred) or fmt.token_outliers or fmt.entries not in (0, 1 << fmt.code_bits):
        return None
    return _KERNEL_KINDS.get((fmt.encoding, fmt.code_bits, fmt.vector_dim))


def make_page(tier_id: int, slot: int) -> int:
    """The page of a slot; raises ValueError past 2**24 slots a pool."""
    if not 0 <= slot < 1 << _SLOT_BITS:
        raise ValueError(f"slot {slot} does not fit a page: a pool holds at most {1 << _SLOT_BITS} tiles")
    return tier_id << _SLOT_BITS | slot


def page_tiers(pages: Tensor) -> Tensor:
    """Tier ids of pages, -1 for ``NO_PAGE``."""
    return pages >> _SLOT_BITS


def page_slots(pages: Tensor) -> Tensor:
    """Slots of pages, meaningless for ``NO_PAGE``."""
    return pages & ((1 << _SLOT_BITS) - 1)
