"""Where in a record a code and a scale lie: in the order in which the lanes of a warp read them.

A tensor-core instruction wants every lane to hold certain elements of its operand. With lane ``4 g + t`` (g = 0..7,
t = 0..3) the operand of m16n8k16 has its free index along g and the contracted one along t. Keys are contracted over
channels, values over tokens, so a tile is dealt out to lanes in one of two orders (``Order``). It consists of two
units of 64 tokens, and within a unit lane ``4 g + t`` owns

    keys     tokens 8 i + g (i = 0..7),   channels [t D/4, (t+1) D/4)
    values   tokens 4 i + t (i = 0..15),  channels [g D/8, (g+1) D/8)

Its codes, token after token and channels ascending, are one stream of W words (``bitpack.py``). Words of the 32 lanes
are interleaved in vectors of v = 4, 2 or 1 words (the largest that divides W), so that a warp's loads are contiguous:

    codes    [unit 2][vector W / v][lane 32][word v]
    scales   [unit 2][g 8][i 8]: lane ``4 g + t`` meets scores of tokens 8 i + g and reads its scales as 16 bytes

Head dimensions that are no multiple of 64 do not divide into whole words a lane: their codes and scales lie token
after token.
"""

from enum import Enum

from torch import Tensor

from subbyte_kernels.bitpack import pack_codes, unpack_codes


UNIT_TOKENS = 64
_UNITS = 2
_LANES = 32


class Order(Enum):
    """Which index of an attention product a lane's values are contracted over."""

    KEYS = "keys"  # channels
    VALUES = "values"  # tokens


def in_lanes(head_dim: int) -> bool:
    """Whether tiles of this width are dealt out to lanes, or lie token after token."""
    return head_dim % UNIT_TOKENS == 0


def vector_words(words: int) -> int:
    """Neighbouring words of one lane, given the words of its stream in a unit."""
    return next(size for size in (4, 2, 1) if words % size == 0)


def _owners(order: Order) -> tuple[int, int, int]:
    """Tokens that a lane owns in a unit, and the parts into which a unit's tokens and a token's channels fall."""
    return (8, 8, 4) if order is Order.KEYS else (16, 4, 8)


def pack_tile_codes(codes: Tensor, width: int, order: Order, head_dim: int) -> Tensor:
    """Codes of whole tiles -> words.

    Args:
        codes: ``[M, 128, C]`` any integer type, C codes a token.
        width: bits a code.
        order: which lanes own them.
        head_dim: D.

    Returns:
        ``[M, 128 * C * width / 32]`` int32.
    """
    if not in_lanes(head_dim):
        return pack_codes(codes.flatten(1), width)
    owned, tokens, parts = _owners(order)
    units = codes.view(len(codes), _UNITS, owned, tokens, parts, -1)
    # [M, u, i, token part, channel part, code] -> lanes g, t: keys have g along tokens, values along channels
    lanes = (0, 1, 3, 4, 2, 5) if order is Order.KEYS else (0, 1, 4, 3, 2, 5)
    words = pack_codes(units.permute(lanes).flatten(4), width)
    vector = vector_words(words.shape[-1])
    record: Tensor = words.flatten(2, 3).unflatten(-1, (-1, vector)).transpose(2, 3).flatten(1)
    return record


def unpack_tile_codes(words: Tensor, width: int, order: Order, head_dim: int) -> Tensor:
    """Inverse of :func:`pack_tile_codes`.

    Args:
        words: ``[M, w]`` int32.
        width: bits a code.
        order: which lanes own them.
        head_dim: D.

    Returns:
        ``[M, 128, C]`` int32.
    """
    if not in_lanes(head_dim):
        linear: Tensor = unpack_codes(words, width).unflatten(-1, (_UNITS * UNIT_TOKENS, -1))
        return linear
    owned, tokens, parts = _owners(order)
    size = words.shape[-1] // (_UNITS * _LANES)
    vector = vector_words(size)
    lanes = words.view(len(words), _UNITS, size // vector, _LANES, vector).transpose(2, 3).flatten(3)
    codes = unpack_codes(lanes, width)
    if order is Order.KEYS:
        units = codes.view(len(words), _UNITS, tokens, parts, owned, -1).permute(0, 1, 4, 2, 3, 5)
    else:
        units = codes.view(len(words), _UNITS, parts, tokens, owned, -1).permute(0, 1, 4, 3, 2, 5)
    ordered: Tensor = units.reshape(len(words), _UNITS * UNIT_TOKENS, -1)
    return ordered


def transpose_scales(scales: Tensor, head_dim: int) -> Tensor:
    """Scales ``[M, 128]`` in token order -> in the order of a record, and back: the map is its own inverse."""
    if not in_lanes(head_dim):
        return scales
    moved: Tensor = scales.view(-1, _UNITS, 8, 8).transpose(2, 3).reshape(len(scales), -1)
    return moved
