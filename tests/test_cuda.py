"""The same on a GPU: run with ``pytest -m gpu`` on a machine that has one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.cli.running import load_model, tensor_bytes
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.explain import cache_size
from hf_subbyte_moe.patching import use_packed_attention
from support.models import FAMILIES, left_padded, prompt, tiny_model


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXACT = {"policy": "uniform:exact", "window": 8, "sinks": 2}


def generate(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": 140, "do_sample": False, "output_logits": True}
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        return_dict_in_generate=True,
        **{**settings, **options},
    )


def ours(config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": CACHE_NAME, "cache_config": config}


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 60}], ids=["greedy", "beams", "chunked prefill"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_exact_tier_equals_dynamic_cache(family: str, options: dict[str, Any]) -> None:
    model = tiny_model(family).cuda()
    ids, mask = left_padded([prompt(40, seed=1), prompt(170, seed=2)])
    options = {**options, "max_new_tokens": 40}
    packed = generate(model, ids, mask, **options, **ours(EXACT))
    plain = generate(model, ids, mask, **options)
    assert torch.equal(packed.sequences, plain.sequences)
    for left, right in zip(packed.logits, plain.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "policy", ["uniform:vq175", "uniform:vq3o", "uniform:nuq2", "uniform:fp6", "uniform:fp8", "error"]
)
@pytest.mark.parametrize("codebook", ["universal", "online"])
def test_a_packed_cache_gives_what_it_gives_on_the_cpu(policy: str, codebook: str) -> None:
    config = {"policy": policy, "codebook": codebook, "window": 8, "sinks": 2}
    model = tiny_model("mixtral")
    on_cpu = generate(model, prompt(600), max_new_tokens=6, **ours(config))
    on_gpu = generate(model.cuda(), prompt(600), max_new_tokens=6, **ours(config))
    assert cache_size(cache_of(on_gpu)) == cache_size(cache_of(on_cpu))
    for left, right in zip(on_gpu.logits, on_cpu.logits, strict=True):
        # a code on the border between two entries may fall to either side
        assert (left.cpu() - right).norm() <= 0.05 * right.norm()


@pytest.mark.parametrize("backend", ["cuda", "triton"])
@pytest.mark.parametrize("policy", ["uniform:vq175", "error"])
def test_a01_kernels_decode_like_the_reference_across_flushes_and_row_operations(policy: str, backend: str) -> None:
    model, _ = load_model(None)
    use_packed_attention(model)
    ids, mask = left_padded([prompt(700, seed=1), prompt(420, seed=2)])
    steps = prompt(150, rows=3, seed=3).cuda()
    runs = []
    for name in ("torch", backend):
        cache = EntropySubbyteCache(model.config, policy=policy, backend=name)
        seen = mask.cuda()
        with torch.no_grad():
            logits = [model(ids.cuda(), attention_mask=seen, **{CACHE_KW: cache}).logits[:, -1]]
            for step in range(150):
                if step == 60:
                    cache.batch_select_indices(torch.tensor([1, 0, 0]))
                    seen = seen[[1, 0, 0]]
                seen = torch.cat([seen, seen.new_ones(len(seen), 1)], dim=1)
                token = steps[: len(seen), step : step + 1]
                logits.append(model(token, attention_mask=seen, **{CACHE_KW: cache}).logits[:, -1])
        runs.append(logits)
    errors = [
        (found - expected).float().norm() / expected.float().norm() for expected, found in zip(*runs, strict=True)
    ]
    # a rounding can send a token to another expert; rows or tiles that were mixed up would be wrong at every step
    assert torch.stack(errors).median() <= 0.02
    assert max(errors) <= 0.3


def test_prompt_lookup_equals_plain_decoding_and_a_saved_cache_moves_to_the_gpu(tmp_path: Path) -> None:
    model = tiny_model("llama")
    ids = prompt(80).repeat(1, 2)
    on_cpu = generate(model, ids, **ours(EXACT))
    cache_of(on_cpu).save_pretrained(tmp_path)
    model.cuda()
    packed = generate(model, ids, prompt_lookup_num_tokens=5, **ours(EXACT))
    assert torch.equal(packed.sequences, generate(model, ids).sequences)
    moved = EntropySubbyteCache.from_pretrained(tmp_path, model.config, device="cuda")
    longer = torch.cat([on_cpu.sequences, prompt(20)], dim=1)
    left = generate(model, longer, max_new_tokens=4, **{CACHE_KW: moved})
    right = generate(model.cpu(), longer, max_new_tokens=4, **{CACHE_KW: cache_of(on_cpu)})
    for one, other in zip(left.logits, right.logits, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-3)


def test_a12_allocated_memory_falls_with_the_bits() -> None:
    model, _ = load_model(None)
    ids = prompt(16384)
    held = {}
    for name, options in {
        "plain": {"cache_implementation": "dynamic"},
        "packed": ours({"policy": "uniform:vq175"}),
    }.items():
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        output = generate(model, ids, max_new_tokens=2, output_logits=False, **options)
        cache = cache_of(output)
        del output
        held[name] = torch.cuda.memory_allocated() - before
        counted = tensor_bytes(cache) if name == "plain" else cache.allocated_bytes()
        assert held[name] == pytest.approx(counted, rel=0.03)
        del cache
    assert held["packed"] <= 0.155 * held["plain"]
