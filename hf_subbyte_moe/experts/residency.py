"""Which expert is in which slot: a fixed pool, least recently used first out.

Keys are ``layer * experts + expert``. A key is known only while its slot holds it wholly; a slot that is being filled
belongs to nobody, so a copy that fails or is given up leaves nothing wrong behind.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray


_NOWHERE = -1


class SlotPool:
    """Slots and their keys.

    Args:
        slots: how many.
        where: ``[keys]`` kept up to date with every key's slot, -1 where it has none.
    """

    def __init__(self, slots: int, where: NDArray[np.int32]) -> None:
        self.slots = slots
        self.map = where
        self.evicted_last = False
        self._where: OrderedDict[int, int] = OrderedDict()  # least recently used first
        self._free = list(range(slots))[::-1]

    def __len__(self) -> int:
        return len(self._where)

    def slot(self, key: int) -> int:
        """Where a key is; -1 if it is nowhere."""
        return self._where.get(key, _NOWHERE)

    def touch(self, key: int) -> None:
        """Make a key the most recently used."""
        self._where.move_to_end(key)

    def demote(self, key: int) -> None:
        """Make a key the next to go."""
        if key in self._where:
            self._where.move_to_end(key, last=False)

    def claim(self, keep: Collection[int] = ()) -> int:
        """A slot to fill: a free one, or that of the least recently used key.

        Args:
            keep: keys that must stay.

        Returns:
            The slot; -1 if every slot holds a key that must stay.
        """
        self.evicted_last = not self._free
        if self._free:
            return self._free.pop()
        for key in self._where:
            if key not in keep:
                return self._forget(key)
        return _NOWHERE

    def put(self, key: int, slot: int) -> None:
        """A claimed slot now holds a key."""
        assert key not in self._where
        self._where[key] = slot
        self.map[key] = slot

    def give_back(self, slot: int) -> None:
        """A claimed slot holds nothing."""
        self._free.append(slot)

    def reserve(self, slots: Iterable[int]) -> None:
        """Take slots out of the pool, with what they hold."""
        wanted = set(slots)
        for key in [key for key, slot in self._where.items() if slot in wanted]:
            self._forget(key)
        self._free = [slot for slot in self._free if slot not in wanted]

    def _forget(self, key: int) -> int:
        self.map[key] = _NOWHERE
        return self._where.pop(key)
