"""Caches of a host that runs ahead of its GPU, and of one that does not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache, settling
from hf_subbyte_moe.cache import layer as layer_module
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.explain import explain
from support.models import tiny_model


LAYERS = 3
POLICIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "error": {"policy": "error", "chunk": 128, "codebook": "queries"},
    "uniform": {"policy": "uniform"},
    "entropy": {"policy": "entropy", "codebook": "online"},
    "nuq2": {"policy": "uniform:nuq2"},
}


def treat_as_gpu(monkeypatch: pytest.MonkeyPatch, treated: bool) -> None:
    for module in (layer_module, settling):
        monkeypatch.setattr(module, "waits_cost", lambda states: treated)


def make_model(family: str = "llama", **options: Any) -> PreTrainedModel:
    return hf_subbyte_moe.apply(tiny_model(family, num_hidden_layers=LAYERS, **options))


def make_cache(model: PreTrainedModel, **options: Any) -> EntropySubbyteCache:
    return EntropySubbyteCache(model.config, **{"window": 8, "sinks": 2, **options})


def run(model: PreTrainedModel, cache: EntropySubbyteCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, **{CACHE_KW: cache}).logits
    return logits


def waiting(cache: EntropySubbyteCache) -> list[bool]:
    return [not layer.is_settled for layer in cache.packed_layers.values()]


def assert_same(left: EntropySubbyteCache, right: EntropySubbyteCache) -> None:
    for ours, theirs in zip(left.layers, right.layers, strict=True):
        if not isinstance(ours, EntropySubbyteLayer):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
            continue
        assert (ours.length, ours.starts.tolist()) == (theirs.length, theirs.starts.tolist())
        state, other = ours.rows.state(), theirs.rows.state()
        assert state.keys() == other.keys()
        for name, tensor in state.items():
            assert torch.equal(tensor, other[name]), name
        settled = [[(tiers.tolist(), length) for tiers, length in row] for row in ours.rows.settled]
        assert settled == [[(tiers.tolist(), length) for tiers, length in row] for row in theirs.rows.settled]
    assert repr(explain(left)) == repr(explain(right))


def both(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, use: Callable[[], Any]) -> list[Any]:
    """What a use gives where the host runs ahead, and where it does not."""
    with monkeypatch.context() as patch:
        treat_as_gpu(patch, True)
        first = use()
    return [first, use()]


def pieces(model: PreTrainedModel, cache: EntropySubbyteCache, ids: Tensor, mask: Tensor, *edges: int) -> Tensor:
    """Logits of the last of a prompt's pieces."""
    logits = torch.empty(0)
    for low, high in zip((0, *edges), (*edges, ids.shape[1]), strict=True):
        logits = run(model, cache, ids[:, low:high], mask[:, :high])
    return logits
