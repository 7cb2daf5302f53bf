"""A device's clock and memory: events and a peak on a GPU; a CPU has the host's clock and no peak."""

import gc
import time
from typing import Any

import torch


_COPY_BYTES = {"cuda": 4 << 30, "cpu": 64 << 20}
_COPIES = 8


class DeviceClock:
    """Of one device.

    Attributes:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._on_gpu = device, device.type == "cuda"

    @property
    def name(self) -> str:
        """Of the device, for people."""
        return torch.cuda.get_device_name(self.device) if self._on_gpu else "CPU"

    def mark(self) -> Any:
        """Now, for the device."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms_between(self, first: Any, last: Any) -> float:
        """Milliseconds between two marks that the device has passed; see :meth:`wait`."""
        return float(first.elapsed_time(last)) if self._on_gpu else 1e3 * float(last - first)

    def wait(self) -> None:
        """Until the device is done."""
        if self._on_gpu:
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Let go of memory that nobody uses, and forget the peak."""
        gc.collect()
        if self._on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Allocated at most since :meth:`clear`; None where nobody counts."""
        return torch.cuda.max_memory_allocated(self.device) if self._on_gpu else None

    def copy_rate(self) -> float:
        """Bytes/s that the device copies, reads and writes counted."""
        size = _COPY_BYTES[self.device.type]
        source = torch.empty(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        spans: list[float] = []
        for _ in range(_COPIES):
            first = self.mark()
            target.copy_(source)
            last = self.mark()
            self.wait()
            spans.append(self.ms_between(first, last))
        return 1e3 * 2 * size / min(spans)
