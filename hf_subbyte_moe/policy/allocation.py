"""Spend a budget of bits where an error table says that it helps most.

Greedy on the lower convex hull of each unit's error over its bytes: the steps of all units, best gain a bit first,
taken while they fit. On hulls this is optimal up to the last step; what the last step leaves is handed to the next
layer, so a whole model lands on its budget although a layer of a small model has few steps to choose from.

Source: reverse water-filling over measured distortion, as in RateQuant (arXiv 2605.06675).
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


Floats = NDArray[np.float64]


def convex_hull(bits: Floats, errors: Floats) -> list[int]:
    """Indices of the choices on the lower hull, fewest bits first; each one costs more and errs less than the last."""
    hull: list[int] = []
    for index in np.lexsort((errors, bits)):
        if hull and errors[index] >= errors[hull[-1]]:
            continue
        while len(hull) > 1:
            before, last = hull[-2], hull[-1]
            gain = (errors[before] - errors[last]) * (bits[index] - bits[last])
            if gain > (errors[last] - errors[index]) * (bits[last] - bits[before]):
                break
            hull.pop()
        if hull and bits[index] == bits[hull[-1]]:
            hull.pop()
        hull.append(int(index))
    return hull


def allocate(errors: Floats, bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
    """Choose one of C choices for each of U units.

    Args:
        errors: ``[U, C]`` error of a unit under a choice, finite.
        bits: ``[C]`` or ``[U, C]`` bits a value of a choice.
        sizes: ``[U]`` values in a unit.
        budget: bits for all units together.

    Returns:
        ``[U]`` choices. Each unit gets at least its cheapest choice, also where the budget does not reach that far.
    """
    bits = np.broadcast_to(bits, errors.shape)
    hulls = [convex_hull(cost, error) for cost, error in zip(bits, errors, strict=True)]
    chosen = np.array([hull[0] for hull in hulls], dtype=np.int64)
    left = budget - float((bits[np.arange(len(chosen)), chosen] * sizes).sum())
    steps = []
    for unit, hull in enumerate(hulls):
        for rank, (low, high) in enumerate(pairwise(hull)):
            cost = (bits[unit, high] - bits[unit, low]) * sizes[unit]
            steps.append((-(errors[unit, low] - errors[unit, high]) / cost, unit, rank, cost, high))
    reached = [0] * len(hulls)
    for _, unit, rank, cost, high in sorted(steps):
        if rank == reached[unit] and cost <= left:
            chosen[unit], reached[unit], left = high, rank + 1, left - cost
    return chosen
