"""``apply`` and ``restore``: one model changed and put back."""

import copy
from typing import Any

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from support.models import prompt, tiny_model


def state_of(model: Any) -> dict[str, Any]:
    """Everything that a model or its modules and config carry as attributes."""
    modules = {name: sorted(vars(module)) for name, module in model.named_modules()}
    return {"modules": modules, "config": model.config.to_dict(), "attention": model.config._attn_implementation}


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
def test_restore_leaves_no_trace(previous: str) -> None:
    model = tiny_model("mixtral")
    model.set_attn_implementation(previous)
    before = copy.deepcopy(state_of(model))
    with torch.no_grad():
        logits = model(prompt(20)).logits
    hf_subbyte_moe.apply(model, {"kv_cache": {"bits": 4.0}})
    model.generate(prompt(300), max_new_tokens=2)
    assert state_of(model) != before
    hf_subbyte_moe.restore(model)
    assert state_of(model) == before
    with torch.no_grad():
        assert torch.equal(model(prompt(20)).logits, logits)


def test_apply_without_options_uses_the_models_own_or_the_default() -> None:
    model = hf_subbyte_moe.apply(tiny_model())
    assert model.config.hf_subbyte_moe == {"version": 1, "kv_cache": {}}
    model = tiny_model()
    model.config.hf_subbyte_moe = {"kv_cache": {"bits": 3.0}}
    assert hf_subbyte_moe.apply(model).config.hf_subbyte_moe == {"version": 1, "kv_cache": {"bits": 3.0}}


def test_wrong_options_leave_the_model_alone() -> None:
    model = tiny_model()
    before = copy.deepcopy(state_of(model))
    for options in ({"kv_cahce": {}}, {"kv_cache": {"bits": "two"}}, {"kv_cache": 3}, {"version": 99}):
        with pytest.raises(ValueError, match=r"kv_cahce|bits|kv_cache|version"):
            hf_subbyte_moe.apply(model, options)
    assert state_of(model) == before


def test_apply_refuses_a_model_that_is_not_supported() -> None:
    model = tiny_model("mixtral", sliding_window=8)
    with pytest.raises(ValueError, match="no full-attention layer"):
        hf_subbyte_moe.apply(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_was_not_switched_still_computes_but_warns() -> None:
    """Foreign attention gets dequantized states: exact at the prompt, the tier's error afterwards."""
    model = tiny_model()
    ids = prompt(300)
    cache = EntropySubbyteCache(model.config, policy="uniform:exact", window=8)
    plain = model(ids, use_cache=True)
    with torch.no_grad():
        with pytest.warns(UserWarning, match="did not call the entropy_subbyte attention function"):
            packed = model(ids, **{CACHE_KW: cache})
        torch.testing.assert_close(packed.logits, plain.logits)
        for step in range(5):
            token = prompt(1, seed=step)
            left = model(token, **{CACHE_KW: cache}).logits
            right = model(token, **{CACHE_KW: cache_of(plain)}).logits
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    assert int(cache.layers[0].rows.store.counts[0]) == 2
    assert all(choice.entropy is None for choice in hf_subbyte_moe.explain(cache).choices)
