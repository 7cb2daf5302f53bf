"""Assisted decoding, streaming, copies, files and refusals; cases A07, A08, A17 and A18."""

import copy
import warnings
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, CompileConfig
from transformers.cache_utils import StaticCache
from transformers.generation.streamers import BaseStreamer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME, PREVIOUS_ATTRIBUTE, EntropySubbyteCache, EntropySubbyteLayer, attention
from hf_subbyte_moe.cache.saving import FILE_NAME
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.ops import decode_attention
from support.models import left_padded, prompt, tiny_model


EXACT = {"policy": "uniform:exact", "window": 8, "sinks": 2}
LOSSY = {"bits": 4.0, "window": 8, "sinks": 2}
SLIDING = {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "output_logits": True}
    torch.manual_seed(7)
    return model.generate(ids, return_dict_in_generate=True, **{**settings, **options})


def ours(config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": CACHE_NAME, "cache_config": dict(config)}


def assert_same(left: Any, right: Any) -> None:
    assert torch.equal(left.sequences, right.sequences)
    for one, other in zip(left.logits, right.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("assistant_uses_ours", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3", "deepseek_v3"])
def test_assisted_decoding_equals_plain_decoding(family: str, assistant_uses_ours: bool) -> None:
    model = tiny_model(family)
    assistant = tiny_model("llama", seed=0, num_hidden_layers=1)
    if assistant_uses_ours:
        assistant.generation_config.cache_implementation = CACHE_NAME
        assistant.generation_config.cache_config = dict(EXACT)
    ids = prompt(170)
    packed = generate(model, ids, assistant_model=assistant, **ours(EXACT))
    assert_same(packed, generate(model, ids))
    assert cache_of(packed).get_seq_length() == packed.sequences.shape[1] - 1
    if assistant_uses_ours:
        assert hf_subbyte_moe.explain(assistant).policy == "uniform:exact"  # it did use our cache


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 5}, {"assistant_model": "itself"}])
def test_taking_tokens_back_packs_the_same_tiles_as_plain_decoding(options: dict[str, Any]) -> None:
    """At the same length a lossy cache holds the same tiles in the same tiers, however it got there."""
    model = tiny_model("llama")
    ids = prompt(80).repeat(1, 2)
    if "assistant_model" in options:
        options = {"assistant_model": tiny_model("llama")}
    config = {"policy": "uniform:vq4", "window": 32, "sinks": 2}
    packed = cache_of(generate(model, ids, max_new_tokens=200, **options, **ours(config)))
    plain = cache_of(generate(model, ids, max_new_tokens=200, **ours(config)))
    for left, right in zip(packed.layers, plain.layers, strict=True):
        assert left.length == right.length
        assert left.rows.store.counts.tolist() == right.rows.store.counts.tolist()
        exact = left.length - int(left.rows.store.counts[0]) * 128
        assert exact >= 32
        for one, other in zip(left.dequantize(), right.dequantize(), strict=True):
            torch.testing.assert_close(one[:, :, :130], other[:, :, :130])  # the prompt's


def test_num_return_sequences_and_streaming() -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    model = tiny_model("mixtral")
    ids = prompt(150)
    streamer = Collect()
    output = generate(model, ids, streamer=streamer, **ours(LOSSY))
    assert streamer.tokens == [*output.sequences[0].tolist(), -1]
    several = generate(model, ids, do_sample=True, num_return_sequences=3, **ours(LOSSY))
    assert several.sequences.shape[0] == 3
    assert cache_of(several).layers[0].rows.lengths.tolist() == [several.sequences.shape[1] - 1] * 3


@pytest.mark.parametrize(
    "config",
    [
        LOSSY,
        {**LOSSY, "codebook": "online"},
        {**LOSSY, "codebook": "queries"},
        {"policy": "uniform:nuq2", "window": 8},
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v2"])
def test_copies_and_files_go_on_like_the_original(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = hf_subbyte_moe.apply(tiny_model(family))
    text_config = model.config.get_text_config(decoder=True)
    config = {**config, "bits": 5.0} if "bits" in config else config
    cache = EntropySubbyteCache(text_config, **config)
    with torch.no_grad():
        model(prompt(600, rows=2), **{CACHE_KW: cache})
        cache.reorder_cache(torch.tensor([1, 0, 1]))
        cache.save_pretrained(tmp_path)
        cache.save_pretrained(tmp_path / "named.safetensors")
        twin = copy.deepcopy(cache)
        loaded = EntropySubbyteCache.from_pretrained(tmp_path, text_config)
        named = EntropySubbyteCache.from_pretrained(tmp_path / "named.safetensors", text_config)
        assert (tmp_path / FILE_NAME).stat().st_size < 1.5 * cache.allocated_bytes() + 1e5
        assert str(hf_subbyte_moe.explain(loaded)) == str(hf_subbyte_moe.explain(cache))
        for step in range(3):
            token = prompt(1 if step else 150, rows=3, seed=step)
            expected = model(token, **{CACHE_KW: cache}).logits
            for other in (twin, loaded, named):
                torch.testing.assert_close(model(token, **{CACHE_KW: other}).logits, expected, rtol=0, atol=0)
    assert twin.get_seq_length() == loaded.get_seq_length() == cache.get_seq_length()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    cache = EntropySubbyteCache(model.config, **LOSSY)
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: cache})
    cache.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no cache at"):
        EntropySubbyteCache.from_pretrained(tmp_path / "nowhere", model.config)
    with pytest.raises(ValueError, match="written for a model with num_hidden_layers 2, not 3"):
        EntropySubbyteCache.from_pretrained(tmp_path, tiny_model("llama", num_hidden_layers=3).config)
    with pytest.raises(ValueError, match="written for a model with model_type 'llama', not 'mistral'"):
        EntropySubbyteCache.from_pretrained(tmp_path, tiny_model("mistral").config)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="holds no entropy_subbyte cache"):
        EntropySubbyteCache.from_pretrained(tmp_path / "model" / "model.safetensors", model.config)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors here")
    with pytest.raises(ValueError, match="is no cache file"):
        EntropySubbyteCache.from_pretrained(broken, model.config)


@pytest.mark.parametrize("previous", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"prompt_lookup_num_tokens": 5}, {"assistant_model": "tiny"}])
def test_a07_sliding_layers_announce_what_they_return(previous: str, options: dict[str, Any]) -> None:
    model = tiny_model("gemma3", sliding_window=8)
    model.set_attn_implementation(previous)
    if options.get("assistant_model"):
        options = {"assistant_model": tiny_model("llama", num_hidden_layers=1)}
    ids = prompt(80).repeat(1, 2)
    assert_same(generate(model, ids, **options, **ours(EXACT)), generate(model, ids))


def test_a07_announced_length_equals_returned_length() -> None:
    model = hf_subbyte_moe.apply(tiny_model("gemma2", sliding_window=8))
    cache = EntropySubbyteCache(model.config, **EXACT)
    announced: list[tuple[int, int]] = []
    original = EntropySubbyteCache.update

    def update(self: Any, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        length, _ = self.get_mask_sizes(key.shape[2], layer_idx)
        keys, values = original(self, key, value, layer_idx, *args, **kwargs)
        announced.append((length, keys.shape[2]))
        assert keys.shape[2] == values.shape[2]
        return keys, values

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(EntropySubbyteCache, "update", update)
        for tokens in (1, 3, 8, 9, 20, 1, 200, 1):
            model(prompt(tokens), **{CACHE_KW: cache})
    assert len(announced) == 16
    assert all(left == right for left, right in announced)


@pytest.mark.parametrize("tokens", [21, 300])
def test_a08_keys_and_values_of_different_width(tokens: int) -> None:
    """Latent width 32 and rotary width 8; a tier of its own for each side, four bits or more for the key."""
    model = tiny_model("deepseek_v3")
    ids = prompt(tokens)
    config = {"policy": "uniform:vq175", "window": 8}
    cache = cache_of(generate(model, ids, max_new_tokens=10, **ours(config)))
    layer = cache.layers[0]
    assert [states.shape[-1] for states in layer.dequantize()] == [32, 8]
    if tokens > 200:
        choices = hf_subbyte_moe.explain(cache).choices
        assert {choice.tier for choice in choices if choice.side == "keys"} == {"vq175"}
        assert {choice.tier for choice in choices if choice.side == "values"} == {"vq4"}
    assert_same(generate(model, ids, max_new_tokens=10, **ours(EXACT)), generate(model, ids, max_new_tokens=10))


def test_a08_a_mask_with_a_head_dimension_is_refused() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    mask = torch.ones(1, 4, 6, 6, dtype=torch.bool).tril()
    cache = EntropySubbyteCache(model.config)
    with torch.no_grad(), pytest.raises(ValueError, match="attention mask with a head dimension"):
        model(prompt(6), attention_mask=mask, **{CACHE_KW: cache})


class Codes(torch.nn.Module):
    """A projection that keeps codes of its weight, as quantized checkpoints do."""

    def __init__(self, linear: torch.nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", (linear.weight * 16).round().clamp(-100, 100).to(dtype))

    def forward(self, states: Tensor) -> Tensor:
        return states @ (self.weight.to(states.dtype) / 16).t()


class Adapted(torch.nn.Module):
    """A projection with an adapter beside it, which shows its base layer's weight as PEFT's do."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.base = linear
        self.extra = torch.nn.Linear(linear.in_features, linear.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.extra(states)


@pytest.mark.parametrize("kind", ["int8", "fp8", "adapter"])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_a_latent_projection_without_a_plain_weight_falls_back(family: str, kind: str) -> None:
    """History is dequantized and expanded by the module itself, and nothing is measured."""
    model = tiny_model(family)
    dtypes = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    for layer in model.model.layers:
        plain = layer.self_attn.kv_b_proj
        layer.self_attn.kv_b_proj = Codes(plain, dtypes[kind]) if kind in dtypes else Adapted(plain)
    ids = prompt(170)
    expected = generate(model, ids)
    with pytest.warns(UserWarning, match="nothing was measured"):
        packed = generate(model, ids, **ours(EXACT))
    assert_same(packed, expected)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_model_offloaded_by_accelerate_generates(family: str) -> None:
    expected = generate(tiny_model(family), prompt(170))
    model = accelerate.cpu_offload(tiny_model(family), execution_device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(generate(model, prompt(170), **ours(EXACT)), expected)


def test_flash_attention_is_told_which_columns_are_padding(monkeypatch: Any) -> None:
    """A fake one: a sliding layer's mask must not pass for padding."""
    seen: list[Any] = []
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def fake_flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        seen.append(mask)
        return sdpa(module, query, key, value, None, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "fake_flash", fake_flash)
    model = hf_subbyte_moe.apply(tiny_model("qwen2", **SLIDING))
    for module in model.modules():
        if hasattr(module, PREVIOUS_ATTRIBUTE):
            setattr(module, PREVIOUS_ATTRIBUTE, "fake_flash")
    ids, mask = left_padded([prompt(10, seed=1), prompt(40, seed=2)])
    with torch.no_grad():
        model(ids, **{CACHE_KW: EntropySubbyteCache(model.config, **EXACT)})
        assert seen == [None, None]
        model(ids, attention_mask=mask, **{CACHE_KW: EntropySubbyteCache(model.config, **EXACT)})
    assert all(torch.equal(given, mask.bool()) for given in seen[2:])


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "llama", "deepseek_v2"])
def test_a_model_that_names_our_attention_itself_computes_as_before(family: str) -> None:
    model = tiny_model(family)
    ids = prompt(170)
    expected = generate(model, ids)
    named = tiny_model(family)
    named.set_attn_implementation(CACHE_NAME)
    assert_same(generate(named, ids), expected)
    assert_same(generate(named, ids, **ours(EXACT)), expected)


@pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")
def test_a17_everything_of_a_layer_lies_on_the_layers_device() -> None:
    model = tiny_model("llama")
    cache = EntropySubbyteCache(model.config, policy="uniform:vq2", window=8)
    on_cpu, on_meta = (torch.empty(2, 2, 300, 16, device=device).fill_(1.0) for device in ("cpu", "meta"))
    cache.update(on_cpu, on_cpu, 0)
    cache.update(on_meta, on_meta, 1)
    devices = []
    for layer in cache.layers:
        assert isinstance(layer, EntropySubbyteLayer)
        layer.settle_without_statistics()
        layer.update(*[states[:, :, :1] for states in ((on_cpu, on_cpu), (on_meta, on_meta))[len(devices)]])
        tensors = [*layer.rows.window.tensors(), layer.rows.codecs.mean, *layer.rows.codecs.rotations]
        for side in (0, 1):
            tensors += [*layer.rows.store.pools(side).values(), *layer.rows.codecs.tables(side).values()]
            tensors.append(layer.rows.store.pages(side))
        devices.append({tensor.device.type for tensor in tensors})
    assert devices == [{"cpu"}, {"meta"}]
    first, second = ({id(t) for t in layer.rows.window.tensors()} for layer in cache.layers)
    assert not first & second


def test_a18_the_cache_says_that_it_is_not_compilable_and_generate_does_not_try(monkeypatch: Any) -> None:
    model = tiny_model("llama")
    cache = EntropySubbyteCache(model.config)
    assert not cache.is_compileable
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: pytest.fail("generate compiled the model"))
    generate(model, prompt(150), compile_config=CompileConfig(), **ours(LOSSY))


def test_continuous_batching_is_refused() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    with pytest.raises(ValueError, match=r"continuous batching|paged"):
        model.generate_batch([prompt(8)[0].tolist()], max_new_tokens=2)


def test_a_static_cache_is_left_to_transformers() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))  # ours is the default
    output = generate(model, prompt(150), cache_implementation="static")
    assert isinstance(cache_of(output), StaticCache)
    assert_same(output, generate(tiny_model("llama"), prompt(150)))


def test_attention_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="does not return attention weights"):
        generate(tiny_model("llama"), prompt(8), output_attentions=True, **ours(EXACT))


def test_a_backend_that_cannot_compute_is_refused_and_nothing_is_stored() -> None:
    model = tiny_model("mixtral")
    hf_subbyte_moe.apply(model, {"kv_cache": {"default": False}})
    cache = EntropySubbyteCache(model.config, window=8, sinks=2, backend="cuda")
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: cache})
        with pytest.raises(ValueError, match="the cuda kernel cannot compute this attention: the tensors lie on cpu"):
            model(prompt(1), **{CACHE_KW: cache})
    assert cache.get_seq_length() == 300


@pytest.mark.parametrize(
    ("named", "tokens", "asked"),
    [
        ("auto", 1, {"auto"}),
        ("auto", 5, {"auto"}),
        ("auto", 9, set()),
        ("triton", 5, {"auto"}),
        ("torch", 5, {"torch"}),
    ],
)
def test_a_few_new_tokens_go_to_a_kernel_and_many_to_the_model_s_own_attention(
    named: str, tokens: int, asked: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def recorded(*arguments: Any) -> Any:
        seen.append(arguments[-1])
        return decode_attention(*arguments[:-1], "torch")

    monkeypatch.setattr(attention, "decode_attention", recorded)
    model = hf_subbyte_moe.apply(tiny_model("mixtral"), {"kv_cache": {"default": False}})
    cache = EntropySubbyteCache(model.config, window=8, sinks=2, backend=named)
    with torch.no_grad():
        model(prompt(300), **{CACHE_KW: cache})
        model(prompt(tokens), **{CACHE_KW: cache})
    assert set(seen) == asked
