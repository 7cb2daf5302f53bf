"""Decides, from what it measures, whether to prefetch and how much.

A :class:`Pace` knows how long the link lies idle between a layer's copies and the next layer's choice (after the last
layer, the first one's of the next token), so a prefetch gets what the link can carry in that time and no more. A
:class:`Governor` tries prefetching and not prefetching on alternating runs of decode steps, keeps what was faster, and
looks again now and then: where a prediction costs more than it brings, prefetch is off, and stays off but for these
looks.

Gives up: a few steps at the start, and 1 in 64 later, run with what turns out slower.
"""

import math
from collections.abc import Sequence
from statistics import median

from hf_subbyte_moe.config import OFF


_RUN = 4  # steps with one choice; the first of them still feels the choice before
_ROUNDS = 3
_SETTLED_STEPS = 448
_GAIN = 0.005  # that prefetch must bring, as a share of a step
_SMOOTHING = 0.2


class Pace:
    """How much a link can carry ahead of time.

    Args:
        layers: how many.
        speed: of the link, bytes a second.
    """

    def __init__(self, layers: int, speed: float) -> None:
        self.speed = speed
        self._idle: list[float | None] = [None] * layers
        self._last: tuple[int, float, int] | None = None

    def chose(self, layer: int, now: float) -> None:
        """A layer's choice is known; after the last layer comes the first, of the next token."""
        if self._last is None:
            return
        before, then, copied = self._last
        self._last = None
        if (before + 1) % len(self._idle) != layer:
            return
        idle = max(0.0, now - then - copied / self.speed)
        known = self._idle[before]
        self._idle[before] = idle if known is None else known + _SMOOTHING * (idle - known)

    def asked(self, layer: int, now: float, copied: int) -> None:
        """Its copies were asked."""
        self._last = (layer, now, copied)

    def budget(self, layer: int) -> float:
        """Bytes that may be copied between a layer's choice and the next one's."""
        idle = self._idle[layer]
        if idle is None:
            return 0.0
        return idle * self.speed if math.isfinite(self.speed) else self.speed


class Governor:
    """Chooses one of several ways by the time that steps take.

    Args:
        ways: what can be chosen, ``off`` first.
    """

    def __init__(self, ways: Sequence[str]) -> None:
        self.ways = tuple(ways)
        self._schedule: list[str] = []
        self._seconds: dict[str, list[float]] = {}
        self.settled: str | None = None
        self._since = 0
        self._start()

    def _start(self) -> None:
        runs = [way for _ in range(_ROUNDS) for way in self.ways for _ in range(_RUN)]
        self._schedule = [] if len(self.ways) == 1 else runs
        self._seconds = {way: [] for way in self.ways}
        self._since = 0
        if len(self.ways) == 1:
            self.settled = self.ways[0]

    @property
    def way(self) -> str:
        """What the coming step uses."""
        return self._schedule[0] if self._schedule else (self.settled or OFF)

    def took(self, seconds: float) -> None:
        """A step is over."""
        if not self._schedule:
            self._since += 1
            if self._since >= _SETTLED_STEPS and len(self.ways) > 1:
                self._start()
            return
        way = self._schedule.pop(0)
        if len(self._schedule) % _RUN != _RUN - 1:  # not the first of its run
            self._seconds[way].append(seconds)
        if not self._schedule:
            self.settled = self._fastest()

    def medians(self) -> dict[str, float]:
        """Seconds of a step with each way, as measured last."""
        return {way: median(seconds) for way, seconds in self._seconds.items() if seconds}

    def _fastest(self) -> str:
        found = self.medians()
        best = min(found, key=lambda way: found[way])
        return best if found[best] < (1 - _GAIN) * found[self.ways[0]] else self.ways[0]
