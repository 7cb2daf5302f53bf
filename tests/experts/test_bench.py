"""``bench experts`` on a toy: every system follows the trace, and rows are written as they come."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_subbyte_moe import cli
from hf_subbyte_moe.cli import bench_experts, running
from hf_subbyte_moe.cli.offload_timing import time_cell
from hf_subbyte_moe.cli.shapes import random_model
from hf_subbyte_moe.experts import governor
from hf_subbyte_moe.experts.governor import Governor
from hf_subbyte_moe.experts.replay import Playback, Statistics, draw_trace, played
from support.experts import offloaded


STATISTICS = Statistics((0.4, 0.3, 0.2, 0.1), 0.4, {"gate": 0.7, "head": 0.9}, "a test")


def run(*arguments: str, ok: bool = True) -> str:
    result = CliRunner().invoke(cli.app, ["bench", "experts", "--model", "toy", *arguments], env={"COLUMNS": "150"})
    assert (result.exit_code == 0) == ok, result.output
    return result.output if ok else str(result.exception)


def test_a_shape_that_there_is_not_is_said_before_statistics_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(running, "_REFERENCE", tmp_path / "nowhere")
    assert "--model 'llama' is not possible: one of ['Mixtral-8x7B'," in run("--model", "llama", ok=False)
    assert "outside a clone of the project there are no statistics: give --statistics FILE" in run(ok=False)
    missing = str(tmp_path / "statistics.safetensors")
    assert f"there is no {missing!r}: give --statistics FILE" in run("--statistics", missing, ok=False)


def test_rows(tmp_path: Path) -> None:
    report = tmp_path / "experts.json"
    cell = ["--layers", "2", "--resident", "0.5", "--trace", "reference", "--settle", "2", "--json", str(report)]
    shown = run(*cell, "--steps", "3", "--rounds", "1")
    found = json.loads(report.read_text())
    assert [row["system"] for row in found["rows"]] == list(bench_experts.SYSTEMS)
    for row in found["rows"]:
        keys = {
            "model",
            "resident",
            "system",
            "trace",
            "ms",
            "hit_rate",
            "bytes",
            "share_of_bound",
            "device",
            "commit",
        }
        assert keys <= set(row)
        assert row["ms"] > 0
        assert 0 <= row["hit_rate"] <= 1
    assert found["conditions"]["statistics"] == "subbyte-moe-31m"
    assert "of the bound" in shown
    accelerate = found["rows"][-1]
    assert accelerate["bytes"] == 8 * 3 * 64 * 96 * 2  # one of two layers, whole
    run(*cell, "--steps", "2", "--rounds", "1", "--system", "none")
    again = json.loads(report.read_text())["rows"]
    assert len(again) == len(found["rows"])  # the cell's row was replaced
    assert again[-1]["system"] == "none"


def test_wrong_options() -> None:
    assert "--trace 'best' is not possible" in run("--trace", "best", ok=False)
    assert "--system 'magic' is not possible" in run("--system", "magic", ok=False)
    assert "--layers is given 2 times for 1 shapes" in run("--layers", "2", "--layers", "3", ok=False)


@pytest.mark.parametrize("name", ["gate", "head", "oracle"])
def test_predictors_say_what_the_trace_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = random_model("toy", 4, torch.device("cpu"))
    model.set_experts_implementation("batched_mm")
    trace = draw_trace(STATISTICS, "t", 20, 4, 8, 2)
    engine = offloaded(model, 8, prefetch="off")
    monkeypatch.setattr(governor, "_ROUNDS", 0)  # no trials, and
    monkeypatch.setattr(Governor, "way", name)  # no choice
    timed = time_cell(model, engine, trace, [name], (4, 16), 1)[name]
    counters = engine.counters
    named = counters.total("right") / counters.total("foretold")
    if name == "oracle":
        assert named == 1.0
        assert [layer.hit_rate for layer in counters.by_layer()[1:]] == [1.0] * 3  # the first is not foretold
        assert timed.hit_rate > 0.75
    else:
        told, truth = trace.foretold[name][4:, 1:], trace.chosen[4:, 1:]
        expected = (told[..., :, None] == truth[..., None, :]).any(-1).float().mean()
        assert named == pytest.approx(float(expected), abs=0.03)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_systems_meet_the_same_steps() -> None:
    """Where nothing new is fetched, systems need the same experts but for what a prediction keeps longer."""
    torch.manual_seed(0)
    model = random_model("toy", 3, torch.device("cpu"))
    model.set_experts_implementation("batched_mm")
    trace = draw_trace(STATISTICS, "t", 24, 3, 8, 2)
    engine = offloaded(model, 12, prefetch="off")
    found = time_cell(model, engine, trace, ["none", "previous"], (14, 10), 3)
    assert found["none"].missed == pytest.approx(found["previous"].missed, rel=0.15)
    assert found["none"].bytes == found["none"].missed > 0


def test_routers_are_overruled_only_as_long_as_it_lasts() -> None:
    model: Any = random_model("toy", 2, torch.device("cpu"))
    trace = draw_trace(STATISTICS, "t", 5, 2, 8, 2)
    seen = []
    hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    with torch.no_grad(), played(model, Playback(trace, model.device)):
        for _ in range(3):
            model(torch.ones(1, 1, dtype=torch.int64))
    assert torch.equal(torch.cat(seen), trace.chosen[:3, 1])
    hook.remove()
    assert not any(module._forward_hooks for module in model.modules())
