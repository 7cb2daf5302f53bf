"""What a tier is: a byte layout, where its table comes from, and how much it loses."""

from dataclasses import dataclass
from enum import Enum

from hf_subbyte_moe.ops import TileFormat


class Table(Enum):
    """Where a tier's table comes from."""

    NONE = "none"
    CODEBOOK = "codebook"  # vectors, one table for all heads of a side: universal or fitted to the prompt
    CENTROIDS = "centroids"  # scalars, fitted to each head's own values


@dataclass(frozen=True)
class Codec:
    """One tier.

    Attributes:
        format: byte layout; its name is the tier's name.
        table: where the table comes from.
        relative_error: E|x - decoded|^2 / E|x|^2 on rotated (Gaussian) vectors: the prior where nothing was measured,
            and what a test holds the codec to.
        summary: one line for tables that people read.
    """

    format: TileFormat
    table: Table
    relative_error: float
    summary: str

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def tier_id(self) -> int:
        return self.format.tier_id
