"""The commands, as a person types them, on the reference model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import hf_subbyte_moe
from hf_subbyte_moe import cli
from hf_subbyte_moe.cli import running
from hf_subbyte_moe.cli.prompts import needle_prompt
from hf_subbyte_moe.scoring import RunFailedError


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
    shown = run(
        "bench", "--context", "600", "--context", "900", "--prefills", "1", "--pairs", "2", "--json", str(report)
    )
    timings = json.loads(report.read_text())["timings"]
    assert [timing["context"] for timing in timings] == [600, 900]
    assert all(value > 0 for timing in timings for value in timing.values())
    assert "ratio" in shown


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Words of every command."""
    for name, command in group.commands.items():
        yield (*path, name)
        if hasattr(command, "commands"):  # whichever click Typer brings
            yield from commands(command, (*path, name))


@pytest.mark.parametrize("command", [*commands(typer.main.get_command(cli.app))], ids=" ".join)
def test_every_command_explains_itself(command: tuple[str, ...]) -> None:
    assert f"Example: hf-subbyte-moe {' '.join(command)}" in run(*command, "--help")


def exit_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """What the shell gets."""
    monkeypatch.setattr("sys.argv", ["hf-subbyte-moe", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    return int(left.value.code or 0)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["de"], ["demo"]),
        (["demo", "--pol"], ["--policy"]),
        (["demo", "--policy", "entropy"], ["entropy", "entropy_rank", "entropy_rank_inverse"]),
        (["demo", "--policy", "uniform:vq1"], ["uniform:vq175"]),
        (["cluster", "--by", "co"], ["coactivation"]),
        (["eval", "--prefill", "c"], ["chunked"]),
    ],
)
def test_a_shell_completes(
    words: list[str], offered: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_HF_SUBBYTE_MOE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["hf-subbyte-moe", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert exit_of(monkeypatch) == 0
    assert sorted(capsys.readouterr().out.split()) == offered


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--model", "./nowhere"], "nor one on the Hub: there is no such file or folder"),
        (["explain", "./nowhere"], "or JSON file with a model's config: there is no such file or folder"),
        (["explain", str(running._REFERENCE), "--bits", "40"], "bits=40.0 is not possible"),
        (["explain", str(running._REFERENCE), "--watch"], "--policy, --plot and --watch run a prompt, on --model"),
        (["explain", str(running._REFERENCE), "--policy", "error"], "computes without weights"),
        (["bench", "cache", "--policy", "magic"], "policy='magic' is not possible"),
        (["demo", "--context", "50"], "context=50 is too short: the question alone takes"),
        (["demo", "--context", "65513"], "a prompt of 65,513 tokens and 24 to generate is over the limit of 65,536"),
        (["explain", "--context", "65537"], "a prompt of 65,537 tokens is over the limit of 65,536 (the model's)"),
        (["demo", "--policy", "magic"], "policy='magic' is not possible"),
        (["demo", "--bits", "1.5"], "bits=1.5 is out of reach at head_dim 64"),
        (["demo", "--policy", "entropy", "--bits", "3"], "policy 'entropy' fixes its own bits"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(monkeypatch, *arguments) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert message in said[0]


@pytest.mark.parametrize("words", [["nonsense"], ["demo", "--nonsense"], ["demo", "--context", "many"]])
def test_what_no_command_takes_is_exit_code_2(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_of(monkeypatch, *words) == 2


@pytest.mark.parametrize("command", [["demo"], ["explain"], ["bench", "cache"]], ids=" ".join)
def test_options_that_no_model_takes_are_refused_before_one_is_loaded(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(monkeypatch, *command, "--model", "./nowhere", "--bits", "40") == 2
    assert "bits=40.0 is not possible" in capsys.readouterr().err


def test_a_small_step_is_not_shown_as_nothing() -> None:
    shown = run("explain", str(running._REFERENCE))
    assert "1 row of 4,096 tokens on 1 H200" in shown
    assert " 0.00 " not in shown


def test_the_version_is_said() -> None:
    assert run("--version").split() == ["hf-subbyte-moe", hf_subbyte_moe.__version__]


def test_help_is_exit_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_of(monkeypatch, "--help") == 0


@pytest.mark.parametrize(("error", "code"), [(RunFailedError, 1), (ValueError, 2), (OSError, 2)])
def test_a_run_that_fails_is_told_from_a_mistake_and_brackets_are_kept(
    error: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: str) -> None:
        raise error("pip install 'hf-subbyte-moe[eval]' [/x]")

    monkeypatch.setattr(cli, "app", fail)
    assert exit_of(monkeypatch) == code
    assert capsys.readouterr().err == "error: pip install 'hf-subbyte-moe[eval]' [/x]\n"


def test_outside_a_clone_a_model_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(running, "_REFERENCE", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="name one, by its Hub id or folder"):
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
    # four times the tokens, and room for a clock on a busy machine; cache/test_cost.py counts operations exactly
    assert long["packed_step_ms"] <= 6 * short["packed_step_ms"]
    assert long["prefill_ratio"] <= 1.8
