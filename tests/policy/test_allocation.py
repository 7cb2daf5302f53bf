"""Greedy on hulls against every possible choice."""

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_subbyte_moe.policy.allocation import Floats, allocate, convex_hull


# whole numbers: every sum and comparison below is exact
COUNTS = st.integers(1, 4)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Floats, Floats, Floats]:
    """Errors ``[U, C]``, ascending bits ``[C]`` and sizes ``[U]``."""
    units, choices = draw(COUNTS), draw(COUNTS)
    errors = [draw(st.lists(st.integers(0, 50), min_size=choices, max_size=choices)) for _ in range(units)]
    bits = draw(st.lists(st.integers(1, 9), min_size=choices, max_size=choices, unique=True).map(sorted))
    sizes = draw(st.lists(st.integers(1, 4), min_size=units, max_size=units))
    return np.array(errors, dtype=float), np.array(bits, dtype=float), np.array(sizes, dtype=float)


def spent(chosen: np.ndarray, bits: Floats, sizes: Floats) -> float:
    return float((bits[chosen] * sizes).sum())


def total(chosen: np.ndarray, errors: Floats) -> float:
    return float(errors[np.arange(len(errors)), chosen].sum())


def best(errors: Floats, bits: Floats, sizes: Floats, budget: float) -> float:
    """The smallest error of all choices within a budget."""
    choices = product(range(len(bits)), repeat=len(errors))
    fitting = [np.array(choice) for choice in choices if spent(np.array(choice), bits, sizes) <= budget]
    return min(total(choice, errors) for choice in fitting)


def hull_steps(errors: Floats, bits: Floats, sizes: Floats) -> list[tuple[float, float, float]]:
    """(gain a bit, gain, cost) of every step of every hull, the best first."""
    steps = []
    for row, size in zip(errors, sizes, strict=True):
        hull = convex_hull(bits, row)
        for low, high in pairwise(hull):
            gain, cost = row[low] - row[high], (bits[high] - bits[low]) * size
            steps.append((gain / cost, gain, cost))
    return sorted(steps, reverse=True)


@settings(max_examples=150, deadline=None)
@given(problem=problems(), spare=st.integers(0, 60))
def test_the_error_is_the_best_one_but_for_the_last_step(problem: tuple[Floats, Floats, Floats], spare: int) -> None:
    errors, bits, sizes = problem
    budget = bits.min() * sizes.sum() + spare
    chosen = allocate(errors, bits, sizes, budget)
    assert spent(chosen, bits, sizes) <= budget
    reached, optimum = total(chosen, errors), best(errors, bits, sizes, budget)
    last_step = max((gain for _, gain, _ in hull_steps(errors, bits, sizes)), default=0)
    assert optimum <= reached <= optimum + last_step


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_where_whole_steps_use_up_the_budget_the_choice_is_optimal(problem: tuple[Floats, Floats, Floats]) -> None:
    errors, bits, sizes = problem
    steps = hull_steps(errors, bits, sizes)
    budget = bits.min() * sizes.sum()
    for taken in range(len(steps) + 1):
        if taken:
            budget += steps[taken - 1][2]
        if 0 < taken < len(steps) and steps[taken - 1][0] - steps[taken][0] < 1e-9:
            continue  # equally good steps may be taken in either order
        chosen = allocate(errors, bits, sizes, budget)
        assert total(chosen, errors) == best(errors, bits, sizes, budget)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), budgets=st.tuples(st.integers(0, 120), st.integers(0, 120)))
def test_more_budget_never_means_more_error(problem: tuple[Floats, Floats, Floats], budgets: tuple[int, int]) -> None:
    errors, bits, sizes = problem
    less, more = (allocate(errors, bits, sizes, float(budget)) for budget in sorted(budgets))
    assert total(more, errors) <= total(less, errors)


@settings(max_examples=100, deadline=None)
@given(problem=problems(), short=st.integers(1, 50))
def test_a_budget_below_the_cheapest_gives_the_cheapest(problem: tuple[Floats, Floats, Floats], short: int) -> None:
    errors, bits, sizes = problem
    chosen = allocate(errors, bits, sizes, bits.min() * sizes.sum() - short)
    assert (bits[chosen] == bits.min()).all()


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_without_a_limit_every_unit_gets_its_least_error_at_the_fewest_bits(
    problem: tuple[Floats, Floats, Floats],
) -> None:
    errors, bits, sizes = problem
    chosen = allocate(errors, bits, sizes, 1e9)
    for row, choice in zip(errors, chosen, strict=True):
        assert row[choice] == row.min()
        assert bits[choice] == bits[row == row.min()].min()


def test_units_without_error_stay_cheapest_whatever_the_budget() -> None:
    errors = np.array([[0.0, 0.0, 0.0], [9.0, 3.0, 1.0]])
    chosen = allocate(errors, np.array([2.0, 3.0, 4.0]), np.array([10.0, 10.0]), 1e6)
    assert chosen.tolist() == [0, 2]


def test_the_sensitive_unit_is_served_first() -> None:
    errors = np.array([[1.0, 0.1], [100.0, 10.0]])
    bits, sizes = np.array([2.0, 4.0]), np.array([1.0, 1.0])
    assert allocate(errors, bits, sizes, 6.0).tolist() == [0, 1]
    assert allocate(errors, bits, sizes, 5.9).tolist() == [0, 0]
    assert allocate(errors, bits, sizes, 8.0).tolist() == [1, 1]


def test_a_large_unit_pays_for_its_size() -> None:
    errors = np.array([[10.0, 1.0], [9.0, 1.0]])
    bits = np.array([1.0, 2.0])
    # the first gains 9 for 4 bits, the second 8 for 1
    assert allocate(errors, bits, np.array([4.0, 1.0]), 6.0).tolist() == [0, 1]
    assert allocate(errors, bits, np.array([1.0, 1.0]), 3.0).tolist() == [1, 0]


def test_a_step_that_does_not_fit_leaves_room_for_smaller_ones() -> None:
    errors = np.array([[100.0, 1.0], [5.0, 1.0]])
    bits = np.array([1.0, 3.0])
    assert allocate(errors, bits, np.array([10.0, 1.0]), 11.0 + 2.0).tolist() == [0, 1]


def test_choices_off_the_hull_are_never_taken() -> None:
    errors = np.array([[10.0, 9.5, 1.0]])  # the middle saves next to nothing for half of the bits
    for budget in np.arange(1, 6, 0.25):
        assert allocate(errors, np.array([1.0, 2.0, 3.0]), np.ones(1), budget)[0] in (0, 2)


@settings(max_examples=200, deadline=None)
@given(
    points=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=8),
)
def test_a_hull_falls_ever_more_slowly_and_nothing_lies_below_it(points: list[tuple[int, int]]) -> None:
    bits, errors = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    hull = convex_hull(bits, errors)
    assert bits[hull[0]] == bits.min()
    assert errors[hull[0]] == errors[bits == bits.min()].min()
    assert errors[hull[-1]] == errors.min()
    assert bits[hull[-1]] == bits[errors == errors.min()].min()
    across, down = np.diff(bits[hull]), -np.diff(errors[hull])
    assert (across > 0).all()
    assert (down > 0).all()
    # slopes as products: a division would round
    assert (down[:-1] * across[1:] > down[1:] * across[:-1]).all()
    line = np.interp(bits, bits[hull], errors[hull])
    assert (errors >= line - 1e-9).all()


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_a_hull_does_not_depend_on_the_order_of_its_choices(order: list[int]) -> None:
    bits, errors = np.array([1.0, 2.0, 3.0, 4.0]), np.array([20.0, 8.0, 9.0, 2.0])
    hull = convex_hull(bits[order], errors[order])
    assert bits[order][hull].tolist() == [1.0, 2.0, 4.0]
