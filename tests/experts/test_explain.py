"""``explain`` and the live view show what placed experts do."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hf_subbyte_moe
from hf_subbyte_moe import cli
from support.experts import always, offloaded, steps
from support.models import prompt
from support.moe import tiny_moe


def test_explain_counts() -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    engine = offloaded(model, 12, prefetch="gate")
    always(engine, "gate")
    steps(model, prompt(30))
    explanation = hf_subbyte_moe.explain(model)
    state = explanation.experts
    assert state is not None
    assert (state.experts, state.slots, state.tokens) == (24, 12, 24)
    slab = 3 * 64 * 96 * 4
    assert state.device_bytes == 12 * slab
    assert state.host_bytes == 24 * slab
    assert state.hit_rate == pytest.approx(1 - engine.counters.total("missed") / (24 * 3 * 2))
    assert state.bytes_per_token == pytest.approx(engine.counters.bytes / 24)
    assert state.stall_ms_per_token is not None
    assert state.stall_ms_per_token > 0
    assert [layer.layer for layer in state.layers] == [0, 1, 2]
    assert state.layers[0].slots_right is None  # nothing foretells the first layer
    assert state.layers[1].slots_right is not None
    assert json.loads(json.dumps(explanation.to_dict(), allow_nan=False))["experts"]["slots"] == 12
    shown = str(explanation)
    for text in ("in slots", "12 of 24", "hit rate", "stall, ms a token", "foretold right", "gate (of gate)"):
        assert text in shown
    hf_subbyte_moe.restore(model)
    assert hf_subbyte_moe.explain(model).experts is None


def test_watch(tmp_path: Path) -> None:
    report = tmp_path / "experts.json"
    arguments = ["explain", "--watch", "--context", "200", "--new-tokens", "6", "--json", str(report)]
    result = CliRunner().invoke(cli.app, [*arguments, "--gpu-slots", "0.25"], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    state = json.loads(report.read_text())["experts"]
    assert state["slots"] == 32
    assert state["predictors"] == ["head"]  # the reference MoE has a sidecar
    assert state["tokens"] == 5
    assert "hit rate" in result.output
    assert "calibrated" in result.output
