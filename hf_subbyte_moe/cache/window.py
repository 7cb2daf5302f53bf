"""The exact tokens of a layer: the first few of each row and a ring of the recent ones.

Token i of a row (counted from its first real token) lives in slot i if it is a sink, else in slot
``sinks + (i - sinks) % ring``. Attention does not care about the order of keys, so the ring is never unrolled for one
query; rows of different length need no alignment, and appending moves nothing.

Source: attention sinks, StreamingLLM (arXiv 2309.17453); exact recent window, KIVI (arXiv 2402.02750).
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.ops import TILE_TOKENS


Ints = NDArray[np.int64]
_STEPS_AHEAD = 32


class ExactWindow:
    """Keys and values ``[B, H, sinks + ring, D]`` in the model's dtype; ring = window + 128."""

    def __init__(self, key_states: Tensor, value_states: Tensor, sinks: int, window: int) -> None:
        """Take shapes, dtype and device from ``[B, H, any, D]`` tensors."""
        self.sinks = sinks
        self.ring = window + TILE_TOKENS
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)

    def _buffer(self, states: Tensor) -> Tensor:
        batch, heads, _, dim = states.shape
        return states.new_zeros(batch, heads, self.sinks + self.ring, dim)

    def slots(self, index: Ints) -> Ints:
        """Slots of token indices."""
        return np.where(index < self.sinks, index, self.sinks + (index - self.sinks) % self.ring)

    def append(self, lengths: Ints, key_states: Tensor, value_states: Tensor) -> None:
        """Append one token to every row: ``[B, H, 1, D]``; ``lengths`` are the rows' lengths before."""
        slots = self.slots(lengths)
        if (slots == slots[0]).all():
            slot = int(slots[0])
            self.keys.select(2, slot).copy_(key_states.select(2, 0))
            self.values.select(2, slot).copy_(value_states.select(2, 0))
            return
        rows = torch.arange(len(slots), device=self.keys.device)
        columns = torch.from_numpy(slots).to(self.keys.device)
        self.keys[rows, :, columns] = key_states[:, :, 0]
        self.values[rows, :, columns] = value_states[:, :, 0]

    def write(self, row: int, first: int, key_states: Tensor, value_states: Tensor) -> None:
        """Store neighbouring tokens ``[H, n, D]`` of one row, the first of them at index ``first``; n <= ring."""
        index = np.arange(first, first + key_states.shape[1])
        slots = torch.from_numpy(self.slots(index)).to(self.keys.device)
        self.keys[row].index_copy_(1, slots, key_states)
        self.values[row].index_copy_(1, slots, value_states)

    def read(self, row: int, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Copies of the tokens ``first`` to ``last - 1`` of one row, ``[H, n, D]``."""
        slots = self.slots(np.arange(first, last))
        if len(slots) and slots[-1] - slots[0] == len(slots) - 1:  # neighbours: nothing to upload
            part = slice(int(slots[0]), int(slots[-1]) + 1)
            return self.keys[row, :, part].clone(), self.values[row, :, part].clone()
        index = torch.from_numpy(slots).to(self.keys.device)
        return self.keys[row].index_select(1, index), self.values[row].index_select(1, index)

    def visible(self, lengths: Ints, first_recent: Ints) -> Tensor:
        """``[B, 1, slots]`` bool: which slots hold a token, given the rows' lengths and the ring's oldest tokens."""
        slot = np.arange(self.sinks + self.ring)
        length = lengths[:, None]
        newest = length - 1 - self.sinks
        in_ring = slot - self.sinks
        index = newest - (newest - in_ring) % self.ring + self.sinks  # the latest token that fell into the slot
        recent = (in_ring >= 0) & (index >= np.maximum(first_recent[:, None], self.sinks)) & (newest >= 0)
        held = np.where(in_ring < 0, slot < length, recent)
        return torch.from_numpy(held[:, None]).to(self.keys.device)

    def widen(self, tokens: int, lengths: Ints, first_recent: Ints) -> None:
        """Make the ring longer; the rows' tokens from ``first_recent`` on keep their places in the row."""
        held = []
        for row, (first, length) in enumerate(zip(first_recent.tolist(), lengths.tolist(), strict=True)):
            held.append((first, *self.read(row, first, max(first, length))))
        old_keys, old_values = self.keys, self.values
        self.ring += tokens
        self.keys, self.values = self._buffer(old_keys), self._buffer(old_values)
        for new, old in ((self.keys, old_keys), (self.values, old_values)):
            new[:, :, : self.sinks] = old[:, :, : self.sinks]
        for row, (first, key, value) in enumerate(held):
            self.write(row, first, key, value)

    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows."""
        self.keys = self.keys.index_select(0, rows)
        self.values = self.values.index_select(0, rows)

    def tensors(self) -> list[Tensor]:
        """Everything that it holds."""
        return [self.keys, self.values]


class MasksAhead:
    """Masks of a window for the next decode steps, made together: many take no longer to upload than one."""

    def __init__(self) -> None:
        self._lengths: Ints = np.zeros(0, dtype=np.int64)
        self._first_recent: Ints = self._lengths
        self._masks: Tensor | None = None

    def mask(self, window: ExactWindow, lengths: Ints, first_recent: Ints) -> Tensor:
        """``[B, 1, slots]`` bool, what :meth:`ExactWindow.visible` says."""
        made = self._masks
        if made is not None and len(lengths) == len(self._lengths) and made.shape[-1] == window.keys.shape[2]:
            step = int(lengths[0] - self._lengths[0])
            if (
                0 <= step < _STEPS_AHEAD
                and (lengths - self._lengths == step).all()
                and (first_recent == self._first_recent).all()
            ):
                return made[step]
        self._lengths, self._first_recent = lengths.copy(), first_recent.copy()
        ahead = (lengths + np.arange(_STEPS_AHEAD)[:, None]).ravel()
        masks = window.visible(ahead, np.tile(first_recent, _STEPS_AHEAD))
        self._masks = masks.unflatten(0, (_STEPS_AHEAD, -1))
        return self._masks[0]
