"""A cache that was used goes through pickle and ``torch.save``, and goes on like the original."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW
from support.models import prompt, tiny_model


def through_a_file(cache: EntropySubbyteCache) -> Any:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[EntropySubbyteCache], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "torch": through_a_file,
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_used_cache_goes_on_like_the_original(way: str, family: str, rows: int) -> None:
    model = hf_subbyte_moe.apply(tiny_model(family))
    cache = EntropySubbyteCache(model.config, bits=4.5, window=8)
    with torch.no_grad():
        for tokens in (300, 1, 1):
            model(prompt(tokens, rows=rows), **{CACHE_KW: cache})
        twin = WAYS[way](cache)
        for tokens in (*[1] * 3, 140, 1):
            ids = prompt(tokens, rows=rows, seed=tokens)
            left, right = (model(ids, **{CACHE_KW: held}).logits for held in (cache, twin))
            torch.testing.assert_close(left, right, rtol=0, atol=0)
        with pytest.raises(ValueError, match="filled by another model"):
            hf_subbyte_moe.apply(tiny_model(family, seed=1))(prompt(1, rows=rows), **{CACHE_KW: twin})
