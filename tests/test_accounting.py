"""Formulas of bytes, by invariants and by one layer counted by hand."""

import itertools

import pytest

from hf_subbyte_moe import accounting, config, ops
from hf_subbyte_moe.accounting import LayerGeometry, layer_bytes, pool_capacity, tiles_of


def test_spare_capacity_stays_below_a_sixteenth() -> None:
    for tiles in range(20_000):
        spare = pool_capacity(tiles) - tiles
        assert spare >= 0
        assert spare * 16 < max(tiles, 1)


def test_capacity_never_falls() -> None:
    capacities = [pool_capacity(tiles) for tiles in range(20_000)]
    assert all(low <= high for low, high in itertools.pairwise(capacities))


def test_capacity_is_its_own_capacity() -> None:
    """A pool that is full to its capacity was not made for less: growing by one tile always takes a step."""
    for tiles in range(1, 5000):
        assert pool_capacity(pool_capacity(tiles)) == pool_capacity(tiles)


def test_growing_takes_at_least_sixteen_steps_to_double() -> None:
    for tiles in (16, 100, 1000, 10_000):
        steps = {pool_capacity(count) for count in range(tiles, 2 * tiles)}
        assert 16 <= len(steps) <= 33


@pytest.mark.parametrize(
    ("tiles", "capacity"),
    [(0, 0), (1, 1), (15, 15), (31, 31), (32, 32), (33, 34), (63, 64), (65, 68), (1000, 1024), (1025, 1088)],
)
def test_capacity_by_example(tiles: int, capacity: int) -> None:
    assert pool_capacity(tiles) == capacity


@pytest.mark.parametrize(
    ("tokens", "sinks", "window", "tiles"),
    [
        (0, 4, 128, 0),
        (132, 4, 128, 0),
        (259, 4, 128, 0),
        (260, 4, 128, 1),
        (387, 4, 128, 1),
        (388, 4, 128, 2),
        (128, 0, 1, 0),
        (129, 0, 1, 1),
        (3, 4, 128, 0),
    ],
)
def test_a_tile_is_packed_when_it_fits_behind_sinks_and_window(
    tokens: int, sinks: int, window: int, tiles: int
) -> None:
    assert tiles_of(tokens, sinks, window) == tiles


def test_the_exact_tokens_left_over_always_fit_sinks_and_ring() -> None:
    for tokens, sinks, window in itertools.product(range(900), (0, 4), (1, 100, 128)):
        left = tokens - 128 * tiles_of(tokens, sinks, window)
        assert left < sinks + window + 128
        if tiles_of(tokens, sinks, window):
            assert left >= sinks + window


def geometry(**changes: int) -> LayerGeometry:
    shapes = {"rows": 2, "kv_heads": 3, "key_dim": 64, "value_dim": 32, "itemsize": 2, "window": 128, "sinks": 4}
    return LayerGeometry(**{**shapes, **changes})


def test_values_of_a_token_are_both_sides_of_all_heads() -> None:
    assert geometry().values_per_token == 3 * (64 + 32)


def test_a_layer_counted_by_hand() -> None:
    exact = 2 * (4 + 128 + 128) * 288 * 2  # rows, slots, values, bytes
    pages = 2 * 2 * 3 * 34 * 4  # sides, rows, heads, 33 tiles and one to spare, bytes
    means = 2 * 3 * 64 * 4
    pools = 1000 * 34 + 500 * 5
    assert exact + pages + means + pools + 77 == 299_520 + 1_632 + 1_536 + 36_500 + 77
    assert layer_bytes(geometry(), 33, [(1000, 33), (500, 5)], 77) == 299_520 + 1_632 + 1_536 + 36_500 + 77


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({"rows": 3}, (299_520 + 1_632 + 1_536) // 2),
        ({"itemsize": 4}, 299_520),
        ({"window": 129}, 2 * 288 * 2),
        ({"sinks": 5}, 2 * 288 * 2),
        ({"key_dim": 65}, 2 * 260 * 3 * 2 + 2 * 3 * 4),
        ({"value_dim": 33}, 2 * 260 * 3 * 2),
    ],
)
def test_each_shape_costs_what_it_should(change: dict[str, int], more: int) -> None:
    assert layer_bytes(geometry(**change), 33, [], 0) - layer_bytes(geometry(), 33, [], 0) == more


def test_a_layer_without_tiles_holds_its_window_and_its_means() -> None:
    assert layer_bytes(geometry(), 0, [], 0) == 299_520 + 1_536


def test_one_tile_is_the_same_everywhere() -> None:
    assert accounting.TILE_TOKENS == config.TILE_TOKENS == ops.TILE_TOKENS == 128
