"""Every family of models, tiny and random: the conformance test that a new family gets by one line in ``CONFIGS``."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.codecs import codecs
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from support.models import FAMILIES, left_padded, prompt, tiny_model


EXACT = {"policy": "uniform:exact", "window": 8, "sinks": 2}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.0},
    "prompt lookup": {"prompt_lookup_num_tokens": 5},
    "chunked prefill": {"prefill_chunk_size": 60},
    "assisted": {"assistant_model": "tiny"},
}
# full attention, sliding layers, attention sinks, latents, experts: what modes and tiers could treat in another way
ONE_OF_EACH = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "mixtral")
PADDED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "chunked prefill": {"prefill_chunk_size": 60},
}


def everywhere(*names: str) -> list[tuple[str, str]]:
    """Every family with the first name, one of each kind with all of them."""
    return [(family, name) for family in FAMILIES for name in names[: None if family in ONE_OF_EACH else 1]]


def options_of(mode: str) -> dict[str, Any]:
    options = dict(MODES[mode])
    if options.get("assistant_model"):
        options["assistant_model"] = tiny_model("llama", num_hidden_layers=1)
    return options


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "output_logits": True}
    torch.manual_seed(7)
    return model.generate(ids, return_dict_in_generate=True, **{**settings, **options})


def ours(config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": CACHE_NAME, "cache_config": config}


def assert_same(packed: Any, plain: Any) -> None:
    assert torch.equal(packed.sequences, plain.sequences)
    for left, right in zip(packed.logits, plain.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)


def packed_tiles(cache: EntropySubbyteCache) -> int:
    return min(int(layer.rows.store.counts.min()) for layer in cache.packed_layers.values())


@pytest.mark.parametrize(("family", "mode"), everywhere(*MODES))
def test_exact_tier_equals_dynamic_cache(family: str, mode: str) -> None:
    model = tiny_model(family)
    ids = prompt(80).repeat(1, 2)  # repeats itself, so that prompt lookup finds candidates
    packed = generate(model, ids, **options_of(mode), **ours(EXACT))
    assert isinstance(cache_of(packed), EntropySubbyteCache)
    assert packed_tiles(cache_of(packed)) >= 1
    assert_same(packed, generate(model, ids, **options_of(mode)))


@pytest.mark.parametrize(("family", "mode"), everywhere(*PADDED))
def test_left_padded_batches(family: str, mode: str) -> None:
    model = tiny_model(family)
    ids, mask = left_padded([prompt(40, seed=1), prompt(170, seed=2)])
    packed = generate(model, ids, attention_mask=mask, max_new_tokens=20, **PADDED[mode], **ours(EXACT))
    assert_same(packed, generate(model, ids, attention_mask=mask, max_new_tokens=20, **PADDED[mode]))


@pytest.mark.parametrize("family", FAMILIES)
def test_further_questions_in_a_left_padded_batch(family: str) -> None:
    model = tiny_model(family)
    ids, mask = left_padded([prompt(40, seed=1), prompt(170, seed=2)])
    packed = generate(model, ids, attention_mask=mask, **ours(EXACT))
    plain = generate(model, ids, attention_mask=mask)
    longer = torch.cat([plain.sequences, prompt(150, rows=2, seed=3)], dim=1)
    mask = torch.cat([mask, torch.ones(2, longer.shape[1] - mask.shape[1], dtype=mask.dtype)], dim=1)
    again = generate(model, longer, attention_mask=mask, **{CACHE_KW: cache_of(packed)})
    assert_same(again, generate(model, longer, attention_mask=mask, **{CACHE_KW: cache_of(plain)}))


def filled(model: Any, ids: Tensor, **config: Any) -> EntropySubbyteCache:
    cache = EntropySubbyteCache(model.config.get_text_config(decoder=True), **config)
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
    return cache


@pytest.mark.parametrize(
    ("family", "tier"), everywhere("nuq2", *(codec.name for codec in codecs() if codec.name != "nuq2"))
)
def test_every_tier_equals_attention_over_its_own_dequantized_values(family: str, tier: str) -> None:
    model = hf_subbyte_moe.apply(tiny_model(family))
    ids = prompt(300)
    cache = filled(model, ids, policy=f"uniform:{tier}", window=8, sinks=2)
    assert packed_tiles(cache) == 2
    oracle = DynamicCache(config=model.config.get_text_config(decoder=True))
    with torch.no_grad():
        model(ids, **{CACHE_KW: oracle})
        for index, layer in cache.packed_layers.items():
            oracle.layers[index].keys, oracle.layers[index].values = layer.dequantize()
        for queries in (1, 1, 5):
            token = prompt(queries, seed=queries)
            left = model(token, **{CACHE_KW: cache}).logits
            right = model(token, **{CACHE_KW: oracle}).logits
            torch.testing.assert_close(left, right, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("config", [{"bits": 5.0}, {"policy": "uniform:vq2"}], ids=["budget", "uniform"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_do_not_depend_on_their_neighbours_or_on_padding(family: str, config: dict[str, Any]) -> None:
    config = {**config, "window": 8, "sinks": 2}
    model = tiny_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[1] *= 100  # the padding token
    rows = [prompt(5, seed=1), prompt(290, seed=2)]
    ids, mask = left_padded(rows, 7)
    together = generate(model, ids, attention_mask=mask, max_new_tokens=4, **ours(config))
    for row, alone_ids in enumerate(rows):
        alone = generate(model, alone_ids, max_new_tokens=4, **ours(config))
        for left, right in zip(together.logits, alone.logits, strict=True):
            torch.testing.assert_close(left[row], right[0], rtol=5e-3, atol=5e-3)
