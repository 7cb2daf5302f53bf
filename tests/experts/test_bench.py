"""``bench experts`` on a toy: every system follows the trace, and rows are written as they come."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import hf_subbyte_moe
from hf_subbyte_moe import cli
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli import bench_experts, offload_timing, running
from hf_subbyte_moe.cli.offload_timing import OPTIONS, Decoder, time_cell, time_resident, with_slots
from hf_subbyte_moe.cli.shapes import cached_widths, random_model
from hf_subbyte_moe.decode import runner
from hf_subbyte_moe.experts import Engine, engine_of, governor
from hf_subbyte_moe.experts.governor import Governor
from hf_subbyte_moe.experts.replay import Playback, Statistics, draw_trace, played


STATISTICS = Statistics((0.4, 0.3, 0.2, 0.1), 0.4, {"gate": 0.7, "head": 0.9}, "a test")


@pytest.fixture(params=["fused", "modules"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How steps are computed: the CPU takes fused ones, too, or does not."""
    if request.param == "fused":
        monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))
    return str(request.param)


def in_slots(layers: int, slots: int) -> tuple[Any, Engine]:
    torch.manual_seed(0)
    model = random_model("toy", layers, torch.device("cpu"))
    model.set_experts_implementation("batched_mm")
    hf_subbyte_moe.apply(model, with_slots(slots))
    engine = engine_of(model)
    assert engine is not None
    return model, engine


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


def test_rows(tmp_path: Path, way: str) -> None:
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
        assert row["step"] == ("modules" if row["system"] == "accelerate" else way)
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
def test_predictors_say_what_the_trace_says(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = in_slots(4, 8)
    trace = draw_trace(STATISTICS, "t", 20, 4, 8, 2)
    monkeypatch.setattr(governor, "_ROUNDS", 0)  # no trials, and
    monkeypatch.setattr(Governor, "way", name)  # no choice
    timed = time_cell(model, engine, trace, [name], (4, 16), 1)[name]
    assert timed.fused == (way == "fused")
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
    model, engine = in_slots(3, 12)
    trace = draw_trace(STATISTICS, "t", 24, 3, 8, 2)
    found = time_cell(model, engine, trace, ["none", "previous"], (14, 10), 3)
    assert found["none"].missed == pytest.approx(found["previous"].missed, rel=0.15)
    assert found["none"].bytes == found["none"].missed > 0


def test_where_fused_steps_must_be_taken_others_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("toy", 2, torch.device("cpu"))
    hf_subbyte_moe.apply(model, OPTIONS)
    assert time_resident(model) > 0
    monkeypatch.setattr(offload_timing, "_FUSED", ("cpu",))
    with pytest.raises(RuntimeError, match="ran through the model's own modules: the model is on cpu"):
        time_resident(model)


def test_no_tile_is_due_in_a_turn() -> None:
    model = random_model("toy", 2, torch.device("cpu"))
    cache = EntropySubbyteCache(model.config)
    Decoder(model, cached_widths(model), cache)
    rows = cache.packed_layers[0].rows
    assert rows.store.counts.tolist() == [2]
    assert rows.free() == 115


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
