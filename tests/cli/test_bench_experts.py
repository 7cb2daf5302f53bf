"""``bench experts``: the bound is one, whenever the computation was timed."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hf_subbyte_moe
from hf_subbyte_moe import cli
from hf_subbyte_moe.cli import bench_experts
from hf_subbyte_moe.cli.offload_timing import RESIDENT, time_cell, with_slots
from hf_subbyte_moe.cli.shapes import random_model
from hf_subbyte_moe.experts import engine_of
from hf_subbyte_moe.experts.replay import Statistics, draw_trace


STATISTICS = Statistics((0.4, 0.3, 0.2, 0.1), 0.4, {"gate": 0.7, "head": 0.9}, "a test")


def test_a_step_that_is_repeated_copies_nothing() -> None:
    torch.manual_seed(0)
    model = random_model("toy", 3, torch.device("cpu"))
    model.set_experts_implementation("batched_mm")
    trace = draw_trace(STATISTICS, "t", 24, 3, 8, 2)
    hf_subbyte_moe.apply(model, with_slots(12))
    engine = engine_of(model)
    assert engine is not None
    found = time_cell(model, engine, trace, ["none", "previous"], (14, 10), 3)
    assert list(found) == ["none", "previous", RESIDENT]
    assert found["none"].missed > 0
    assert (found[RESIDENT].bytes, found[RESIDENT].missed, found[RESIDENT].hit_rate) == (0, 0, 1)


def test_no_row_has_more_than_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_experts, "time_resident", lambda *_: 1e6)  # the host was busy then
    report = tmp_path / "experts.json"
    command = ["bench", "experts", "--model", "toy", "--layers", "2", "--resident", "0.5", "--trace", "reference"]
    command += ["--settle", "2", "--steps", "3", "--rounds", "2", "--json", str(report)]
    result = CliRunner().invoke(cli.app, [*command, "--system", "none", "--system", "oracle"])
    assert result.exit_code == 0, result.output
    rows = json.loads(report.read_text())["rows"]
    assert [row["system"] for row in rows] == ["none", "oracle"]
    assert len({row["compute_ms"] for row in rows}) == 1
    assert all(0 < row["share_of_bound"] <= 1.001 for row in rows)  # times are rounded in the file

    rows[0].update(compute_ms=7.0, share_of_bound=0.5)  # of another number of layers, maybe
    report.write_text(json.dumps({"rows": rows}))
    CliRunner().invoke(cli.app, [*command, "--system", "oracle"])
    kept, fresh = json.loads(report.read_text())["rows"]
    assert (kept["system"], kept["compute_ms"], kept["share_of_bound"]) == ("none", 7.0, 0.5)
    assert (fresh["system"], fresh["compute_ms"]) != ("oracle", 7.0)


def test_without_a_gpu_real_shapes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.app, ["bench", "experts"])
    assert isinstance(result.exception, ValueError)
    assert "needs a CUDA device; without one only --model toy" in str(result.exception)
