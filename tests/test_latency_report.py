"""The table and the waterfall of measured latencies."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import latency_report


def row(system: str, ms: float, context: int = 1024, **own: Any) -> dict[str, Any]:
    return {
        "model": "toy",
        "weights": "bf16",
        "context": context,
        "batch": 1,
        "system": system,
        "policy": "uniform:vq2",
        "ms_generate": ms,
        "ms_mean": ms + 1,
        "ms_step": None if "static" in system else ms / 2,
        "share_of_roofline": 1.5 / ms,
        "first_ms": 100.0,
        "peak_gb": 2.0,
        "device": "GPU",
        "commit": "abc",
        **own,
    }


def write(path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    conditions = {"torch": "x", "copy_bytes_a_second": 4e12}
    path.write_text(json.dumps({"conditions": conditions, "rows": rows}))
    return latency_report.load(path)


def test_rows_come_by_cell_and_system(tmp_path: Path) -> None:
    given = [
        row("+ graph", 6.0),
        row("stock static compiled", 8.0),
        row("+ graph", 7.0, 512),
        row("stock default", 90.0),
    ]
    result = write(tmp_path / "latency.json", given)
    assert [(one["context"], one["system"]) for one in result["rows"]] == [
        (512, "+ graph"),
        (1024, "stock default"),
        (1024, "stock static compiled"),
        (1024, "+ graph"),
    ]
    text = latency_report.table(result)
    assert "| toy bf16, batch 1, 1,024 tokens | stock default | 90.00 | 91.00 | 45.00 | 2% | 100 | 2.0 |" in text
    assert "| stock static compiled | 8.00 | 9.00 | - |" in text
    assert "GPU, torch x; commit abc" in text
    assert "4.00 TB/s" in text


def test_rows_of_several_gpus_or_fewer_layers_are_cells_of_their_own(tmp_path: Path) -> None:
    given = [row("+ router", 9.0, gpus=2), row("+ router", 7.0, layers=4, gpus=1), row("+ router", 3.0, layers=2)]
    result = write(tmp_path / "latency.json", [*given, row("+ router", 8.0, layers=2, gpus=2)])
    assert [one["ms_generate"] for one in result["rows"]] == [7.0, 9.0, 3.0, 8.0]
    assert [latency_report.is_whole_on_one_gpu(one) for one in result["rows"]] == [True, False, False, False]
    labels = [line.split(" | ")[0] for line in latency_report.table(result).splitlines()[2:6]]
    rest = "batch 1, 1,024 tokens"
    names = ["toy bf16", "toy bf16, 2 GPUs", "toy bf16, 2 layers", "toy bf16, 2 layers, 2 GPUs"]
    assert labels == [f"| {name}, {rest}" for name in names]


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    assert "Not measured yet" in latency_report.table(latency_report.load(tmp_path / "none.json"))


def test_a_plot_knows_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = write(
        tmp_path / "latency.json", [row("stock default", 90.0), row("+ attention", 50.0), row("+ graph", 6.0)]
    )
    path = tmp_path / "latency.png"
    assert latency_report.is_stale(path, result["rows"])
    latency_report.plot(result["rows"], path)
    assert not latency_report.is_stale(path, result["rows"])
    assert latency_report.is_stale(path, result["rows"][:2])
