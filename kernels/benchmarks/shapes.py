"""What is measured: model shapes, cache sizes, and how the tiles of a cache divide among tiers.

A context counts every token that is attended to: sinks and recent tokens, which are exact, and packed tiles. So the
packed cache and the bf16 one that it is compared with hold the same number of tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_subbyte_moe.codecs import get_codec
from subbyte_kernels.formats import TILE_TOKENS


SINKS = 4
WINDOW = 128
RING = WINDOW + TILE_TOKENS  # slots of recent tokens; the last of them to fill up a tile wait there too
RUN_TILES = 32  # neighbouring tiles of a head that share their tiers in a mixture


@dataclass(frozen=True)
class Shape:
    """Attention of one decoder layer.

    Attributes:
        name: what tables call it.
        query_heads: HQ.
        heads: H.
        head_dim: width of keys (of a latent's first part) and of values.
        rest: width of a latent's second part, its rotary key; 0 where keys and values are apart.
        tokens: new tokens of a row.
    """

    name: str
    query_heads: int
    heads: int
    head_dim: int = 128
    rest: int = 0
    tokens: int = 1

    @property
    def key_dim(self) -> int:
        """Width of queries and keys."""
        return self.head_dim + self.rest

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query_heads // self.heads


@dataclass(frozen=True)
class Cell:
    """One cache size: ``batch`` rows of ``context`` tokens each; at least SINKS + WINDOW."""

    shape: Shape
    batch: int
    context: int

    @property
    def tiles(self) -> int:
        """Packed tiles of a row and head."""
        return (self.context - SINKS - WINDOW) // TILE_TOKENS

    @property
    def recent(self) -> int:
        """Exact tokens in the ring, WINDOW to WINDOW + 127."""
        return self.context - SINKS - self.tiles * TILE_TOKENS

    @property
    def units(self) -> int:
        """Pairs of a row and a KV head."""
        return self.batch * self.shape.heads

    @property
    def plain_bytes(self) -> int:
        """Bytes of the cache in bf16."""
        width = self.shape.key_dim if self.shape.rest else 2 * self.shape.head_dim  # a latent is stored once
        return 2 * self.units * self.context * width

    @property
    def name(self) -> str:
        return f"{self.shape.name}, batch {self.batch}, {self.context} tokens"


@dataclass(frozen=True)
class Pair:
    """Tiers of keys and values."""

    keys: str
    values: str

    @property
    def code_bits(self) -> float:
        """Bits of codes for each cached value."""
        return sum(get_codec(name).format.code_bits_per_value() for name in (self.keys, self.values)) / 2

    @property
    def name(self) -> str:
        return f"{self.keys}/{self.values}"


@dataclass(frozen=True)
class Variant:
    """Tiers of a whole cache.

    Attributes:
        name: what tables call it.
        pairs: one pair for every tile, or a cycle of them, which heads and runs of tiles enter at different places. A
            cycle comes in parts of four pairs with the same sum of bits, so that any four heads spend the average.
    """

    name: str
    pairs: tuple[Pair, ...]

    @property
    def tiers(self) -> tuple[str, str]:
        """What the columns for keys and values show."""
        return (self.pairs[0].keys, self.pairs[0].values) if len(self.pairs) == 1 else (self.name, self.name)

    def assign(self, cell: Cell) -> Tensor:
        """``[B, H, T]`` int64: each tile's index into ``pairs``."""
        row = torch.arange(cell.batch).view(-1, 1, 1)
        head = torch.arange(cell.shape.heads).view(1, -1, 1)
        run = (torch.arange(cell.tiles) // RUN_TILES).view(1, 1, -1)
        if len(self.pairs) == 1:
            return torch.zeros(cell.batch, cell.shape.heads, cell.tiles, dtype=torch.int64)
        parts = len(self.pairs) // 4
        part = (head // 4 + row + run) % parts
        return 4 * part + (head + run // parts) % 4

    def shares(self, cell: Cell) -> list[float]:
        """Each pair's share of the tiles."""
        counts = torch.bincount(self.assign(cell).flatten(), minlength=len(self.pairs))
        return [count / counts.sum().item() for count in counts.tolist()]

    def code_bits(self, cell: Cell) -> float:
        """Average bits of codes for each packed value."""
        return sum(share * pair.code_bits for share, pair in zip(self.shares(cell), self.pairs, strict=True))


def _pure(keys: str, values: str) -> Variant:
    pair = Pair(keys, values)
    return Variant(pair.name, (pair,))


MIXTRAL = Shape("Mixtral-8x7B", query_heads=32, heads=8)
QWEN3 = Shape("Qwen3-30B-A3B", query_heads=32, heads=4)
SHAPES = (MIXTRAL, QWEN3)
# heads of other widths, a latent for all heads (16 or 128), several new tokens
OTHER_SHAPES = (
    Shape("DeepSeek-V2-Lite", query_heads=16, heads=1, head_dim=512, rest=64),
    Shape("DeepSeek-V3", query_heads=128, heads=1, head_dim=512, rest=64),
    Shape("Gemma-2-9B", query_heads=16, heads=8, head_dim=256),
    Shape("Phi-3-mini", query_heads=32, heads=32, head_dim=96),
    Shape("Phi-2", query_heads=32, heads=32, head_dim=80),
    Shape("4 tokens, Mixtral-8x7B", query_heads=32, heads=8, tokens=4),
)
CONTEXTS = (32768, 131072, 8192)
BATCHES = (1, 8, 32)

LOWEST = _pure("vq175", "vq175")
TWO_BITS = _pure("vq2", "vq2")
FOUR_BITS = _pure("vq4", "vq4")
OTHERS = (
    _pure("vq3", "vq175"),
    _pure("vq3", "vq2"),
    _pure("vq4", "vq2"),
    FOUR_BITS,
    _pure("fp6", "vq3"),
    _pure("fp8", "fp8"),
)
MIX = Variant(
    "mix-2.5",
    (
        *(Pair("vq175", "vq175"), Pair("fp6", "vq3"), Pair("vq175", "vq175"), Pair("vq2", "vq2")),
        *(Pair("vq2", "vq2"), Pair("vq3", "vq2"), Pair("vq4", "vq2"), Pair("vq3", "vq2")),
    ),
)
TUNED = (LOWEST, TWO_BITS)


def grid() -> list[Cell]:
    """Every cell of a full run; last those where 31 bits do not count a side's values, which may break a baseline."""
    cells = [Cell(shape, batch, context) for batch in BATCHES for context in CONTEXTS for shape in SHAPES]
    cells += [Cell(shape, 1, 32768) for shape in OTHER_SHAPES]
    return sorted(cells, key=lambda cell: cell.plain_bytes >= 1 << 33)


def smoke_grid() -> list[Cell]:
    """Cells of a run of seconds: one tile, and runs of tiles with an end that is not whole."""
    other = (Shape("latent", query_heads=4, heads=1, head_dim=64, rest=32), Shape("tokens", 4, 2, 80, tokens=2))
    return [Cell(MIXTRAL, 1, 300), Cell(MIXTRAL, 2, 4640), Cell(QWEN3, 2, 4608), *(Cell(one, 2, 300) for one in other)]


def variants(cell: Cell, all_pairs: bool = False) -> list[Variant]:
    """What is timed in a cell; a mixture comes after the pairs that it consists of."""
    if cell.shape in OTHER_SHAPES:
        return [TWO_BITS, FOUR_BITS]
    wide = cell.shape is MIXTRAL and cell.batch < 32 and cell.context >= 32768
    return [LOWEST, TWO_BITS, *(OTHERS if wide or all_pairs else ()), MIX]


def backends(cell: Cell, variant: Variant, everywhere: bool = False) -> list[str]:
    """Implementations that a variant is timed with on a GPU; ``everywhere``: whatever the cell."""
    if cell.shape.rest or cell.shape.tokens > 1 or cell.shape.head_dim not in (64, 128):
        return ["triton", "torch"] if everywhere else ["triton"]
    compared = variant is LOWEST and (everywhere or (cell.batch == 1 and cell.context >= 32768))
    return ["cuda", "triton", "torch"] if compared else ["cuda"]
