"""Experts as slabs: all weights of one expert side by side, so that one copy moves it.

A slab holds ``gate_up | down`` (or ``up | down``), then biases where a family has them. A bank keeps the slabs of all
layers: :class:`HostBank` in host memory, pinned where a GPU will read it; :class:`DiskBank` in files that are mapped
into memory, with as many slabs as fit kept in host memory.

Layers are converted one after the other, each giving its own weights up, so a model is never held twice.

Gives up: experts of one layer share a dtype, and training.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_subbyte_moe.experts.memory import HostBuffer
from hf_subbyte_moe.experts.residency import SlotPool


logger = logging.getLogger(__name__)

_GIB = 1 << 30
_ALIGNMENT = 16  # bytes: what matrix products on a GPU ask of a row's start
_FIRST = ("gate_up_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Part:
    """One weight of an expert inside its slab.

    Attributes:
        name: of the parameter.
        shape: of one expert's share.
        offset: of its first element.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def elements(self) -> int:
        """Elements without padding."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class SlabLayout:
    """Where an expert's weights lie in its slab.

    Attributes:
        parts: the weights, gate_up and down first.
        elements: of a slab.
        dtype: of all of them.
    """

    parts: tuple[Part, ...]
    elements: int
    dtype: torch.dtype

    @classmethod
    def of(cls, experts: nn.Module, count: int) -> "SlabLayout":
        """The layout of a module's experts.

        Raises:
            ValueError: its weights are not one tensor per kind with an expert a row, or differ in dtype.
        """
        found = {name: weight for name, weight in experts.named_parameters() if weight.shape[:1] == (count,)}
        names = [*(name for name in _FIRST if name in found), *(name for name in found if name not in _FIRST)]
        if "down_proj" not in found or len({weight.dtype for weight in found.values()}) != 1:
            raise ValueError(f"experts: {type(experts).__name__} does not keep its experts in tensors of one dtype")
        dtype = found[names[0]].dtype
        step = max(1, _ALIGNMENT // dtype.itemsize)
        parts, offset = [], 0
        for name in names:
            parts.append(Part(name, tuple(found[name].shape[1:]), offset))
            offset += -(-parts[-1].elements // step) * step
        return cls(tuple(parts), offset, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a slab."""
        return self.elements * self.dtype.itemsize

    def views(self, slabs: Tensor) -> dict[str, Tensor]:
        """``[N, *shape]`` of every weight in slabs ``[N, elements]``, without a copy."""
        return {
            part.name: slabs[:, part.offset : part.offset + part.elements].unflatten(1, part.shape)
            for part in self.parts
        }


def _nothing() -> None:
    """Nobody copies yet."""


class Bank(Protocol):
    """Where slabs come from."""

    layout: SlabLayout
    pinned: bool
    writable: bool
    drain: Callable[[], None]  # waits until no copy reads host memory any more; who copies sets it

    def slab(self, layer: int, expert: int) -> Tensor:
        """``[elements]`` in host memory; stays as it is until the copies out of it are done."""

    def weights(self, layer: int) -> dict[str, Tensor]:
        """``[E, *shape]`` of every weight of a layer, on the CPU."""

    def host_bytes(self) -> int:
        """Host memory that it occupies."""


class HostBank:
    """All slabs in host memory.

    Args:
        layout: of the slabs.
        experts: of every layer.
        pin: for copies to a GPU.
    """

    writable = True

    def __init__(self, layout: SlabLayout, experts: int, pin: bool) -> None:
        self.layout, self.drain, self.pinned = layout, _nothing, pin
        self.buffers: list[HostBuffer] = []
        self._experts = experts
        self._rows: list[tuple[Tensor, ...]] = []

    def add(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the next layer's experts, ``[E, *shape]`` each."""
        buffer = HostBuffer(self._experts * self.layout.nbytes, self.pinned)
        slabs = buffer.tensor.view(self.layout.dtype).view(self._experts, self.layout.elements)
        for name, view in self.layout.views(slabs).items():
            view.copy_(weights[name])
        self.pinned = buffer.pinned
        self.buffers.append(buffer)
        self._rows.append(slabs.unbind(0))

    def give_up(self, layer: int) -> dict[str, Tensor]:
        """The weights of a layer, whose memory goes with them; it and those behind it are not in the bank any more."""
        weights = self.weights(layer)
        del self.buffers[layer:], self._rows[layer:]
        return weights

    def slab(self, layer: int, expert: int) -> Tensor:
        """``[elements]`` of one expert."""
        return self._rows[layer][expert]

    def weights(self, layer: int) -> dict[str, Tensor]:
        """``[E, *shape]`` of every weight of a layer, views."""
        buffer, experts = self.buffers[layer], len(self._rows[layer])
        return {
            part.name: buffer.rows(self.layout.dtype, part.offset, (experts, *part.shape), self.layout.elements)
            for part in self.layout.parts
        }

    def host_bytes(self) -> int:
        """Host memory that it occupies."""
        return sum(buffer.nbytes for buffer in self.buffers)


@dataclass(frozen=True)
class TensorFile:
    """One tensor in a safetensors file."""

    path: Path
    name: str

    def map(self) -> Tensor:
        """The tensor, mapped into memory: read when it is touched."""
        with safe_open(self.path, framework="pt") as file:
            mapped: Tensor = file.get_tensor(self.name)
            return mapped


class DiskBank:
    """Slabs in files, some of them in host memory.

    Args:
        files: for every layer, the file of each weight.
        layout: of the slabs.
        experts: of every layer.
        kept: slabs in host memory.
        pin: for copies to a GPU.
        folder: kept as long as the bank, where the files are its own.
    """

    writable = False

    def __init__(
        self,
        files: Sequence[Mapping[str, TensorFile]],
        layout: SlabLayout,
        experts: int,
        kept: int,
        pin: bool,
        folder: object = None,
    ) -> None:
        self.layout, self.drain, self._folder = layout, _nothing, folder
        self.reads = 0
        self._mapped = [{name: file.map() for name, file in layer.items()} for layer in files]
        self._experts = experts
        self._buffer = HostBuffer(kept * layout.nbytes, pin)
        self.pinned = self._buffer.pinned
        slabs = self._buffer.tensor.view(layout.dtype).view(kept, layout.elements)
        self._rows = slabs.unbind(0)
        self._views = layout.views(slabs)
        self._pool = SlotPool(kept, np.full(len(files) * experts, -1, dtype=np.int32))

    def slab(self, layer: int, expert: int) -> Tensor:
        """``[elements]`` of one expert, read from its file where it is not in host memory."""
        key = layer * self._experts + expert
        slot = self._pool.slot(key)
        if slot < 0:
            slot = self._pool.claim()
            assert slot >= 0
            try:
                if self._pool.evicted_last:
                    self.drain()  # a copy may still read the slab that goes
                for name, view in self._views.items():
                    view[slot].copy_(self._mapped[layer][name][expert])
            except BaseException:
                self._pool.give_back(slot)
                raise
            self._pool.put(key, slot)
            self.reads += 1
        else:
            self._pool.touch(key)
        return self._rows[slot]

    def weights(self, layer: int) -> dict[str, Tensor]:
        """``[E, *shape]`` of every weight of a layer, mapped."""
        return dict(self._mapped[layer])

    def host_bytes(self) -> int:
        """Host memory that it occupies; pages of the files that the system keeps are not counted."""
        return self._buffer.nbytes


def refuse_full_disk(folder: Path, needed: int, what: str) -> None:
    """Refuse what a disk cannot take, before anything is written; a disk that does not say how much it can is tried.

    Raises:
        ValueError: with both numbers.
    """
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return
    if disk.total > 0 and disk.free < needed:
        raise ValueError(
            f"the disk is too small: {what} need {needed / _GIB:.1f} GiB and {disk.free / _GIB:.1f} GiB are free in "
            f"{folder}; the variable TMPDIR names another folder"
        )


def write_files(folder: Path, layer: int, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, TensorFile]:
    """Write one layer's experts where a :class:`DiskBank` finds them."""
    path = folder / f"experts-{layer:04d}.safetensors"
    save_file({name: weight.detach().to("cpu", dtype).contiguous() for name, weight in weights.items()}, path)
    return {name: TensorFile(path, name) for name in weights}
