"""What moving experts did: hits, misses, bytes, stalls and how often a prediction was right, by layer."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


_COUNTED = (
    "calls",  # of the layer
    "asked",  # experts that calls needed
    "missed",  # of them, not in a slot
    "demand_bytes",  # copied because they were needed
    "ahead_bytes",  # copied because they were foretold
    "useful_bytes",  # of these, needed by the call they were brought for
    "wasted_bytes",  # of these, not needed by it
    "streamed_bytes",  # copied for calls that needed more experts than there are slots
    "foretold",  # experts that predictions named
    "right",  # of them, chosen
    "sets",  # predictions
    "exact",  # of them, right in every expert
)


@dataclass(frozen=True)
class LayerCounts:
    """One layer's counts, as shares where that says more.

    Attributes:
        layer: number of the MoE layer.
        hit_rate: experts that were in a slot when they were needed; None before the first.
        bytes_per_call: copied for the layer, all reasons together; None likewise.
        slots_right: share of foretold experts that were chosen; None without a prediction.
        sets_right: share of predictions that named every expert; None likewise.
    """

    layer: int
    hit_rate: float | None
    bytes_per_call: float | None
    slots_right: float | None
    sets_right: float | None


class Counters:
    """Counts by layer.

    Args:
        layers: how many.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.counts: dict[str, NDArray[np.int64]] = {name: np.zeros(layers, dtype=np.int64) for name in _COUNTED}
        self.stall_seconds = 0.0

    def reset(self) -> None:
        """Start anew."""
        for counts in self.counts.values():
            counts[:] = 0
        self.stall_seconds = 0.0

    def demanded(self, layer: int, asked: int, missed: int, copied: int) -> None:
        """A layer needed experts."""
        counts = self.counts
        counts["calls"][layer] += 1
        counts["asked"][layer] += asked
        counts["missed"][layer] += missed
        counts["demand_bytes"][layer] += copied

    def streamed(self, layer: int, copied: int) -> None:
        """Slabs were copied for a layer that is streamed."""
        self.counts["streamed_bytes"][layer] += copied

    def foretold(self, layer: int, copied: int) -> None:
        """Slabs were copied ahead of time."""
        self.counts["ahead_bytes"][layer] += copied

    def used_ahead(self, layer: int, nbytes: int) -> None:
        """They were needed."""
        self.counts["useful_bytes"][layer] += nbytes

    def wasted(self, layer: int, nbytes: int) -> None:
        """They were not."""
        self.counts["wasted_bytes"][layer] += nbytes

    def predicted(self, layer: int, named: int, right: int, exact: bool) -> None:
        """A prediction met what was chosen."""
        counts = self.counts
        counts["foretold"][layer] += named
        counts["right"][layer] += right
        counts["sets"][layer] += 1
        counts["exact"][layer] += exact

    def total(self, name: str) -> int:
        """One count over all layers."""
        return int(self.counts[name].sum())

    @property
    def hit_rate(self) -> float | None:
        """Experts that were in a slot when they were needed."""
        return _share(self.total("asked") - self.total("missed"), self.total("asked"))

    @property
    def bytes(self) -> int:
        """Everything that was copied."""
        return sum(self.total(name) for name in ("demand_bytes", "ahead_bytes", "streamed_bytes"))

    @property
    def tokens(self) -> int:
        """Forward passes that ran in slots."""
        return int(self.counts["calls"].max(initial=0))

    def by_layer(self) -> list[LayerCounts]:
        """Every layer."""
        counts = {name: column.tolist() for name, column in self.counts.items()}
        found = []
        for layer in range(self.layers):
            at = {name: column[layer] for name, column in counts.items()}
            copied = at["demand_bytes"] + at["ahead_bytes"]
            found.append(
                LayerCounts(
                    layer=layer,
                    hit_rate=_share(at["asked"] - at["missed"], at["asked"]),
                    bytes_per_call=_share(copied, at["calls"]),
                    slots_right=_share(at["right"], at["foretold"]),
                    sets_right=_share(at["exact"], at["sets"]),
                )
            )
        return found


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
