"""Calls that need more experts than slots should give: whole layers pass through two buffers.

While one layer computes out of one buffer, the next layer's experts come into the other: from slots where they are in
slots, from the host otherwise. An expert lies at its own number, so experts functions see a layer as they know it. The
buffers are the pool's first slots where it has enough, and what lies there afterwards stays known; else they are
memory of their own, given back when a call fits into slots again.

A buffer is filled only when the host has seen the choice of a later layer than the one that computed out of it, so it
is not in use any more, whatever the number of layers.

Source: double-buffered layers at prefill, as FreeToken (arXiv 2608.16157).
"""

from collections.abc import Collection

import torch
from torch import Tensor

from hf_subbyte_moe.experts.counters import Counters
from hf_subbyte_moe.experts.link import Link, Ticket
from hf_subbyte_moe.experts.residency import SlotPool
from hf_subbyte_moe.experts.weights import Bank


_BUFFERS = 2
_AHEAD = 0.75  # share of its experts that a layer needs for the next to be brought whole


class LayerStream:
    """Two layers' worth of slabs.

    Args:
        bank: where slabs come from.
        pool: which slot holds what.
        slots: ``[S, elements]`` on the device.
        link: to the device.
        experts: of every layer.
        layers: how many.
        counters: what is counted.
    """

    def __init__(
        self, bank: Bank, pool: SlotPool, slots: Tensor, link: Link, experts: int, layers: int, counters: Counters
    ) -> None:
        self.bank, self.pool, self.link, self.counters = bank, pool, link, counters
        self.experts, self.layers = experts, layers
        self._slots = slots
        self._borrows = pool.slots >= _BUFFERS * experts
        self._own: Tensor | None = None
        self._layer: list[int | None] = [None] * _BUFFERS
        self._loaded: list[set[int]] = [set(), set()]
        self._tickets: list[Ticket | None] = [None, None]
        self.active = False

    def bring(self, layer: int, needed: Collection[int]) -> Tensor:
        """Have a layer's experts in a buffer; the computation that follows waits for them.

        Args:
            layer: the layer.
            needed: its experts that are used.

        Returns:
            ``[E, elements]``; rows of experts that are not needed may hold anything.
        """
        self._open()
        buffer = layer % _BUFFERS
        self._fill(buffer, layer, sorted(needed))
        following = layer + 1
        if following < self.layers and len(needed) >= _AHEAD * self.experts:
            ticket = self._tickets[buffer]
            self._fill((buffer + 1) % _BUFFERS, following, range(self.experts))
        else:
            ticket = self._tickets[buffer]
        if ticket is not None:
            self.link.use(ticket, timed=True)
        return self._rows(buffer)

    def close(self) -> None:
        """Let slots know what lies in borrowed buffers, or give own ones back."""
        if not self.active:
            return
        self.active = False
        if self._own is not None:
            self.link.drain()
            self._own = None
        else:
            self.link.drain()  # once, after a prompt: what is known is whole
            for buffer, layer in enumerate(self._layer):
                for expert in range(self.experts):
                    slot = buffer * self.experts + expert
                    key = None if layer is None else layer * self.experts + expert
                    if key is not None and expert in self._loaded[buffer] and self.pool.slot(key) < 0:
                        self.pool.put(key, slot)
                    else:
                        self.pool.give_back(slot)
        self._forget()

    def abandon(self) -> None:
        """A copy failed: nothing in the buffers is known."""
        if not self.active:
            return
        self._forget()
        self.close()

    def _forget(self) -> None:
        self._layer = [None] * _BUFFERS
        self._loaded = [set(), set()]
        self._tickets = [None, None]

    def _open(self) -> None:
        if self.active:
            return
        self.active = True
        if self._borrows:
            self.pool.reserve(range(_BUFFERS * self.experts))
        else:
            shape = (_BUFFERS * self.experts, self.bank.layout.elements)
            with torch.inference_mode(False):  # later calls may be outside it
                self._own = torch.empty(shape, dtype=self.bank.layout.dtype, device=self._slots.device)

    def _rows(self, buffer: int) -> Tensor:
        held = self._slots if self._own is None else self._own
        return held[buffer * self.experts : (buffer + 1) * self.experts]

    def _fill(self, buffer: int, layer: int, wanted: Collection[int]) -> None:
        if self._layer[buffer] != layer:
            self._layer[buffer] = layer
            self._loaded[buffer] = set()
        loaded, rows, copied = self._loaded[buffer], self._rows(buffer), 0
        asked = [expert for expert in wanted if expert not in loaded]
        with self.link.copying():
            for expert in asked:
                slot = self.pool.slot(layer * self.experts + expert)
                if slot >= 0:
                    self.link.copy(rows[expert], self._slots[slot])
                else:
                    self.link.copy(rows[expert], self.bank.slab(layer, expert))
                    copied += self.bank.layout.nbytes
                loaded.add(expert)
        if asked:
            self._tickets[buffer] = self.link.mark()
            self.counters.streamed(layer, copied)
