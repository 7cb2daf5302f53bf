"""Which tiers the rows of a layer took, and which ones the next tiles take.

A choice is for all of the layer's heads, on whatever rank they are, and so is what is remembered of it.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hf_subbyte_moe.accounting import TILE_TOKENS
from hf_subbyte_moe.cache.groups import RowGroup
from hf_subbyte_moe.cache.prompts import BitLedger, LayerStatistics
from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.distributed.heads import HeadRanks
from hf_subbyte_moe.policy import (
    KEYS,
    VALUES,
    ChunkStatistics,
    Measured,
    Policy,
    budget_bits,
    gather_chunks,
    side_bits,
    side_codec,
)


TierChoice = NDArray[np.int64]


class TierChoices:
    """What was chosen for every row of a layer.

    Attributes:
        ranks: who holds the layer's other heads; None where these are all.
        settled: per row the tiers ``[H, 2]`` that later tiles take, and the row's length at that time; newest last.
        statistics: what was measured and chosen.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        policy: Policy,
        ledger: BitLedger,
        statistics: LayerStatistics,
        dims: tuple[int, int],
        latent: bool,
        rows: int,
    ) -> None:
        """Start with nothing chosen.

        Args:
            config: options.
            policy: chooses.
            ledger: bits that this layer leaves to the next.
            statistics: to be filled.
            dims: widths of both sides.
            latent: the first side is a latent.
            rows: B.
        """
        self._policy, self._ledger, self.statistics = policy, ledger, statistics
        self._dims, self._wanted = dims, budget_bits(config, dims, latent)
        self._bits = side_bits(policy.tiers, dims, latent)
        self._ids = np.array(
            [[side_codec(codec, side, latent).tier_id for codec in policy.tiers] for side in (KEYS, VALUES)]
        )
        self.ranks: HeadRanks | None = None
        self.settled: list[list[tuple[TierChoice, int]]] = [[] for _ in range(rows)]
        ledger.open(rows)
        statistics.chunks = [[] for _ in range(rows)]

    def later(self, rows: RowGroup) -> TierChoice:
        """``[b, H, 2]`` tiers of tiles that come without measurement: those of the last chunk that was settled."""
        return np.stack([self.settled[row][-1][0] for row in rows.rows])

    def choose(self, rows: RowGroup, chunks: Sequence[Sequence[Measured]], length: int) -> TierChoice:
        """Choose and remember tiers for rows of ``length`` tokens.

        Args:
            rows: which.
            chunks: what was measured on each of them, of the same tiles.
            length: of each row.

        Returns:
            Tier ids ``[b, tiles, H, 2]`` of the chunks' tiles.
        """
        if self.ranks is not None:  # all rows at once
            count = len(chunks[0])
            gathered = gather_chunks([chunk for row in chunks for chunk in row], self.ranks)
            chunks = [gathered[low : low + count] for low in range(0, len(gathered), count)]
        return np.stack([self._choose(*row, length) for row in zip(rows.rows, chunks, strict=True)])

    def _choose(self, row: int, chunks: Sequence[Measured], length: int) -> TierChoice:
        heads = len(chunks[0].entropy)
        own = slice(None) if self.ranks is None else self.ranks.part(heads)
        sizes = np.array(
            [[max(1, chunk.tiles) * TILE_TOKENS * dim for dim in self._dims] for chunk in chunks], dtype=np.float64
        )
        budget = (self._wanted or 0.0) * float(sizes.sum()) * heads + self._ledger.inherited(row)
        chosen = self._policy.choose(chunks, self._bits, sizes, budget)
        sides = np.broadcast_to(np.arange(2), chosen.shape)
        if self._wanted is not None:
            spent = self._bits[sides, chosen] * sizes[:, None, :]
            self._ledger.leave(row, budget - float(spent.sum()))
        chosen_ids = self._ids[sides, chosen]
        for chunk, choice, tier_ids in zip(chunks, chosen, chosen_ids, strict=True):
            errors = np.take_along_axis(chunk.errors, choice[..., None], axis=-1)[..., 0]
            self.statistics.chunks[row].append(ChunkStatistics(**vars(chunk), tiers=tier_ids, chosen_errors=errors))
        self.settled[row].append((chosen_ids[-1, own], length))
        return np.repeat(chosen_ids[:, own], [chunk.tiles for chunk in chunks], axis=0)

    def crop(self, row: int, length: int, kept: int) -> None:
        """A row is only ``length`` tokens long now and has ``kept`` tiles."""
        settled = [entry for entry in self.settled[row] if entry[1] <= length]
        if kept and not settled:  # the tiles that are left were chosen by the oldest entry
            settled = [(tiers, min(length, settled_at)) for tiers, settled_at in self.settled[row][:1]]
        self.settled[row] = settled
        self.statistics.chunks[row] = [
            chunk for chunk in self.statistics.chunks[row] if chunk.first_tile < kept or settled
        ]

    def select_rows(self, rows: Ints) -> None:
        """Keep, reorder or repeat rows."""
        self._ledger.select_rows(rows)
        self.settled = [list(self.settled[row]) for row in rows]
        self.statistics.chunks = [list(self.statistics.chunks[row]) for row in rows]
