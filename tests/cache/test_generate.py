"""Ways of generating: with the ``exact`` tier, logits and tokens equal DynamicCache's; cases A02, A03, A04 and A06."""

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.cache_utils import DynamicCache, StaticCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from support.models import KINDS, left_padded, prompt, tiny_model


EXACT = {"policy": "uniform:exact", "window": 8, "sinks": 2}
LOSSY = {"bits": 4.0, "window": 8, "sinks": 2}


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": 140, "do_sample": False, "output_logits": True}
    torch.manual_seed(7)
    return model.generate(ids, return_dict_in_generate=True, **{**settings, **options})


def ours(config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": CACHE_NAME, "cache_config": config}


def assert_same(packed: Any, plain: Any, tolerance: float = 1e-4) -> None:
    assert torch.equal(packed.sequences, plain.sequences)
    for left, right in zip(packed.logits, plain.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=tolerance)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_exact_tier_equals_dynamic_cache(kind: str, mode: str) -> None:
    model = tiny_model(kind)
    ids = prompt(170)
    packed = generate(model, ids, **MODES[mode], **ours(EXACT))
    plain = generate(model, ids, **MODES[mode])
    assert isinstance(cache_of(packed), EntropySubbyteCache)
    assert cache_of(packed).layers[0].rows.store.counts.min() >= 2  # tiles of the prompt and of generated tokens
    assert_same(packed, plain)


@pytest.mark.parametrize("mode", MODES)
def test_exact_tier_equals_dynamic_cache_in_left_padded_batches(mode: str) -> None:
    model = tiny_model("mixtral")
    ids, mask = left_padded([prompt(40, seed=1), prompt(170, seed=2), prompt(139, seed=3)])
    packed = generate(model, ids, attention_mask=mask, **MODES[mode], **ours(EXACT))
    assert_same(packed, generate(model, ids, attention_mask=mask, **MODES[mode]))


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_chunks_of_a_padded_prompt_may_be_padding_throughout(chunk: int) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([prompt(5, seed=1), prompt(170, seed=2)])
    packed = generate(model, ids, attention_mask=mask, prefill_chunk_size=chunk, max_new_tokens=20, **ours(EXACT))
    assert cache_of(packed).layers[0].rows.lengths.tolist() == [24, 189]
    assert_same(packed, generate(model, ids, attention_mask=mask, max_new_tokens=20))


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
def test_the_model_keeps_the_attention_that_it_had(previous: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation(previous)
    ids, mask = left_padded([prompt(40, seed=1), prompt(170, seed=2)])
    plain = generate(model, ids, attention_mask=mask)
    assert_same(generate(model, ids, attention_mask=mask, **ours(EXACT)), plain)
    assert_same(generate(model, ids, attention_mask=mask), plain, 0)  # delegates for every other cache
    hf_subbyte_moe.restore(model)
    assert model.config._attn_implementation == previous


@pytest.mark.parametrize("questions", [(1, 5, 12), (200, 1, 300)])
def test_a_returned_cache_continues_with_further_questions(questions: tuple[int, ...]) -> None:
    model = tiny_model("qwen3_moe")
    ids = prompt(150)
    packed, plain = generate(model, ids, **ours(EXACT)), generate(model, ids)
    for number, tokens in enumerate(questions):
        ids = torch.cat([plain.sequences, prompt(tokens, seed=number)], dim=1)
        packed = generate(model, ids, max_new_tokens=20, **{CACHE_KW: cache_of(packed)})
        plain = generate(model, ids, max_new_tokens=20, **{CACHE_KW: cache_of(plain)})
        assert_same(packed, plain)
    assert cache_of(packed).get_seq_length() == packed.sequences.shape[1] - 1


def test_no_cache_is_no_cache() -> None:
    model = tiny_model("llama")
    ids = prompt(150)
    without = generate(model, ids, use_cache=False, max_new_tokens=5, **ours(EXACT))
    assert without.get(CACHE_KW) is None
    assert_same(without, generate(model, ids, max_new_tokens=5))


def test_a02_the_callers_cache_config_is_never_changed() -> None:
    config = {"policy": "error", "bits": 4.0, "window": 8}
    before = copy.deepcopy(config)
    two, four = tiny_model("llama"), tiny_model("llama", num_hidden_layers=4)
    ids = prompt(150)
    generation_config = GenerationConfig(cache_implementation=CACHE_NAME, cache_config=config, max_new_tokens=4)
    saved = generation_config.to_dict()
    first, other, again = (
        generate(model, ids, max_new_tokens=4, generation_config=generation_config) for model in (two, four, two)
    )
    assert config == before
    assert generation_config.to_dict() == saved
    assert [len(cache_of(output).layers) for output in (first, other, again)] == [2, 4, 2]
    assert_same(again, first, 0)
    direct = generate(two, ids, max_new_tokens=4, **ours(config))
    assert config == before
    assert_same(direct, first, 0)


def test_a03_the_name_works_as_argument_in_configs_and_from_files(tmp_path: Any) -> None:
    model = tiny_model("llama")
    ids = prompt(150)
    expected = generate(model, ids, max_new_tokens=4, **ours(LOSSY))
    by_config = GenerationConfig(**ours(LOSSY), max_new_tokens=4)
    assert_same(generate(model, ids, generation_config=by_config, max_new_tokens=4), expected, 0)
    model.generation_config.cache_implementation = CACHE_NAME
    model.generation_config.cache_config = dict(LOSSY)
    assert_same(generate(model, ids, max_new_tokens=4), expected, 0)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.cache_implementation == CACHE_NAME
    assert loaded.generation_config.cache_config == LOSSY
    assert isinstance(cache_of(generate(loaded, ids, max_new_tokens=4)), EntropySubbyteCache)


def test_a03_without_the_import_the_name_is_refused_readably() -> None:
    code = f"from transformers import GenerationConfig; GenerationConfig(cache_implementation={CACHE_NAME!r})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "Invalid `cache_implementation`" in ran.stderr


@pytest.mark.parametrize(("name", "cls"), [("dynamic", DynamicCache), ("static", StaticCache)])
def test_a03_the_built_in_names_still_work(name: str, cls: type) -> None:
    output = generate(tiny_model("llama"), prompt(20), max_new_tokens=4, cache_implementation=name)
    assert isinstance(cache_of(output), cls)


def test_options_of_from_pretrained_make_the_cache_the_default(tmp_path: Any) -> None:
    tiny_model("mixtral").save_pretrained(tmp_path)
    ids = prompt(150)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe={"kv_cache": LOSSY})
    cache = cache_of(generate(model, ids, max_new_tokens=2))
    assert isinstance(cache, EntropySubbyteCache)
    assert (cache.kv_config.bits, cache.kv_config.window) == (4.0, 8)
    # generate's own options win, key by key
    cache = cache_of(generate(model, ids, max_new_tokens=2, **ours({"bits": 3.5})))
    assert (cache.kv_config.bits, cache.kv_config.window) == (3.5, 8)
    cache = cache_of(generate(model, ids, max_new_tokens=2, **ours({"policy": "entropy"})))
    assert (cache.kv_config.policy, cache.kv_config.bits) == ("entropy", None)


def test_options_in_a_hub_config_apply_and_survive_saving(tmp_path: Any) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", hf_subbyte_moe={"kv_cache": LOSSY})
    model.save_pretrained(tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert saved["hf_subbyte_moe"] == {"version": 1, "kv_cache": LOSSY}
    assert CACHE_NAME not in json.dumps({key: value for key, value in saved.items() if key != "hf_subbyte_moe"})
    assert CACHE_NAME not in (tmp_path / "ours" / "generation_config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert isinstance(cache_of(generate(loaded, prompt(150), max_new_tokens=2)), EntropySubbyteCache)
    # an argument replaces what the file says
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", hf_subbyte_moe={"kv_cache": {"default": False}})
    assert isinstance(cache_of(generate(other, prompt(150), max_new_tokens=2)), DynamicCache)


def test_a_callers_own_cache_wins_over_the_default(tmp_path: Any) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"), {"kv_cache": LOSSY})
    model.generation_config.cache_implementation = CACHE_NAME
    given = DynamicCache(config=model.config)
    assert cache_of(generate(model, prompt(20), max_new_tokens=2, **{CACHE_KW: given})) is given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a04_questions_one_after_another_on_one_context(dtype: torch.dtype) -> None:
    """After trimming, the cache equals one that only ever saw the context."""
    model = hf_subbyte_moe.apply(tiny_model("llama").to(dtype), {"kv_cache": {"bits": 4.0}})
    context = prompt(37)
    cache = EntropySubbyteCache(model.config, bits=4.0)

    def run(ids: torch.Tensor, target: EntropySubbyteCache) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, **{CACHE_KW: target}).logits

    run(context, cache)
    for tokens in (1, 5, 12):
        assert cache.get_seq_length() == 37
        question = prompt(tokens, seed=tokens)
        fresh = EntropySubbyteCache(model.config, bits=4.0)
        run(context, fresh)
        torch.testing.assert_close(run(question, cache), run(question, fresh), rtol=0, atol=0)
        assert cache.get_seq_length() == 37 + tokens
        keys, values = cache.layers[0].dequantize()
        assert keys.shape[2] == 37 + tokens
        assert keys.dtype == values.dtype == dtype
        for layer in cache.layers:
            layer.crop(-tokens)


@pytest.mark.parametrize("config", [EXACT, {"policy": "uniform:vq2", "window": 8, "sinks": 2}, LOSSY])
@pytest.mark.parametrize("extra", [0, 1, 7, 64])
def test_a06_a_row_does_not_depend_on_neighbours_or_padding(config: dict[str, Any], extra: int) -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[1] *= 100  # the padding token
    rows = [prompt(5, seed=1), prompt(170, seed=2), prompt(290, seed=3)]
    ids, mask = left_padded(rows, extra)
    together = generate(model, ids, attention_mask=mask, max_new_tokens=12, **ours(config))
    for row, alone_ids in enumerate(rows):
        alone = generate(model, alone_ids, max_new_tokens=12, **ours(config))
        for left, right in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(left[row], right[0], rtol=1e-3, atol=1e-3)


def test_a06_padding_enters_no_budget_and_no_statistic() -> None:
    model = tiny_model("llama")
    rows = [prompt(170, seed=2), prompt(600, seed=3)]
    ids, mask = left_padded(rows, 64)
    together = hf_subbyte_moe.explain(
        cache_of(generate(model, ids, attention_mask=mask, max_new_tokens=1, **ours(LOSSY)))
    )
    for row, alone_ids in enumerate(rows):
        alone = hf_subbyte_moe.explain(cache_of(generate(model, alone_ids, max_new_tokens=1, **ours(LOSSY))))
        mine = [choice for choice in together.choices if choice.row == row]
        assert [choice.tier for choice in mine] == [choice.tier for choice in alone.choices]
        for left, right in zip(mine, alone.choices, strict=True):
            assert left.entropy == pytest.approx(right.entropy, rel=1e-4)
            assert left.error == pytest.approx(right.error, rel=1e-2, abs=1e-9)
