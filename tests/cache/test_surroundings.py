"""What a program may set around a cache: PyTorch's default dtype, inference mode, autocast."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.policy import sample_positions
from support.models import prompt, tiny_model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("codebook", ["universal", "queries"])
def test_the_default_dtype_changes_nothing(codebook: str) -> None:
    model = tiny_model()
    for made_once in (rotation_matrix, rotation_signs):
        made_once.cache_clear()

    def generated() -> Any:
        return model.generate(
            prompt(300, rows=2),
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            cache_implementation="entropy_subbyte",
            cache_config={"window": 8, "codebook": codebook},
        )

    with default_dtype(torch.bfloat16):
        found = generated()
    for made_once in (rotation_matrix, rotation_signs):
        assert made_once(16, torch.device("cpu")).dtype is torch.float32
    expected = generated()
    for layer, other in zip(cache_of(found).layers, cache_of(expected).layers, strict=True):
        for name, tensor in other.rows.state().items():
            assert layer.rows.state()[name].dtype is tensor.dtype, name
            assert torch.equal(layer.rows.state()[name], tensor), name
    assert torch.equal(found.sequences, expected.sequences)


def test_the_default_dtype_moves_no_sample() -> None:
    """bf16 counts to 256 in ones, and to 65536 in steps of 256."""
    expected = sample_positions(60_000)
    with default_dtype(torch.bfloat16):
        assert torch.equal(sample_positions(60_000), expected)


def step(model: Any, cache: EntropySubbyteCache, tokens: int = 1, rows: int = 1) -> torch.Tensor:
    logits: torch.Tensor = model(prompt(tokens, rows, seed=7), **{CACHE_KW: cache}).logits
    return logits


def crop(cache: EntropySubbyteCache) -> None:
    cache.crop(torch.tensor(-2))


def forget_a_step(cache: EntropySubbyteCache) -> None:
    """Take back a question that brought tiles and factors."""
    for layer in cache.layers:
        key, value = (side[:, :, :140] for side in layer.dequantize())
        layer.update(key * torch.logspace(0, 3, 16), value)
        before = layer.before
        layer.settle_without_statistics()
        layer.undo(before)


BETWEEN: dict[str, Callable[[EntropySubbyteCache], Any]] = {
    "nothing": lambda cache: None,
    "other rows": lambda cache: cache.reorder_cache(torch.tensor([0, 0])) or cache.reorder_cache(torch.tensor([0])),
    "a wider window": lambda cache: cache.activate_past_recording(),
    "crop": crop,
    "undo": forget_a_step,
    "a copy": copy.deepcopy,
}


@pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("tokens", [134, 390])  # a tile is due soon, the first one or the third
@pytest.mark.parametrize(
    "options",
    [
        {"policy": "uniform:vq2", "codebook": "online"},
        {"policy": "error", "codebook": "queries"},
        {"policy": "uniform:nuq2"},
    ],
)
def test_a_cache_leaves_inference_mode(options: dict[str, Any], tokens: int, between: str) -> None:
    """As a ``DynamicCache`` does: everything may go on outside that was done in it."""
    model = hf_subbyte_moe.apply(tiny_model(), {"kv_cache": {}})
    caches, logits = [], []
    for mode in (torch.inference_mode(), torch.no_grad()):
        cache = EntropySubbyteCache(model.config, window=8, **options)
        with mode:
            model(prompt(tokens), **{CACHE_KW: cache})
            step(model, cache)
            cache = BETWEEN[between](cache) or cache
        caches.append(cache)
    with torch.no_grad():
        for cache in caches:
            made = [step(model, cache) for _ in range(12)]
            made.append(step(model, cache, 130))
            cache.reorder_cache(torch.tensor([0, 0]))
            made.append(step(model, cache, 2, rows=2)[:1])
            logits.append(torch.cat(made, dim=1))
    assert torch.equal(*logits)
    for layer in caches[0].layers:
        assert not any(tensor.is_inference() for tensor in layer.rows.state().values())


def test_generation_goes_on_outside_inference_mode() -> None:
    model, sequences = tiny_model(), []
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            options: dict[str, Any] = {"cache_implementation": "entropy_subbyte", "cache_config": {"window": 8}}
            first = model.generate(
                prompt(386), max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **options
            )
        ids = torch.cat([first.sequences, prompt(5, seed=4)], dim=1)
        sequences.append(model.generate(ids, max_new_tokens=12, do_sample=False, **{CACHE_KW: cache_of(first)}))
    assert torch.equal(*sequences)


def test_a_file_that_is_read_in_inference_mode_may_be_used_outside(tmp_path: Path) -> None:
    model = hf_subbyte_moe.apply(tiny_model(), {"kv_cache": {}})
    cache = EntropySubbyteCache(model.config, window=8)
    with torch.no_grad():
        model(prompt(390), **{CACHE_KW: cache})
    cache.save_pretrained(tmp_path)
    with torch.inference_mode():
        loaded = EntropySubbyteCache.from_pretrained(tmp_path, model.config)
    with torch.no_grad():
        for _ in range(12):
            assert torch.equal(step(model, loaded), step(model, cache))


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "uniform:exact"},
        {"policy": "error", "bits": 6},
        {"policy": "error", "bits": 6, "codebook": "queries"},
        {"policy": "error", "bits": 6, "codebook": "online"},
    ],
)
def test_autocast_leaves_keys_wider_than_values(options: dict[str, Any]) -> None:
    """RoPE's cosines are fp32, and so are keys and queries behind it."""
    model = hf_subbyte_moe.apply(tiny_model(), {"kv_cache": {}})
    cache, plain = EntropySubbyteCache(model.config, window=8, **options), DynamicCache(config=model.config)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for held in (cache, plain):
            model(prompt(300), **{CACHE_KW: held})
            logits = step(model, held)
            held.crop(-100)  # into a tile
            after = step(model, held, 3)
            if held is cache:
                found = (logits, after)
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        key, value = layer.dequantize()
        assert (key.dtype, value.dtype) == (other.keys.dtype, torch.bfloat16) == (torch.float32, torch.bfloat16)
    if options["policy"] == "uniform:exact":
        first = cache.layers[0].dequantize()
        assert torch.equal(first[0], plain.layers[0].keys)
        assert torch.equal(first[1], plain.layers[0].values)  # which older releases widen
    for ours, theirs in zip(found, (logits, after), strict=True):
        assert (ours - theirs).abs().max() < 0.02 * theirs.abs().max()
