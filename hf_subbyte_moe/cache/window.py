"""The exact tokens of a layer: the first few of each row and a ring of the recent ones.

Token i of a row (counted from its first real token) lives in slot i if it is a sink, else in slot
``sinks + (i - sinks) % ring``. Attention does not care about the order of keys, so the ring is never unrolled for one
query; rows of different length need no alignment, and appending moves nothing.

Source: attention sinks, StreamingLLM (arXiv 2309.17453); exact recent window, KIVI (arXiv 2402.02750).
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_subbyte_moe.ops import TILE_TOKENS
from hf_subbyte_moe.transfers import upload


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

    @torch.inference_mode(False)
    def _buffer(self, states: Tensor) -> Tensor:
        batch, heads, _, dim = states.shape
        return states.new_zeros(batch, heads, self.sinks + self.ring, dim)

    def slots(self, index: Ints) -> Ints:
        """Slots of token indices."""
        return np.where(index < self.sinks, index, self.sinks + (index - self.sinks) % self.ring)

    def write(self, rows: int | slice | Tensor, first: int, key_states: Tensor, value_states: Tensor) -> None:
        """Store neighbouring tokens, the first of them at index ``first``; n <= ring.

        Args:
            rows: one row, or several of the same places.
            first: index of the first token.
            key_states: ``[H, n, D]`` of one row or ``[b, H, n, D]`` of several.
            value_states: likewise.
        """
        slots = self.slots(np.arange(first, first + key_states.shape[-2]))
        edges = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
        for low, high in itertools.pairwise(edges):  # neighbours: nothing to upload
            if low < high:
                part = slice(int(slots[low]), int(slots[low]) + high - low)
                self.keys[rows, :, part] = key_states[..., low:high, :]
                self.values[rows, :, part] = value_states[..., low:high, :]

    def read(self, rows: int | slice | Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Copies of the tokens ``first`` to ``last - 1``, ``[H, n, D]`` of one row or ``[b, H, n, D]`` of several."""
        slots = self.slots(np.arange(first, last))
        if len(slots) and slots[-1] - slots[0] == len(slots) - 1:  # neighbours: nothing to upload
            part = slice(int(slots[0]), int(slots[-1]) + 1)
            return self.keys[rows, :, part].clone(), self.values[rows, :, part].clone()
        index = upload(slots, self.keys.device)
        return self.keys[rows].index_select(-2, index), self.values[rows].index_select(-2, index)

    def visible(self, lengths: Ints, first_recent: Ints) -> Tensor:
        """``[B, 1, slots]`` bool: which slots hold a token, given the rows' lengths and the ring's oldest tokens."""
        return self.visible_ahead(lengths, first_recent, 0)[0]

    def visible_ahead(self, lengths: Ints, first_recent: Ints, steps: int) -> Tensor:
        """``[steps + 1, B, 1, slots]`` bool: now, and after each of so many tokens more that take free slots."""
        since = self.visible_since(lengths, first_recent)
        seen = (since <= np.arange(steps + 1, dtype=np.int32)[:, None, None])[:, :, None]
        return upload(seen, self.keys.device)

    def visible_since(self, lengths: Ints, first_recent: Ints) -> NDArray[np.int32]:
        """``[B, slots]``: after how many tokens more, that take free slots, a slot holds one; 0 for now."""
        slot = np.arange(self.sinks + self.ring)
        length = lengths[:, None]
        newest = length - 1 - self.sinks
        in_ring = slot - self.sinks
        index = newest - (newest - in_ring) % self.ring + self.sinks  # the latest token that fell into the slot
        recent = (in_ring >= 0) & (index >= np.maximum(first_recent[:, None], self.sinks)) & (newest >= 0)
        held = np.where(in_ring < 0, slot < length, recent)
        next_ring = np.maximum(length, self.sinks)  # the next token that falls into the ring
        wait = np.where(in_ring < 0, slot, next_ring + (slot - next_ring) % self.ring) - length
        since: NDArray[np.int32] = np.where(held, 0, wait + 1).astype(np.int32)
        return since

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

    @torch.inference_mode(False)
    def select_rows(self, rows: Tensor) -> None:
        """Keep, reorder or repeat rows."""
        self.keys = self.keys.index_select(0, rows)
        self.values = self.values.index_select(0, rows)

    def tensors(self) -> list[Tensor]:
        """Everything that it holds."""
        return [self.keys, self.values]


class StepsAhead:
    """Masks and places of the next tokens, one for each row at a time: many take no longer to upload than one.

    They hold until anything but :meth:`append` changes a row.

    Attributes:
        left: tokens that can still be appended to every row.
        version: of the tiles.
        layout: what the caller knows about the tokens that it appended.
    """

    def __init__(self, window: ExactWindow, lengths: Ints, first_recent: Ints, free: int, version: int) -> None:
        """Look ahead from rows of these lengths, which can take ``free`` tokens before one must be packed."""
        self.left = min(free, _STEPS_AHEAD)
        self.version = version
        self.layout: object = None
        self._window, self._lengths = window, lengths
        self._step = 0
        self._masks = window.visible_ahead(lengths, first_recent, self.left).unbind(0)
        self._places: Sequence[tuple[Tensor, Tensor] | Tensor] | None = None

    @property
    def mask(self) -> Tensor:
        """``[B, 1, slots]`` bool, what :meth:`ExactWindow.visible` says now."""
        return self._masks[self._step]

    def append(self, key_states: Tensor, value_states: Tensor) -> None:
        """Store one token ``[B, H, 1, D]`` for every row."""
        if self._places is None:
            self._places = self._next_places()
        place = self._places[self._step]
        if isinstance(place, tuple):
            place[0].copy_(key_states)
            place[1].copy_(value_states)
        else:
            for held, states in ((self._window.keys, key_states), (self._window.values, value_states)):
                held.view(-1, held.shape[-1]).index_copy_(0, place, states.reshape(-1, held.shape[-1]))
        self._step += 1
        self.left -= 1

    def _next_places(self) -> Sequence[tuple[Tensor, Tensor] | Tensor]:
        """Of each step, views of the slot that all rows take, or ``[B * H]`` slots in all rows' and heads' buffers."""
        window = self._window
        slots = window.slots(self._lengths + np.arange(self.left)[:, None])
        rows, heads, size = window.keys.shape[:3]
        if (slots == slots[:, :1]).all():
            first = int(slots[0, 0])
            run = min(self.left, size - first)  # then the ring begins again
            views = []
            for held in (window.keys, window.values):
                parts = (held.narrow(2, first, run), held.narrow(2, window.sinks, self.left - run))
                views.append([view for part in parts if part.shape[2] for view in part.split(1, 2)])
            return list(zip(*views, strict=True))
        buffers = size * np.arange(rows * heads).reshape(rows, heads)
        return upload((slots[:, :, None] + buffers).reshape(self.left, -1), window.keys.device).unbind(0)
