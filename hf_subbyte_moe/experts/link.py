"""The way between host and device: what the device chose comes up, slabs go down.

Copies run in order, on a stream of their own. A ticket marks a place in that order; the computation waits for tickets,
the host never does. Once a layer the host waits for the device's choice of experts: everything that the computation
was given before is done then, so slots that the layer itself does not use may be overwritten, and the copy stream
waits for the same event.

Without CUDA copies are done at once and tickets say nothing.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor


_PROBE_BYTES = 1 << 28
_UNLIMITED = float("inf")
_EVENTS = 1024
_KNOWN_COUNTS = 64


class Ticket:
    """A place in the order of copies.

    Attributes:
        number: later tickets have larger ones.
        event: of the copy stream; None without one.
    """

    __slots__ = ("event", "number")

    def __init__(self, number: int, event: torch.cuda.Event | None) -> None:
        self.number = number
        self.event = event


class Link(Protocol):
    """Copies to a device, and its choices back."""

    speed: float  # bytes a second

    def read(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Whole numbers on the device, as lists; waits for them."""

    def copying(self) -> AbstractContextManager[Any]:
        """Where copies are asked."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy after all that was asked before."""

    def mark(self) -> Ticket:
        """The end of the copies asked so far."""

    def use(self, ticket: Ticket, timed: bool = False) -> None:
        """Let the computation wait for a ticket; ``timed`` counts the wait as a stall."""

    def stalled(self) -> float:
        """Seconds that the computation waited since this was asked last, as far as they are known."""

    def drain(self) -> None:
        """Wait until every copy is done."""


class DirectLink:
    """Copies that are done when they are asked."""

    def __init__(self) -> None:
        self.speed = _UNLIMITED
        self._tickets = 0
        self._seconds = 0.0

    def read(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """Whole numbers as lists."""
        return [tensor.flatten().tolist() for tensor in tensors]

    def copying(self) -> AbstractContextManager[Any]:
        """Anywhere."""
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy."""
        start = time.perf_counter()
        target.copy_(source)
        self._seconds += time.perf_counter() - start

    def mark(self) -> Ticket:
        """A number."""
        self._tickets += 1
        return Ticket(self._tickets, None)

    def use(self, ticket: Ticket, timed: bool = False) -> None:
        """Nothing to wait for."""

    def stalled(self) -> float:
        """Every copy was waited for."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def drain(self) -> None:
        """Nothing is on its way."""


def _events() -> Iterator[torch.cuda.Event]:
    """Events again and again, since making one takes longer than using it.

    One that is recorded anew while somebody waits for what it meant before makes him wait longer, never too short: all
    of a ring are recorded on one stream.
    """
    return itertools.cycle([torch.cuda.Event(enable_timing=True) for _ in range(_EVENTS)])


class CudaLink:
    """Copies on a stream of their own.

    Args:
        device: a CUDA device.
        most: whole numbers that are read at a time, at least.
    """

    def __init__(self, device: torch.device, most: int = 4096) -> None:
        self.device = device
        self.speed = _UNLIMITED  # until it is measured
        self.stream = torch.cuda.Stream(device)
        self._choices, self._copies = _events(), _events()
        self._read = next(self._choices)
        self._numbers = torch.empty(most, dtype=torch.int64, pin_memory=True)
        self._parts: dict[tuple[int, ...], list[Tensor]] = {}
        self._tickets = 0
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def measure(self, source: Tensor, target: Tensor) -> None:
        """Measure the speed with copies of one slab onto another."""
        repeats = max(2, min(64, _PROBE_BYTES // max(1, source.nbytes)))
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with self.copying():
            self.copy(target, source)
            first.record()
            for _ in range(repeats):
                self.copy(target, source)
            last.record()
        last.synchronize()
        self.speed = repeats * source.nbytes / (first.elapsed_time(last) * 1e-3)

    def read(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        """One small copy for every tensor, and one wait."""
        parts = self._room(tuple(tensor.numel() for tensor in tensors))
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.view(-1) if tensor.is_contiguous() else tensor.reshape(-1), non_blocking=True)
        self._read = next(self._choices)
        self._read.record(torch.cuda.current_stream(self.device))
        self.stream.wait_event(self._read)
        self._read.synchronize()
        return [part.tolist() for part in parts]

    def _room(self, counts: tuple[int, ...]) -> list[Tensor]:
        """Pinned memory for so many numbers."""
        parts = self._parts.get(counts)
        if parts is None:
            if sum(counts) > self._numbers.numel():
                with torch.inference_mode(False):  # later calls may be outside it
                    self._numbers = torch.empty(2 * sum(counts), dtype=torch.int64, pin_memory=True)
                self._parts = {}
            if len(self._parts) > _KNOWN_COUNTS:
                self._parts = {}
            with torch.inference_mode(False):
                parts = self._parts[counts] = list(self._numbers[: sum(counts)].split(list(counts)))
        return parts

    def copying(self) -> AbstractContextManager[Any]:
        """On the stream for copies."""
        return torch.cuda.stream(self.stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Ticket:
        """An event behind the copies."""
        self._tickets += 1
        event = next(self._copies)
        event.record(self.stream)
        return Ticket(self._tickets, event)

    def use(self, ticket: Ticket, timed: bool = False) -> None:
        """The current stream waits."""
        assert ticket.event is not None
        torch.cuda.current_stream(self.device).wait_event(ticket.event)
        if timed:
            self._waits.append((self._read, ticket.event))

    def stalled(self) -> float:
        """From the choice of experts to the end of their copies, of waits that are over."""
        milliseconds = 0.0
        while self._waits and self._waits[0][1].query():
            asked, done = self._waits.pop(0)
            milliseconds += max(0.0, asked.elapsed_time(done))
        return 1e-3 * milliseconds

    def drain(self) -> None:
        """Wait for the copy stream."""
        self.stream.synchronize()
