"""Bytes by formula. The cache measures what it holds; tests hold the two equal."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


TILE_TOKENS = 128
PAGE_BYTES = 4


def pool_capacity(tiles: int) -> int:
    """Records that a pool (or a page table) has room for once it has held ``tiles``.

    A multiple of a power of two that is at most 1/16 of ``tiles``: growing is rare, and spare capacity stays below
    1/16. It depends on ``tiles`` alone, not on how they arrived.
    """
    step = 1 << max(0, (tiles // 16).bit_length() - 1)
    return math.ceil(tiles / step) * step


def tiles_of(tokens: int, sinks: int, window: int) -> int:
    """Packed tiles of a row with ``tokens`` tokens."""
    return max(0, (tokens - sinks - window) // TILE_TOKENS)


@dataclass(frozen=True)
class LayerGeometry:
    """One layer's shapes.

    Attributes:
        rows: batch rows.
        kv_heads: KV heads.
        key_dim: width of a key.
        value_dim: width of a value.
        itemsize: bytes of one element of the model's dtype.
        window: exact recent tokens.
        sinks: exact first tokens.
    """

    rows: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int
    window: int
    sinks: int

    @property
    def values_per_token(self) -> int:
        """Values that a token of one row has, both sides and all heads."""
        return self.kv_heads * (self.key_dim + self.value_dim)


def layer_bytes(
    geometry: LayerGeometry,
    tiles_per_row: int,
    pools: Iterable[tuple[int, int]],
    table_bytes: int,
) -> int:
    """All bytes that one layer holds.

    Args:
        geometry: shapes.
        tiles_per_row: tiles of the longest row, at the most that there were.
        pools: for each pool the bytes of a record and the tiles in it, at the most that there were.
        table_bytes: codebooks and centroids.

    Returns:
        Window and sinks, pools and page tables with their spare capacity, the key's channel means, tables.
    """
    slots = geometry.sinks + geometry.window + TILE_TOKENS
    exact = geometry.rows * slots * geometry.values_per_token * geometry.itemsize
    pages = 2 * geometry.rows * geometry.kv_heads * pool_capacity(tiles_per_row) * PAGE_BYTES
    means = geometry.rows * geometry.kv_heads * geometry.key_dim * 4
    packed = sum(size * pool_capacity(count) for size, count in pools)
    return exact + pages + means + packed + table_bytes
