"""No speed without a right answer: errors of outputs against fp32 attention.

A kernel over packed tiles is compared with fp32 attention over the separately dequantized values. What it may be off
by is derived from PyTorch: bf16 attention over the same values, rounded to bf16, against fp32 attention over those
rounded values. Twice that error is the limit.
"""

from dataclasses import dataclass

import torch
from inputs import DTYPE, PackedInput, PlainInput, checked_units, dequantized
from shapes import Cell
from torch import Tensor
from torch.nn import functional as F


MAX_ERROR_RATIO = 2.0
MAX_PLAIN_ERROR = 2e-2  # of a bf16 baseline


def exact_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """``[G, D]`` fp32 attention of one row and KV head: query ``[G, D]``, keys and values ``[N, D]``."""
    query = query.float()
    scores = query @ keys.float().t() * query.shape[-1] ** -0.5
    output: Tensor = scores.softmax(-1) @ values.float()
    return output


def relative_error(output: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is right; NaN and Inf stay visible."""
    return float((output.float() - expected).norm() / expected.norm())


def _of_units(cell: Cell, states: Tensor) -> Tensor:
    """``[U, G * Sq, D]``: the checked rows and KV heads of ``[B, HQ, Sq, D]``."""
    grouped = states.reshape(cell.batch, cell.shape.heads, -1, states.shape[-1])
    return torch.stack([grouped[row, head] for row, head in checked_units(cell)])


@dataclass(frozen=True)
class Gate:
    """What an input's output should be.

    Attributes:
        cell: cache size.
        expected: ``[U, G, D]`` fp32, outputs of the checked rows and heads.
        plain_error: relative error of PyTorch's bf16 attention over the same values; None where the input is bf16.
    """

    cell: Cell
    expected: Tensor
    plain_error: float | None

    def error(self, output: Tensor) -> float:
        """Relative error of an output ``[B, HQ, 1, D]``."""
        return relative_error(_of_units(self.cell, output), self.expected)


def packed_gate(cell: Cell, given: PackedInput) -> Gate:
    """The gate for kernels over packed tiles."""
    query = _of_units(cell, given.query)
    expected, plain, plain_expected = [], [], []
    for unit, (row, head) in zip(query, checked_units(cell), strict=True):
        keys, values = dequantized(given, row, head)
        expected.append(exact_attention(unit, keys, values))
        keys, values = keys.to(DTYPE), values.to(DTYPE)
        plain_expected.append(exact_attention(unit, keys, values))
        plain.append(F.scaled_dot_product_attention(unit[None, None], keys[None, None], values[None, None])[0, 0])
    return Gate(cell, torch.stack(expected), relative_error(torch.stack(plain), torch.stack(plain_expected)))


def plain_gate(cell: Cell, given: PlainInput) -> Gate:
    """The gate for baselines."""
    units = zip(_of_units(cell, given.query), checked_units(cell), strict=True)
    expected = [exact_attention(unit, given.keys[row, head], given.values[row, head]) for unit, (row, head) in units]
    return Gate(cell, torch.stack(expected), None)
