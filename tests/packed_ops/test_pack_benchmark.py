"""The benchmark of packing and statistics, as far as it needs no GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from subbyte_kernels.lanes import Order
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


def test_statistics_are_timed_beside_their_references(run: Any) -> None:
    run.measure()
    assert [row["implementation"] for row in run.statistics] == ["selected", "reference"] * 2
    assert all(row["us"] > 0 and row["failed"] is None for row in run.statistics)
