"""Blocks of a launch that stays the same while tiles are added."""

import numpy as np
import pytest

from subbyte_kernels.decode_attention.balance import cut_rows, extend_blocks
from subbyte_kernels.decode_attention.steady import SPARE_TILES, tiles_ahead


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("tiles", [0, 1, 40, 300])
def test_extended_blocks_cover_every_unit_once(tiles: int, mixed: bool) -> None:
    heads, rows = 4, 2
    generator = np.random.default_rng(tiles)
    lengths = np.array([2 * tiles] * 4 + [2 * max(1, tiles - 5)] * 4)
    costs = (np.arange(2 * tiles + 2) < lengths[:, None]).astype(np.float64)
    costs *= generator.choice([0.5, 0.75, 1.25], (len(costs), 1)) if mixed else 1
    blocks = cut_rows(costs, heads, 132, 8)
    grown = lengths + 2 * generator.integers(0, 3, len(lengths))
    extended = extend_blocks(blocks, grown, heads)
    assert np.array_equal(extended[:, :5], blocks[:, :5])
    assert np.array_equal(extended[:, 6], blocks[:, 6])
    for pair in range(rows * heads):
        own = extended[extended[:, 0] * heads + extended[:, 1] == pair]
        own = own[own[:, 2].argsort()]
        assert own[:, 2].tolist() == list(range(own[0, 3]))
        covered = [unit for block in own for unit in range(block[4], block[5])]
        assert covered == list(range(grown[pair]))


def test_there_is_room_for_some_tiles_or_a_sixteenth() -> None:
    assert tiles_ahead(0) == tiles_ahead(8) == SPARE_TILES
    assert tiles_ahead(1600) == 100
