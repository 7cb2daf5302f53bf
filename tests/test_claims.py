"""Verdicts follow from rows, by rule; README is rendered by one machinery; a claim without rows breaks nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest


sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import claims
import findings
import report
from findings import BEATEN, ELSEWHERE, PART, REACHED, REFUTED, Case, verdict_of


ROOT = Path(__file__).parents[1]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes the result files that rules then read; there are no others."""
    monkeypatch.setattr(findings, "RESULTS", tmp_path)
    monkeypatch.setattr(findings, "KERNELS", tmp_path)

    def write(name: str, rows: list[dict[str, Any]], **more: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows, **more}), encoding="utf-8")

    return write


def line_of(words: str) -> list[str]:
    """Cells of a claim's line."""
    (line,) = [line for line in claims.claims().splitlines() if words in line]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("figures", "part", "premise", "expected"),
    [
        ([1.2, 1.1], False, False, BEATEN),
        ([1.2, 1.0], False, False, REACHED),
        ([1.2, 1.1], False, True, REACHED),
        ([1.2, 0.9], False, False, PART),
        ([0.9], True, False, PART),
        ([0.9, 0.5], False, False, REFUTED),
    ],
)
def test_verdicts(figures: list[float], part: bool, premise: bool, expected: str) -> None:
    assert verdict_of([Case(figure, 1.0) for figure in figures], part, premise) == expected
    assert verdict_of([Case(1 / figure, 1.0, at_most=True) for figure in figures], part, premise) == expected


def test_a_claim_without_rows_says_so(results: Any) -> None:
    assert line_of("under 5 ms a token")[2:4] == ["**not measured yet**", "-"]
    shown = claims.claims()
    unmeasured = [claim for claim in claims.CLAIMS if claim.source.startswith(("eval/results", "kernels"))]
    assert shown.count("not measured yet") == len(unmeasured)


def test_latency_is_about_8x22b_and_smaller_models_stand_in_for_it(results: Any) -> None:
    def row(model: str, system: str, ms: float, context: int = 65536) -> dict[str, Any]:
        return {
            "model": model,
            "weights": "bf16",
            "context": context,
            "batch": 1,
            "system": system,
            "ms_generate": ms,
            "ms_step": ms,
            "device": "X",
        }

    results(
        "latency", [row("Qwen3", "stock", 70.0), row("Qwen3", "+ graph", 6.0), row("Mixtral-8x22B", "+ int4", 9.0)]
    )
    assert line_of("under 5 ms a token")[2] == f"**{REFUTED}**"
    results(
        "latency", [row("Qwen3", "+ cache", 9.0), row("Qwen3", "+ graph", 4.0), row("Mixtral-8x22B", "+ int4", 9.0)]
    )
    cells = line_of("under 5 ms a token")
    assert cells[2] == f"**{REFUTED}**"
    assert "Qwen3 (bf16) 4.0 ms, Mixtral-8x22B (bf16) 9.0 ms (65,536 tokens, batch 1, one X)" in cells[3]
    results("latency", [row("Qwen3", "+ graph", 4.0)])
    assert line_of("under 5 ms a token")[2] == f"**{PART}**"
    results("latency", [row("Mixtral-8x22B", "+ int4", 4.0), row("Qwen3", "stock", 70.0, context=131072)])
    assert line_of("under 5 ms a token")[2] == f"**{BEATEN}**"
    assert line_of("past 50 ms a token")[2] == f"**{REACHED}**"


def test_what_no_machine_here_can_run(results: Any) -> None:
    row = {"model": "Q", "weights": "bf16", "context": 65536, "batch": 1, "ms_generate": 9.0, "device": "X"}
    results("latency", [{**row, "system": "+ graph"}])
    assert line_of("under 5 ms a token")[2] == f"**{ELSEWHERE}**"
    shape = {"model": "Q", "layers": 4, "batch": 1, "mode": "expert", "device": "X"}
    placements = (("by index", 9.0, 100.0), ("clustered, soft", 5.0, 60.0))
    for gpus, verdict in ((2, ELSEWHERE), (16, BEATEN)):
        rows = [
            {**shape, "gpus": gpus, "placement": name, "ms": ms, "expert_bytes": sent} for name, ms, sent in placements
        ]
        results("distributed", rows)
        cells = line_of("routing 3.2 to under 0.4 ms")
        assert cells[2] == f"**{verdict}**"
        assert f"+4.00 ms saved and 40% fewer bytes on {gpus} GPUs" in cells[3]
    routers = [
        {"model": model, "tokens": 1, "backend": name, "us": us, "failed": None}
        for model, name, us in (
            ("Qwen3-30B-A3B", "stock", 50.0),
            ("Qwen3-30B-A3B", "cuda", 5.0),
            ("DeepSeek-V3", "cuda", 8.0),
        )
    ]
    results("distributed", [])
    results("router", routers)
    assert line_of("routing 3.2 to under 0.4 ms")[2] == f"**{PART}**"
    assert "Qwen3-30B-A3B 0.24 ms, DeepSeek-V3 0.46 ms" in line_of("routing 3.2 to under 0.4 ms")[3]


def test_prefetch_needs_half_the_time(results: Any) -> None:
    def row(system: str, ms: float) -> dict[str, Any]:
        return {"model": "M", "resident": 0.5, "trace": "t", "system": system, "ms": ms, "device": "X"}

    for ours, verdict in ((4.0, BEATEN), (5.0, REACHED), (8.0, PART), (9.9, REFUTED)):
        results("experts", [row("none", 10.0), row("gate", ours), row("oracle", 4.0), row("accelerate", 90.0)])
        assert line_of("hides the experts")[2] == f"**{verdict}**"


def test_the_entropy_rule_is_judged_on_the_same_texts(results: Any) -> None:
    def row(policy: str, kl: float, count: int = 4) -> dict[str, Any]:
        cell = {"model": "m", "context": 1024, "protocol": "one-piece", "budget": 2.3, "device": "CPU", "texts": "t"}
        return {**cell, "codebook": "universal", "policy": policy, "task": "text", "kl": kl, "n": count}

    ours = row("entropy_rank", 0.01)
    for others, verdict in (
        ([row("uniform", 0.02, count=5)], "not measured yet"),
        ([row("uniform", 0.02)], REACHED),
        ([row("uniform", 0.02), row("random", 0.01)], PART),
        ([row("uniform", 0.0099)], REFUTED),
    ):
        results("quality", [ours, *others])
        assert line_of("high entropy needs more bits")[2] == f"**{verdict}**"


@pytest.mark.parametrize(
    ("lost", "interval", "expected"),
    [(0.0, [0.0, 0.0], REACHED), (0.005, [-0.02, 0.01], REFUTED), (0.1, [-0.2, 0.0], REFUTED)],
)
def test_accuracy_is_kept_where_the_whole_interval_says_so(
    results: Any, lost: float, interval: list[float], expected: str
) -> None:
    row = {"model": "m", "task": "needle", "context": 1024, "policy": "auto", "budget": 2.3, "bits": 2.5}
    scores = {"score": 1 - lost, "score_exact": 1.0, "score_difference_interval": interval}
    results("quality", [{**row, **scores}, {**row, **scores, "policy": "error", "score": 0.0}])
    assert line_of("full accuracy on long-context tasks")[2] == f"**{expected}**"


def test_fp8_harms_where_the_whole_interval_says_so(results: Any) -> None:
    row = {"policy": "fp8", "task": "text", "model": "m", "n": 8, "dnll": 0.05, "nll_exact": 2.0}
    for interval, expected in (([0.03, 0.07], REACHED), ([0.01, 0.09], REFUTED)):
        results("quality_peers", [{**row, "dnll_interval": interval}])
        assert line_of("FP8 degrades accuracy")[2] == f"**{expected}**"


def test_premises(results: Any) -> None:
    def model(name: str, entropy: list[float], share: float, keys: float) -> dict[str, Any]:
        uniform = [
            {"nbits": nbits, "sides": [side], "dnll": loss, "dnll_interval": [0.9 * loss, loss], "nll_exact": 2.0}
            for nbits in (2, 3)
            for side, loss in (("keys", keys), ("values", 0.01))
        ]
        outliers = [{"side": side, "token": share} for side in ("keys", "values")]
        return {"model": name, "entropy": entropy, "outliers": outliers, "uniform": uniform}

    falling, rising = model("a", [5.0, 4.0, 3.0], 0.01, 1.0), model("b", [3.0, 4.0, 5.0], 0.02, 0.1)
    results("premises", [], models=[falling, rising], conditions={"context": 1024, "n": 6})
    for words in ("early layers have high entropy", "outliers beyond 3.5 sigma", "fail on keys"):
        assert line_of(words)[2] == f"**{PART}**"
    assert "a -1.00, b +1.00" in line_of("early layers have high entropy")[3]


def test_sources_are_there_or_not_measured_yet() -> None:
    for claim in claims.CLAIMS:
        assert (ROOT / claim.source).exists() or line_of(claim.words)[2] == "**not measured yet**", claim.words


def test_check_fails_on_a_page_that_is_out_of_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- report: claims -->\nold\n<!-- end report -->\n", encoding="utf-8")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    assert report.main(True, [page]) == 1
    assert "old" in page.read_text(encoding="utf-8")
    assert report.main(False, [page]) == 0
    assert report.main(True, [page]) == 0
    assert claims.claims() in page.read_text(encoding="utf-8")
