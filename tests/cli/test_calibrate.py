"""``hf-subbyte-moe calibrate``: the sidecar that it writes, the model's own text, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_subbyte_moe.cli import app
from hf_subbyte_moe.cli import calibrate as command
from hf_subbyte_moe.cli import texts as texts_of
from hf_subbyte_moe.policy import SIDECAR_NAME, load_calibration
from support.models import tiny_model
from support.tokens import Letters


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a tiny model that the command loads."""
    model = tiny_model("llama")
    model.config.name_or_path = str(tmp_path)
    monkeypatch.setattr(command, "load_model", lambda name, **_: (model, Letters()))
    return tmp_path


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["calibrate", "tiny", "--windows", "2", "--context", "300", *words])


def test_a_sidecar_is_written_into_the_models_folder(folder: Path) -> None:
    lines = [json.dumps({"text": "some text of its own, " * 30}) for _ in range(3)]
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    result = run("--data", str(folder / "texts.jsonl"))
    assert result.exit_code == 0, result.output
    found = load_calibration(folder / SIDECAR_NAME)
    assert found.notes == {"texts": 2, "tokens": 428, "samples": 4, "seed": 0}
    for line in ("2.0", "2.3", "3.0"):
        assert f"│ {line}" in result.output.replace("|", "│") or f" {line} " in result.output
    assert "sidecar written to" in result.output


def test_without_data_the_model_writes_its_own(folder: Path) -> None:
    result = run("--out", str(folder / "own.safetensors"))
    assert result.exit_code == 0, result.output
    assert load_calibration(folder / "own.safetensors").notes["texts"] == 2


def test_what_the_model_writes_is_long_enough_varied_and_seeded() -> None:
    model: Any = tiny_model("llama")
    tokenizer: Any = Letters()
    first, again, other = (texts_of.written_windows(model, tokenizer, 2, 40, seed) for seed in (0, 0, 1))
    assert first.shape == (2, 40)
    assert (first[:, 0] == 1).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])
    assert (first != 2).all()  # it does not stop early


@pytest.mark.parametrize("start", [1, None])
def test_windows_come_from_as_many_texts_as_there_are_and_do_not_overlap(start: int | None) -> None:
    tokenizer: Any = Letters()
    tokenizer.bos_token_id = start
    texts = [letter * 44 for letter in "abc"]
    pieces = texts_of.text_windows(tokenizer, texts, 3, 20, seed=0)
    body = pieces[:, 1:] if start is not None else pieces
    assert sorted(map(set, body.tolist()), key=min) == [set(tokenizer(letter)["input_ids"]) for letter in "abc"]
    if start is not None:
        assert (pieces[:, 0] == start).all()
    with pytest.raises(ValueError, match="the texts hold 6 pieces of 20 tokens, not 7: give more of them"):
        texts_of.text_windows(tokenizer, texts, 7, 20, seed=0)


def test_plain_text_and_json_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n', encoding="utf-8")
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n["two"]\n', encoding="utf-8")
    assert texts_of.read_texts(tmp_path / "a.txt") == ["one\ntwo"]
    assert texts_of.read_texts(tmp_path / "b.jsonl") == ["one", "two"]
    with pytest.raises(ValueError, match=r"c\.jsonl, line 2: not "):
        texts_of.read_texts(tmp_path / "c.jsonl")


def test_a_model_without_a_folder_needs_a_file_to_write(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama")
    model.config.name_or_path = "somebody/some-model"
    monkeypatch.setattr(command, "load_model", lambda name, **_: (model, Letters()))
    result = run()
    assert isinstance(result.exception, ValueError)
    assert "is no folder that a sidecar could lie in: give --out FILE" in str(result.exception)
