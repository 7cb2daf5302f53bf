"""Host memory: how much is free, and buffers that a GPU copies from at full speed.

PyTorch's pinned allocator rounds every block up to a power of two, which can cost as much again as the weights; so
buffers are ordinary anonymous memory in huge pages, registered with CUDA.

Gives up: where registration fails, copies run from pageable memory, several times slower; that is said once.
"""

import contextlib
import logging
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import torch


logger = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 1 << 30


def available_memory() -> int:
    """Bytes of host memory that this process can still get."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
        limit = int((_CGROUP / "memory.max").read_text(encoding="ascii"))
        free = min(free, limit - int((_CGROUP / "memory.current").read_text(encoding="ascii")))
    return free


def refuse_too_large(needed: int, what: str) -> None:
    """Refuse what does not fit, before anything is loaded.

    Raises:
        ValueError: with both numbers.
    """
    free = available_memory()
    if needed > free:
        raise ValueError(
            f"host memory is too small: {what} need {needed / _GIB:.1f} GiB and {free / _GIB:.1f} GiB are available; "
            'placement "disk" needs less'
        )


class HostBuffer:
    """Bytes in host memory.

    Args:
        nbytes: how many.
        pin: register them with CUDA; where that fails they stay pageable, and a warning says so.
    """

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.nbytes = nbytes
        block = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
        self._block = block
        self.tensor = torch.frombuffer(block, dtype=torch.uint8)
        if pin:
            self.tensor.zero_()  # by all cores; registering would touch the pages one by one
        self.pinned = pin and _register(self.tensor)
        if self.pinned:
            weakref.finalize(self, _unregister, self.tensor)

    def rows(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: int) -> torch.Tensor:
        """Equal rows at a distance, as a tensor with a storage of its own.

        Whoever looks for weights that share memory, as ``save_pretrained`` does, finds none.

        Args:
            dtype: of the elements.
            offset: of the first row, in elements.
            shape: ``[N, *row]``.
            stride: from row to row, in elements.
        """
        flat = torch.frombuffer(self._block, dtype=dtype, offset=offset * dtype.itemsize)
        inner = torch.empty(shape[1:], device="meta").stride()
        return flat.as_strided(shape, (stride, *inner))


def _cudart() -> Any:
    return torch.cuda.cudart()


def _register(tensor: torch.Tensor) -> bool:
    result = _cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(result) == 0:
        return True
    logger.warning(
        "experts: %.1f GiB of host memory could not be pinned (CUDA error %d); copies run from pageable memory, "
        "which is many times slower (14 times where we measured)",
        tensor.nbytes / _GIB,
        int(result),
    )
    return False


def _unregister(tensor: torch.Tensor) -> None:
    with contextlib.suppress(RuntimeError):  # at exit CUDA may be gone
        for device in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(device):  # others have copied nothing, and would be woken up
                torch.cuda.synchronize(device)
        _cudart().cudaHostUnregister(tensor.data_ptr())
