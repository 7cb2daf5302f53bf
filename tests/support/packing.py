"""Packed tiles for tests: tables of a tier, one round trip, and whole sides with their dense values."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_subbyte_moe.codecs import Codec, Table, codecs, get_codec
from hf_subbyte_moe.codecs.codebooks import fit_centroids, universal_table
from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from subbyte_kernels.formats import NO_PAGE, TILE_TOKENS, Encoding, PackedTiles, TileFormat, make_page
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles import pack_tiles_reference, unpack_tiles_reference
from subbyte_kernels.pack_tiles.reference import normalize_tokens, split_outliers


CPU = torch.device("cpu")
TIERS = [codec.name for codec in codecs()]


def rotation(head_dim: int) -> Tensor:
    """The package's rotation on the CPU."""
    return rotation_matrix(head_dim, CPU)


def generator(seed: int) -> torch.Generator:
    """A seeded generator."""
    return torch.Generator().manual_seed(seed)


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=generator(seed)).to(dtype)


def pack_table(codec: Codec, tiles: Tensor, fit: bool = False) -> Tensor | None:
    """The table that packing ``[M, 128, D]`` tiles wants; ``fit`` gives each tile centroids of its own."""
    if codec.table is Table.NONE:
        return None
    table = universal_table(codec.format, CPU)[0, 0].float()
    if codec.table is Table.CODEBOOK:
        return table
    if not fit:
        return table.squeeze(-1).expand(len(tiles), -1)
    _, _, inliers = split_outliers(tiles.float(), codec.format.tile_outliers(tiles.shape[-1]))
    unit = normalize_tokens(inliers)[0].flatten(1)
    return torch.stack([fit_centroids(part, codec.format).squeeze(-1) for part in unit])


def unpack_table(codec: Codec, table: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """``table`` and ``table_rows`` that ``unpack_tiles_reference`` wants for a table of :func:`pack_table`."""
    if table is None:
        return None, None
    if codec.table is Table.CODEBOOK:
        return table.unsqueeze(0), None
    return table.unsqueeze(-1), torch.arange(len(table))


def unpack(
    records: Tensor, fmt: TileFormat, tables: tuple[Tensor | None, Tensor | None], head_dim: int, dtype: torch.dtype
) -> Tensor:
    """``unpack_tiles_reference`` with the package's rotation and no mean."""
    return unpack_tiles_reference(records, fmt, *tables, rotation(head_dim), None, dtype, Order.KEYS)


def round_trip(
    tier: str, tiles: Tensor, mean: Tensor | None = None, dtype: torch.dtype | None = None, fit: bool = False
) -> Tensor:
    """``[M, 128, D]`` tiles as they come back from a tier, in ``dtype`` or their own (``exact`` always)."""
    codec = get_codec(tier)
    table = pack_table(codec, tiles, fit)
    turn = rotation(tiles.shape[-1])
    records = pack_tiles_reference(tiles, codec.format, table, turn, mean, Order.KEYS)
    if codec.format.encoding is Encoding.RAW:
        dtype = tiles.dtype  # its bytes mean nothing else
    return unpack_tiles_reference(
        records, codec.format, *unpack_table(codec, table), turn, mean, dtype or tiles.dtype, Order.KEYS
    )


def relative_error(decoded: Tensor, states: Tensor) -> float:
    """Squared error over energy."""
    states = states.float()
    return float((decoded.float() - states).square().sum() / states.square().sum())


def packed_side(
    states: Tensor,
    tiers: Sequence[Sequence[Sequence[str]]],
    mean: Tensor | None,
    spare_slots: int = 0,
    own_tables: dict[int, Tensor] | None = None,
    order: Order = Order.KEYS,
    raw: torch.dtype | None = None,
) -> tuple[PackedTiles, Tensor]:
    """Pack one side and decode it again, tile by tile.

    Args:
        states: ``[B, H, T, 128, D]``.
        tiers: tier names by row, head and tile; a row (all of its heads) may have fewer than T tiles.
        mean: ``[B, H, D]`` or None.
        spare_slots: slots of 0xFF bytes around each record in its pool.
        own_tables: tier id -> ``[B or 1, H or 1, entries, vector_dim]`` in place of the universal tables.
        order: which lanes own the codes.
        raw: dtype of what the tier ``exact`` stores; that of ``states`` if None.

    Returns:
        The packed side, and ``[B, H, T, 128, D]`` fp32 what every record alone unpacks to, zero where no tile is.
    """
    rows, heads, tiles, _, dim = states.shape
    turn = rotation(dim)
    pages = torch.full((rows, heads, tiles), NO_PAGE, dtype=torch.int32)
    dense = torch.zeros(rows, heads, tiles, TILE_TOKENS, dim)
    pools: dict[int, list[Tensor]] = {}
    formats: dict[int, TileFormat] = {}
    tables: dict[int, Tensor] = dict(own_tables or {})
    for row in range(rows):
        for head in range(heads):
            for tile, name in enumerate(tiers[row][head]):
                codec = get_codec(name)
                one = states[row, head, tile][None]
                if raw is not None and codec.format.encoding is Encoding.RAW:
                    one = one.to(raw)
                table = pack_table(codec, one)
                if codec.tier_id in tables:
                    whole = tables[codec.tier_id].expand(rows, heads, -1, -1)[row, head].float()
                    table = whole if codec.table is Table.CODEBOOK else whole.squeeze(-1).unsqueeze(0)
                centre = None if mean is None else mean[row, head][None]
                record = pack_tiles_reference(one, codec.format, table, turn, centre, order)
                unpacked = unpack_tiles_reference(
                    record, codec.format, *unpack_table(codec, table), turn, centre, one.dtype, order
                )
                dense[row, head, tile] = unpacked[0].float()
                pool = pools.setdefault(codec.tier_id, [])
                pool += [torch.full_like(record, -1)] * spare_slots
                pages[row, head, tile] = make_page(codec.tier_id, len(pool))
                pool.append(record)
                formats[codec.tier_id] = codec.format
                if codec.table is not Table.NONE and codec.tier_id not in tables:
                    tables[codec.tier_id] = universal_table(codec.format, CPU)
    for pool in pools.values():
        pool += [torch.full_like(pool[0], -1)] * spare_slots
    side = PackedTiles(
        pages=pages,
        pools={tier: torch.cat(pool) for tier, pool in pools.items()},
        formats=formats,
        tables=tables,
        rotation=turn,
        mean=mean,
        order=order,
        signs=rotation_signs(dim, CPU),
    )
    return side, dense


def packed_at_once(tiles: Tensor, fmt: TileFormat, *args: Any) -> Tensor:
    """In place of packing: one operation, as with a kernel."""
    count = len(tiles) if args[-1] is None else len(args[-1][0])
    return torch.zeros(count, fmt.record_words(tiles.shape[-1], tiles.element_size()), dtype=torch.int32)


def shaped_at_once(tiles: Tensor, heads: Tensor, codec: Any, *args: Any) -> Tensor:
    return packed_at_once(tiles, codec.format, args[-1])


def unpacked_at_once(records: Tensor, fmt: TileFormat, table: Any, rows: Any, rotation: Tensor, *args: Any) -> Tensor:
    return torch.zeros(len(records), TILE_TOKENS, rotation.shape[0])
