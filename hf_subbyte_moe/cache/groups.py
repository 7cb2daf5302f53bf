"""Rows of a layer that are alike, and are therefore handled together: as if they were more heads of one row.

Nothing is shared between them. What is done to a head is done to the heads of all of them by the same calls, since a
call takes the host as long for one row as for many.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.transfers import upload


_MOST_ROWS = 16  # what measuring a row takes for a moment, in memory, it takes for each of them
_MOST_TOKENS = 1 << 16  # likewise; a row of more of them stays alone


class RowGroup:
    """Rows in ascending order.

    Attributes:
        rows: their numbers.
        index: the same for the first dimension of a tensor: a slice where they are neighbours.
    """

    index: slice | Tensor

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        """``device``: of the tensors that :attr:`index` is for."""
        self.rows = list(rows)
        if self.rows[-1] - self.rows[0] == len(self.rows) - 1:
            self.index = slice(self.rows[0], self.rows[-1] + 1)
        else:
            self.index = upload(np.array(self.rows), device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def first(self) -> int:
        """The row that says what is the same for all of them."""
        return self.rows[0]


def group_rows(kinds: Iterable[tuple[int, Hashable]], tokens: int, device: torch.device) -> list[RowGroup]:
    """Rows and their kinds in groups of one kind, of a size that memory allows.

    Args:
        kinds: number and kind of each row.
        tokens: of each row, at most.
        device: of what the groups index.
    """
    alike: dict[Hashable, list[int]] = {}
    for row, kind in kinds:
        alike.setdefault(kind, []).append(row)
    most = max(1, min(_MOST_ROWS, _MOST_TOKENS // max(1, tokens)))
    return [RowGroup(rows[low : low + most], device) for rows in alike.values() for low in range(0, len(rows), most)]
