"""``hf-subbyte-moe cluster``: the file that it writes, what ``from_pretrained`` makes of it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from hf_subbyte_moe.cli import app
from hf_subbyte_moe.cli import cluster as command
from hf_subbyte_moe.routing import ROUTING_SIDECAR_NAME, Clusters, find_routers
from support.models import prompt, tiny_model
from support.moe import tiny_moe
from support.tokens import Letters


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny model that the command loads, with texts in it."""
    model = tiny_moe("qwen3_moe")
    model.save_pretrained(tmp_path)
    model.config.name_or_path = str(tmp_path)
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (model, Letters()))
    lines = [json.dumps({"text": f"text {number} " * 30}) for number in range(4)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["cluster", "tiny", "--windows", "4", "--context", "64", *words])


def error_of(result: Any) -> str:
    assert result.exit_code != 0
    return str(result.exception)


def test_a_file_is_written_and_loaded(folder: Path) -> None:
    out, picture = folder / "own.safetensors", folder / "seen.png"
    result = run("--clusters", "4", "--data", str(folder / "texts.jsonl"), "--out", str(out), "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    clusters = Clusters.load(out)
    assert clusters.count == 4
    assert clusters.source == "traces"
    assert clusters.model == {"model_type": "qwen3_moe", "layers": 2, "experts": 8, "top_k": 2}
    assert all(torch.equal(torch.bincount(row), torch.full((4,), 2)) for row in clusters.labels)
    for name in ("traces", "index", "random"):
        assert name in result.output
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, hf_subbyte_moe={"routing": {"mode": "hard", "top_clusters": 1, "sidecar": str(out)}}
    )
    for layer, place in enumerate(find_routers(model)):
        indices = place.module(torch.randn(100, 64))[2]
        found = clusters.labels[layer][indices]
        assert torch.equal(found[:, 0], found[:, 1])
    model.save_pretrained(folder / "again")
    again: Any = AutoModelForCausalLM.from_pretrained(folder / "again")
    assert torch.equal(again(prompt(9)).logits, model(prompt(9)).logits)


def test_a_file_in_the_models_folder_is_found(folder: Path) -> None:
    assert run("--data", str(folder / "texts.jsonl"), "--by", "outputs").exit_code == 0
    clusters = Clusters.load(folder / ROUTING_SIDECAR_NAME)
    model = AutoModelForCausalLM.from_pretrained(folder, hf_subbyte_moe={"routing": {"mode": "soft"}})
    for layer, place in enumerate(find_routers(model)):
        state: Any = place.module._hf_subbyte_moe_routing
        assert torch.equal(state.membership, clusters.membership(layer))


@pytest.mark.parametrize("by", ["coactivation", "transitions", "weights", "rows"])
def test_signals_and_replicas(folder: Path, by: str) -> None:
    out = folder / "own.safetensors"
    result = run("--data", str(folder / "texts.jsonl"), "--by", by, "--replicas", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    clusters = Clusters.load(out)
    assert clusters.source == by
    assert clusters.replicated.sum(1).tolist() == [2, 2]


def test_bad_input(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ("--data", str(folder / "texts.jsonl"))
    assert "--clusters 9 is not possible: Qwen3MoeForCausalLM has 8 experts" in error_of(run("--clusters", "9"))
    assert "--by 'luck' is not possible: one of ['traces'" in error_of(run("--by", "luck"))
    assert "replicas=7 is not possible with 8 experts in 2 clusters" in error_of(run(*texts, "--replicas", "7"))
    (folder / "broken.jsonl").write_text('{"text": 1}\nno json', encoding="utf-8")
    assert "broken.jsonl, line 2" in error_of(run("--data", str(folder / "broken.jsonl")))
    monkeypatch.setattr(command, "load_model", lambda *_, **__: (tiny_model("llama"), Letters()))
    assert "does not support LlamaForCausalLM" in error_of(run())
