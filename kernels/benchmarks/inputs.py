"""Caches to attend to, filled with random bits: nothing is packed, so that making a large one takes no time.

Every bit pattern of a code decodes to a number (FP8's two NaN patterns are left out), and scales are such that keys
and values have a root mean square near 1, as random bf16 ones have: the softmax is as flat for one as for the other.
Slots are shuffled, so that no two tiles of a head are neighbours in memory unless by chance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from shapes import RING, SINKS, Cell, Variant
from torch import Tensor

from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.codecs.codebooks import universal_table
from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from subbyte_kernels.decode_attention import AttentionTiles, ExactTokens
from subbyte_kernels.formats import (
    TILE_TOKENS,
    Encoding,
    PackedTiles,
    TileFormat,
    make_page,
    page_slots,
    page_tiers,
)
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles.reference import e2m3_table, unpack_tiles_reference


DTYPE = torch.bfloat16
_SETS_BYTES = 300_000_000  # of all input sets: five times an L2 cache of 60 MB
_MAX_SETS = 160
_FEW_BYTES = 8_000_000_000  # below this, there are two sets at least


@dataclass(frozen=True)
class PackedInput:
    """One call's input over packed tiles.

    Attributes:
        query: ``[B, HQ, Sq, D]`` bf16.
        exact: sinks and ring.
        tiles: everything older.
    """

    query: Tensor
    exact: ExactTokens
    tiles: AttentionTiles


@dataclass(frozen=True)
class PlainInput:
    """One call's input over a bf16 cache.

    Attributes:
        query: ``[B, HQ, Sq, D]`` bf16; new tokens see everything.
        keys: ``[B, H, N, D]`` bf16, contiguous.
        values: ``[B, H, N, Dv]``; of a latent the first part of the keys.
    """

    query: Tensor
    keys: Tensor
    values: Tensor


def sets_wanted(bytes_each: int, device: torch.device) -> int:
    """Input sets that a timing rotates through, so that none is in the L2 cache when its turn comes."""
    if device.type != "cuda":
        return 1
    least = 2 if bytes_each < _FEW_BYTES else 1
    return min(_MAX_SETS, max(least, -(-_SETS_BYTES // bytes_each)))


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _normal(shape: tuple[int, ...], device: torch.device, random: torch.Generator) -> Tensor:
    """Standard normal bf16, row after row: a whole cache may have more elements than 31 bits can count."""
    states = torch.empty(shape, dtype=DTYPE, device=device)
    for row in states:
        row.normal_(generator=random)
    return states


def plain_input(cell: Cell, device: torch.device, seed: int) -> PlainInput:
    """A bf16 cache of random values."""
    shape, random = cell.shape, generator(device, seed)
    size = (cell.batch, shape.heads, cell.context, shape.key_dim)
    query = _normal((cell.batch, shape.query_heads, shape.tokens, shape.key_dim), device, random)
    keys = _normal(size, device, random)
    return PlainInput(query, keys, keys[..., : shape.head_dim] if shape.rest else _normal(size, device, random))


def packed_input(cell: Cell, variant: Variant, device: torch.device, seed: int) -> PackedInput:
    """A packed cache of random codes."""
    shape, random = cell.shape, generator(device, seed)
    query = _normal((cell.batch, shape.query_heads, shape.tokens, shape.key_dim), device, random)
    mean = 0.5 * torch.randn(cell.batch, shape.heads, shape.key_dim, generator=random, device=device)
    assigned = variant.assign(cell).to(device)
    key_tiers, value_tiers = [pair.keys for pair in variant.pairs], [pair.values for pair in variant.pairs]
    keys = _side(key_tiers, assigned, Order.KEYS, mean[..., : shape.head_dim].contiguous(), random)
    if shape.rest:  # the latent is the values, too
        rest = _side(value_tiers, assigned, Order.KEYS, mean[..., shape.head_dim :].contiguous(), random)
        tiles = AttentionTiles((keys, rest), keys)
    else:
        tiles = AttentionTiles((keys,), _side(value_tiers, assigned, Order.VALUES, None, random, shape.head_dim))
    return PackedInput(query, _exact(cell, device, random), tiles)


def _exact(cell: Cell, device: torch.device, random: torch.Generator) -> ExactTokens:
    """Sinks and a ring whose unused slots are anywhere."""
    shape = cell.shape
    size = (cell.batch, shape.heads, SINKS + RING, shape.key_dim)
    start = torch.randint(RING, (cell.batch, 1), generator=random, device=device)
    age = (torch.arange(RING, device=device) - start) % RING
    sinks = torch.ones(cell.batch, SINKS, dtype=torch.bool, device=device)
    visible = torch.cat([sinks, age < cell.recent], dim=1).unsqueeze(1)
    keys = _normal(size, device, random)
    values = keys[..., : shape.head_dim] if shape.rest else _normal(size, device, random)
    return ExactTokens(keys, values, visible)


def _side(
    tiers: list[str],
    assigned: Tensor,
    order: Order,
    mean: Tensor | None,
    random: torch.Generator,
    width: int = 0,
) -> PackedTiles:
    """One side's tiles.

    Args:
        tiers: tier of each pair of the variant.
        assigned: ``[B, H, T]`` index into ``tiers``.
        order: which side.
        mean: ``[B, H, D]`` of keys.
        random: on the device.
        width: D of a side without a mean.
    """
    device, dim = assigned.device, width if mean is None else mean.shape[-1]
    used = assigned.unique().tolist()
    formats = {tiers[index]: get_codec(tiers[index]).format for index in used}
    tier_ids = torch.tensor([get_codec(name).tier_id for name in tiers], device=device)[assigned]
    pages = torch.empty(assigned.shape, dtype=torch.int32, device=device)
    pools = {}
    for fmt in formats.values():
        chosen = tier_ids == fmt.tier_id
        count = int(chosen.sum())
        pools[fmt.tier_id] = random_records(fmt, count, dim, random)
        slots = torch.randperm(count, generator=random, device=device)
        pages[chosen] = (make_page(fmt.tier_id, 0) + slots).to(torch.int32)
    return PackedTiles(
        pages=pages,
        pools=pools,
        formats={fmt.tier_id: fmt for fmt in formats.values()},
        tables={fmt.tier_id: universal_table(fmt, device) for fmt in formats.values() if fmt.entries},
        rotation=rotation_matrix(dim, device),
        mean=mean,
        order=order,
        signs=rotation_signs(dim, device),
    )


def random_records(fmt: TileFormat, count: int, head_dim: int, random: torch.Generator) -> Tensor:
    """``[count, record_words]`` int32 of a tier whose codes and scales are all that a record holds.

    Raises:
        ValueError: the tier's records hold more.
    """
    if fmt.encoding in (Encoding.RAW, Encoding.SCALAR) or fmt.token_outliers:
        raise ValueError(f"there are no random records of tier {fmt.name!r}")
    records = torch.empty(count, fmt.record_words(head_dim), dtype=torch.int32, device=random.device)
    bits = records.view(torch.uint8)
    if fmt.encoding is Encoding.FLOAT8:
        bits.random_(0, 254, generator=random)  # 0 to 0x7E and 0x80 to 0xFE: what is left out is NaN
        bits.add_(bits >= 0x7F)
    else:
        bits.random_(0, 256, generator=random)
    spread = 0.5 + torch.rand(count, TILE_TOKENS, generator=random, device=random.device)
    start = fmt.code_words(head_dim)
    records[:, start:] = (spread / _code_rms(fmt)).to(torch.bfloat16).view(torch.int32)
    return records


def _code_rms(fmt: TileFormat) -> float:
    """Root mean square of the values that random codes stand for."""
    if fmt.encoding is Encoding.VECTOR:
        values = universal_table(fmt, torch.device("cpu")).float()
    elif fmt.encoding is Encoding.FLOAT6:
        values = e2m3_table()
    else:
        values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        values = values[values.isfinite()]
    return values.square().mean().sqrt().item()


def packed_bytes(given: PackedInput) -> int:
    """Bytes of records and exact tokens that a call must read."""
    sides = {id(side): side for side in (*given.tiles.keys, given.tiles.values)}.values()
    records = sum(pool.nbytes for side in sides for pool in side.pools.values())
    latent = len(given.tiles.keys) > 1
    width = given.exact.keys.shape[-1] + (0 if latent else given.exact.values.shape[-1])
    token = given.exact.keys.shape[1] * width * given.exact.keys.itemsize
    return records + int(given.exact.visible.sum()) * token


def input_sets(cell: Cell, variant: Variant, device: torch.device) -> list[PackedInput]:
    """As many inputs as a timing wants."""
    first = packed_input(cell, variant, device, seed=0)
    count = sets_wanted(packed_bytes(first), device)
    return [first, *(packed_input(cell, variant, device, seed) for seed in range(1, count))]


def _side_of_unit(side: PackedTiles, row: int, head: int) -> Tensor:
    """``[T * 128, D]`` fp32."""
    pages = side.pages[row, head]
    tiers, slots = page_tiers(pages), page_slots(pages)
    values = torch.empty(len(pages), TILE_TOKENS, side.head_dim, device=pages.device)
    for tier_id, pool in side.pools.items():
        chosen = tiers == tier_id
        if not chosen.any():
            continue
        table = side.tables.get(tier_id)
        values[chosen] = unpack_tiles_reference(
            pool[slots[chosen].long()],
            side.formats[tier_id],
            None if table is None else table.float().flatten(0, 1),
            None,
            side.rotation,
            None if side.mean is None else side.mean[row, head].unsqueeze(0),
            torch.float32,
            side.order,
        )
    return values.flatten(0, 1)


def dequantized(given: PackedInput, row: int, head: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one row and head, ``[N, D]`` fp32, tiles decoded one by one; exact tokens come last."""
    seen = given.exact.visible[row, 0]
    keys = torch.cat([_side_of_unit(part, row, head) for part in given.tiles.keys], dim=-1)
    return (
        torch.cat([keys, given.exact.keys[row, head, seen].float()]),
        torch.cat([_side_of_unit(given.tiles.values, row, head), given.exact.values[row, head, seen].float()]),
    )


def checked_units(cell: Cell, limit: int = 8) -> Iterator[tuple[int, int]]:
    """Rows and heads that outputs are checked in: spread evenly, the first and the last among them."""
    count = min(limit, cell.units)
    for number in range(count):
        yield divmod(number * (cell.units - 1) // max(1, count - 1), cell.shape.heads)
