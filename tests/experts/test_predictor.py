"""What foretells experts: the control, heads, their sidecar, and what a model with one does."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import hf_subbyte_moe
from hf_subbyte_moe import cli
from hf_subbyte_moe.cli.running import default_model
from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME, Heads, calibration
from hf_subbyte_moe.experts.calibration import (
    CONTROL,
    gate_of,
    mean_accuracy,
    measure_accuracy,
    train_heads,
    watch,
)
from hf_subbyte_moe.experts.predictor import GATE, HEAD, PREVIOUS
from hf_subbyte_moe.experts.replay import Statistics, draw_trace, statistics_of
from hf_subbyte_moe.routing import FAMILIES, find_routers
from support.experts import always, offloaded, same, steps
from support.models import prompt
from support.moe import EXPERTS, TOP_K, tiny_moe


@pytest.mark.parametrize("family", FAMILIES)
def test_control_is_perfect(family: str) -> None:
    """Asked about a layer's true input, the gate says what the model says: biases, groups and norms included."""
    model = tiny_moe(family)
    gate = gate_of(model, find_routers(model))
    assert gate is not None
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    seen = watch(model, prompt(60, rows=3), gate)
    accuracy = mean_accuracy(measure_accuracy(model, seen, gate))
    assert accuracy[CONTROL].found == (1.0, 1.0, 1.0)
    assert accuracy[CONTROL].exact == 1.0
    assert 0.2 < accuracy[GATE].found[0] <= 1
    assert accuracy[GATE].found[0] <= accuracy[GATE].found[1] <= accuracy[GATE].found[2]
    gate.states.remove()
    assert sum(hooks) - sum(len(module._forward_pre_hooks) for module in model.modules()) == len(gate.places)


@pytest.mark.parametrize("mode", [{"mode": "native"}, {"mode": "hard", "clusters": 2, "top_clusters": 1}])
def test_control_of_steered_routers(mode: dict[str, object]) -> None:
    model = hf_subbyte_moe.apply(tiny_moe("mixtral"), {"routing": mode})
    gate = gate_of(model, find_routers(model))
    assert gate is not None
    seen = watch(model, prompt(40), gate)
    for layer in range(2):
        assert seen.states is not None
        assert torch.equal(gate.ask(layer, seen.states[layer]), seen.chosen[:, layer])


class Negative(torch.nn.Module):
    """No norm that any model has."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return -states


def test_a_gate_that_asks_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    expected = steps(model, prompt(20))
    engine = offloaded(model, 6, prefetch="gate")
    always(engine, GATE)
    assert engine.states is not None
    engine.states.norms[1] = Negative()
    assert same(expected, steps(model, prompt(20)))
    assert "layer 1's gate does not repeat its choice" in caplog.text
    assert not engine.predictors[GATE].usable  # type: ignore[attr-defined]


def test_a_prompts_states_are_not_kept() -> None:
    model = tiny_moe("mixtral")
    engine = offloaded(model, 8, prefetch="gate")
    always(engine, GATE)
    assert engine.states is not None
    with torch.no_grad():
        for tokens, kept in ((16, True), (17, False), (500, False), (1, True)):
            model(prompt(tokens))
            for state in engine.states.latest:
                assert (state is not None) == kept
                assert state is None or state.shape[1] == tokens


def test_previous_token() -> None:
    model = tiny_moe("mixtral")
    seen = watch(model, prompt(50, rows=2), None)
    found = mean_accuracy(measure_accuracy(model, seen))[PREVIOUS].found[0]
    chosen = seen.chosen.unflatten(0, (2, 50))[:, :, 1]
    again = (chosen[:, 1:, :, None] == chosen[:, :-1, None, :]).any(-1).sum()
    assert found == pytest.approx(float(again) / (100 * TOP_K), abs=0.02)  # a text's first token guesses


def test_only_the_token_before_foretells_the_first_layer() -> None:
    model = tiny_moe("mixtral", num_hidden_layers=4)
    expected = steps(model, prompt(60))
    for way in (PREVIOUS, GATE):
        engine = offloaded(model, 12, prefetch=way)
        always(engine, way)
        assert same(expected, steps(model, prompt(60)))
        for name in ("foretold", "ahead_bytes"):
            counts = engine.counters.counts[name].tolist()
            assert (counts[0] > 0) == (way == PREVIOUS)
            assert all(count > 0 for count in counts[1:])


def test_heads_learn_and_are_kept(tmp_path: Path) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    gate = gate_of(model, find_routers(model))
    assert gate is not None
    seen = watch(model, prompt(256, rows=8), gate)
    heads = train_heads(model, seen.part(slice(2, None)))
    found = mean_accuracy(measure_accuracy(model, seen.part(slice(0, 2)), gate, heads))
    assert found[HEAD].found[0] > 0.5  # a quarter by chance
    heads.save(tmp_path / PREDICTOR_SIDECAR_NAME)
    again = Heads.load(tmp_path / PREDICTOR_SIDECAR_NAME)
    assert torch.equal(again.weights, heads.weights)
    expected = steps(model, prompt(30))
    engine = offloaded(model, 6, prefetch="head", sidecar=str(tmp_path / PREDICTOR_SIDECAR_NAME))
    always(engine, HEAD)
    assert same(expected, steps(model, prompt(30)))
    counted = engine.counters
    assert counted.total("right") / counted.total("foretold") > 0.4
    with pytest.raises(ValueError, match="the heads belong to another model"):
        offloaded(tiny_moe("mixtral"), 6, prefetch="head", sidecar=str(tmp_path / PREDICTOR_SIDECAR_NAME))
    with pytest.raises(ValueError, match="there is no sidecar"):
        offloaded(tiny_moe("mixtral"), 6, prefetch="head", sidecar=str(tmp_path / "none"))


def test_reference_heads_find_what_was_measured() -> None:
    """The committed sidecar belongs to the reference MoE, and notes what a linear head should reach."""
    heads = Heads.load(Path(default_model()) / PREDICTOR_SIDECAR_NAME)
    recall = heads.notes["statistics"]["recall"]
    assert recall[HEAD] > 0.8
    assert recall[GATE] == pytest.approx(0.72, abs=0.03)
    assert len(heads.notes["accuracy"]) == 7 * 4


def test_calibrate_writes_a_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_STEPS", 40)
    out = tmp_path / "heads.safetensors"
    model = tiny_moe("qwen3_moe")
    arguments = ["calibrate", default_model(), "--predictor", "--windows", "4", "--context", "300", "--out", str(out)]
    text = tmp_path / "text.txt"
    text.write_text("Nothing to see here, and nobody who would look. " * 400)
    result = CliRunner().invoke(cli.app, [*arguments, "--data", str(text)], env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    assert "control" in result.output
    assert set(Heads.load(out).notes["statistics"]["recall"]) == {GATE, HEAD}
    with pytest.raises(ValueError, match="the heads belong to another model"):
        offloaded(model, 6, prefetch="head", sidecar=str(out))


def test_traces_have_the_statistics_they_are_drawn_from() -> None:
    wanted = Statistics((0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.05, 0.05), 0.6, {GATE: 0.7, HEAD: 0.9}, "a test")
    trace = draw_trace(wanted, "t", tokens=400, layers=6, experts=EXPERTS, top_k=TOP_K)
    found = statistics_of(trace.chosen, EXPERTS, 400, {}, "")
    assert found.repeat == pytest.approx(0.6, abs=0.03)
    assert trace.chosen.sort(-1).values.diff(dim=-1).min() > 0
    for name, recall in wanted.recall.items():
        named = (trace.foretold[name][..., :, None] == trace.chosen[..., None, :]).any(-1)
        assert float(named.float().mean()) == pytest.approx(recall, abs=0.02)
    flat = draw_trace(wanted.flattened(), "u", tokens=400, layers=6, experts=16, top_k=TOP_K)
    assert statistics_of(flat.chosen, 16, 400, {}, "").repeat == pytest.approx(TOP_K / 16, abs=0.03)
