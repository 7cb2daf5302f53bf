"""What goes between a prompt's attention call, the packing of its layer, and whoever asks afterwards."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.policy import AttentionForm, ChunkStatistics


@dataclass(frozen=True)
class PromptQueries:
    """What the attention call of new tokens brings along for measuring.

    Attributes:
        query: ``[B, HQ, q, D]`` queries of the new tokens.
        form: scores to probabilities.
        weight: ``[hidden, HQ * Dv]`` output projection, or None.
        absorb: makes queries fit the stored keys where these are latents; None where they fit already.
    """

    query: Tensor
    form: AttentionForm
    weight: Tensor | None
    absorb: Callable[[Tensor], Tensor] | None = None

    def sample(self, positions: Tensor) -> Tensor:
        """``[B, HQ, S, D]`` queries at some places."""
        query = self.query[:, :, positions]
        return query if self.absorb is None else self.absorb(query)


@dataclass
class LayerStatistics:
    """What one layer's prompts showed and what its policy chose; outlives the layer's tensors.

    Attributes:
        policy: name of the policy.
        chunks: per row the chunks that were measured, oldest first.
    """

    policy: str
    chunks: list[list[ChunkStatistics]] = field(default_factory=list)


@dataclass(frozen=True)
class RowsSnapshot:
    """The stored tokens of a layer before a step: what the step may change, and nothing else.

    Attributes:
        lengths: ``[B]`` stored tokens of each row.
        tiles: ``[B]`` tiles of each row.
        frozen: ``[B]`` rows whose means and tables are fixed.
        factors: ``[B, H, D]`` by which keys are divided, or None.
        settled: per row what was settled.
        chunks: per row what was measured.
        moments: of the queries that rows have seen, and how many these were; None where they do not count.
        window: keys and values of the exact tokens; None where the step cannot overwrite one.
    """

    lengths: Ints
    tiles: Ints
    frozen: NDArray[np.bool_]
    factors: Tensor | None
    settled: list[list[tuple[NDArray[np.int64], int]]]
    chunks: list[list[ChunkStatistics]]
    moments: tuple[Tensor, Ints] | None
    window: tuple[Tensor, Tensor] | None


class Snapshot(NamedTuple):
    """A layer before a step.

    Attributes:
        length: its columns.
        starts: ``[B]`` padding of each row.
        rows: the stored tokens; only ``[B]`` their number if the step adds one to each row and packs nothing; None for
            a layer that was empty.
    """

    length: int
    starts: Ints
    rows: RowsSnapshot | Ints | None


class BitLedger:
    """Bits that a layer's rows were allowed but could not spend, for the next layer to use."""

    def __init__(self, previous: "BitLedger | None") -> None:
        self._previous = previous
        self._unspent: NDArray[np.float64] = np.zeros(0)

    def open(self, rows: int) -> None:
        """Start with nothing left over."""
        self._unspent = np.zeros(rows)

    def inherited(self, row: int) -> float:
        """What the layer before left for a row; nothing where it has not begun."""
        if self._previous is None or not len(self._previous._unspent):
            return 0.0
        return float(self._previous._unspent[row])

    def leave(self, row: int, bits: float) -> None:
        """Leave bits of a row to the next layer; a debt is negative."""
        self._unspent[row] = bits

    def select_rows(self, rows: Ints) -> None:
        """Keep, reorder or repeat rows."""
        self._unspent = self._unspent[rows]
