"""Factors of keys whose channels differ by far: nothing exact changes, and what is packed comes back better."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_subbyte_moe.cache import EntropySubbyteCache, EntropySubbyteLayer
from hf_subbyte_moe.cache.balance import KeyBalance, channel_factors
from hf_subbyte_moe.cache.groups import RowGroup
from hf_subbyte_moe.cache.prompts import PromptQueries
from hf_subbyte_moe.patching import use_packed_attention
from hf_subbyte_moe.policy import AttentionForm, positions_on
from hf_subbyte_moe.scoring import decode, forward
from support.layers import make_layer, put, states
from support.models import prompt, tiny_model
from support.packing import CPU


pytestmark = pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")

FIRST = RowGroup([0], CPU)
TOKENS = 4 + 128 + 128 + 60


def wide_states(rows: int, tokens: int = TOKENS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys with a channel that is 64 times the others in the first of two heads."""
    key, value = states(rows, tokens, seed=seed)
    key[:, 0, :, 5] *= 64
    return key, value


def factors_of(layer: EntropySubbyteLayer) -> Tensor | None:
    return layer.rows.codecs.balance.factors


def wide_model(kind: str = "llama") -> Any:
    """A model with a rotary pair of every key head 64 times larger, and of every query as much smaller."""
    model: Any = tiny_model(kind)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, factor in ((layer.self_attn.k_proj, 64.0), (layer.self_attn.q_proj, 1 / 64)):
                heads = projection.weight.unflatten(0, (-1, 16))
                heads[:, [3, 11]] *= factor
    use_packed_attention(model)
    return model


def test_factors_are_powers_of_two_and_one_where_channels_are_alike() -> None:
    factors = channel_factors(wide_states(1)[0][0])
    assert torch.equal(factors[1], torch.ones(64))
    assert factors[0, 5] == 1
    assert set(factors[0, torch.arange(64) != 5].tolist()) == {1 / 8}
    assert torch.equal(factors, factors.log2().round().exp2())
    assert set(channel_factors(torch.zeros(1, 128, 64)).flatten().tolist()) == {1.0}


def test_factors_take_nothing_out_of_fp16() -> None:
    """Large queries, small keys of a large channel, and a large channel that is constant but for a few tokens."""
    key = wide_states(1)[0][0].half()
    key[..., 5] *= 16
    key[0, :, 7] = 2000.0
    balance = KeyBalance((1, 2, 64), possible=True)
    assert balance.fit(FIRST, key)
    small = torch.full_like(key[None], 1.2e-5)
    for states_ in (key[None], 4 * key[None], small):
        assert torch.isfinite(balance.divided(states_)).all()
        assert torch.equal(balance.multiplied(balance.divided(states_))[0], states_[0])
    query = torch.full((1, 4, 1, 64), 60000.0, dtype=torch.float16)
    assert torch.isfinite(balance.of_query(query)).all()


def test_a_layer_of_like_channels_has_no_factors() -> None:
    layer = make_layer()
    put(layer, *states(2, TOKENS))
    assert factors_of(layer) is None
    assert layer.rows.codecs.balance.nbytes() == 0


def test_only_the_row_that_needs_them_gets_factors() -> None:
    layer, alone = make_layer(), make_layer()
    plain, wide = states(1, TOKENS), wide_states(1, seed=1)
    put(layer, torch.cat([plain[0], wide[0]]), torch.cat([plain[1], wide[1]]))
    put(alone, *wide)
    factors = factors_of(layer)
    assert factors is not None
    assert torch.equal(factors[0], torch.ones(2, 64))
    assert torch.equal(factors[1:], factors_of(alone))
    assert torch.equal(layer.dequantize()[0][1:], alone.dequantize()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("policy", ["uniform:exact", "uniform:vq2"])
def test_exact_tokens_come_back_bit_for_bit(dtype: torch.dtype, policy: str) -> None:
    layer = make_layer(policy=policy)
    key, value = (part.to(dtype) for part in wide_states(2))
    put(layer, key[:, :, :-20], value[:, :, :-20])
    for token in range(TOKENS - 20, TOKENS):
        put(layer, key[:, :, token : token + 1], value[:, :, token : token + 1])
    assert factors_of(layer) is not None
    returned = layer.dequantize()[0]
    exact = slice(0, None) if policy == "uniform:exact" else slice(4 + 128 + 60, None)
    assert torch.equal(returned[:, :, exact], key[:, :, exact])
    assert torch.equal(returned[:, :, :4], key[:, :, :4])


def test_scores_of_packed_keys_are_nearer() -> None:
    key, value = wide_states(1)
    query = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(2))
    query[:, :, 5] /= 64
    errors = []
    for possible in (True, False):
        layer = make_layer(policy="uniform:vq2")
        layer.lazy_initialization(key, value)
        layer.rows.codecs.balance._possible = possible
        put(layer, key, value)
        errors.append((query @ (layer.dequantize()[0] - key)[0].mT)[0].square().mean())
    assert errors[0] < errors[1] / 4


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2"])
@pytest.mark.parametrize("protocol", ["one-piece", "chunked"])
def test_the_exact_tier_equals_the_plain_cache(kind: str, protocol: str) -> None:
    model, ids = wide_model(kind), prompt(700, rows=2)
    cache = EntropySubbyteCache(model.config, policy="uniform:exact")
    with torch.no_grad():
        found = torch.cat(list(decode(model, ids, 660, cache, protocol)), dim=1)
        expected = torch.cat(list(decode(model, ids, 660, DynamicCache(config=model.config), protocol)), dim=1)
    assert factors_of(cache.layers[0]) is not None
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("codebook", ["universal", "queries"])
def test_low_bits_lose_less_with_factors(codebook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = wide_model(), prompt(640)
    with torch.no_grad():
        expected = torch.cat(list(decode(model, ids, 600, DynamicCache(config=model.config), "one-piece")), dim=1)
        errors = []
        for least in (8.0, float("inf")):
            monkeypatch.setattr("hf_subbyte_moe.cache.balance._LEAST", least)
            cache = EntropySubbyteCache(model.config, policy="error", codebook=codebook)
            found = torch.cat(list(decode(model, ids, 600, cache, "one-piece")), dim=1)
            errors.append((found.log_softmax(-1) - expected.log_softmax(-1)).square().mean())
    assert errors[0] < errors[1] / 2


def test_a_first_tile_that_is_packed_while_decoding_is_balanced_too() -> None:
    layer = make_layer(policy="uniform:vq2")
    key, value = wide_states(1)
    put(layer, key[:, :, :10], value[:, :, :10])
    for token in range(10, TOKENS):
        put(layer, key[:, :, token : token + 1], value[:, :, token : token + 1])
    assert factors_of(layer) is not None
    returned = layer.dequantize()[0]
    assert torch.equal(returned[:, :, -128:], key[:, :, -128:])
    assert torch.equal(returned[:, :, :4], key[:, :, :4])


def test_rows_move_with_their_factors() -> None:
    layer = make_layer(policy="uniform:vq2")
    plain, wide = states(1, TOKENS), wide_states(1, seed=1)
    put(layer, torch.cat([plain[0], wide[0]]), torch.cat([plain[1], wide[1]]))
    before = layer.dequantize()[0]
    layer.reorder_cache(torch.tensor([1, 0, 1]))
    assert torch.equal(layer.dequantize()[0], before[[1, 0, 1]])


@pytest.mark.parametrize("tokens", [1, 150])
def test_a_step_that_is_taken_back_takes_its_factors_back(tokens: int) -> None:
    layer = make_layer(policy="uniform:vq2")
    key, value = wide_states(1, 4 + 128 + 127 + tokens)
    held = key.shape[2] - tokens
    put(layer, key[:, :, :held], value[:, :, :held])
    assert factors_of(layer) is None
    layer.update(key[:, :, held:], value[:, :, held:])
    before = layer.before
    assert before is not None
    if tokens > 1:
        layer.settle(None)
    assert factors_of(layer) is not None
    layer.undo(before)
    assert factors_of(layer) is None
    assert torch.equal(layer.dequantize()[0], key[:, :, :held])


def test_files_and_copies_keep_factors(tmp_path: Path) -> None:
    model, ids = wide_model(), prompt(400)
    cache = EntropySubbyteCache(model.config, policy="uniform:vq2")
    with torch.no_grad():
        forward(model, ids, cache)
    cache.save_pretrained(tmp_path / "cache.safetensors")
    loaded = EntropySubbyteCache.from_pretrained(tmp_path / "cache.safetensors", model.config)
    for other in (loaded, copy.deepcopy(cache)):
        for layer, original in zip(other.layers, cache.layers, strict=True):
            assert torch.equal(factors_of(layer), factors_of(original))
            assert torch.equal(layer.dequantize()[0], original.dequantize()[0])


@pytest.mark.parametrize("one_by_one", [False, True])
def test_queries_that_were_seen_before_the_factors_are_multiplied_too(one_by_one: bool) -> None:
    """A short prompt packs nothing; its queries choose the codes of tiles whose keys are balanced when they come."""
    layer, alone = (make_layer(policy="uniform:vq2", codebook="queries") for _ in range(2))
    key, value = wide_states(1)
    query = torch.randn(1, 4, 100, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(0, 1, 64)
    queries = PromptQueries(query, AttentionForm(0.125), None)
    layer.update(key[:, :, :100], value[:, :, :100])
    layer.settle(queries)
    codecs, before = layer.rows.codecs, layer.rows.snapshot(2)
    seen = codecs._moments.clone()
    assert codecs._shaping(FIRST) is not None
    for tokens in torch.arange(100, TOKENS).split(1 if one_by_one else TOKENS):
        put(layer, key[:, :, tokens], value[:, :, tokens])
    factors = factors_of(layer)
    assert factors is not None
    put(alone, key, value)
    sampled = queries.sampled(positions_on(100, CPU), codecs.moment_positions(100))
    alone.rows.codecs.see_queries(FIRST, alone.rows.codecs.balance.of_prompt(sampled, FIRST))
    assert torch.equal(factors_of(alone), factors)
    torch.testing.assert_close(codecs._moments, alone.rows.codecs._moments, atol=2e-3, rtol=0)
    assert torch.equal(codecs._shaping(FIRST)._moment, codecs._moments[0])
    layer.rows.undo(before)
    torch.testing.assert_close(codecs._moments, seen, atol=2e-2, rtol=0)
    assert torch.equal(codecs._shaping(FIRST)._moment, codecs._moments[0])
