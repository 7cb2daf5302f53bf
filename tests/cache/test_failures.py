"""A step that fails, wherever it does, was never there; or the cache says that it cannot be used."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache, attention
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.compat import CACHE_KW, last_storing_layer
from hf_subbyte_moe.ops import MAX_TOKENS
from support.models import linear_attention_model, prompt, tiny_model


EXACT: dict[str, Any] = {"policy": "uniform:exact", "window": 8, "sinks": 2}


def run(model: PreTrainedModel, cache: Cache, ids: Tensor, **options: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, **{CACHE_KW: cache}, **options).logits
    return logits


def make(family: str) -> PreTrainedModel:
    if family == "qwen3_next":
        return hf_subbyte_moe.apply(linear_attention_model("linear_attention", "full_attention", "linear_attention"))
    return hf_subbyte_moe.apply(tiny_model(family))


def lengths(cache: EntropySubbyteCache) -> list[int]:
    return [layer.length for layer in cache.packed_layers.values()]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3", "qwen3_next"])
@pytest.mark.parametrize("wrong", ["gradients", "right padding", "attention weights"])
def test_a_first_prompt_that_is_refused_leaves_an_empty_cache(family: str, wrong: str) -> None:
    model, ids = make(family), prompt(30)
    cache = EntropySubbyteCache(model.config, **EXACT)
    options: dict[str, Any] = {}
    if wrong == "right padding":
        options["attention_mask"] = torch.tensor([[1] * 25 + [0] * 5])
    if wrong == "attention weights":
        options["output_attentions"] = True
    with torch.set_grad_enabled(wrong == "gradients"), pytest.raises((RuntimeError, ValueError)):
        model(ids, **{CACHE_KW: cache}, **options)
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(run(model, cache, ids), run(model, DynamicCache(config=model.config), ids))


@pytest.mark.parametrize("tokens", [1, 5, 20, 200])
@pytest.mark.parametrize("problem", [ValueError("x"), RuntimeError("CUDA out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize(("family", "failing"), [("llama", 1), ("llama", 2), ("gemma3", 1)])
def test_a_failing_attention_call_takes_the_step_back(
    family: str, failing: int, problem: BaseException, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = hf_subbyte_moe.apply(tiny_model(family))
    cache = EntropySubbyteCache(model.config, policy="uniform:vq2", window=8)
    run(model, cache, prompt(267))  # one token more packs a tile
    # many tokens attend to what tiles stand for
    place, name = (attention, "decode_attention") if tokens <= MAX_TOKENS else (EntropySubbyteLayer, "dequantize")
    twin, real, calls = copy.deepcopy(cache), getattr(place, name), []

    def attend(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == failing:
            raise problem
        return real(*args)

    monkeypatch.setattr(place, name, attend)
    with pytest.raises(type(problem)):
        run(model, cache, prompt(tokens, seed=4))
    monkeypatch.undo()
    assert [layer.get_seq_length() for layer in cache.layers] == [267] * 2
    for ids in (prompt(tokens, seed=4), prompt(1), prompt(150, seed=2)):
        torch.testing.assert_close(run(model, cache, ids), run(model, twin, ids), rtol=0, atol=0)


@pytest.mark.parametrize("codebook", ["universal", "queries"])
def test_a_failing_measurement_takes_the_step_back(codebook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    cache = EntropySubbyteCache(model.config, bits=4.5, window=8, codebook=codebook)
    run(model, cache, prompt(300))
    twin = copy.deepcopy(cache)

    def add(*args: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cache.layers[1].rows, "add", add)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, cache, prompt(200, seed=4))
    monkeypatch.undo()
    assert lengths(cache) == [300, 300]
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(layer.rows.codecs._moments, other.rows.codecs._moments)
        assert layer.rows.codecs._seen.tolist() == other.rows.codecs._seen.tolist()
    ids = prompt(200, seed=4)
    torch.testing.assert_close(run(model, cache, ids), run(model, twin, ids), rtol=0, atol=0)


USES: dict[str, Callable[[EntropySubbyteCache], Any]] = {
    "crop": lambda cache: cache.crop(-1),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "reorder": lambda cache: cache.reorder_cache(torch.LongTensor([0])),
    "save": lambda cache: cache.save_pretrained("nowhere"),
}


@pytest.mark.parametrize("use", ["forward", *USES])
@pytest.mark.parametrize("before", [0, 300])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_failure_that_the_cache_does_not_see_is_said_at_its_next_use(family: str, before: int, use: str) -> None:
    model, ids = hf_subbyte_moe.apply(tiny_model(family)), prompt(20, seed=4)
    cache, twin = (EntropySubbyteCache(model.config, **EXACT) for _ in range(2))
    for held in (cache, twin):
        if before:
            run(model, held, prompt(before))

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    hook = model.model.layers[0].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(model, cache, ids)
    hook.remove()
    with pytest.raises(RuntimeError, match="was taken back"):
        USES[use](cache) if use in USES else run(model, cache, ids)
    assert [layer.get_seq_length() for layer in cache.layers] == [before] * 2
    torch.testing.assert_close(run(model, cache, ids), run(model, twin, ids), rtol=0, atol=0)


def test_layers_without_attention_are_not_waited_for() -> None:
    layers = EntropySubbyteCache(tiny_model("llama", num_hidden_layers=3).config).layers
    assert last_storing_layer(PreTrainedConfig(layer_types=["linear_attention", "full_attention", "mlp"]), layers) == 1
    assert last_storing_layer(PreTrainedConfig(), layers) == 2


def test_lost_states_of_linear_attention_make_a_cache_unusable() -> None:
    model, ids = make("qwen3_next"), prompt(20, seed=4)
    cache = EntropySubbyteCache(model.config, **EXACT)
    run(model, cache, prompt(300))
    with pytest.raises(ValueError, match="does not return attention weights"):
        run(model, cache, ids, output_attentions=True)
    with pytest.raises(RuntimeError, match=r"cannot be taken back; call reset\(\)"):
        run(model, cache, ids)
    cache.reset()
    torch.testing.assert_close(run(model, cache, ids), run(model, DynamicCache(config=model.config), ids))


def test_a_cache_keeps_nothing_of_a_step_that_is_over() -> None:
    for family in ("llama", "gemma3"):
        model = hf_subbyte_moe.apply(tiny_model(family))
        cache = EntropySubbyteCache(model.config, **EXACT)
        for tokens in (300, 1, 5):
            run(model, cache, prompt(tokens))
            assert not cache._journal._before


@pytest.mark.parametrize("options", [{"num_kv_shared_layers": 2}, {"kv_sharing_modes": ["own", "own", "reuse"]}])
def test_models_that_share_keys_and_values_between_layers_are_refused(options: dict[str, Any]) -> None:
    config = tiny_model("llama", num_hidden_layers=3).config
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match="'llama' shares keys and values between layers"):
        EntropySubbyteCache(config)


def test_a_layer_may_be_filled_before_the_one_before_it() -> None:
    cache = EntropySubbyteCache(tiny_model("llama").config)
    states = torch.randn(1, 2, 400, 16, generator=torch.Generator().manual_seed(0))
    keys, values = cache.update(states, states, 1)
    with pytest.warns(UserWarning, match="did not call the entropy_subbyte attention function"):
        assert (keys + values).isfinite().all()
