"""Placed experts give the resident model's outputs bit for bit, in every family, whatever the slots."""

from typing import Any

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.experts import PlacedExperts, engine_of
from support.models import prompt
from support.moe import MOE_CONFIGS, tiny_moe


def steps(model: Any, ids: torch.Tensor, prefix: int = 6) -> list[torch.Tensor]:
    """Logits of a prompt and of the tokens after it, one by one."""
    found = model(ids[:, :prefix], use_cache=True)
    logits, cache = [found.logits], found.get("cache", found.get("past_key_values"))
    name = "cache" if "cache" in found else "past_key_values"
    for at in range(prefix, ids.shape[1]):
        found = model(ids[:, at : at + 1], **{name: cache}, use_cache=True)
        logits.append(found.logits)
    return logits


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", MOE_CONFIGS)
def test_exact(family: str, implementation: str) -> None:
    model = tiny_moe(family)
    model.set_experts_implementation(implementation)
    ids = prompt(14)
    with torch.no_grad():
        expected = steps(model, ids)
        for slots in (4, 7, 16):
            hf_subbyte_moe.apply(model, {"experts": {"placement": "offload", "gpu_slots": slots}})
            assert any(isinstance(module, PlacedExperts) for module in model.modules())
            found = steps(model, ids)
            assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
            engine = engine_of(model)
            assert engine is not None
            assert engine.counters.total("asked") > 0
            assert engine.counters.total("streamed_bytes") > 0
