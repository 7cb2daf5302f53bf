"""Tiles <-> records: mean, rotation, scale, lookup, outliers and packing. ``reference.py`` defines it."""

from subbyte_kernels.pack_tiles.reference import pack_tiles_reference, unpack_tiles_reference


__all__ = ["pack_tiles_reference", "unpack_tiles_reference"]
