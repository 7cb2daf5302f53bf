"""The commands, as a person types them, on the reference model."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_subbyte_moe import cli
from hf_subbyte_moe.cli import running
from hf_subbyte_moe.cli.prompts import needle_prompt


PNG = b"\x89PNG"


def run(*arguments: str, ok: bool = True) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "150"})
    assert (result.exit_code == 0) == ok, result.output
    return result.output


def test_demo_shows_both_answers_and_writes_numbers_and_a_plot(tmp_path: Path) -> None:
    report, plot = tmp_path / "demo.json", tmp_path / "tiers.png"
    shown = run("demo", "--context", "900", "--bits", "3", "--json", str(report), "--plot", str(plot))
    numbers = json.loads(report.read_text())
    assert set(numbers) == {"context", "expected", "plain", "packed"}
    assert set(numbers["plain"]) == {"answer", "bytes", "tokens_per_s"}
    assert set(numbers["packed"]) == {"answer", "bytes", "tokens_per_s", "code_bits", "bits", "bits_total"}
    assert numbers["context"] == 900
    assert numbers["packed"]["bits"] == pytest.approx(3, rel=0.02)
    assert numbers["packed"]["bytes"] < numbers["plain"]["bytes"]
    assert numbers["plain"]["answer"].startswith(numbers["expected"])
    assert numbers["expected"] in shown
    assert f"{numbers['packed']['bytes']:,}" in shown
    assert "right" in shown
    assert plot.read_bytes().startswith(PNG)


def test_demo_takes_another_model_policy_and_text(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Nothing to see here. " * 50)
    shown = run(
        "demo",
        "--model",
        str(running._REFERENCE),
        "--context",
        "700",
        "--policy",
        "uniform:vq175",
        "--haystack",
        str(text),
    )
    assert "vq175" in shown
    assert "vq3" not in shown


def test_explain_shows_every_head(tmp_path: Path) -> None:
    report, text = tmp_path / "explain.json", tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 100)
    shown = run("explain", "--context", "700", "--policy", "entropy", "--text", str(text), "--json", str(report))
    choices = json.loads(report.read_text())["choices"]
    assert len(choices) == 8 * 2 * 2
    assert {choice["tier"] for choice in choices} <= {"fp6", "vq3", "vq175"}
    for choice in choices:
        expected = "fp6" if choice["entropy"] > 4.5 else "vq3" if choice["entropy"] > 2.5 else "vq175"
        assert choice["tier"] == expected
    assert "entropy" in shown


def test_bench_reports_prefill_and_steps(tmp_path: Path) -> None:
    report = tmp_path / "bench.json"
    shown = run("bench", "--context", "600", "--context", "900", "--pairs", "2", "--json", str(report))
    timings = json.loads(report.read_text())["timings"]
    assert [timing["context"] for timing in timings] == [600, 900]
    assert all(value > 0 for timing in timings for value in timing.values())
    assert "ratio" in shown


@pytest.mark.parametrize("command", [[], ["demo"], ["explain"], ["bench"]])
def test_every_command_explains_itself(command: list[str]) -> None:
    shown = run(*command, "--help")
    assert "Example: hf-subbyte-moe" in shown or not command
    assert "--json" in shown or not command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--context", "50"], "context=50 is too short: the question alone takes"),
        (["demo", "--policy", "magic"], "policy='magic' is not possible"),
        (["demo", "--bits", "1.5"], "bits=1.5 is out of reach at head_dim 64"),
        (["demo", "--policy", "entropy", "--bits", "3"], "policy 'entropy' fixes its own bits"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_1(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hf-subbyte-moe", *arguments])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_outside_a_clone_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "_REFERENCE", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="give --model ID_OR_PATH"):
        running.load_model(None)


@pytest.mark.parametrize("context", [200, 1000])
@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_needle_prompt_has_the_asked_length_and_hides_one_needle(context: int, depth: float) -> None:
    _, tokenizer = running.load_model(None)
    made = needle_prompt(tokenizer, context, seed=3, depth=depth)
    assert made.ids.shape == (1, context)
    text = tokenizer.decode(made.ids[0])
    assert text.count(made.expected) == 1
    assert text.rstrip().endswith("mentioned in the provided text is")
    assert torch.equal(made.ids, needle_prompt(tokenizer, context, seed=3, depth=depth).ids)
    assert made.expected != needle_prompt(tokenizer, context, seed=4, depth=depth).expected


@pytest.mark.slow
def test_at_16k_a_step_costs_at_most_8_plain_ones_grows_linearly_and_packing_at_most_80_percent(
    tmp_path: Path,
) -> None:
    report = tmp_path / "bench.json"
    run("bench", "--quick", "--json", str(report))
    short, long = json.loads(report.read_text())["timings"]
    assert (short["context"], long["context"]) == (4096, 16384)
    assert long["step_ratio"] <= 8
    assert long["packed_step_ms"] <= 4.4 * short["packed_step_ms"]
    assert long["prefill_ratio"] <= 1.8
