"""Numbers between the host and a GPU that nobody waits for.

A GPU works through what it was given while the host prepares more. A host that looks at a tensor waits until all of
that is done, and the GPU then has nothing to do until the host has caught up. So what the host must know is asked for
together, comes while both go on, and is read when it has had the time to come.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


Floats = NDArray[np.float64]


def waits_cost(states: Tensor) -> bool:
    """Whether the host should run ahead of what computes these states; elsewhere it looks at once."""
    return states.is_cuda


def upload(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """Values on a device. What they were given in may be changed as soon as this returns, unless it lay there."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    # out of other memory, more than 64 KiB would wait, and what has gaps would go through such memory
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


@contextmanager
def following(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let the current stream go on with what another one made, and drop it: each waits for the other, no host does."""
    current = None if stream is None else torch.cuda.current_stream(stream.device)
    if stream is None or current is None or current == stream:
        yield
        return
    current.wait_stream(stream)
    try:
        yield
    finally:
        stream.wait_stream(current)  # memory of what is dropped is the other stream's, which may write to it at once


@lru_cache(maxsize=64)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a GPU for many small kernels, which go before those of others wherever there is room for them."""
    return torch.cuda.Stream(device, priority=-1)


class Answers:
    """What the host wants to know about tensors of one device: asked together, read later, with one wait."""

    def __init__(self) -> None:
        self._asked: list[Tensor] = []
        self._beside: torch.cuda.Stream | None = None
        self._kept: list[object] = []
        self._sent: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._found: list[Floats] | None = None

    def ask(self, *tensors: Tensor) -> Callable[[], list[Floats]]:
        """Want the values of tensors, as fp32 holds them; what is returned gives them, once they were sent."""
        first = len(self._asked)
        self._asked += [tensor.detach() for tensor in tensors]
        part = slice(first, len(self._asked))
        return lambda: self._read()[part]

    @contextmanager
    def beside(self, *read: Tensor, keep: object) -> Iterator[None]:
        """Ask for what the current stream need not wait for: on a GPU, it is computed on another one.

        Args:
            *read: tensors that are read there; they may be dropped before they were.
            keep: holds everything else that is read there, for as long as nobody has read the answers.
        """
        if not read[0].is_cuda:
            yield
            return
        self._kept.append(keep)
        self._beside = side_stream(read[0].device)
        self._beside.wait_stream(torch.cuda.current_stream(read[0].device))
        for tensor in read:
            tensor.record_stream(self._beside)
        with torch.cuda.stream(self._beside):
            yield

    def send(self) -> None:
        """Let all that was asked for come to the host."""
        if not self._asked:
            return
        if self._beside is not None:
            self._beside.wait_stream(torch.cuda.current_stream(self._beside.device))
        # without one, asking for no stream would still look for a device
        with nullcontext() if self._beside is None else torch.cuda.stream(self._beside):
            together = torch.cat([tensor.float().flatten() for tensor in self._asked])
            self._sent = together.to("cpu", non_blocking=together.is_cuda)  # which means pinned memory
            if together.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record(torch.cuda.current_stream(together.device))

    def _read(self) -> list[Floats]:
        if self._found is None:
            self._found = self._arrived()
            self._kept.clear()
        return self._found

    def _arrived(self) -> list[Floats]:
        if not self._asked:
            return []
        assert self._sent is not None
        if self._event is not None:
            self._event.synchronize()
        values = self._sent.numpy().astype(np.float64)
        parts = np.split(values, np.cumsum([tensor.numel() for tensor in self._asked])[:-1])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, self._asked, strict=True)]
