"""What goes between a prompt's attention call, the packing of its layer, and whoever asks afterwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.policy import SIDES, AttentionForm, ChunkStatistics
from hf_subbyte_moe.transfers import Floats


@dataclass(frozen=True)
class PromptQueries:
    """What the attention call of new tokens brings along for measuring.

    Attributes:
        query: ``[B, HQ, q, D]`` queries of the new tokens.
        form: scores to probabilities.
        weight: ``[hidden, HQ * Dv]`` output projection, or None.
        absorb: makes queries fit the stored keys where these are latents; None where they fit already.
        seen: ``[B, H, T, D]`` keys and values of all tokens so far, read back where they were packed; None where
            nobody did that, and for a first prompt.
    """

    query: Tensor
    form: AttentionForm
    weight: Tensor | None
    absorb: Callable[[Tensor], Tensor] | None = None
    seen: tuple[Tensor, Tensor] | None = None

    def of(self, rows: slice | Tensor, new: int, tokens: int) -> "PromptQueries":
        """Those of some rows alone, which have ``new`` new tokens, the last of ``tokens``."""
        seen = None
        if self.seen is not None:
            keys, values = (states[rows][:, :, states.shape[2] - tokens :] for states in self.seen)
            seen = (keys, values)
        return replace(self, query=self.query[rows][:, :, self.query.shape[2] - new :], seen=seen)

    def sampled(self, probe: Tensor, moment: Tensor | None) -> "SampledQueries":
        """The queries at ``[S]`` places to measure with, and at ``[M]`` places for their moments, if at any."""
        moments = None if moment is None else self._at(moment)
        return SampledQueries(self.query.shape[2], self._at(probe), moments, self.form, self.weight)

    def _at(self, positions: Tensor) -> Tensor:
        query = self.query[:, :, positions]
        return query if self.absorb is None else self.absorb(query)


@dataclass(frozen=True)
class SampledQueries:
    """What is kept of a prompt's queries until its layer is packed.

    Attributes:
        tokens: how many queries there were.
        probe: ``[B, HQ, S, D]`` those that measure.
        moment: ``[B, HQ, M, D]`` those whose moments choose the keys' codes; None where none do.
        form: scores to probabilities.
        weight: ``[hidden, HQ * Dv]`` output projection, or None.
    """

    tokens: int
    probe: Tensor
    moment: Tensor | None
    form: AttentionForm
    weight: Tensor | None


class LayerStatistics:
    """What one layer's prompts showed and what its policy chose; outlives the layer's tensors.

    Attributes:
        policy: name of the policy.
        finish: what has to be done first where a prompt was measured and nothing chosen yet, which keeps no layer
            alive; None where all is chosen.
    """

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.finish: Callable[[], None] | None = None
        self._chunks: list[list[ChunkStatistics]] = []

    @property
    def chunks(self) -> list[list[ChunkStatistics]]:
        """Per row the chunks that were measured, oldest first."""
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        return self._chunks

    @chunks.setter
    def chunks(self, chunks: list[list[ChunkStatistics]]) -> None:
        self._chunks = chunks

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, which hold nothing that waits."""
        return {**vars(self), "_chunks": self.chunks, "finish": None}


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


@dataclass(frozen=True)
class MeasuredPrompt:
    """New tokens of a layer that were measured and are not stored yet.

    Attributes:
        groups: what goes on with storing them, for rows that are alike.
        numbers: what was measured of them, which holds none of them.
        stream: of the GPU that measures them; None elsewhere.
    """

    groups: Sequence[Iterator[object]]
    numbers: "MeasuredNumbers"
    stream: torch.cuda.Stream | None


@dataclass(frozen=True)
class MeasuredNumbers:
    """What was measured of new tokens of a layer.

    Attributes:
        layer: name of the layer.
        finite: whether all keys are finite, and all values; nothing where that is known already.
        choices: choose and remember the tiers of each group of rows; either they are called, or the groups go on.
    """

    layer: str
    finite: Callable[[], list[Floats]]
    choices: Sequence[Callable[[], object]]

    def check(self) -> None:
        """Refuse tokens that are not finite.

        Raises:
            ValueError: names the layer.
        """
        for name, finite in zip(SIDES, self.finite(), strict=False):
            if not finite:
                raise ValueError(
                    f"the {name} of {self.layer} hold NaN or Inf; nothing was stored of the call that brought them"
                )

    def choose(self) -> None:
        """Choose tiers for tokens that nobody will store.

        Raises:
            ValueError: see :meth:`check`.
        """
        self.check()
        for choose in self.choices:
            choose()


@dataclass
class PromptMask:
    """What the attention mask of a prompt says, which is the same for all layers.

    Attributes:
        mask: the mask.
        starts: ``[B]`` padding columns of each row.
        among_new: ``[B, q, q]`` which of the new tokens their queries see; None before somebody asked.
    """

    mask: Tensor
    starts: Ints
    among_new: Tensor | None = None


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
