"""Pages show what their result files say."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def report() -> ModuleType:
    path = Path(__file__).parents[1] / "eval" / "report.py"
    spec = importlib.util.spec_from_file_location("report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_page_is_stale(report: ModuleType) -> None:
    assert report.main(check=True) == 0


@pytest.mark.parametrize(
    ("words", "code", "asked"),
    [([], 0, [False]), (["--check"], 1, [True]), (["--chek"], 2, []), (["--help"], 0, []), (["README.md"], 2, [])],
)
def test_pages_are_written_for_no_other_words(
    words: list[str], code: int, asked: list[bool], report: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(report, "main", lambda check: seen.append(check) or int(check))
    app = typer.Typer()
    app.command()(report.command)
    assert CliRunner().invoke(app, words).exit_code == code
    assert seen == asked


def test_every_section_is_shown_somewhere(report: ModuleType) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in report.PAGES)
    for name in report.SECTIONS:
        assert f"<!-- report: {name} -->" in pages


def test_a_changed_figure_is_noticed(report: ModuleType) -> None:
    page = "before\n<!-- report: training -->\nold\n<!-- end report -->\nafter\n"
    fresh = report.rendered(page)
    assert fresh.startswith("before\n<!-- report: training -->\n| held-out text | loss |")
    assert fresh.endswith("<!-- end report -->\nafter\n")
    assert report.rendered(fresh) == fresh
    assert report.rendered(fresh.replace("0.94", "0.99")) == fresh


# ------------------------------------------------------------------ quality


def row(policy: str, task: str = "text", **changes: Any) -> dict[str, Any]:
    """A row as the harness writes it."""
    score = {} if task == "text" else {"score": 0.5, "score_exact": 0.75}
    return {
        "model": "tiny",
        "dtype": "float32",
        "texts": "texts.jsonl",
        "protocol": "one-piece",
        "context": 400,
        "task": task,
        "policy": policy,
        "codebook": "universal",
        "default": False,
        "budget": None,
        "options": {},
        "code_bits": 2.0,
        "bits": 2.25,
        "bits_total": 9.0,
        "bits_total_16": 5.0,
        "kl": 0.02,
        "kl_p99": 0.1,
        "dnll": 0.01,
        "top1": 0.9,
        "score": None,
        "score_exact": None,
        "nll_exact": 2.0,
        "kl_interval": [0.01, 0.03],
        "dnll_interval": [-0.01, 0.02],
        "mass": 0.25,
        "n": 4,
        "tokens": 32,
        "device": "CPU",
        "commit": "abc1234",
        **score,
        **changes,
    }


CONTROL = row("control", codebook=None, kl=0.5, mass=0.3, code_bits=1.0)
DEFAULT = row("error", budget=2.3, default=True, kl=0.01, code_bits=2.3, bits=2.55)
PEER = row("kivi", codebook=None, options={"nbits": 2}, kl=0.04, mass=None, bits=3.0)


@pytest.fixture
def results(report: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the rows of result files that the report then reads."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)

    def write(name: str, rows: list[dict[str, Any]], dropped: list[dict[str, Any]] | None = None) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows, "dropped": dropped or []}), encoding="utf-8")

    return write


def lines_of(text: str) -> list[list[str]]:
    """Cells of the tables in a section, headers and rules left out."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|") and "---" not in line
    ]


def test_sections_without_rows_say_how_to_make_them(report: ModuleType, results: Any) -> None:
    for section, config in (("policies", "quality"), ("all", "quality"), ("peers", "peers"), ("collapse", "collapse")):
        wanted = f"Not measured yet: `python eval/run.py eval/configs/{config}.json`."
        assert report.SECTIONS[f"quality_{section}"]() == wanted


def test_the_short_table_has_a_line_a_policy_and_both_protocols(report: ModuleType, results: Any) -> None:
    chunked = {**DEFAULT, "protocol": "chunked", "kl": 0.015}
    results("quality", [CONTROL, DEFAULT, chunked, row("error", "needle", budget=2.3, default=True)])
    header, control, default = lines_of(report.quality_policies())
    assert header[3:] == ["tiny, 400: KL one-piece", "tiny, 400: KL chunked", "tiny, 400: `needle`"]
    assert (control, default) == (
        ["control, one bit", "1.00", "2.25", "0.5000", "-", "-"],
        ["`error`, 2.3 bits (default)", "2.30", "2.55", "0.0100", "0.0150", "0.50 of 0.75"],
    )


def test_peers_show_every_figure_and_what_is_left_out(report: ModuleType, results: Any, tmp_path: Path) -> None:
    needle = row("kivi", "needle", codebook=None, options={"nbits": 2})
    gone = {**{key: CONTROL[key] for key in ("model", "context", "protocol")}, "task": "variables", "score_exact": 0.1}
    results("quality_peers", [CONTROL, DEFAULT, PEER, needle], [gone])
    text = report.quality_peers()
    assert "**tiny, 400 tokens, one-piece**" in text
    assert "Not shown: tiny, 400 tokens, one-piece, `variables`: the exact cache itself scores 0.10." in text
    assert "4 texts of 8 scored tokens; 4 prompts of `needle`; dtype float32, texts texts.jsonl" in text
    *_, peer = lines_of(text)
    assert peer[:5] == ["KIVI: nbits 2", "2.00", "3.00", "5.00", "-"]
    assert peer[5:] == ["0.0400 (0.0100 to 0.0300)", "0.100", "+0.0100 (-0.0100 to +0.0200)", "0.900", "0.50 of 0.75"]


def test_ablations_are_held_against_what_they_change(report: ModuleType, results: Any) -> None:
    plain = row("simulated", codebook=None, options={"tier": "vq2"}, kl=0.02)
    changed = row("simulated", codebook=None, options={"tier": "vq2", "mean": False}, kl=0.05)
    outliers = {"tier": "vq2", "outlier_sigma": 3.0}
    kept = row("simulated", codebook=None, options=outliers, kl=0.01, bits=2.25 + 24 * 0.01)
    window = {**DEFAULT, "default": False, "options": {"window": 32}, "kl": 0.03}
    results("quality_ablations", [CONTROL, DEFAULT, window, plain, changed, kept])
    ratios = {line[0]: line[5] for line in lines_of(report.quality_ablations())[1:]}
    assert ratios == {
        "control, one bit": "-",
        "`error`, 2.3 bits (default)": "1.00",
        "`error`, 2.3 bits: window 32": "3.00",
        "simulated: tier vq2": "1.00",
        "simulated: tier vq2, mean False": "2.50",
        "simulated: tier vq2, outlier_sigma 3.0 (1.00% of values)": "0.50",
    }


def test_collapse_shows_how_much_each_loss_grows(report: ModuleType, results: Any) -> None:
    hard = {**PEER, "model": "tiny, offsets", "dnll": 0.5, "nll_exact": 2.5, "kl": 0.7}
    results("quality_collapse", [DEFAULT, PEER, hard])
    text = report.quality_collapse()
    assert lines_of(text)[1:] == [
        ["`error`, 2.3 bits (default)", "2.55", "+0.5%", "0.010", "-", "-"],
        ["KIVI: nbits 2", "3.00", "+0.5%", "0.040", "+20.0%", "0.700"],
    ]
    assert "The exact cache's loss: tiny 2.000, tiny, offsets 2.500." in text


def test_a_plot_is_drawn_anew_where_its_rows_changed(report: ModuleType, tmp_path: Path) -> None:
    path, rows = tmp_path / "quality.png", report.quality.drawn_rows([CONTROL, DEFAULT, PEER, row("uniform:exact")])
    assert len(rows) == 3
    assert report.quality.is_stale(path, rows)
    report.quality.plot_bits(rows, path)
    assert not report.quality.is_stale(path, rows)
    assert report.quality.is_stale(path, rows[1:])
