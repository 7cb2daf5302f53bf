"""Brings experts into slots: those that a layer needs at once, and those that the next one may need.

Demand goes first, since it is asked first and copies run in order. What is foretold is copied in chunks, up to what
the link can carry before the next layer asks; what does not fit is not asked at all. When a layer has chosen, loads
for it that it does not need are given up, and half a load that it does need is completed.

A slot is known under its key only when all its copies are asked; the computation waits for their ticket before it
reads it. A copy that fails leaves its slot empty and fails the call that needed the expert.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_subbyte_moe.experts.counters import Counters
from hf_subbyte_moe.experts.link import Link, Ticket
from hf_subbyte_moe.experts.residency import SlotPool
from hf_subbyte_moe.experts.weights import Bank


logger = logging.getLogger(__name__)

_CHUNK_BYTES = 8 << 20  # within 4 % of the link's best speed


@dataclass
class Load:
    """A slot that is being filled ahead of time.

    Attributes:
        slot: the slot.
        done: elements whose copies are asked.
    """

    slot: int
    done: int = 0


class Prefetcher:
    """Loads of one model's experts.

    Args:
        bank: where slabs come from.
        pool: which slot holds what.
        slots: ``[S, elements]`` on the device.
        link: to the device.
        experts: of every layer.
        counters: what is counted.
    """

    def __init__(
        self, bank: Bank, pool: SlotPool, slots: Tensor, link: Link, experts: int, counters: Counters
    ) -> None:
        self.bank, self.pool, self.link, self.experts, self.counters = bank, pool, link, experts, counters
        self._rows = slots.unbind(0)
        self._chunk = max(1, _CHUNK_BYTES // bank.layout.dtype.itemsize)
        self._arriving: dict[int, Ticket] = {}  # keys whose copies are asked and were not waited for
        self._ahead: dict[int, dict[int, Load]] = {}  # by layer: loads that are not complete
        self._unused: dict[int, set[int]] = {}  # by layer: keys brought ahead of time and not used yet

    def demand(self, layer: int, chosen: Sequence[int]) -> int:
        """Have a layer's experts in slots; the computation that follows waits for them.

        Args:
            layer: the layer.
            chosen: its experts, each once, at most as many as there are slots.

        Returns:
            Bytes that had to be copied.
        """
        base = layer * self.experts
        keys = [base + expert for expert in chosen]
        missing, wait = [], None
        unused = self._unused.get(layer, set())
        for key in keys:
            if self.pool.slot(key) < 0:
                missing.append(key)
                continue
            self.pool.touch(key)
            ticket = self._arriving.pop(key, None)
            if ticket is not None and (wait is None or ticket.number > wait.number):
                wait = ticket
            if key in unused:
                unused.remove(key)
                self.counters.used_ahead(layer, self.bank.layout.nbytes)
        copied = 0
        if missing:
            keep = set(keys)
            try:
                with self.link.copying():
                    for key in missing:
                        copied += self._bring(layer, key, keep)
            except BaseException:
                self._note_arriving(missing)
                raise
            wait = self.link.mark()
        self.counters.demanded(layer, len(keys), len(missing), copied)
        self.give_up(layer)
        if wait is not None:
            self.link.use(wait, timed=bool(missing))
        return copied

    def foretell(self, layer: int, likely: Sequence[int], budget: float, keep: set[int]) -> int:
        """Begin to bring experts that a layer may need.

        Args:
            layer: the layer.
            likely: experts, the likeliest first.
            budget: bytes that may be copied.
            keep: keys that are needed now.

        Returns:
            Bytes whose copies were asked.
        """
        elements, size = self.bank.layout.elements, self.bank.layout.dtype.itemsize
        budget = min(budget, len(likely) * self.bank.layout.nbytes)
        base, asked = layer * self.experts, 0
        keep = keep | {base + expert for expert in likely}
        ahead = self._ahead.setdefault(layer, {})
        complete = []
        for expert in likely:
            key, left = base + expert, int(budget - asked) // size
            if self.pool.slot(key) >= 0:
                self.pool.touch(key)
                continue
            if left < min(self._chunk, elements):
                break
            load = ahead.get(key)
            if load is None:
                slot = self.pool.claim(keep)
                if slot < 0:
                    break
                load = ahead[key] = Load(slot)
            end = elements if left >= elements - load.done else load.done + left // self._chunk * self._chunk
            try:
                source = self.bank.slab(layer, expert)
                with self.link.copying():
                    self.link.copy(self._rows[load.slot][load.done : end], source[load.done : end])
            except (OSError, RuntimeError) as error:  # the call that needs the expert tries again, and fails
                logger.warning("experts: layer %d, expert %d could not be brought ahead: %s", layer, expert, error)
                self.pool.give_back(ahead.pop(key).slot)
                break
            asked += (end - load.done) * size
            load.done = end
            if end == elements:
                complete.append(key)
        if asked:
            ticket = self.link.mark()
            for key in complete:
                self.pool.put(key, ahead.pop(key).slot)
                self._arriving[key] = ticket
                self._unused.setdefault(layer, set()).add(key)
            self.counters.foretold(layer, asked)
        return asked

    def give_up(self, layer: int) -> None:
        """Drop loads for a layer that has chosen, and let what it did not use go first."""
        size = self.bank.layout.dtype.itemsize
        for load in self._ahead.pop(layer, {}).values():
            self.pool.give_back(load.slot)
            self.counters.wasted(layer, load.done * size)
        for key in self._unused.pop(layer, ()):
            self.pool.demote(key)
            self.counters.wasted(layer, self.bank.layout.nbytes)

    def give_all_up(self) -> None:
        """Drop every load that is not complete."""
        for layer in [*self._ahead, *self._unused]:
            self.give_up(layer)

    def _bring(self, layer: int, key: int, keep: set[int]) -> int:
        load = self._ahead.get(layer, {}).pop(key, None)
        if load is None:
            slot = self.pool.claim(keep)
            if slot < 0:  # the rest is being filled for others
                self._give_up_loads(keep)
                slot = self.pool.claim(keep)
            assert slot >= 0
            load = Load(slot)
        elif load.done:
            self.counters.used_ahead(layer, load.done * self.bank.layout.dtype.itemsize)
        try:
            source = self.bank.slab(layer, key - layer * self.experts)
            target = self._rows[load.slot]
            if load.done:
                source, target = source[load.done :], target[load.done :]
            self.link.copy(target, source)
        except BaseException:
            self.pool.give_back(load.slot)
            raise
        self.pool.put(key, load.slot)
        return source.nbytes

    def _give_up_loads(self, keep: set[int]) -> None:
        size = self.bank.layout.dtype.itemsize
        for layer, loads in self._ahead.items():
            for key in [key for key in loads if key not in keep]:
                load = loads.pop(key)
                self.pool.give_back(load.slot)
                self.counters.wasted(layer, load.done * size)

    def _note_arriving(self, keys: Sequence[int]) -> None:
        """A demand failed half way: what was copied must still be waited for."""
        ticket = self.link.mark()
        for key in keys:
            if self.pool.slot(key) >= 0:
                self._arriving[key] = ticket
