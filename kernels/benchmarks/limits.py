"""What bounds a run: filters, seconds, and a device that answers."""

import signal
import time
from collections.abc import Callable
from typing import ClassVar, TypeVar

import torch
from baselines import brief
from shapes import LOWEST, MIX, OTHERS, TWO_BITS, Cell, Variant


_Made = TypeVar("_Made")


class DeadlineError(BaseException):
    """The seconds of a run are over: no failure of what is interrupted, so ``except Exception`` lets it pass."""


class DeviceLostError(RuntimeError):
    """The device answers no more; what comes later in this process cannot be measured."""


class Only:
    """Filters from the command line: ``key=value``, those of one key as alternatives."""

    KEYS = ("shape", "batch", "context", "pair", "backend")
    _NAMED: ClassVar[dict[str, list[str]]] = {
        "pair": [variant.name for variant in (LOWEST, TWO_BITS, *OTHERS, MIX)],
        "backend": ["cuda", "triton", "torch"],
    }

    def __init__(self, given: list[str]) -> None:
        """Raises ValueError for a key, a pair or a backend that does not exist."""
        self._wanted: dict[str, set[str]] = {}
        for text in given:
            key, _, value = text.partition("=")
            if key not in self.KEYS or not value:
                raise ValueError(f"--only {text!r} is not possible: it is KEY=VALUE with a key of {list(self.KEYS)}")
            if value.lower() not in self._NAMED.get(key, [value.lower()]):
                raise ValueError(f"--only {text!r} is not possible: a {key} is one of {self._NAMED[key]}")
            self._wanted.setdefault(key, set()).add(value.lower())

    def _takes(self, key: str, value: str) -> bool:
        return key not in self._wanted or value.lower() in self._wanted[key]

    def cell(self, cell: Cell) -> bool:
        named = self._wanted.get("shape")
        shape = named is None or any(cell.shape.name.lower().startswith(name) for name in named)
        return shape and self._takes("batch", str(cell.batch)) and self._takes("context", str(cell.context))

    def variant(self, variant: Variant) -> bool:
        return self._takes("pair", variant.name)

    def backend(self, name: str) -> bool:
        return self._takes("backend", name)


class Budget:
    """Seconds that a run may take, and what it left out for want of them."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self.skipped: list[str] = []

    def allows(self, seconds: float, what: str) -> bool:
        """Whether something that takes about so long still fits; remembered if it does not."""
        if self._end is None or time.monotonic() + seconds <= self._end:
            return True
        self.skipped.append(what)
        return False

    def within(self, what: str, call: Callable[[], _Made]) -> _Made | None:
        """What a call returns, or None where the seconds are over before: it is interrupted, and remembered.

        Compilers and kernels are interrupted as soon as they come back to Python. A call that swallows that is
        interrupted again each second, and what it returns is dropped.
        """
        if self._end is None:
            return call()
        interrupted = False

        def interrupt(*_: object) -> None:
            nonlocal interrupted
            interrupted = True
            raise DeadlineError

        made: _Made | None = None
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, max(self._end - time.monotonic(), 1e-3), 1.0)
            made = call()
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        except (DeadlineError, RuntimeError):  # ending a graph that is being captured raises its own
            if not interrupted:
                raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        if interrupted:
            self.skipped.append(what)
            return None
        return made


def check_device(device: torch.device) -> None:
    """Give cached memory back; raises DeviceLostError where an earlier kernel broke the CUDA context."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(brief(error)) from error
