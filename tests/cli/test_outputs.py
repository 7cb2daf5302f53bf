"""What cannot be written is said before a model is loaded: no run is lost to its last line."""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_subbyte_moe import cli
from hf_subbyte_moe.cli import running
from hf_subbyte_moe.cli.outputs import check_file, check_folder
from hf_subbyte_moe.routing import Clusters


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading a model is too late. ``folder`` is one, ``file`` is none."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(running.AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(importlib.import_module("hf_subbyte_moe.cli.evaluate"), "_load_model", load)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["demo", "--json", "nowhere/a.json"],
            "--json 'nowhere/a.json' is not possible: there is no folder 'nowhere'",
        ),
        (["demo", "--json", "folder"], "--json 'folder' is not possible: it is a folder"),
        (["demo", "--plot", "file/a.png"], "--plot 'file/a.png' is not possible: there is no folder 'file'"),
        (["demo", "--plot", "a.xyz"], "--plot 'a.xyz' is not possible: the ending is one of ["),
        (["explain", "--plot", "folder"], "--plot 'folder' is not possible: it is a folder"),
        (["explain", "--json", "folder"], "--json 'folder' is not possible: it is a folder"),
        (["bench", "--json", "folder"], "--json 'folder' is not possible: it is a folder"),
        (["bench", "cache", "--json", "nowhere/a.json"], "there is no folder 'nowhere'"),
        (["bench", "experts", "--json", "nowhere/a.json"], "there is no folder 'nowhere'"),
        (["bench", "latency", "--json", "nowhere/a.json"], "there is no folder 'nowhere'"),
        (["cluster", "--out", "folder"], "--out 'folder' is not possible: it is a folder"),
        (["cluster", "--out", "file/a"], "--out 'file' is not possible:"),
        (["cluster", "--plot", "nowhere/a.png"], "there is no folder 'nowhere'"),
        (["calibrate", "--out", "folder"], "--out 'folder' is not possible: it is a folder"),
        (["calibrate", "--predictor", "--out", "file/a"], "--out 'file' is not possible:"),
        (["eval", "--tasks", "subbyte_text", "--out", "file/report"], "--out 'file/report' is not possible:"),
        (["publish", "model", "file/out"], "OUT_DIR 'file/out' is not possible:"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_place_where_nothing_can_be_written_is_refused_at_once(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if words[0] == "eval":
        pytest.importorskip("lm_eval", reason="pip install 'hf-subbyte-moe[eval]'")
    if "--plot" in words:
        pytest.importorskip("matplotlib", reason="pip install 'hf-subbyte-moe[eval]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["hf-subbyte-moe", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said


def test_what_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may write everywhere
    with pytest.raises(ValueError, match="the file may not be written"):
        check_file(tmp_path / "file", "--json")
    with pytest.raises(ValueError, match=r"--json: nothing may be written into the folder .*folder"):
        check_file(tmp_path / "folder" / "new", "--json")
    with pytest.raises(ValueError, match=r"--out: nothing may be written into the folder .*folder"):
        check_folder(tmp_path / "folder" / "new" / "new", "--out")


def test_what_can_be_written_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_file(Path("file"), "--json")
    check_file(Path("new"), "--json")
    check_file(Path("new/new/file"), "--out", makes_folders=True)
    check_folder(Path("new/new"), "--out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_clusters_that_cannot_be_written_are_an_ordinary_error(tmp_path: Path) -> None:
    labels = (torch.arange(8) // 4).expand(3, -1).contiguous()
    clusters = Clusters(labels, torch.zeros(3, 8, dtype=torch.bool), 2)
    with pytest.raises(OSError, match=r"folder"):
        clusters.save(tmp_path / "folder")
    clusters.save(tmp_path / "new" / "clusters.safetensors")
    assert Clusters.load(tmp_path / "new" / "clusters.safetensors").count == 2
