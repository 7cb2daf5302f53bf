"""A long generation: nothing grows beyond the formula, lengths do not drift, and an old needle is still found."""

import pytest
import torch

from hf_subbyte_moe.accounting import PAGE_BYTES, pool_capacity, tiles_of
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.cli.prompts import needle_prompt
from hf_subbyte_moe.cli.running import load_model
from hf_subbyte_moe.codecs import codec_of
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.explain import cache_size


CONTEXT, NEW_TOKENS = 2048, 1500


def expected_bytes(cache: EntropySubbyteCache, tokens: int) -> int:
    """By the rules of ``accounting``, from the tiers that each layer's prompt settled."""
    total = 0
    for layer in cache.packed_layers.values():
        geometry = layer.rows.geometry()
        tiles = tiles_of(tokens, geometry.sinks, geometry.window)
        tiers = layer.rows.settled[0][-1][0].flatten().tolist()
        pools = {tier: tiers.count(tier) * tiles for tier in set(tiers)}
        total += sum(
            4 * codec_of(tier).format.record_words(geometry.key_dim) * pool_capacity(count)
            for tier, count in pools.items()
        )
        total += 2 * geometry.kv_heads * pool_capacity(tiles) * PAGE_BYTES
        total += (geometry.sinks + geometry.window + 128) * geometry.values_per_token * geometry.itemsize
        total += layer.rows.codecs.nbytes()
    return total


@pytest.mark.slow
def test_fifteen_hundred_tokens_from_a_packed_cache() -> None:
    model, tokenizer = load_model(None)
    prompt = needle_prompt(tokenizer, CONTEXT, seed=1, depth=0.4)
    story = torch.tensor(
        [tokenizer("\n\nAbstract\n========\n\nThis PEP proposes", add_special_tokens=False)["input_ids"]]
    )
    ids = torch.cat([prompt.ids, story], dim=1)
    generator = {"do_sample": True, "temperature": 0.8, "return_dict_in_generate": True}
    torch.manual_seed(0)
    output = model.generate(
        ids,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        cache_implementation=CACHE_NAME,
        cache_config={"bits": 2.5},
        **generator,
    )
    cache = cache_of(output)
    tokens = ids.shape[1] + NEW_TOKENS - 1
    for layer in cache.layers:
        assert layer.get_seq_length() == tokens
        assert layer.rows.lengths.tolist() == [tokens]
        assert layer.rows.store.counts.tolist() == [tiles_of(tokens, 4, 128)]
    assert cache.allocated_bytes() == expected_bytes(cache, tokens)
    assert cache_size(cache).bits == pytest.approx(2.5, rel=0.02)

    asked = torch.tensor([tokenizer(prompt.question, add_special_tokens=False)["input_ids"]])
    ids = torch.cat([output.sequences, asked], dim=1)
    answer = model.generate(ids, max_new_tokens=9, do_sample=False, **{CACHE_KW: cache})
    assert tokenizer.decode(answer[0, ids.shape[1] :]).strip().startswith(prompt.expected)
