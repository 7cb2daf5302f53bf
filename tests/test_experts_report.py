"""The table, the bars and the plot of measured offload."""

import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import experts_report


def row(system: str, ms: float, resident: float = 0.5, **own: Any) -> dict[str, Any]:
    return {
        "model": "Mixtral-8x7B",
        "layers": 12,
        "resident": resident,
        "trace": "reference",
        "system": system,
        "ms": ms,
        "hit_rate": 0.5,
        "bytes": 10**9,
        "share_of_bound": 40 / ms,
        "compute_ms": 10.0,
        "device": "a device",
        "commit": "abc",
        **own,
    }


ROWS = [
    row("none", 50.0),
    row("gate", 46.0, step="fused"),
    row("accelerate", 2000.0),
    row("none", 80.0, 0.25),
    row("gate", 82.0, 0.25),
]
ACCURACY = [
    {"predictor": name, "layer": layer, "found": [share, 0.9, 0.95], "exact": 0.5}
    for name, share in (("control", 1.0), ("gate", 0.7))
    for layer in (1, 2)
]


def test_bars_are_judged_by_the_rows() -> None:
    lines = experts_report.bars(ROWS)
    assert lines[0] == "- times faster than accelerate: 40.00 to 40.00; bar 20 holds."
    assert lines[1] == "- of the bound at 50% resident, the best of ours: 0.87 to 0.87; bar 0.85 holds."
    assert lines[2] == "- with prefetch, over without: 0.98 to 1.09; bar 0.99 missed in 1 of 2."
    assert experts_report.bars([]) == []


def test_tables_show_every_row(tmp_path: Path) -> None:
    text = experts_report.table({"conditions": {"device": "a device"}, "rows": ROWS})
    assert text.count("Mixtral-8x7B, 12 layers") == len(ROWS)
    assert "| Mixtral-8x7B, 12 layers, 50%, reference | accelerate | modules | 2000.0 | 50% | 1,000 | 0.02 |" in text
    assert "| Mixtral-8x7B, 12 layers, 50%, reference | gate | fused | 46.0 | 50% | 1,000 | 0.87 |" in text
    assert experts_report.table(experts_report.load(tmp_path / "none.json")).startswith("Not measured yet")
    accuracy = experts_report.accuracy_table({"accuracy": ACCURACY})
    assert "| gate | 0.700 | 0.900 | 0.950 | 0.500 | 1: 0.700 |" in accuracy


def test_a_plot_knows_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "experts.png"
    experts_report.plot(ROWS, ACCURACY, path)
    assert not experts_report.is_stale(path, [ROWS, ACCURACY])
    assert experts_report.is_stale(path, [ROWS[:-1], ACCURACY])
