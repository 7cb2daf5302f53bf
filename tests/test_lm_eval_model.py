"""The lm-eval model class: answers come out of the chosen cache, and results say how.

Kind K11 of bug: an evaluation that never reads the cache it names (EleutherAI/lm-evaluation-harness#1105).
"""

import copy
import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from support.models import prompt, tiny_model
from support.tokens import letter_tokenizer


lm_eval = pytest.importorskip("lm_eval", reason="pip install lm-eval")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_subbyte_moe.cache import EntropySubbyteCache, count_packed_reads  # noqa: E402
from hf_subbyte_moe.lm_eval_model import SubByteLM, _alike  # noqa: E402
from hf_subbyte_moe.patching import use_packed_attention  # noqa: E402
from hf_subbyte_moe.scoring import decode  # noqa: E402


COARSE = {"policy": "uniform:vq175", "window": 16}
EXACT = {"policy": "uniform:exact", "window": 16}
CONTEXT, ITEMS = 230, 3
KINDS: dict[str, dict[str, Any]] = {
    "generate_until": {"generation_kwargs": {"max_gen_toks": 6, "until": ["\x03"], "do_sample": False}},
    "loglikelihood": {},
    "multiple_choice": {"doc_to_choice": ["{{answer}}", "xy", "zw"], "doc_to_target": 0},
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("documents") / "items.jsonl"
    texts = ["".join(map(chr, prompt(CONTEXT, seed=seed)[0].clamp(33, 126).tolist())) for seed in range(ITEMS)]
    items = [{"text": text, "answer": "ab", "max_length": CONTEXT} for text in texts]
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


def task(kind: str, documents: Path, **changes: Any) -> dict[str, Any]:
    return {
        "task": f"local_{kind}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}, "cache_dir": str(documents.parent)},
        "output_type": kind,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        **copy.deepcopy(KINDS[kind]),  # the harness writes into it
        **changes,
    }


def evaluate(lm: Any, config: dict[str, Any], **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=lm, tasks=[config], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, **options
    )
    return found


def answers(found: dict[str, Any]) -> list[Any]:
    (samples,) = found["samples"].values()
    return [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def ours(model: PreTrainedModel, cache_config: Any = COARSE, **options: Any) -> SubByteLM:
    return SubByteLM(
        model, tokenizer=letter_tokenizer(), device="cpu", cache_config=cache_config, max_length=512, **options
    )


def numbers(found: dict[str, Any]) -> torch.Tensor:
    return torch.tensor(
        [
            float(reply[0][0] if isinstance(reply[0], (list, tuple)) else reply[0])
            for replies in answers(found)
            for reply in replies
        ]
    )


@pytest.mark.parametrize("kind", ["loglikelihood", "multiple_choice", "loglikelihood_rolling"])
def test_exact_tiles_score_as_the_stock_model_does_and_coarse_ones_do_not(
    kind: str, model: PreTrainedModel, documents: Path
) -> None:
    config = task(kind, documents)
    stock = numbers(evaluate(HFLM(model, tokenizer=letter_tokenizer(), max_length=512, device="cpu"), config))
    lm = ours(model, EXACT)
    exact = evaluate(lm, config)
    torch.testing.assert_close(numbers(exact), stock, rtol=1e-4, atol=1e-3)
    usage = exact["config"]["subbyte"]["usage"][f"local_{kind}"][str(CONTEXT)]
    assert usage["packed_tokens_read"] > 0
    assert usage["requests"] == ITEMS * (3 if kind == "multiple_choice" else 1)
    lm.choose_cache("entropy_subbyte", COARSE)
    coarse = evaluate(lm, config)
    assert (numbers(coarse) - stock).abs().max() > 1e-2
    lm.choose_cache("dynamic")
    torch.testing.assert_close(numbers(evaluate(lm, config)), stock, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", ["loglikelihood", "multiple_choice", "loglikelihood_rolling"])
def test_requests_that_are_scored_together_get_what_they_get_alone(
    kind: str, model: PreTrainedModel, documents: Path
) -> None:
    config = task(kind, documents)
    alone, together = (evaluate(ours(model, batch_size=rows), config) for rows in (1, 4))
    torch.testing.assert_close(numbers(together), numbers(alone), rtol=1e-4, atol=1e-3)
    said = [found["config"]["subbyte"]["usage"][f"local_{kind}"][str(CONTEXT)] for found in (alone, together)]
    assert said[0]["requests"] == said[1]["requests"]
    assert said[0]["prompt_tokens"] == said[1]["prompt_tokens"]


def test_batches_hold_equal_contexts_and_little_padding() -> None:
    lengths = [(9, 5), (9, 90), (7, 1), (9, 1), (9, 70), (9, 3)]
    assert list(_alike(lengths, 3)) == [[2], [3, 5, 0], [4, 1]]
    assert list(_alike(lengths, 2)) == [[2], [3, 5], [0], [4, 1]]
    assert list(_alike(lengths, "auto")) == [[2], [3], [5], [0], [4], [1]]
    assert list(_alike([], 2)) == []


@pytest.mark.parametrize("prefill", ["one-piece", "chunked"])
def test_generation_reads_the_cache_and_results_say_how(prefill: str, model: PreTrainedModel, documents: Path) -> None:
    config = task("generate_until", documents)
    stock = evaluate(HFLM(model, tokenizer=letter_tokenizer(), max_length=512, device="cpu"), config)
    lm = ours(model, EXACT, prefill=prefill, batch_size=2)
    exact = evaluate(lm, config)
    assert answers(exact) == answers(stock)
    said = exact["config"]["subbyte"]
    assert said["cache"] == "entropy_subbyte"
    assert said["cache_config"] == EXACT
    assert said["prefill"] == prefill
    usage = said["usage"]["local_generate_until"][str(CONTEXT)]
    assert usage["requests"] == ITEMS
    assert usage["prompt_tokens"] == {"least": CONTEXT, "most": CONTEXT}
    # 2 layers, the tile of each row, every step but the first
    assert usage["packed_tokens_read"] == ITEMS * 2 * 128 * 5
    assert usage["tokens_per_s"] > 0
    assert usage["bits"] == 32
    lm.choose_cache("entropy_subbyte", COARSE)
    coarse = evaluate(lm, config)["config"]["subbyte"]["usage"]["local_generate_until"][str(CONTEXT)]
    assert coarse["cache_bytes"] < usage["cache_bytes"]


def test_a_task_that_never_reads_a_packed_token_fails(model: PreTrainedModel, documents: Path) -> None:
    with pytest.raises(ValueError, match=r"'local_loglikelihood' never read a packed token.*packs from 260 tokens"):
        evaluate(ours(model, {"policy": "uniform:vq2"}), task("loglikelihood", documents))
    evaluate(ours(model, None, cache="dynamic"), task("loglikelihood", documents))


@pytest.mark.parametrize("start", [40, 260, 300])
def test_blocks_score_as_single_tokens_do(start: int, model: PreTrainedModel) -> None:
    use_packed_attention(model)
    ids = prompt(420)
    found = []
    for block in (1, 64):
        with count_packed_reads() as reads:
            cache = EntropySubbyteCache(model.config, bits=3.5, window=32)
            steps = list(decode(model, ids, start, cache, "one-piece", block))
        found.append((torch.cat(steps, dim=1), reads.tokens))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    assert found[0][1] == found[1][1] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill": "two"}, "prefill='two' is not possible"),
        ({"block": 0}, "block=0 is not possible"),
        ({"cache": "static"}, "cache='static' is not possible"),
        ({"cache_config": {"bit": 2}}, "unknown key 'bit'"),
        ({"cache_config": 3}, "cache_config=3 is not possible"),
        ({"cache": "dynamic"}, "cache 'dynamic' takes no options"),
        ({"cache": "quantized", "cache_config": {"backend": "paper"}}, "paper"),
    ],
)
def test_wrong_options_fail_at_once(options: dict[str, Any], message: str, model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=message):
        ours(model, **options)


def test_a_length_over_the_models_limit_is_refused(model: PreTrainedModel, documents: Path) -> None:
    with pytest.raises(ValueError, match="max_length=8192 is over the model's limit of 4096"):
        SubByteLM(model, tokenizer=letter_tokenizer(), device="cpu", max_length=8192)
    for kind in ("generate_until", "loglikelihood"):
        lm = SubByteLM(model, tokenizer=letter_tokenizer(), device="cpu", cache_config=COARSE, max_length=200)
        with pytest.raises(ValueError, match=r"over the limit of \d+ .*lose its beginning"):
            evaluate(lm, task(kind, documents))


def test_an_empty_prompt_is_refused(model: PreTrainedModel, documents: Path) -> None:
    with pytest.raises(ValueError, match="prompt of a task is empty"):
        evaluate(ours(model), task("generate_until", documents, doc_to_text=""))


def test_generation_options_that_name_another_cache_are_refused(model: PreTrainedModel, documents: Path) -> None:
    with pytest.raises(ValueError, match=r"gen_kwargs may not hold \['cache_implementation'\]"):
        evaluate(ours(model), task("generate_until", documents), gen_kwargs={"cache_implementation": "dynamic"})


def test_answers_of_another_configuration_are_not_reused(
    model: PreTrainedModel, documents: Path, tmp_path: Path
) -> None:
    config, held = task("generate_until", documents), str(tmp_path / "answers")
    first = evaluate(ours(model), config, use_cache=held)
    again = evaluate(ours(model), config, use_cache=held)
    assert answers(again) == answers(first)
    with pytest.raises(ValueError, match="use_cache: the file holds answers of another"):
        evaluate(ours(model, EXACT), config, use_cache=held)
    with pytest.raises(ValueError, match="use_cache: the file holds answers of another"):
        evaluate(ours(model, prefill="chunked"), config, use_cache=held)


def test_the_entry_point_names_the_class() -> None:
    (point,) = entry_points(group="lm_eval.models", name="subbyte")
    assert point.load() is SubByteLM
    assert lm_eval.api.registry.get_model("subbyte") is SubByteLM
