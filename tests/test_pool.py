"""Commands side by side, and the parts of runs that they measure."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from support.models import tiny_model
from support.scripts import EVAL, scripts_of
from support.tokens import letter_tokenizer


MODULES = ("pool", "run", "quality.config", "quality.harness", "quality.parts", "quality.rows")
POLICIES = [{"policy": "uniform:vq2"}, {"code_bits": [2.0, 2.3]}, {"cache": "lloyd-max", "nbits": 4}]


@pytest.fixture(scope="module")
def scripts() -> Iterator[Any]:
    with scripts_of(EVAL, *MODULES) as found:
        yield found


def job(pool: Any, folder: Path, name: str, text: str) -> Any:
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return pool.Job(name, [str(folder / f"{name}.py")], folder / f"{name}.json")


def test_what_was_written_is_gathered_also_of_jobs_that_fail(scripts: Any, tmp_path: Path) -> None:
    write = "from pathlib import Path; Path(__file__).with_suffix('.json').write_text('done')\n"
    jobs = [
        job(scripts.pool, tmp_path, "good", write),
        job(scripts.pool, tmp_path, "bad", f"{write}raise SystemExit('out of luck')"),
        job(scripts.pool, tmp_path, "silent", ""),
    ]
    gathered: list[str] = []
    failed = scripts.pool.run_jobs(jobs, 2, lambda path: gathered.append(path.name))
    assert sorted(gathered) == ["bad.json", "good.json"]
    assert failed == [f"bad ended with 1: out of luck ({tmp_path / 'bad.log'})"]


def test_so_many_run_at_a_time_and_all_end_with_the_run(scripts: Any, tmp_path: Path) -> None:
    run = (
        "import os, sys, time; from pathlib import Path; here = Path(__file__)\n"
        "here.with_suffix('.json').write_text(str(os.getpid())); time.sleep(60)\n"
    )
    jobs = [job(scripts.pool, tmp_path, name, run) for name in "abc"]
    begun: list[str] = []

    def gather(path: Path) -> None:
        begun.append(path.name)
        if len(begun) == 2:
            raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        scripts.pool.run_jobs(jobs, 2, gather)
    assert time.monotonic() - start < 30
    assert sorted(begun) == ["a.json", "b.json"]
    assert [job.ended() is not None for job in jobs[:2]] == [True, True]


def config_of(quality: Any, **changes: Any) -> Any:
    whole = {"models": [{"name": "tiny", "contexts": [400]}], "policies": POLICIES, "contexts": [9999], **changes}
    return quality.config.QualityConfig.from_dict({"tasks": ["text"], **whole})


def test_parts_name_every_policy_once_and_leave_out_what_there_is(scripts: Any, tmp_path: Path) -> None:
    quality = scripts
    config, keep = config_of(quality, tasks=["text", "needle"]), quality.harness.Keep
    results = quality.rows.ResultFile(tmp_path / "rows.json")
    only = quality.harness.Only(["protocol=one-piece"])
    parts = dict(quality.parts.parts_of(config, results, only, keep.ALL, "t.jsonl", most=3))
    assert list(parts) == [f"tiny-one-piece-400-{task}-{part}" for task in ("text", "needle") for part in (0, 1)]
    entries = []
    for name, part in parts.items():
        again = quality.config.QualityConfig.from_dict(part)
        assert (again.models[0].contexts, again.contexts, again.windows) == (None, (400,), config.windows)
        entries += [entry.identity() for entry in again.policies] if "text" in name else []
    assert entries == [entry.identity() for entry in config.policies]
    cell = {"model": "tiny", "dtype": "float32", "texts": "t.jsonl", "protocol": "one-piece", "context": 400}
    results.add({**cell, "task": "text", **config.policies[1].identity(), "commit": "old"})
    results.drop({**cell, "task": "needle"})
    parts = dict(quality.parts.parts_of(config, results, only, keep.ALL, "t.jsonl", most=3))
    assert [len(part["policies"]) for part in parts.values()] == [3]
    assert {"code_bits": 2.0} not in parts["tiny-one-piece-400-text-0"]["policies"]
    everything = quality.parts.parts_of(config, results, only, keep.NOTHING, "t.jsonl", most=3)
    assert len(dict(everything)) == 4


@pytest.mark.slow
def test_two_processes_measure_what_one_does(scripts: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_model("mixtral").save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": "abcdefghijklmnopqrstuvwxyz" * 40 + "xyz" * number}) + "\n" for number in range(6))
    )
    config = {
        "models": [{"name": "tiny", "path": str(folder)}],
        "policies": [{"policy": "uniform:exact"}, {"policy": "uniform:vq2"}],
        "contexts": [400, 500],
        "protocols": ["one-piece"],
        "tasks": ["text"],
        "windows": 2,
        "scored_tokens": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(scripts.run.main)

    def run(name: str, *more: str) -> list[dict[str, Any]]:
        given = [str(tmp_path / "config.json"), "--texts", str(tmp_path / "texts.jsonl"), "--device", "cpu"]
        given += ["--out", str(tmp_path / name), "--commit", "abc1234", *more]
        done = CliRunner().invoke(app, given, env={"COLUMNS": "250"})
        assert done.exit_code == 0, done.output
        rows: list[dict[str, Any]] = json.loads((tmp_path / name).read_text())["rows"]
        return sorted(rows, key=scripts.rows.identity)

    alone = run("alone.json")
    together = run("together.json", "--jobs", "2")
    assert len(alone) == 6
    assert together == alone
    kept = json.loads((tmp_path / "together.json").read_text())
    kept["rows"] = [row for row in kept["rows"] if (row["context"], row["policy"]) != (500, "uniform:vq2")]
    kept["rows"][0]["kl"] = 7.0  # is not looked at again
    (tmp_path / "together.json").write_text(json.dumps(kept))
    for jobs in ("1", "2"):
        filled = run("together.json", "--missing", "--jobs", jobs)
        assert len(filled) == 6
        assert [row["kl"] for row in filled].count(7.0) == 1
    again = run("together.json", "--resume", "--jobs", "2")
    assert again == filled


def test_parts_of_lm_eval_runs_are_what_has_no_row() -> None:
    pytest.importorskip("lm_eval")
    with scripts_of(EVAL, "lm_eval_runs") as found:
        runs = found.lm_eval_runs
    config = runs.read_config(EVAL / "configs" / "lm_eval.json")
    every = dict(runs.parts_of(config, [], None))
    count = sum(len(run["lengths"]) * len(run["tasks"]) for run in config["runs"]) * len(config["caches"])
    assert len(every) == count
    (run,) = next(iter(every.values()))["runs"]
    assert (len(run["lengths"]), len(run["tasks"])) == (1, 1)
    row = {"model": "smollm2-135m", "prefill": "chunked", "task": "subbyte_text", "length": 2048, "label": "dynamic"}
    left = dict(runs.parts_of(config, [row], None))
    assert set(every) - set(left) == {"smollm2-135m-chunked-subbyte_text-2048-dynamic"}
    assert set(dict(runs.parts_of(config, [row], ["subbyte_text"]))) == {name for name in left if "_text-" in name}
