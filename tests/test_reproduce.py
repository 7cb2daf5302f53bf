"""Every result file has a command that makes it, and the runner of these commands says what it did not run."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from support.scripts import EVAL, scripts_of


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def reproduce() -> Iterator[Any]:
    with scripts_of(EVAL, "reproduce") as found:
        yield found.reproduce


@pytest.fixture
def project(reproduce: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project of three steps, whose pages render themselves."""
    a, b = {"files": ["results/a.json"], "minutes": 1}, {"files": ["results/b.json", "results/c.json"], "minutes": 1}
    steps = [
        {**a, "on": "cpu", "run": "python write.py {file} {texts}"},
        {**b, "on": "cpu", "run": "python write.py made.json nothing", "keep": "made.json"},
        {**b, "on": "2 gpus", "run": "python write.py {file} nothing"},
    ]
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    (tmp_path / "results").mkdir()
    (tmp_path / "write.py").write_text("import sys\nopen(sys.argv[1], 'w').write(sys.argv[2])\n")
    for page in ("eval/report.py", "kernels/benchmarks/moe_report.py"):
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text(f"open({Path(page).stem!r}, 'w').close()\n")
    listed = reproduce.read_steps(tmp_path / "steps.json")
    monkeypatch.setattr(reproduce, "read_steps", lambda: listed)
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(reproduce.torch.cuda, "device_count", lambda: 1)
    return tmp_path


def run(reproduce: Any, *words: str) -> tuple[int, str]:
    app = reproduce.typer.Typer()
    app.command()(reproduce.main)
    done = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
    return done.exit_code, done.output


def test_every_result_file_has_its_command_and_every_command_exists(reproduce: Any) -> None:
    listed = {file for step in reproduce.read_steps() for file in step.files}
    folders = ("eval/results", "kernels/benchmarks/results")
    there = {str(file.relative_to(ROOT)) for folder in folders for file in (ROOT / folder).glob("*.json")}
    assert {file for file in there if not Path(file).name.startswith("tuning")} <= listed  # those are not kept
    for step in reproduce.read_steps():
        program, script = step.command[:2]
        if program == "torchrun":
            script = step.command[3]
        if script == "-m":
            assert importlib.util.find_spec(step.command[4])
        elif program in ("python", "torchrun"):
            assert (ROOT / script).exists()
        else:
            assert program == "hf-subbyte-moe"
            assert shutil.which(step.words({})[0])
        for word in step.command:
            if word.startswith("eval/configs/"):
                assert (ROOT / word).exists()


def test_steps_run_and_what_does_not_is_said(reproduce: Any, project: Path) -> None:
    (project / "texts.jsonl").write_text("")
    code, said = run(reproduce, "--texts", str(project / "texts.jsonl"))
    assert code == 0, said
    assert (project / "results" / "a.json").read_text() == str(project / "texts.jsonl")
    assert (project / "results" / "b.json").read_text() == "nothing"
    assert (project / "report").exists()
    assert (project / "moe_report").exists()
    assert "needs 2 gpus" in said
    assert said.count("done") == 2
    code, said = run(reproduce, "--minutes", "0.5", "--file", "c.json")
    assert "no time left" in said
    code, said = run(reproduce)
    assert code == 0
    assert "needs --texts" in said


def test_a_step_that_fails_is_named_and_the_others_run(reproduce: Any, project: Path) -> None:
    (project / "results" / "a.json").mkdir()
    (project / "texts.jsonl").write_text("")
    code, said = run(reproduce, "--texts", str(project / "texts.jsonl"))
    assert code == 1
    assert "exit code 1" in said
    assert (project / "results" / "b.json").exists()


@pytest.mark.parametrize(
    ("given", "named"), [(None, "abc+"), ("", "abc+"), ("of the caller", "of the caller"), (None, None)]
)
def test_steps_know_the_commit_that_they_measure(
    given: str | None, named: str | None, reproduce: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(reproduce, "commit_of", lambda root: asked.append(root) or named or "")
    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    if given is not None:
        monkeypatch.setenv("BENCH_COMMIT", given)
    (project / "write.py").write_text("import os\nprint(os.environ.get('BENCH_COMMIT'), file=open('said', 'a'))\n")
    (project / "made.json").touch()
    (project / "texts.jsonl").touch()
    assert run(reproduce, "--texts", str(project / "texts.jsonl"))[0] == 0
    assert (project / "said").read_text() == f"{named}\n" * 2
    assert asked == ([] if given else [project])  # once: the first step changes files


def test_a_commit_has_a_mark_where_files_differ(reproduce: Any, tmp_path: Path) -> None:
    def git(*words: str) -> str:
        own = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        return subprocess.run(["git", *own, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert reproduce.commit_of(tmp_path) == ""
    git("init")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-m", "a")
    commit = git("rev-parse", "--short=10", "HEAD").strip()
    assert reproduce.commit_of(tmp_path) == commit
    (tmp_path / "other").write_text("nobody's")
    assert reproduce.commit_of(tmp_path) == commit
    (tmp_path / "file").write_text("b")
    assert reproduce.commit_of(tmp_path) == commit + "+"


def test_latencies_are_measured_with_the_policy_of_their_rows(reproduce: Any) -> None:
    rows = json.loads((ROOT / "eval/results/latency.json").read_text())["rows"]
    (policy,) = {row["policy"] for row in rows}
    steps = [step.command for step in reproduce.read_steps() if step.files == ("eval/results/latency.json",)]
    assert steps
    assert all(words[words.index("--policy") + 1] == policy for words in steps)


def test_listing_runs_nothing(reproduce: Any, project: Path) -> None:
    code, said = run(reproduce, "--list", "--on", "cpu")
    assert code == 0
    assert "python write.py results/a.json '{texts}'" in said
    assert "2 gpus" not in said
    assert not (project / "made.json").exists()
    assert run(reproduce, "--file", "nothing")[0] == 2


def test_an_unknown_place_is_refused(reproduce: Any, tmp_path: Path) -> None:
    step = {"files": ["a"], "on": "tpu", "minutes": 1, "run": "python a.py"}
    (tmp_path / "steps.json").write_text(json.dumps([step]))
    with pytest.raises(ValueError, match="on='tpu' is not possible"):
        reproduce.read_steps(tmp_path / "steps.json")
