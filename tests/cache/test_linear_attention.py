"""Models that mix linear with full attention: the cache holds, saves and counts states too."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache, saving
from hf_subbyte_moe.compat import CACHE_KW
from support.models import linear_attention_model, prompt


EXACT: dict[str, Any] = {"policy": "uniform:exact", "window": 8, "sinks": 2}


def filled() -> tuple[Any, EntropySubbyteCache]:
    model = hf_subbyte_moe.apply(linear_attention_model("linear_attention", "full_attention"))
    cache = EntropySubbyteCache(model.config, **EXACT)
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: cache})
    return model, cache


def test_a_file_holds_the_states(tmp_path: Path) -> None:
    model, cache = filled()
    cache.save_pretrained(tmp_path)
    loaded = EntropySubbyteCache.from_pretrained(tmp_path, model.config)
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: plain})
        for tokens in (1, 5):
            ours, again, theirs = (model(prompt(tokens), **{CACHE_KW: held}).logits for held in (cache, loaded, plain))
            torch.testing.assert_close(again, ours, rtol=0, atol=0)
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_empty_cache_in_a_file_is_empty(tmp_path: Path) -> None:
    model, cache = filled()
    EntropySubbyteCache(model.config, **EXACT).save_pretrained(tmp_path)
    loaded = EntropySubbyteCache.from_pretrained(tmp_path, model.config)
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: loaded})
        torch.testing.assert_close(*(model(prompt(1), **{CACHE_KW: held}).logits for held in (cache, loaded)))


def test_a_file_without_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = filled()
    monkeypatch.setattr(saving, "_plain_state", lambda layer: ({}, {"kind": type(layer).__name__, "attributes": {}}))
    cache.save_pretrained(tmp_path)  # as releases before did
    monkeypatch.undo()
    with pytest.raises(ValueError, match="did not store states of linear attention"):
        EntropySubbyteCache.from_pretrained(tmp_path, model.config)


def test_layers_of_a_kind_that_is_not_stored_are_refused(tmp_path: Path) -> None:
    _, cache = filled()

    class OtherLayer(type(cache.layers[0])):  # type: ignore[misc]
        pass

    cache.layers[0] = OtherLayer()
    with pytest.raises(ValueError, match="layers of kind OtherLayer cannot be saved"):
        cache.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_states_are_counted() -> None:
    _, cache = filled()
    layer = cache.layers[0]
    expected = layer.conv_states[0].nbytes + layer.recurrent_states[0].nbytes
    assert cache.other_bytes() == expected > 0
