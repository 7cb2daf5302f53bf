"""Captured steps on a GPU: run with ``pytest -m gpu`` on a machine that has one."""

import copy
from typing import Any

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.decode import runner
from support.models import left_padded, prompt, tiny_model


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXACT = {"policy": "uniform:exact", "window": 8, "sinks": 2}
MIXED = {"bits": 3.0}
STEPS = 400
WIDE = {
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
}


def model_of(kind: str, cache: dict[str, Any], fused: bool, **options: Any) -> Any:
    model = tiny_model(kind, **options).to("cuda", torch.bfloat16)
    model.set_experts_implementation("batched_mm")
    return hf_subbyte_moe.apply(model, {"kv_cache": cache, "decode": {"cuda_graph": True, "fused": fused}})


def filled(model: Any, ids: torch.Tensor) -> EntropySubbyteCache:
    """A cache that holds a prompt."""
    cache = EntropySubbyteCache(model.config, **model.config.hf_subbyte_moe["kv_cache"])
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
    return cache


def forced(model: Any, ids: torch.Tensor, prompt_cache: EntropySubbyteCache) -> tuple[torch.Tensor, Any]:
    """``[steps, rows, vocabulary]`` logits of known tokens, one at a time behind a prompt, and what computed them."""
    cache = copy.deepcopy(prompt_cache)
    with torch.no_grad():
        logits = [model(token, **{CACHE_KW: cache}).logits[:, -1] for token in ids.split(1, 1)]
    steps = model.forward.graphed(cache) if "forward" in vars(model) else None
    return torch.stack(logits), steps


@pytest.mark.parametrize("fused", [False, True], ids=["modules", "fused"])
@pytest.mark.parametrize(("kind", "rows"), [("llama", 1), ("mixtral", 3), ("qwen3_moe", 1), ("qwen3_moe", 9)])
def test_replays_equal_the_same_steps_without_a_graph(
    kind: str, rows: int, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(kind, MIXED, fused, **WIDE)
    cache, ids = filled(model, prompt(700, rows).cuda()), prompt(STEPS, rows, seed=1).cuda()
    replayed, graph = forced(model, ids, cache)
    assert graph.is_fused == fused
    assert graph.replays == STEPS - graph.captures  # a warm-up for each capture
    assert graph.captures <= 2  # flushes do not capture again, but for pools that grew
    monkeypatch.setattr(runner, "_GRAPHED", ())
    monkeypatch.setattr(runner, "_UNGRAPHED", ("cuda",))
    model.forward._room = None
    launched, plain = forced(model, ids, cache)
    assert plain.captures == plain.replays == 0
    assert torch.equal(replayed, launched)
    hf_subbyte_moe.apply(model, {"kv_cache": MIXED})
    eager, _ = forced(model, ids, cache)
    error = (replayed.float() - eager.float()).abs().max()
    assert error <= 0.05 * eager.float().abs().max()  # other sums of the same numbers in bf16


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_fused_logits_are_as_near_to_fp32_as_the_models_own(kind: str) -> None:
    first, ids = prompt(600).cuda(), prompt(500, seed=1).cuda()
    made = {}
    for name in ("fused", "modules", "fp32"):
        model = model_of(kind, MIXED, name == "fused", **WIDE)
        if name == "fp32":
            hf_subbyte_moe.apply(model.float(), {"kv_cache": MIXED})
        made[name] = forced(model, ids, filled(model, first))[0].float()
    errors = [(made[name] - made["fp32"]).square().mean().sqrt() for name in ("fused", "modules")]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3"])
def test_tokens_equal_dynamic_cache(kind: str) -> None:
    model = tiny_model(kind).cuda()
    model.set_experts_implementation("batched_mm")
    ids, mask = (tensor.cuda() for tensor in left_padded([prompt(40, seed=1), prompt(170, seed=2)]))
    settings: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 140, "return_dict_in_generate": True}
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 5}):
        torch.manual_seed(0)
        plain = model.generate(ids, **settings, **options)
        hf_subbyte_moe.apply(model, {"kv_cache": EXACT, "decode": {"fused": False}})
        torch.manual_seed(0)
        made = model.generate(ids, **settings, **options)
        assert torch.equal(made.sequences, plain.sequences)
        steps = model.forward.graphed(cache_of(made))
        assert steps is not None, model.forward.refused
        assert steps.replays > 100
        hf_subbyte_moe.restore(model)


@pytest.mark.parametrize(("fused", "tokens"), [(False, 2000), (True, 10_000)], ids=["modules", "fused"])
def test_memory_does_not_grow(fused: bool, tokens: int) -> None:
    model = model_of("qwen3_moe", MIXED, fused, **WIDE)
    cache = EntropySubbyteCache(model.config, **MIXED)
    ids = prompt(300).cuda()
    token = ids[:, :1]
    held = []
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
        for step in range(tokens):
            model(token, **{CACHE_KW: cache})
            if (step + 1) % (tokens // 4) == 0:
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated() - cache.allocated_bytes())
        for _ in range(8):  # caches come and go
            other = EntropySubbyteCache(model.config, **MIXED)
            model(ids, **{CACHE_KW: other})
            for _ in range(4):
                model(token, **{CACHE_KW: other})
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated() - cache.allocated_bytes() - other.allocated_bytes())
    assert max(held[1:4]) - held[0] < 1 << 20, held
    assert held[-1] - held[5] < 1 << 20, held
