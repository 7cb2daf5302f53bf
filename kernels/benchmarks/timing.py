"""Time of a call on the device alone: replays of a CUDA graph that holds one call for each of several input sets.

A graph leaves out Python and launches that overlap in a real step anyway. Sets take turns and the L2 cache is
overwritten before each replay, so every call reads its cache from memory. The median of the replays counts, and all
of it is done twice. Without CUDA, the wall clock times calls one by one: enough to try the scripts out.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


Call = Callable[[], object]

DESCRIPTION = (
    "CUDA graph with one call for each input set (together more than 4 times the L2 cache), L2 overwritten before "
    "each replay; median of about 30 ms of replays, measured twice; kernels and merges included, launches from Python "
    "not"
)
_FLUSH_BYTES = 256 << 20
_CALLS = 20  # in a graph at least, so that its own start is spread over them
_SHORT_US = 500.0
_MAX_REPLAYS = 100
_PATIENCE = 4.0


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call.

    Attributes:
        us: median of the first pass.
        us_again: median of the second pass.
        graph: whether a CUDA graph was replayed; without one, launches from Python count too.
    """

    us: float
    us_again: float
    graph: bool


class Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._flush = torch.empty(_FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def time(self, calls: Sequence[Call], budget_ms: float = 30.0, graph: bool = True, best_us: float = 0.0) -> Timing:
        """Time one call, given the same call on several inputs.

        Args:
            calls: one for each input set.
            budget_ms: time that the replays of a pass may take.
            graph: try a CUDA graph; what cannot be captured is called from Python.
            best_us: a competitor's time; far behind it, one replay is enough. 0 without one.
        """
        if self.device.type != "cuda":
            return Timing(*(_wall_us(calls) for _ in range(2)), graph=False)
        for call in calls:  # compile, plan, load
            call()
        single_us = self._replay_us(calls[0])
        rounds = math.ceil(_CALLS / len(calls)) if single_us < _SHORT_US else 1
        captured = self._capture([*calls] * rounds) if graph else None

        def run() -> None:
            for call in calls:
                call()

        replay, count = (run, len(calls)) if captured is None else (captured.replay, rounds * len(calls))
        self._replay_us(replay)
        estimate = self._replay_us(replay)
        fewest = 1 if best_us and estimate / count > _PATIENCE * best_us else 3
        replays = min(_MAX_REPLAYS, max(fewest, int(1e3 * budget_ms / max(estimate, 1e-3))))
        passes = [statistics.median(self._replays_us(replay, replays)) / count for _ in range(2)]
        return Timing(*passes, graph=captured is not None)

    def _capture(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
        """A graph of the calls, or None where one of them waits for the device."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            calls[0]()  # what a call keeps for each stream must not be made within the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                for call in calls:
                    call()
        except RuntimeError:
            torch.cuda.synchronize()  # an error that is not about capturing comes up again here
            return None
        return graph

    def _replay_us(self, replay: Call) -> float:
        return self._replays_us(replay, 1)[0]

    def _replays_us(self, replay: Call, count: int) -> list[float]:
        """Microseconds of each replay; the flush before it hides how long the host takes to launch it."""
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for before, after in marks:
            self._flush.zero_()
            before.record()
            replay()
            after.record()
        torch.cuda.synchronize()
        return [1e3 * before.elapsed_time(after) for before, after in marks]

    def copy_gbs(self, size: int = 2 << 30) -> float:
        """GB/s of a device copy, reads and writes both counted: what bytes could cost at best."""
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        timing = self.time([lambda: target.copy_(source)], budget_ms=60.0, graph=False)
        return 2 * size / 1e3 / min(timing.us, timing.us_again)


def _wall_us(calls: Sequence[Call]) -> float:
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)
