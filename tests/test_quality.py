"""The quality harness: its figures by hand, and whole runs on a tiny model."""

import importlib
import importlib.util
import json
import math
import string
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import typer
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.patching import use_packed_attention
from support.models import VOCABULARY, tiny_model
from support.scripts import EVAL, scripts_of


MODULES = ("tasks", "caches", "config", "scoring", "rows", "harness")
TEXTS = [string.printable.replace("\n", " ") * 9 + str(number) * 40 for number in range(6)]


class Letters:
    """A tokenizer whose tokens are ASCII characters."""

    bos_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    with scripts_of(EVAL, *(f"quality.{name}" for name in MODULES)) as found:
        yield found


@pytest.fixture(scope="module")
def script(quality: Any) -> ModuleType:
    spec = importlib.util.spec_from_file_location("quality_run", EVAL / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    made = tiny_model("mixtral")
    use_packed_attention(made)
    return made


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "models": [{"name": "tiny"}],
        "policies": [{"policy": "uniform:exact"}, {"policy": "auto", "code_bits": 2.3}],
        "contexts": [400],
        "protocols": ["one-piece"],
        "tasks": ["text"],
        "windows": 3,
        "scored_tokens": 8,
        "prompts": 3,
        "batch_tokens": 1000,
        **changes,
    }


@pytest.fixture
def run_cli(
    quality: Any, script: ModuleType, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Runs the command on a tiny model; gives the exit code, the output and what the result file holds."""
    monkeypatch.setattr(quality.harness, "load", lambda entry, device: (model, Letters()))
    texts, out = tmp_path / "texts.jsonl", tmp_path / "results" / "quality.json"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(script.main)

    def invoke(*more: str, **changes: Any) -> Any:
        file = tmp_path / "config.json"
        file.write_text(json.dumps(settings(**changes)), encoding="utf-8")
        given = [str(file), "--texts", str(texts), "--out", str(out), "--commit", "abc1234", *more]
        done = CliRunner().invoke(app, given, env={"COLUMNS": "250"})
        held = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": [], "dropped": []}
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return SimpleNamespace(code=done.exit_code, output=done.output, **held)

    invoke.app = app  # type: ignore[attr-defined]
    return invoke


# ------------------------------------------------------------------ figures


def test_figures_of_hand_made_logits(quality: Any) -> None:
    exact = torch.tensor([[[0.5, 0.5], [0.9, 0.1]], [[0.5, 0.5], [0.25, 0.75]]]).log()
    packed = torch.tensor([[[0.25, 0.75], [0.9, 0.1]], [[0.5, 0.5], [0.75, 0.25]]]).log() + 3.0  # logits have no zero
    targets, counted = torch.tensor([[0, 0], [1, 1]]), torch.tensor([[True, True], [False, True]])
    scores = quality.scoring.compare(exact, packed, targets, counted)
    half = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert scores.kl[0] == pytest.approx([half, 0], abs=1e-6)
    assert scores.kl[1, 1] == pytest.approx(0.5 * math.log(3), rel=1e-5)
    assert scores.dnll[0] == pytest.approx([math.log(2), 0], abs=1e-6)
    assert scores.dnll[1, 1] == pytest.approx(math.log(3), rel=1e-5)
    assert scores.nll_exact[0] == pytest.approx([math.log(2), -math.log(0.9)], rel=1e-5)
    assert scores.same.tolist() == [[False, True], [True, False]]
    assert scores.right.tolist() == [[False, True], [False, False]]
    found = quality.scoring.summary(scores, seed=0, answers=True)
    assert found["kl"] == pytest.approx((half / 2 + 0.5 * math.log(3)) / 2, rel=1e-5)
    assert found["top1"] == 0.25
    assert (found["score"], found["score_exact"], found["n"], found["tokens"]) == (0.0, 1.0, 2, 3)
    assert quality.scoring.summary(scores, seed=0, answers=False)["score"] is None
    joined = quality.scoring.joined([scores, scores], axis=1)
    assert joined.kl.shape == (2, 4)


def test_intervals_are_reproducible_and_cover_the_mean(quality: Any) -> None:
    interval = quality.scoring.interval
    values = np.random.default_rng(1).normal(size=200)
    low, high = interval(values, seed=0)
    assert (low, high) == interval(values, seed=0)
    assert (low, high) != interval(values, seed=1)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(200), rel=0.1)
    assert interval(np.ones(5), seed=0) == (1.0, 1.0)


# ------------------------------------------------------------------ what is decoded


@pytest.mark.parametrize("task", ["needle", "multikey", "variables"])
def test_prompts_have_the_asked_length_and_one_answer(quality: Any, task: str) -> None:
    stream = [ord(letter) for letter in "".join(TEXTS)]
    make = quality.tasks.task_prompt
    for context in (1000, 1001):
        for number in range(8):
            prompt = make(Letters(), stream, task, context, 0, number)
            whole = Letters().decode(prompt.ids)
            assert len(prompt.ids) == context
            assert whole.endswith(prompt.puzzle.question)
            assert len(prompt.puzzle.needles) == {"needle": 1, "multikey": 8, "variables": 8}[task]
            for piece in [*prompt.puzzle.needles, *prompt.puzzle.once]:
                assert whole.count(piece) == 1
            assert prompt == make(Letters(), stream, task, context, 0, number)
    assert make(Letters(), stream, task, 1000, 0, 1).ids != make(Letters(), stream, task, 1000, 1, 1).ids
    with pytest.raises(ValueError, match="context=300 is too short: task"):
        make(Letters(), stream, task, 300, 0, 0)


def test_the_answer_of_a_chain_follows_it(quality: Any) -> None:
    prompt = quality.tasks.task_prompt(Letters(), [65] * 5000, "variables", 1200, 0, 3)
    value = prompt.puzzle.question.split("value ")[1].split()[0]
    chain = []
    for line in prompt.puzzle.needles:
        name, said = line.removeprefix(" VAR ").strip().split(" = ")
        if said == value or said.removeprefix("VAR ") in chain:
            chain.append(name)
    assert prompt.puzzle.answer == " " + " ".join(chain)


def test_a_later_question_is_read_after_the_prompt(quality: Any) -> None:
    stream = [ord(letter) for letter in "".join(TEXTS)]
    prompts = [quality.tasks.task_prompt(Letters(), stream, "multikey-later", 1500, 0, number) for number in range(3)]
    longest = max(len(prompt.puzzle.question) for prompt in prompts)
    given = quality.tasks.task_sequences(prompts)
    assert given.prefill == 1500 - longest
    for row, prompt in enumerate(prompts):
        whole = Letters().decode(given.ids[row].tolist())
        assert prompt.puzzle.question not in whole[: given.prefill]
        assert whole[:1500] == Letters().decode(prompt.ids)
        assert Letters().decode(given.targets[row][given.counted[row]].tolist()) == prompt.puzzle.answer
        assert torch.equal(given.ids[row, given.prefill + 1 :], given.targets[row, :-1])


def test_text_is_cut_into_pieces_that_do_not_overlap(quality: Any) -> None:
    found = quality.tasks.text_sequences(list(range(1, 1000)), [0], 300, 9, 10, seed=0)
    assert found.ids.shape == (3, 309)
    assert (found.ids[:, 0] == 0).all()
    assert torch.equal(found.ids[:, 301:], found.targets[:, :-1])
    assert found.ids[:, 1:].unique().numel() == 3 * 308
    assert len(quality.tasks.text_sequences(list(range(1, 1000)), [0], 300, 9, 2, seed=0)) == 2
    with pytest.raises(ValueError, match="texts of 100 tokens hold no piece of 309"):
        quality.tasks.text_sequences(list(range(100)), [0], 300, 9, 1, seed=0)


def test_texts_come_from_a_file_or_from_our_own_sources(quality: Any, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a", "source": "b"}\n', encoding="utf-8")
    assert quality.tasks.read_texts(file, EVAL.parent) == ["a"]
    assert sum(map(len, quality.tasks.read_texts(None, EVAL.parent))) > 100_000
    file.write_text('{"text": "a"}\n{"txt": "a"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"texts.jsonl, line 2: not"):
        quality.tasks.read_texts(file, EVAL.parent)


# ------------------------------------------------------------------ decoding


def sequences(quality: Any, tokens: int, rows: int = 2, steps: int = 6) -> Any:
    ids = torch.randint(2, VOCABULARY, (rows, tokens + steps + 1), generator=torch.Generator().manual_seed(3))
    targets = ids[:, tokens + 1 :]
    return quality.tasks.Sequences(ids[:, :-1], tokens, targets, torch.ones_like(targets, dtype=torch.bool))


def test_the_exact_tier_changes_nothing_in_either_protocol(quality: Any, model: PreTrainedModel) -> None:
    given = sequences(quality, 700)
    entry = quality.config.PolicyEntry.from_dict("policies[0]", {"policy": "uniform:exact"})[0]
    found = []
    for protocol in ("one-piece", "chunked"):
        exact = quality.harness.exact_logits(model, given, protocol, 4096)
        measured = quality.harness.measure(model, given, exact, entry, protocol, 4096)
        assert measured.scores.kl.max() < 1e-5
        assert measured.scores.same.all()
        assert measured.code_bits == 32
        assert 0 < measured.mass < 1
        found.append(measured.scores)
    np.testing.assert_allclose(found[0].nll_exact + found[0].dnll, found[1].nll_exact + found[1].dnll, atol=1e-4)


def test_batches_do_not_change_a_policys_figures(quality: Any, model: PreTrainedModel) -> None:
    given = sequences(quality, 400, rows=3)
    entry = quality.config.PolicyEntry.from_dict("policies[0]", {"policy": "error", "code_bits": 2.3})[0]
    found = []
    for batch_tokens in (400, 820):
        exact = quality.harness.exact_logits(model, given, "one-piece", batch_tokens)
        found.append(quality.harness.measure(model, given, exact, entry, "one-piece", batch_tokens))
    np.testing.assert_allclose(found[0].scores.kl, found[1].scores.kl, atol=1e-5)
    assert found[0].mass == pytest.approx(found[1].mass, abs=1e-4)
    assert found[0].code_bits == pytest.approx(2.3, abs=0.3)
    assert found[0].bits - found[0].code_bits == pytest.approx(1.0)  # bf16 scales at head_dim 16


def test_the_share_of_packed_tiles_is_that_of_their_columns(quality: Any, model: PreTrainedModel) -> None:
    given = sequences(quality, 700)
    entry = quality.config.PolicyEntry.from_dict("policies[0]", {"policy": "uniform:exact"})[0]
    exact = quality.harness.exact_logits(model, given, "chunked", 4096)
    measured = quality.harness.measure(model, given, exact, entry, "chunked", 4096)
    eager = tiny_model("mixtral", attn_implementation="eager")
    with torch.no_grad():
        weights = torch.stack(eager(given.ids, output_attentions=True).attentions)  # [L, B, HQ, T, T]
    packed = weights[..., 700:, 4 : 4 + 4 * 128]  # sinks, then four tiles: 184 tokens are left for the window
    assert measured.mass == pytest.approx(float(packed.sum(-1).mean()), abs=1e-4)


def test_a_score_is_what_greedy_decoding_gives(quality: Any, model: PreTrainedModel) -> None:
    prompts = sequences(quality, 400, rows=2, steps=1).ids[:, :400]
    cache, ids = DynamicCache(config=model.config), prompts
    with torch.no_grad():
        for _ in range(5):
            logits = model(ids[:, cache.get_seq_length() :], **{CACHE_KW: cache}).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    answers = ids[:, 400:].tolist()
    answers[1][-1] = (answers[1][-1] + 1) % VOCABULARY
    pairs = zip(prompts.tolist(), [answers[0][:4], answers[1]], strict=True)
    given = quality.tasks.task_sequences([quality.tasks.Prompt(prompt, answer, None) for prompt, answer in pairs])
    assert given.counted.sum(1).tolist() == [4, 5]
    exact = torch.cat(quality.harness.exact_logits(model, given, "one-piece", 4096))
    right = (exact.argmax(-1) == given.targets).numpy()
    assert quality.scoring.all_right(right, given.counted.numpy()).tolist() == [1.0, 0.0]
    assert right[1, :4].all()


def test_the_control_says_one_bit_a_value(quality: Any) -> None:
    table = quality.caches.one_bit_table(torch.device("cpu"))
    assert table.shape == (1, 1, 256, 4)
    assert len(table[0, 0].unique(dim=0)) == 16


# ------------------------------------------------------------------ whole runs


def test_a_run_writes_rows_and_the_control_loses(run_cli: Any) -> None:
    done = run_cli(protocols=["one-piece", "chunked"], contexts=[600])
    assert done.code == 0, done.output
    assert [row["policy"] for row in done.rows] == ["control", "uniform:exact", "auto"] * 2
    control, exact, error = done.rows[:3]
    assert exact["kl"] < 1e-5
    assert exact["top1"] == 1.0
    assert 0 < error["kl"] < control["kl"]
    assert error["kl_interval"][0] <= error["kl"] <= error["kl_interval"][1]
    assert (control["default"], exact["default"], error["default"]) == (False, False, True)
    assert (error["budget"], error["codebook"], error["n"], error["seeds"]) == (2.3, "universal", 3, [0])
    assert (control["code_bits"], control["commit"], control["score"]) == (pytest.approx(1.0), "abc1234", None)
    assert done.rows[3]["protocol"] == "chunked"
    assert "auto universal *" in done.output


def test_a_baseline_is_a_policy_like_any_other(run_cli: Any) -> None:
    policies = [{"cache": "lloyd-max", "nbits": 4}, {"cache": "simulated", "tier": "vq2", "mean": False}]
    done = run_cli(contexts=[600], policies=policies)
    assert done.code == 0, done.output
    control, plain, ours = done.rows
    assert (plain["policy"], plain["options"], plain["bits"]) == ("lloyd-max", {"nbits": 4}, 5.0)
    assert (ours["policy"], ours["options"]) == ("simulated", {"tier": "vq2", "mean": False})
    assert 0 < plain["kl"] < ours["kl"] < control["kl"]
    assert plain["bits"] < plain["bits_total_16"] < plain["bits_total"]
    assert control["bits_total_16"] < control["bits_total"]


def test_a_peer_that_is_not_installed_is_left_out_and_named(
    run_cli: Any, quality: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache(self: Any, config: Any) -> None:
        raise quality.harness.MissingPackageError("it needs a package that is not installed: pip install hqq")

    monkeypatch.setattr(quality.config.BASELINES["hqq"], "cache", cache)
    done = run_cli(policies=[{"cache": "hqq", "nbits": 4}, {"policy": "uniform:exact"}])
    assert done.code == 0, done.output
    assert [row["policy"] for row in done.rows] == ["control", "uniform:exact"]
    assert "skipped: hqq: it needs a package that is not installed: pip install hqq" in done.output


def test_tasks_are_scored_or_dropped(run_cli: Any, quality: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {"tasks": ["needle"], "contexts": [600], "policies": [{"policy": "uniform:exact"}]}
    dropped = run_cli(**tasks)
    assert dropped.code == 0
    assert dropped.rows == []
    assert (dropped.dropped[0]["task"], dropped.dropped[0]["score_exact"]) == ("needle", 0.0)
    assert "dropped: tiny, one-piece, 600, needle: the exact cache itself scores 0.00" in dropped.output
    monkeypatch.setattr(quality.harness, "LEAST_EXACT_SCORE", 0.0)
    scored = run_cli(**tasks)
    assert scored.dropped == []
    assert [(row["policy"], row["score"]) for row in scored.rows] == [("control", 0.0), ("uniform:exact", 0.0)]
    assert scored.rows[1]["kl"] < 1e-5
    assert scored.rows[0]["kl"] > 1e-4


def test_a_control_that_does_not_lose_fails_the_run(
    run_cli: Any, quality: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {quality.caches.CONTROL: lambda config, _: EntropySubbyteCache(config, policy="uniform:vq4")}
    monkeypatch.setattr(quality.harness, "CACHES", made)
    done = run_cli()
    assert done.code == 1
    assert "the control does not lose: tiny, float32, texts.jsonl, one-piece, 400, text" in done.output


def test_a_later_run_replaces_its_rows_and_keeps_the_others(run_cli: Any) -> None:
    first = run_cli("--limit", "2")
    again = run_cli("--only", "policy=auto")
    assert [row["policy"] for row in again.rows] == ["control", "uniform:exact", "auto"]
    assert [row["n"] for row in first.rows] == [2, 2, 2]
    assert [row["n"] for row in again.rows] == [3, 2, 3]
    ablation = run_cli(policies=[{"policy": "error", "code_bits": 2.3, "sinks": 0}])
    assert len(ablation.rows) == 4
    assert (ablation.rows[3]["options"], ablation.rows[3]["default"]) == ({"sinks": 0}, False)
    resumed = run_cli("--resume", "--only", "policy=auto")
    assert resumed.rows == ablation.rows


def test_rows_written_so_far_survive(quality: Any, tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    row = dict.fromkeys((*quality.rows.CELL_KEYS, *quality.rows.POLICY_KEYS))
    results = quality.rows.ResultFile(file)
    results.add({**row, "kl": 1.0})
    results.add({**row, "context": 1, "kl": 2.0})
    results = quality.rows.ResultFile(file)
    results.add({**row, "kl": 3.0})
    assert [held["kl"] for held in json.loads(file.read_text(encoding="utf-8"))["rows"]] == [3.0, 2.0]
    results.drop({**row, "context": 1})
    assert [held["kl"] for held in results.rows] == [3.0]
    assert quality.rows.ResultFile(file).dropped == [{**dict.fromkeys(quality.rows.CELL_KEYS), **row, "context": 1}]


# ------------------------------------------------------------------ configs


def test_a_models_sidecar_serves_its_policies(quality: Any, tmp_path: Path) -> None:
    entry = quality.config.ModelEntry("reference", sidecar=str(tmp_path / "gone.safetensors"))
    with pytest.raises(FileNotFoundError, match="there is no sidecar at"):
        quality.harness.load(entry, "cpu")
    own, _ = quality.harness.load(quality.config.ModelEntry("reference"), "cpu")
    (entry,) = quality.config.PolicyEntry.from_dict("policies[0]", {"code_bits": 2.3})
    assert quality.harness.make_cache(own, entry).kv_config.policy == "calibrated"
    assert entry.identity()["default"]


@pytest.mark.parametrize("name", ["smoke", "quality", "policies", "peers", "ablations", "collapse"])
def test_the_configs_that_come_along_are_valid(quality: Any, name: str) -> None:
    config = quality.config.read_config(EVAL / "configs" / f"{name}.json")
    # without a sidecar the default is "error"
    assert any(entry.identity()["default"] or entry.identity()["policy"] == "error" for entry in config.policies)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"promts": 3}, "unknown key 'promts' in the config"),
        ({"prompts": 0}, "prompts=0 is not possible: a whole number, at least 1"),
        ({"prompts": True}, "prompts=True is not possible"),
        ({"contexts": [128]}, r"contexts\[0\]=128 is not possible: a whole number, at least 300"),
        ({"contexts": []}, r"contexts=\[\] is not possible"),
        ({"protocols": ["whole"]}, r"protocols\[0\]='whole' is not possible: one of"),
        ({"tasks": ["text", "text"]}, "tasks=.* is not possible: each name once"),
        ({"policies": [{"policy": "eror"}]}, r"policies\[0\]: policy='eror' is not possible"),
        ({"policies": [{"policy": "error", "bits": 2}]}, r"policies\[0\].bits=2 is not possible: say code_bits"),
        ({"policies": [{"policy": "uniform:vq2", "code_bits": 2}]}, r"policies\[0\]: bits=2 is not possible"),
        (
            {"policies": [{"cache": "gear"}]},
            r"policies\[0\].cache='gear' is not possible: one of \['control', 'fp8', 'hqq', ",
        ),
        ({"policies": [{"policy": "error", "windw": 2}]}, r"policies\[0\]: unknown key 'windw'"),
        ({"models": [{"name": "a", "dtype": "int8"}]}, r"models\[0\].dtype='int8' is not possible"),
        ({"models": [{"name": "a", "change": {"tail": 2}}]}, r"unknown key 'tail' in models\[0\].change"),
        ({"models": [{"name": "a", "change": {"key_offset": 0}}]}, r"models\[0\].change.key_offset=0 is not possible"),
        ({"policies": [{"cache": "kivi"}]}, r"policies\[0\] lacks 'nbits'"),
        ({"models": [{"path": "a"}]}, r"models\[0\].name=None is not possible"),
        ({"models": [{"name": "a"}, {"name": "a"}]}, "models=.* is not possible: each name once"),
    ],
)
def test_a_wrong_config_is_refused(quality: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quality.config.QualityConfig.from_dict(settings(**changes))


def test_errors_name_the_file_and_what_lacks(run_cli: Any, quality: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken.json: Expecting"):
        quality.config.read_config(broken)
    with pytest.raises(ValueError, match="the config lacks 'models'"):
        quality.config.QualityConfig.from_dict({})
    done = run_cli("--only", "policies=error")
    assert done.code == 2
    assert "--only 'policies=error' is not possible" in done.output
    for filters, message in [
        (["model=nosuch"], "--only 'model=nosuch' fits nothing in the config: one of ['tiny']"),
        (["policy=nosuch"], "fits nothing in the config: one of ['auto', 'control', 'uniform:exact']"),
        (["policy=auto", "context=401"], "--only 'context=401' fits nothing in the config: one of ['400', '500']"),
        (["model=tiny", "context=400"], "--only model=tiny --only context=400 together leave nothing"),
    ]:
        models = [{"name": "tiny", "contexts": [500]}, {"name": "other", "contexts": [400]}]
        changes = {"models": models} if "context" in filters[-1] else {}
        done = run_cli(*(word for text in filters for word in ("--only", text)), **changes)
        assert done.code == 2
        assert message in done.output
    folder = CliRunner().invoke(run_cli.app, [str(tmp_path)], env={"COLUMNS": "250"})
    assert folder.exit_code == 2
    assert "is a directory" in folder.output
    out_of_reach = run_cli(policies=[{"policy": "error", "code_bits": 1.0}])
    assert out_of_reach.code == 2
    assert "policy 'error', code_bits 1.0: bits=2.0 is out of reach" in out_of_reach.output
