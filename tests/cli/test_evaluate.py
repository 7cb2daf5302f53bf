"""``hf-subbyte-moe eval`` on a tiny model in a folder, as a person types it."""

import functools
import importlib
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_subbyte_moe import cli
from hf_subbyte_moe.results import read_rows
from hf_subbyte_moe.scoring import RunFailedError
from support.models import tiny_model
from support.tokens import letter_tokenizer


pytest.importorskip("lm_eval", reason="pip install 'hf-subbyte-moe[eval]'")

COARSE = '{"policy": "uniform:vq2", "window": 16}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny-mixtral"
    tiny_model("mixtral").save_pretrained(path)
    letter_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the harness's own tasks out: listing thousands of files takes seconds."""
    tasks = importlib.import_module("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", functools.partial(tasks.TaskManager, include_defaults=False))


def run(folder: Path, out: Path, *arguments: str) -> tuple[int, str, Exception | None]:
    fixed = ["eval", "--model", str(folder), "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*fixed, *arguments], env={"COLUMNS": "200"})
    error = result.exception if isinstance(result.exception, Exception) else None
    return result.exit_code, result.output, error


def test_one_run_gives_a_report_a_table_and_a_heat_map(folder: Path, tmp_path: Path) -> None:
    metadata = '{"num_samples": 2, "depths": 2}'
    arguments = ["--tasks", "subbyte_needle", "--lengths", "500,700", "--cache-config", "dynamic"]
    arguments += ["--cache-config", COARSE, "--metadata", metadata, "--batch_size", "2"]
    code, shown, error = run(folder, tmp_path, *arguments)
    assert code == 0, (shown, error)
    rows = read_rows(tmp_path / "report.json")
    assert [(row["length"], row["cache"]) for row in rows] == [
        (500, "dynamic"),
        (700, "dynamic"),
        (500, "entropy_subbyte"),
        (700, "entropy_subbyte"),
    ]
    for row in rows:
        assert row["n"] == 2
        assert row["prefill"] == "one-piece"
        assert row["prompt_tokens"]["most"] <= row["length"]
        assert (row["packed_tokens_read"] > 0) == (row["cache"] == "entropy_subbyte")
        assert row["tokens_per_s"] > 0
    assert rows[2]["cache_bytes"] < rows[0]["cache_bytes"]
    assert [document["prompt"] for document in rows[0]["documents"]] == [
        document["prompt"] for document in rows[2]["documents"]
    ]
    assert (tmp_path / "report.md").read_text().count("subbyte_needle") == 4
    assert (tmp_path / "needles.png").read_bytes().startswith(b"\x89PNG")
    assert "packed tokens read" in shown
    # what is there is not measured again
    kept = (tmp_path / "report.json").read_text()
    code, shown, error = run(folder, tmp_path, *arguments, "--resume")
    assert code == 0, (shown, error)
    assert (tmp_path / "report.json").read_text() == kept
    # and results of other documents are not taken for these
    code, _, error = run(folder, tmp_path, *arguments, "--resume", "--metadata", '{"data_seed": 3}')
    assert code != 0
    assert "are not reused" in str(error)


@pytest.mark.usefixtures("few_tasks")
def test_another_model_of_the_same_name_is_not_taken_for_it(folder: Path, tmp_path: Path) -> None:
    arguments = ["--tasks", "subbyte_needle", "--lengths", "500", "--cache-config", "dynamic", "--resume"]
    arguments += ["--metadata", '{"num_samples": 1}']
    same, other = (tmp_path / place / folder.name for place in ("same", "other"))
    shutil.copytree(folder, same)
    shutil.copytree(folder, other)
    model = tiny_model("mixtral")
    model.get_output_embeddings().weight.data.mul_(2)  # type: ignore[operator,union-attr]
    model.save_pretrained(other)
    for place in (folder, same):
        code, shown, error = run(place, tmp_path / "report", *arguments)
        assert code == 0, (shown, error)
    kept = (tmp_path / "report" / "report.json").read_text()
    code, _, error = run(other, tmp_path / "report", *arguments)
    assert code != 0
    assert "with other options, documents, weights or another version" in str(error)
    assert (tmp_path / "report" / "report.json").read_text() == kept


@pytest.mark.usefixtures("few_tasks")
def test_what_lm_eval_takes_is_passed_on(folder: Path, tmp_path: Path) -> None:
    written = tmp_path / "lm_eval"
    arguments = ["--tasks", "subbyte_recall", "--lengths", "600", "--cache-config", COARSE, "--prefill", "chunked"]
    arguments += ["--metadata", '{"num_samples": 4, "num_pairs": 3}', "--limit", "2", "--seed", "5"]
    arguments += ["--gen_kwargs", "max_gen_toks=3", "--output_path", str(written), "--log_samples"]
    code, shown, error = run(folder, tmp_path / "report", *arguments)
    assert code == 0, (shown, error)
    (row,) = read_rows(tmp_path / "report" / "report.json")
    assert (row["n"], row["prefill"], row["seeds"]) == (2, "chunked", [5, 5, 5, 5])
    assert row["options"]["gen_kwargs"] == {"max_gen_toks": 3}
    assert len(list(written.rglob("samples_subbyte_recall_*.jsonl"))) == 1
    (results,) = written.rglob("results_*.json")
    said = json.loads(results.read_text())["config"]["subbyte"]
    assert said["prefill"] == "chunked"
    assert said["usage"]["subbyte_recall"]["600"]["packed_tokens_read"] > 0


@pytest.mark.slow
@pytest.mark.usefixtures("few_tasks")
def test_tasks_of_ruler_run_as_they_are(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("wonderwords", reason="pip install 'hf-subbyte-moe[eval]'")
    ruler = Path(importlib.import_module("lm_eval").__file__ or "").parent / "tasks" / "ruler"
    arguments = ["--tasks", "niah_single_1", "--lengths", "1024", "--limit", "2", "--include_path", str(ruler)]
    code, shown, error = run(folder, tmp_path, *arguments, "--cache-config", COARSE, "--gen_kwargs", "max_gen_toks=4")
    assert code == 0, (shown, error)
    rows = read_rows(tmp_path / "report.json")
    (row,) = rows
    assert (row["task"], row["length"], row["metric"], row["n"]) == ("niah_single_1", 1024, "string_match", 2)
    assert row["packed_tokens_read"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nonsense"], "nonsense"),
        (["--tasks", "subbyte_needle", "--lengths", "4k"], "--lengths '4k' is not possible"),
        (["--tasks", "subbyte_needle", "--lengths", "9000"], "are over the limit of 4,096"),
        (["--tasks", "subbyte_needle", "--lengths", "600", "--cache-config", "{bits: 2}"], "is no JSON"),
        (["--tasks", "subbyte_needle", "--lengths", "600", "--cache-config", "static"], "cache='static'"),
        (["--tasks", "subbyte_needle", "--lengths", "600", "--prefill", "two"], "prefill='two'"),
        (["--tasks", "subbyte_needle", "--lengths", "600", "--cache_requests", "true"], "would reuse those"),
        (["--tasks", "subbyte_needle", "--lengths", "500", "--metadata", '{"num_samples": 1}',
          "--cache-config", '{"policy": "uniform:vq2", "window": 900}'], "never read a packed token"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("few_tasks")
def test_bad_input_is_refused(arguments: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    code, _, error = run(folder, tmp_path, *arguments)
    assert code != 0
    assert isinstance(error, ValueError)
    assert isinstance(error, RunFailedError) == ("never read" in message)  # the run, not the words
    assert message in str(error)


def test_without_lm_eval_it_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, error = run(folder, tmp_path, "--tasks", "subbyte_needle")
    assert code != 0
    assert "pip install 'hf-subbyte-moe[eval]'" in str(error)
