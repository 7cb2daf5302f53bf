"""One layer: the window's promise, row operations, padding, bytes, refusals; cases A01, A05, A09, A10, A12 and A24."""

import copy
import random
from typing import Any

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.config import POLICIES
from hf_subbyte_moe.ops import page_slots, page_tiers
from hf_subbyte_moe.policy import make_policy
from support.layers import make_layer, put, states
from support.models import left_padded, prompt, tiny_model


pytestmark = pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")

ALL_POLICIES = (*POLICIES, *(f"uniform:{codec.name}" for codec in codecs()))


@pytest.mark.parametrize("operation", ["permute", "duplicate", "repeat", "select", "mask"])
@pytest.mark.parametrize("tokens", [300, 4 + 128 + 128 + 1])  # in the middle of the window; right after a flush
@pytest.mark.parametrize("policy", ["error", "uniform:nuq2"])
@pytest.mark.parametrize("codebook", ["universal", "online", "queries"])
def test_a01_row_operations_move_everything(operation: str, tokens: int, policy: str, codebook: str) -> None:
    layer = make_layer(policy=policy, codebook=codebook)
    key, value = states(3, tokens)
    scale = torch.tensor([1.0, 10.0, 100.0])[:, None, None, None]
    key, value = key * scale, value * scale
    put(layer, key[:, :, :-1], value[:, :, :-1])
    put(layer, key[:, :, -1:], value[:, :, -1:])
    before = layer.dequantize()
    index = {
        "permute": torch.tensor([2, 0, 1]),
        "duplicate": torch.tensor([1, 1, 0, 1]),
        "repeat": torch.arange(3).repeat_interleave(2),
        "select": torch.tensor([2]),
        "mask": torch.tensor([True, False, True]),
    }[operation]
    if operation == "repeat":
        layer.batch_repeat_interleave(2)
    elif operation in ("select", "mask"):
        layer.batch_select_indices(index)
    else:
        layer.reorder_cache(index)
    for side in (0, 1):
        assert torch.equal(layer.dequantize()[side], before[side][index])
    # and they go on apart: new tokens reach the next tile of each row
    rows = len(layer.starts)
    more_key, more_value = states(rows, 140, seed=1)
    for token in range(140):
        put(layer, more_key[:, :, token : token + 1], more_value[:, :, token : token + 1])
    for side, more in ((0, more_key), (1, more_value)):
        assert torch.equal(layer.dequantize()[side][:, :, :tokens][:, :, :132], before[side][index][:, :, :132])
        assert torch.equal(layer.dequantize()[side][:, :, -128:], more[:, :, -128:])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sinks", [0, 4])
def test_a05_the_newest_tokens_are_exact_and_few(seed: int, sinks: int) -> None:
    window = 8
    layer = make_layer(policy="uniform:vq175", window=window, sinks=sinks)
    sizes = [1, window, window + 1, 3 * window + 5, 128, 129, 260, 1, 1, 300]
    random.Random(seed).shuffle(sizes)
    key, value = states(2, sum(sizes), seed=seed)
    done = 0
    for size in sizes:
        part = slice(done, done + size)
        put(layer, key[:, :, part], value[:, :, part])
        done += size
        assert layer.get_seq_length() == done
        held = layer.dequantize()
        for side, given in ((0, key), (1, value)):
            assert torch.equal(
                held[side][:, :, max(0, done - window) : done], given[:, :, max(0, done - window) : done]
            )
            assert torch.equal(held[side][:, :, : min(sinks, done)], given[:, :, : min(sinks, done)])
        exact = done - int(layer.rows.store.counts[0]) * 128
        assert exact <= sinks + window + 127
        assert layer.rows.window.keys.shape[2] == sinks + window + 128


def test_a05_a_window_longer_than_everything_is_exact() -> None:
    model = tiny_model("llama")
    ids = prompt(170)
    config = {"policy": "uniform:vq175", "window": 400}
    packed = model.generate(
        ids, max_new_tokens=40, do_sample=False, cache_implementation="entropy_subbyte", cache_config=config
    )
    assert torch.equal(packed, model.generate(ids, max_new_tokens=40, do_sample=False))


@pytest.mark.parametrize("head_dim", [8, 16, 24, 72, 80, 96, 112, 128])
def test_a09_defaults_work_for_every_head_dim(head_dim: int) -> None:
    model = tiny_model("llama", head_dim=head_dim, hidden_size=64)
    output = model.generate(
        prompt(300),
        max_new_tokens=3,
        do_sample=False,
        cache_implementation="entropy_subbyte",
        return_dict_in_generate=True,
    )
    cache = cache_of(output)
    assert int(cache.layers[0].rows.store.counts[0]) == 1
    size = hf_subbyte_moe.explain(cache).size
    assert size is not None
    least = get_codec("vq175").format.bits_per_value(head_dim)
    assert size.bits == pytest.approx(max(2.5, least), rel=0.06)  # eight units only: coarse steps


def test_a09_a_head_dim_that_cannot_be_packed_is_refused_before_any_token() -> None:
    model = tiny_model("llama", head_dim=20)
    with pytest.raises(ValueError, match="head_dim 20 cannot be packed: it must be a multiple of 8"):
        model.generate(prompt(5), max_new_tokens=2, cache_implementation="entropy_subbyte")


@pytest.mark.parametrize("policy", ALL_POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a10_degenerate_values_stay_finite(policy: str, dtype: torch.dtype) -> None:
    layer = make_layer(policy=policy)
    key, value = (part.to(dtype) for part in states(1, 132 + 6 * 128))
    for states_ in (key, value):
        for tile, fill in enumerate((0.0, 9.0, -9.0, 1e-30, 65504.0)):
            states_[:, :, 4 + 128 * tile : 4 + 128 * (tile + 1)] = fill
        states_[:, :, 4 + 128 * 5 : 4 + 128 * 6] = 0.5
        states_[:, :, 4 + 128 * 5 : 4 + 128 * 6, 3] = 1000.0
    put(layer, key, value)
    worst = max(codec.relative_error for codec in make_policy(layer.rows._config).tiers)
    mean = layer.rows.codecs.mean[:, :, None]
    for side, given, removed in zip(layer.dequantize(), (key, value), (mean, 0.0), strict=True):
        assert side.dtype == dtype
        assert torch.isfinite(side).all()
        error = (side.double() - given.double()).norm(dim=-1)
        size = given.double().norm(dim=-1) + (given.double() - removed).norm(dim=-1)
        assert (error <= (1.6 * worst**0.5 + 4 * torch.finfo(dtype).eps) * size).all()
    assert (layer.dequantize()[1][:, :, 4:132] == 0).all()


@pytest.mark.parametrize("tokens", [259, 260, 387, 388])  # what is fitted: the prompt, one tile, one tile, two
@pytest.mark.parametrize("policy", ["uniform:nuq2", "uniform:vq2"])
@pytest.mark.parametrize("codebook", ["universal", "online"])
def test_states_may_lie_as_a_model_makes_them(tokens: int, policy: str, codebook: str) -> None:
    """Models view ``[B, T, H, D]`` as ``[B, H, T, D]``."""
    layer, plain = make_layer(policy=policy, codebook=codebook), make_layer(policy=policy, codebook=codebook)
    key, value = states(2, tokens)
    put(plain, key, value)
    put(layer, *(side.transpose(1, 2).contiguous().transpose(1, 2) for side in (key, value)))
    for found, expected in zip(layer.dequantize(), plain.dequantize(), strict=True):
        assert torch.equal(found, expected)


def test_a10_constant_keys_need_the_fewest_bits() -> None:
    """Constant keys cost nothing at any tier, so the error policy spends everything on the values."""
    model = hf_subbyte_moe.apply(tiny_model("llama"), {"kv_cache": {"bits": 4.0, "window": 8}})
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight.zero_()
    cache = EntropySubbyteCache(model.config, bits=4.0, window=8)
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: cache})
    choices = hf_subbyte_moe.explain(cache).choices
    assert {choice.tier for choice in choices if choice.side == "keys"} == {"vq175"}
    assert {choice.tier for choice in choices if choice.side == "values"} != {"vq175"}
    assert {round(choice.entropy, 1) for choice in choices if choice.entropy is not None} == {7.7}  # all tokens alike


@pytest.mark.parametrize("policy", ["uniform:vq2", "uniform:nuq2", "error"])
@pytest.mark.parametrize("codebook", ["universal", "online", "queries"])
def test_a12_a_row_is_quantized_without_looking_at_another(policy: str, codebook: str) -> None:
    key, value = states(2, 600)
    key[1] *= 1000
    value[1] *= 1000
    together, alone = make_layer(policy=policy, codebook=codebook), make_layer(policy=policy, codebook=codebook)
    put(together, key, value)
    put(alone, key[:1], value[:1])
    for side in (0, 1):
        assert torch.equal(together.dequantize()[side][0], alone.dequantize()[side][0])
        assert records(together, side) == records(alone, side)


def records(layer: EntropySubbyteLayer, side: int) -> list[tuple[int, list[int]]]:
    """Tier and record of every tile of the first row."""
    pages = layer.rows.store.pages(side)[0].flatten()
    pools = layer.rows.store.pools(side)
    found = zip(page_tiers(pages).tolist(), page_slots(pages).tolist(), strict=True)
    return [(tier, pools[tier][slot].tolist()) for tier, slot in found]


@pytest.mark.parametrize("fill", [float("nan"), 3e38])
def test_a24_unused_capacity_and_empty_rows_influence_nothing(fill: float) -> None:
    model = tiny_model("llama")
    ids, mask = left_padded([prompt(150, seed=1), prompt(290, seed=2), prompt(1, seed=3)])
    mask[2] = 0  # a row that is padding throughout
    settings: dict[str, Any] = {
        "cache_implementation": "entropy_subbyte",
        "cache_config": {"bits": 4.0, "window": 8},
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    plain = model.generate(ids[:2], attention_mask=mask[:2], max_new_tokens=4, **settings)
    first = model.generate(ids, attention_mask=mask, max_new_tokens=1, **settings)
    cache = cache_of(first)
    for layer in cache.layers:
        window = layer.rows.window
        unused = ~window.visible(layer.rows.lengths, layer.rows.first_recent())[:, 0]
        for buffer in (window.keys, window.values):
            buffer.transpose(1, 2)[unused] = fill
        pages = torch.cat([layer.rows.store.pages(side).flatten() for side in (0, 1)])
        for tier_id, pool in layer.rows.store.pools(0).items():
            used = torch.zeros(pool.shape[0], dtype=torch.bool)
            used[page_slots(pages[page_tiers(pages) == tier_id]).long()] = True
            pool[~used] = -1
    mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
    rest = model.generate(
        first.sequences,
        attention_mask=mask,
        max_new_tokens=3,
        **{CACHE_KW: cache},
        **{k: v for k, v in settings.items() if not k.startswith("cache")},
    )
    for step, logits in enumerate(rest.logits):
        assert torch.isfinite(logits).all()
        torch.testing.assert_close(logits[:2], plain.logits[step + 1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("tokens", [1, 300])
def test_values_that_are_not_finite_are_refused_and_nothing_is_lost(bad: float, side: int, tokens: int) -> None:
    layer = make_layer()
    put(layer, *states(2, 300))
    before = layer.dequantize()
    new = states(2, tokens, seed=1)
    new[side][1, 0, -1, 5] = bad
    with pytest.raises(ValueError, match=f"the {('keys', 'values')[side]} hold NaN or Inf; nothing was stored"):
        layer.update(*new)
    assert layer.get_seq_length() == 300
    for left, right in zip(layer.dequantize(), before, strict=True):
        assert torch.equal(left, right)
    put(layer, *states(2, tokens, seed=1))
    assert layer.get_seq_length() == 300 + tokens


def test_a_failed_step_is_taken_back_in_every_layer() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama", num_hidden_layers=3))
    cache = EntropySubbyteCache(model.config)
    ids = prompt(300)
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
        before = [layer.dequantize() for layer in cache.layers]
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match="NaN or Inf"):
            model(prompt(3), **{CACHE_KW: cache})
    assert [layer.get_seq_length() for layer in cache.layers] == [300] * 3
    for layer, (key, value) in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.dequantize()[0], key)
        assert torch.equal(layer.dequantize()[1], value)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_a_failed_step_that_packed_is_taken_back_exactly(family: str, tokens: int) -> None:
    model = hf_subbyte_moe.apply(tiny_model(family, num_hidden_layers=2))
    cache = EntropySubbyteCache(model.config, policy="uniform:vq2", window=8)
    with torch.no_grad():
        model(prompt(267), **{CACHE_KW: cache})  # one token more packs a tile
        twin = copy.deepcopy(cache)
        weight = model.model.layers[1].self_attn.k_proj.weight
        good = weight.clone()
        weight[0, 0] = float("nan")
        with pytest.raises(ValueError, match="NaN or Inf"):
            model(prompt(tokens), **{CACHE_KW: cache})
        weight.copy_(good)
        assert cache.get_seq_length(0) == cache.get_seq_length(1) == 267
        for ids in (prompt(1), prompt(5, seed=1), prompt(200, seed=2)):
            left, right = (model(ids, **{CACHE_KW: held}).logits for held in (cache, twin))
            torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_cropping_a_question_away_keeps_the_tiers_that_the_context_settled() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    cache = EntropySubbyteCache(model.config, bits=4.5, window=8)
    with torch.no_grad():
        model(prompt(400), **{CACHE_KW: cache})
    layer = cache.layers[0]
    measured = layer.rows.settled[0][-1][0]
    layer.crop(-5)
    assert (layer.rows.settled[0][-1][0] == measured).all()
    layer.crop(-390)
    assert layer.rows.settled[0] == []


def test_a_cache_on_another_device_is_refused() -> None:
    layer = make_layer()
    put(layer, *states(2, 10))
    with pytest.raises(ValueError, match="keys on meta do not fit this cache, which lies on cpu"):
        layer.update(*(part.to("meta") for part in states(2, 1)))


@pytest.mark.parametrize(("policy", "head_dim"), [("uniform:vq3o", 512), ("uniform:nuq2", 1024)])
def test_widths_that_a_tier_cannot_number_are_refused(policy: str, head_dim: int) -> None:
    with pytest.raises(ValueError, match=f"'{policy}' packs keys and values of at most"):
        make_layer(head_dim=head_dim, policy=policy)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        make_layer().update(*states(1, 0))


def test_states_of_another_shape_are_refused() -> None:
    layer = make_layer()
    put(layer, *states(2, 10))
    for other in (states(3, 1), states(2, 1, heads=4), tuple(part.half() for part in states(2, 1))):
        with pytest.raises(ValueError, match="do not fit this cache"):
            layer.update(*other)
    assert layer.get_seq_length() == 10


def test_gradients_are_refused() -> None:
    key, value = states(1, 4)
    with pytest.raises(RuntimeError, match="is for inference"):
        make_layer().update(key.requires_grad_(), value)


def test_a_cache_is_not_used_with_another_model() -> None:
    first, second = (hf_subbyte_moe.apply(tiny_model("llama", seed=seed)) for seed in (0, 1))
    cache = EntropySubbyteCache(first.config)
    with torch.no_grad():
        first(prompt(20), **{CACHE_KW: cache})
        for tokens in (1, 3):
            with pytest.raises(ValueError, match="filled by another model"):
                second(prompt(tokens), **{CACHE_KW: cache})
            assert cache.get_seq_length() == 20
            assert cache.layers[0].rows.lengths.tolist() == [20]
    deeper = hf_subbyte_moe.apply(tiny_model("llama", num_hidden_layers=3))
    with torch.no_grad(), pytest.raises(ValueError, match="made for a model of 2 layers"):
        deeper(prompt(3), **{CACHE_KW: EntropySubbyteCache(first.config)})


@pytest.mark.parametrize("amount", [-3, torch.tensor(-3), -140, -1000])
def test_crop_takes_numbers_and_tensors(amount: Any) -> None:
    layer = make_layer(policy="uniform:vq2")
    key, value = states(2, 420)
    put(layer, key, value)
    before = layer.dequantize()
    layer.crop(amount)
    length = max(0, 420 + int(amount))
    assert layer.get_seq_length() == length
    for left, right in zip(layer.dequantize(), before, strict=True):
        assert torch.equal(left, right[:, :, :length])
    layer.crop(0)
    assert layer.get_seq_length() == length


def test_crop_refuses_positive_numbers() -> None:
    layer = make_layer()
    put(layer, *states(1, 5))
    with pytest.raises(ValueError, match="negative number"):
        layer.crop(3)


def test_reset_forgets_everything() -> None:
    layer = make_layer()
    put(layer, *states(2, 300))
    layer.reset()
    assert layer.get_seq_length() == 0
    assert layer.allocated_bytes() == 0
    put(layer, *states(3, 10))
    assert layer.dequantize()[0].shape == (3, 2, 10, 64)


def test_a_copy_goes_its_own_way() -> None:
    layer = make_layer()
    put(layer, *states(1, 300))
    twin = copy.deepcopy(layer)
    before = twin.dequantize()
    put(layer, *states(1, 200, seed=1))
    assert twin.get_seq_length() == 300
    for left, right in zip(twin.dequantize(), before, strict=True):
        assert torch.equal(left, right)
    put(twin, *states(1, 200, seed=1))
    for left, right in zip(twin.dequantize(), layer.dequantize(), strict=True):
        assert torch.equal(left, right)
