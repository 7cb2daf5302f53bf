"""Rows of lm-eval results: figures by hand, comparisons, refusals."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_subbyte_moe.results import (
    ResultFile,
    choose_cache,
    compare,
    markdown_table,
    plot_needles,
    read_rows,
    rows_of,
)


def row(scores: list[float], **changes: Any) -> dict[str, Any]:
    mean = sum(scores) / len(scores)
    return {
        "model": "tiny",
        "dtype": "float32",
        "prefill": "one-piece",
        "label": "dynamic",
        "task": "needle",
        "length": 1024,
        "metric": "string_match",
        "higher_is_better": True,
        "score": mean,
        "stderr": 0.1,
        "n": len(scores),
        "seeds": [0, 1, 2, 3],
        "options": {"gen_kwargs": None, "fewshot": 0},
        "documents": [
            {"prompt": f"p{number}", "score": score, "depth": (number % 2 + 0.5) / 2}
            for number, score in enumerate(scores)
        ],
        **changes,
    }


def results(samples: list[dict[str, Any]], **usage: Any) -> dict[str, Any]:
    said = {"model": "a/tiny", "dtype": "float32", "prefill": "chunked", "cache": "entropy_subbyte"}
    said |= {"cache_config": {"bits": 2.5}, "version": "0", "usage": {"needle": {"900": usage}}}
    return {
        "samples": {"needle": samples},
        "higher_is_better": {"needle": {"string_match": True}},
        "n-shot": {"needle": 0},
        "git_hash": "abc",
        "config": {"subbyte": said, "gen_kwargs": None, "random_seed": 0},
    }


def sample(number: int, score: float, length: int = 900) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc": {"max_length": length, "depth": 0.5},
        "filter": "none",
        "prompt_hash": f"{number}" * 64,
        "metrics": ["string_match", str(length)],
        "string_match": score,
        str(length): score,
    }


def test_rows_hold_means_errors_and_how_they_were_measured() -> None:
    found = rows_of(results([sample(1, 1.0), sample(0, 0.0), sample(2, 1.0)], cache_bytes=7, packed_tokens_read=9))
    (made,) = found
    assert made["score"] == pytest.approx(2 / 3)
    assert made["stderr"] == pytest.approx((1 / 3) ** 0.5 / 3**0.5)
    assert made["label"] == "entropy_subbyte bits=2.5"
    assert (made["model"], made["prefill"], made["length"], made["n"]) == ("tiny", "chunked", 900, 3)
    assert (made["cache_bytes"], made["packed_tokens_read"], made["metric"]) == (7, 9, "string_match")
    assert [document["score"] for document in made["documents"]] == [0, 1, 1]
    assert "| tiny | chunked | needle | 900 | entropy_subbyte bits=2.5 | 0.667 | 0.333 | 3 | 7 |" in markdown_table(
        found
    )


@pytest.mark.parametrize("own", [{"length": 1200}, {"length": "short"}, {"max_length": "8k"}, {"max_length": True}])
def test_what_a_data_set_calls_length_is_no_length_that_was_asked_for(own: dict[str, Any]) -> None:
    samples = [{**sample(number, 1.0), "doc": {**own, "depth": None}} for number in range(3)]
    samples[0]["doc"] = {key: 7 if type(value) is int else value for key, value in own.items()} | {"depth": None}
    (made,) = rows_of(results(samples))
    assert (made["length"], made["n"]) == (None, 3)


def test_pairs_of_log_likelihood_and_weight_become_losses() -> None:
    rolling = {**sample(0, 0), "metrics": ["bits_per_byte"], "bits_per_byte": (-10.0, 5.0)}
    (made,) = rows_of(results([rolling]))
    assert (made["score"], made["higher_is_better"], made["stderr"]) == (2.0, False, None)


def test_a_score_under_its_length_has_the_name_and_the_sense_of_the_tasks_metric() -> None:
    loss = {**sample(0, 2.5), "metrics": ["nll", "900"], "nll": 2.5}
    found = results([loss])
    found["higher_is_better"]["needle"] = {"nll": False, "900": False}
    (made,) = rows_of(found)
    assert (made["metric"], made["score"], made["higher_is_better"]) == ("nll", 2.5, False)
    ruler = {**sample(0, 0), "metrics": ["4096", "900"], "4096": -1, "900": 0.5}
    (made,) = rows_of(results([ruler]))
    assert (made["metric"], made["score"], made["higher_is_better"]) == ("string_match", 0.5, True)


def test_a_file_replaces_rows_and_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ResultFile(path).add([row([0.0]), row([1.0], length=2048)])
    ResultFile(path).add([row([0.5])])
    assert sorted(held["score"] for held in read_rows(path)) == [0.5, 1.0]
    path.write_text('{"rows": [{"policy": "error"}]}')
    with pytest.raises(ValueError, match=r"report\.json holds no results of hf-subbyte-moe eval"):
        ResultFile(path)


def test_needles_are_drawn(tmp_path: Path) -> None:
    assert plot_needles([row([1.0, 0.0]), row([0.0, 1.0], label="b")], tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    bare = row([1.0])
    bare["documents"][0]["depth"] = None
    assert not plot_needles([bare], tmp_path / "none.png")


def test_differences_are_paired() -> None:
    before, after = row([1, 1, 1, 0, 1, 0]), row([1, 0, 1, 0, 1, 0])
    (found,) = compare([before], [after])
    assert found.change == pytest.approx(-1 / 6)
    assert found.loss == pytest.approx(1 / 6)
    assert found.low <= found.change <= found.high <= 0
    (same,) = compare([before], [before])
    assert (same.change, same.low, same.high) == (0, 0, 0)
    (worse,) = compare([row([1.0, 2.0], higher_is_better=False)], [row([1.5, 2.5], higher_is_better=False)])
    assert worse.loss == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "recall"}, "different tasks or lengths"),
        ({"length": 2048}, "different tasks or lengths"),
        ({"seeds": [1, 1, 2, 3]}, "differ in seeds"),
        ({"prefill": "chunked"}, "differ in prefill"),
        ({"dtype": "bfloat16"}, "differ in dtype"),
        ({"model": "other"}, "differ in model"),
        ({"options": {"gen_kwargs": {"max_gen_toks": 3}, "fewshot": 0}}, "differ in options"),
        ({"documents": [{"prompt": "q", "score": 1.0, "depth": None}] * 2}, "different documents"),
        ({"documents": []}, "different documents"),
    ],
)
def test_runs_that_are_not_alike_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare([row([1.0, 1.0])], [row([1.0, 1.0], **changes)])


def test_a_cache_is_chosen_by_name() -> None:
    rows = [row([1.0]), row([0.0], label="ours")]
    assert choose_cache(rows, "ours", "A") == rows[1:]
    assert choose_cache(rows[:1], None, "A") == rows[:1]
    with pytest.raises(ValueError, match=r"A holds the caches \['dynamic', 'ours'\]: name one"):
        choose_cache(rows, None, "A")
    with pytest.raises(ValueError, match="not 'mine'"):
        choose_cache(rows, "mine", "A")


@pytest.mark.parametrize(
    ("after", "budget", "code"),
    [
        ([1, 1], "0.05", 0),
        ([1, 0], "0.05", 1),
        ([1, 0], "0.5", 0),
        ([1, 0], "string_match=0.5", 0),
        ([1, 0], "nll=0.5", 1),
    ],
)
def test_the_script_exits_by_its_budget(after: list[float], budget: str, code: int, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "eval" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare_script", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    import typer

    app = typer.Typer()
    app.command()(script.main)
    files = []
    for name, scores in (("a", [1, 1]), ("b", after)):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps({"rows": [row([float(score) for score in scores])]}))
    ran = CliRunner().invoke(app, [*map(str, files), "--budget", budget], env={"COLUMNS": "150"})
    assert ran.exit_code == code, ran.output
    assert ("over the budget" in ran.output) == bool(code)
    files[1].write_text(json.dumps({"rows": [row([1.0, 1.0], prefill="chunked")]}))
    ran = CliRunner().invoke(app, [*map(str, files)], env={"COLUMNS": "150"})
    assert ran.exit_code == 2
    assert "refused" in ran.output
    ran = CliRunner().invoke(app, [*map(str, files), "--budget", "-1"], env={"COLUMNS": "150"})
    assert ran.exit_code == 2
    assert "--budget '-1' is not possible" in ran.output
