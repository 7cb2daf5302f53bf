"""The benchmark of packing and statistics, as far as it needs no GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from subbyte_kernels.lanes import Order, pack_tile_codes, unpack_tile_codes
from subbyte_kernels.pack_tiles.reference import e2m3_codes
from support.scripts import BENCHMARKS, scripts_of


@pytest.fixture(scope="module")
def packing() -> Iterator[Any]:
    with scripts_of(BENCHMARKS, "packing") as found:
        yield found.packing


@pytest.fixture(scope="module")
def run(packing: Any) -> Any:
    return packing.Run(torch.device("cpu"), 128)


def test_rows_say_what_a_call_reads_and_writes_and_how_long_it_took(run: Any) -> None:
    run.pack("fp6", Order.KEYS, 1)
    pack, unpack = run.packing[-2:]
    records = 8 * (128 * 128 * 6 // 32 + 64) * 4
    assert pack["bytes"] == unpack["bytes"] == 8 * 128 * 128 * 2 + records
    assert [pack["op"], unpack["op"]] == ["pack", "unpack"]
    for row in (pack, unpack):
        assert row["failed"] is None
        assert row["us"] > 0
        assert row["copy_share"] == pytest.approx(row["bytes"] / 1e3 / row["us"] / run.copy_gbs)


def test_a_row_that_is_not_right_has_no_time(run: Any, packing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "pack_tiles_reference", lambda *given: packing.pack_tiles(*given) + 1)
    run.pack("fp6", Order.VALUES, 1)
    row = run.packing[-2]
    assert row["us"] is None
    assert "elements differ from the reference's" in row["failed"]


@pytest.mark.parametrize(("tier", "vector_dim"), [("fp6", 1), ("vq2", 4)])
@pytest.mark.parametrize("order", Order)
def test_records_that_differ_say_where_and_what_stands_there(
    packing: Any, tier: str, vector_dim: int, order: Order
) -> None:
    tile, token, group = 3, 17, 9
    given = packing.tiles_of(tier, order, 1, torch.device("cpu"), seed=0)
    records = given.pack()
    assert given.unlike(records, records) is None
    words = given.fmt.code_words(128)
    codes = unpack_tile_codes(records[:, :words], given.fmt.code_bits, order, 128)
    right = int(codes[tile, token, group])
    codes[tile, token, group] ^= 1
    found = torch.cat([pack_tile_codes(codes, given.fmt.code_bits, order, 128), records[:, words:]], dim=1)
    text = given.unlike(found, records)
    assert text.startswith(f"1 of {records.numel()} elements differ from the reference's; first: {tier} {order.value}")
    assert f"tile 3 (head 3), token 17, channel {9 * vector_dim}: " in text
    assert f": code {right ^ 1}, the reference's {right}; scale" in text
    scales, values = text.split("scale ")[1].split("; value ")
    found_scale, scale = (float(part) for part in scales.split(", the reference's "))
    assert found_scale == scale > 0
    parts = torch.tensor([float(part) for part in values.split(", ")]) / scale
    if tier == "fp6":
        assert e2m3_codes(parts).item() == right
    else:
        assert parts.sub(given.table[right]).norm() < parts.sub(given.table[right ^ 1]).norm()


def test_states_that_differ_say_where(packing: Any) -> None:
    given = packing.tiles_of("fp8", Order.VALUES, 1, torch.device("cpu"), seed=0)
    states = given.unpack(given.pack())
    assert given.unlike_states(states, states) is None
    found = states.clone()
    found[2, 5, 7] = 3
    text = given.unlike_states(found, states)
    assert text.startswith(f"1 of {states.numel()} elements differ from the reference's; first: fp8 values")
    assert text.endswith(f"tile 2 (head 2), token 5, channel 7: 3, the reference's {states[2, 5, 7]:.9g}")


def test_statistics_are_timed_beside_their_references(run: Any) -> None:
    run.measure()
    assert [row["implementation"] for row in run.statistics] == ["selected", "reference"] * 2
    assert all(row["us"] > 0 and row["failed"] is None for row in run.statistics)
