"""The tables and the plot of measured routing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import routing_report
from quality.report import is_stale


EVAL = Path(__file__).parents[1] / "eval"


def row(**own: Any) -> dict[str, Any]:
    cell = {"domains": 2, "clustering": "traces", "mode": "native", "replicas": 0, "seed": 0, **own}
    soft = cell["mode"] == "soft"
    return {
        **cell,
        "strength": own.get("strength", 0.5) if soft else None,
        "follow": own.get("follow", 0.5) if soft else None,
        "keep": own.get("keep", 1) if soft else None,
        "top_clusters": None if cell["mode"] == "native" else 1,
        "balanced_load": cell["clusters_load"] if "clusters_load" in cell else cell["clustering"] != "random",
        "transitions_local": own.get("transitions_local", 0.7),
        "pairs_local": 0.6,
        "dnll": own.get("dnll", 0.0),
        "dnll_se": 0.001,
        "needle": 1.0,
        "needle_native": 1.0,
        "domain_load": 1.1,
        "load": 3.0,
        "load_native": 4.0,
        "memory": 1.0,
        "bytes_crossing": 4000.0,
        "n_tokens": 1000,
        "commit": "abc",
        "cell": {key: value for key, value in cell.items() if key != "transitions_local"},
    }


ROWS = [
    row(),
    row(mode="soft", strength=0.5, transitions_local=0.8, dnll=0.002),
    row(mode="soft", strength=1.0, transitions_local=0.86, dnll=0.011),
    row(mode="hard", transitions_local=0.83, dnll=0.02),
    row(clustering="random", seed=0, transitions_local=0.4),
    row(clustering="random", seed=1, transitions_local=0.6),
    row(domains=4, transitions_local=0.45),
]
BATCH = {"batch": 8, "batch_aware": 1.0, "keep": 1, "distinct": 8.0, "distinct_native": 10.0, "dnll": 0.01}
RESULT = {"rows": ROWS, "batch": [{**BATCH, "dnll_se": 0.001, "n_tokens": 10, "commit": "abc"}]}


def test_the_short_table_says_what_holds() -> None:
    text = routing_report.short(RESULT)
    assert "| 2 domains, random, native | 50.0% |" in text  # the mean of its seeds
    assert (
        "| 2 domains, clusters, soft 0.5 | 80.0% | 60.0% | +0.0020 ± 0.0010 | 1.00 | 4,000 | 1.00 | 1.10 | 3.00 |"
        in text
    )
    assert (
        "With 2 domains it is reached at +0.0110 nats a token; placement alone, which changes no token, gives 70%"
        in text
    )
    assert "With 4 domains it is not reached: 45%" in text
    assert text.endswith(
        "1,000 held-out tokens; ± one standard error over tokens, which is too small: a text's tokens depend on each "
        "other; native: needle 1.00 of 16 prompts of 512 tokens, busiest expert 4.00; commit abc."
    )


def test_everything_is_in_the_long_table() -> None:
    text = routing_report.full(RESULT)
    assert "| transitions and pairs (default) | 70.0% | - | 45.0% | - | 80.0% at +0.0020 ± 0.0010 |" in text
    assert "| 8 tokens, bonus 1, keep 1 | 10.00 | 8.00 | -20.0% | +0.0100 ± 0.0010 |" in text
    assert text.count("hard, best 1") == 1


def test_the_plot_is_drawn_anew_where_rows_changed(tmp_path: Path) -> None:
    shown, path = routing_report.drawn_rows(RESULT), tmp_path / "routing.png"
    assert is_stale(path, shown)
    routing_report.plot(shown, path)
    assert not is_stale(path, shown)
    assert is_stale(path, shown[1:])


def test_without_a_file(tmp_path: Path) -> None:
    assert routing_report.load(tmp_path / "none.json") == {"rows": [], "batch": []}
    (tmp_path / "some.json").write_text(json.dumps(RESULT), encoding="utf-8")
    assert routing_report.load(tmp_path / "some.json") == RESULT
    assert routing_report.missing().startswith("Not measured yet")


def test_the_error_of_a_loss_is_that_over_texts() -> None:
    import routing

    of_text = torch.tensor([0.1, 0.2, 0.6])
    found = routing.loss_change(of_text[:, None].expand(-1, 500))  # tokens of a text that are all alike
    assert found["dnll"] == pytest.approx(0.3)
    assert found["dnll_se"] == pytest.approx(float(of_text.std()) / 3**0.5)
    assert (found["n_texts"], found["n_tokens"]) == (3, 1500)


def test_rows_from_before_are_marked() -> None:
    result = routing_report.load(EVAL / "results" / "routing.json")
    old = [row for row in (*result["rows"], *result["batch"]) if "n_texts" not in row]
    assert not old or "rows without n_texts over tokens" in result["standard_errors"]


def test_cells_are_spread_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import routing

    asked = {"rows": [{"domains": [2, 4], "replicas": [0, 2], "mode": "soft", "strength": 0.5}]}
    found = list(routing.cells(asked))
    assert [(cell["domains"], cell["replicas"]) for cell in found] == [(2, 0), (2, 2), (4, 0), (4, 2)]
    assert {cell["clustering"] for cell in found} == {"traces"}
