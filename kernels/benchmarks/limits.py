"""What bounds a run: filters, seconds, and a device that answers."""

import time

import torch
from baselines import brief
from shapes import Cell, Variant


class DeviceLostError(RuntimeError):
    """The device answers no more; what comes later in this process cannot be measured."""


class Only:
    """Filters from the command line: ``key=value``, those of one key as alternatives."""

    KEYS = ("shape", "batch", "context", "pair", "backend")

    def __init__(self, given: list[str]) -> None:
        """Raises ValueError for a key that does not exist."""
        self._wanted: dict[str, set[str]] = {}
        for text in given:
            key, _, value = text.partition("=")
            if key not in self.KEYS or not value:
                raise ValueError(f"--only {text!r} is not possible: it is KEY=VALUE with a key of {list(self.KEYS)}")
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


def check_device(device: torch.device) -> None:
    """Give cached memory back; raises DeviceLostError where an earlier kernel broke the CUDA context."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(brief(error)) from error
