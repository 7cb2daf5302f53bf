"""``explain``: the numbers are those of the cache, and the tables show them."""

import json

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.policy import sample_positions
from support.models import left_padded, prompt, tiny_model


CONFIG = {"bits": 4.0, "window": 8, "sinks": 2}


def run(model: torch.nn.Module, ids: torch.Tensor, **options: object) -> EntropySubbyteCache:
    hf_subbyte_moe.apply(model)
    cache = EntropySubbyteCache(model.config, **{**CONFIG, **options})
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
    return cache


def test_entropy_is_that_of_the_real_attention() -> None:
    """One query head a KV head and a short prompt: every sampled query can be checked against eager attention."""
    model = tiny_model("llama", num_key_value_heads=4)
    ids = prompt(60)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    cache = run(model, ids)
    choices = hf_subbyte_moe.explain(cache).choices
    sampled = sample_positions(60)
    for layer, probabilities in enumerate(weights):
        entropy = torch.special.entr(probabilities[0]).sum(-1) / torch.log(torch.tensor(2.0))
        for head in range(4):
            shown = next(c.entropy for c in choices if (c.layer, c.head, c.side) == (layer, head, "keys"))
            assert shown == pytest.approx(float(entropy[head, sampled].mean()), rel=1e-3)


def test_numbers_add_up() -> None:
    cache = run(tiny_model("mixtral"), prompt(600))
    explanation = hf_subbyte_moe.explain(cache)
    size = explanation.size
    assert size is not None
    assert size.tokens == 600
    assert size.bytes == cache.allocated_bytes() == sum(layer.allocated_bytes() for layer in cache.layers)
    assert size.plain_bytes == 2 * 2 * 2 * 600 * 16 * 4
    assert size.bits_total == pytest.approx(8 * size.bytes / (2 * 2 * 2 * 600 * 16))
    tiles = [(get_codec(choice.tier).format, choice.tiles) for choice in explanation.choices]
    packed = sum(count for _, count in tiles)
    assert packed == 2 * 2 * 2 * 4
    assert size.bits == pytest.approx(sum(fmt.bits_per_value(16) * count for fmt, count in tiles) / packed)
    assert size.code_bits == pytest.approx(sum(fmt.code_bits_per_value() * count for fmt, count in tiles) / packed)
    json.dumps(explanation.to_dict(), allow_nan=False)


@pytest.mark.parametrize("bits", [3.0, 3.5, 4.0, 5.0, 6.0])
@pytest.mark.parametrize("policy", ["error", "entropy_rank"])
def test_bits_are_met_within_two_percent(policy: str, bits: float) -> None:
    model = tiny_model("llama", num_hidden_layers=6, head_dim=32)
    cache = run(model, prompt(1000), policy=policy, bits=bits)
    size = hf_subbyte_moe.explain(cache).size
    assert size is not None
    assert size.bits == pytest.approx(bits, rel=0.02)


def test_chunks_of_a_prompt_choose_on_their_own() -> None:
    cache = run(tiny_model("llama"), prompt(900), chunk=256)
    layer = cache.layers[0]
    assert [(chunk.first_tile, chunk.tiles) for chunk in layer.statistics.chunks[0]] == [(0, 2), (2, 2), (4, 2)]
    tiers = [chunk.tiers for chunk in layer.statistics.chunks[0]]
    for side in (0, 1):
        pages = layer.rows.store.pages(side)[0] >> 24  # [H, tiles]
        for number, chosen in enumerate(tiers):
            expected = torch.from_numpy(chosen[:, side])[:, None].expand(-1, 2)
            assert torch.equal(pages[:, 2 * number : 2 * number + 2].long(), expected)


def test_a_model_remembers_what_its_last_cache_measured() -> None:
    model = tiny_model("llama")
    assert not hf_subbyte_moe.explain(model).choices
    ids, mask = left_padded([prompt(200, seed=1), prompt(300, seed=2)])
    settings = {"max_new_tokens": 2, "cache_implementation": CACHE_NAME, "cache_config": CONFIG}
    output = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **settings)
    of_cache = hf_subbyte_moe.explain(cache_of(output))
    del output
    of_model = hf_subbyte_moe.explain(model)
    assert of_model.choices == of_cache.choices
    assert of_model.size is None
    assert of_model.policy == "error"
    shown = str(of_model)
    assert "row 0 of 2" in shown
    assert all(f"│ {name}" in shown or name in shown for name in ("entropy", "keys", "values", "error"))


def test_printing_shows_bits_bytes_and_tiers() -> None:
    cache = run(tiny_model("llama"), prompt(600))
    explanation = hf_subbyte_moe.explain(cache)
    shown = str(explanation)
    assert explanation.size is not None
    assert f"{explanation.size.bytes:,}" in shown
    assert f"{explanation.size.bits:.3f}" in shown
    for choice in explanation.choices:
        assert choice.tier in shown
        assert choice.error is not None
        assert f"{choice.error:.1e}" in shown


def test_a_prompt_too_short_to_measure_is_told_from_none() -> None:
    model = tiny_model("llama")
    assert "nothing was measured yet" in str(hf_subbyte_moe.explain(model))
    assert "nothing was measured yet" in str(hf_subbyte_moe.explain(EntropySubbyteCache(model.config, **CONFIG)))
    settings = {"max_new_tokens": 2, "cache_implementation": CACHE_NAME, "cache_config": CONFIG}
    output = model.generate(prompt(5), return_dict_in_generate=True, **settings)
    of_cache, of_model = (str(hf_subbyte_moe.explain(of)) for of in (cache_of(output), model))
    for shown in (of_cache, of_model):
        assert "nothing was measured yet" not in shown
        assert "the prompt was too short to be measured: tokens are packed where a row has as many" in shown
    assert "(138)" in " ".join(of_cache.split())
    assert "(260 by default)" in " ".join(of_model.split())


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="takes a model or an EntropySubbyteCache, not int"):
        hf_subbyte_moe.explain(3)
