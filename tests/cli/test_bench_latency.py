"""``bench latency``: what can be checked without a GPU, and a small run on one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_subbyte_moe.cli import app
from hf_subbyte_moe.cli.bench_latency import STATIC, SYSTEMS, _Rows, roofline_ms
from hf_subbyte_moe.cli.shapes import SHAPES
from hf_subbyte_moe.roofline import shape_of


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_it_needs_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "latency", "--model", "toy"])
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.output


def test_a_step_reads_active_weights_and_the_cache() -> None:
    shape = shape_of(SHAPES["toy"](), "toy")
    expert, layers = 3 * 64 * 96 * 2, 4
    attention = (2 * 64 * 64 + 2 * 64 * 32) * 2
    dense = layers * (attention + 8 * 64 * 2 + 2 * 64 * 2) + (64 + 128 * 64) * 2
    assert roofline_ms(shape, 1, 1000, 1e9) == pytest.approx((dense + layers * 2 * expert + 1000) / 1e6)
    both = 8 * (1 - (6 / 8) ** 2)  # experts that two tokens are expected to choose
    assert roofline_ms(shape, 2, 0, 1e9) == pytest.approx((dense + layers * both * expert) / 1e6)


def test_a_row_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    cell: dict[str, Any] = {"model": "toy", "weights": "bf16", "context": 8, "batch": 1}
    for system, policy, ms in (("a", "error", 1.0), ("b", "error", 2.0), ("a", "uniform", 4.0), ("a", "error", 3.0)):
        _Rows(file, {"torch": "x"}).add({**cell, "system": system, "policy": policy, "ms_generate": ms})
    kept = json.loads(file.read_text())
    assert kept["conditions"] == {"torch": "x"}
    found = [(row["system"], row["policy"], row["ms_generate"]) for row in kept["rows"]]
    assert found == [("b", "error", 2.0), ("a", "uniform", 4.0), ("a", "error", 3.0)]


def test_rows_from_before_they_named_a_policy_have_the_one_that_they_were_measured_with(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    cell: dict[str, Any] = {"model": "toy", "weights": "bf16", "context": 8, "batch": 1, "system": "a"}
    file.write_text(json.dumps({"rows": [{**cell, "ms_generate": 1.0}]}))
    rows = _Rows(file, {})
    rows.add({**cell, "policy": "error", "ms_generate": 2.0})
    assert [row["policy"] for row in rows.rows] == ["uniform:vq2", "error"]
    rows.add({**cell, "policy": "uniform:vq2", "ms_generate": 3.0})
    assert [row["ms_generate"] for row in rows.rows] == [2.0, 3.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_system_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    systems = [name for name in SYSTEMS if name != STATIC]
    command = ["bench", "latency", "--model", "toy", "--context", "300", "--tokens", "24", "--json", str(file)]
    result = CliRunner().invoke(app, [*command, *(part for name in systems for part in ("--system", name))])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == systems
    assert all(0 < row["share_of_roofline"] < 1 and row["ms_step"] <= row["ms_generate"] for row in rows)
