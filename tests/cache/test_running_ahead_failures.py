"""Where the host runs ahead of a GPU, what fails or is dropped before it is packed leaves nothing behind."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_subbyte_moe.cache import CACHE_NAME, settling
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.explain import explain
from hf_subbyte_moe.policy import statistics as statistics_module
from support.ahead import LAYERS, POLICIES, assert_same, both, make_cache, make_model, run, treat_as_gpu, waiting
from support.models import left_padded, prompt


# the last layer that stores does not pack
HYBRID = {"family": "gemma3", "layer_types": ["full_attention", "full_attention", "sliding_attention"]}


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is treated as a GPU is."""
    treat_as_gpu(monkeypatch, True)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_model_measured_is_told_also_when_its_cache_is_gone(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (ids, mask) = make_model(), left_padded([prompt(700), prompt(460, seed=1)])
    held: list[weakref.ref[Any]] = []
    settle = EntropySubbyteLayer.settle

    def watch(layer: EntropySubbyteLayer, queries: Any) -> None:
        held.extend(map(weakref.ref, (layer, layer.rows, *layer.pending)))
        settle(layer, queries)

    monkeypatch.setattr(EntropySubbyteLayer, "settle", watch)

    def use() -> tuple[str, str]:
        kind = {"cache_implementation": CACHE_NAME, "cache_config": {"window": 8, "sinks": 2, **POLICIES[policy]}}
        model.generate(ids, attention_mask=mask, max_new_tokens=1, **kind)
        gc.collect()
        assert [there for there in held if there() is not None] == []
        copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        assert {choice.layer for choice in explain(model).choices} == {0, 1, 2}
        return repr(explain(model).to_dict()), repr(explain(copied).to_dict())

    (ours, copied), (plain, _) = both(model, monkeypatch, use)
    assert ours == copied == plain
    assert len(held) == 2 * 4 * LAYERS


@pytest.mark.usefixtures("ahead")
def test_a_gone_cache_that_was_given_nan_has_nothing_to_tell() -> None:
    model, ids = make_model(), prompt(400)
    model.model.layers[2].self_attn.k_proj.weight.data[0, 0] = float("nan")
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, cache_implementation=CACHE_NAME)
    gc.collect()
    with pytest.raises(ValueError, match="the keys of layer 2 hold NaN or Inf; nothing was stored"):
        explain(model)
    assert {choice.layer for choice in explain(model).choices} == {0, 1}


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("before", [0, 300])
@pytest.mark.parametrize(
    ("bad", "use", "options"),
    [(0, "forward", {}), (1, "forward", {}), (0, "forward", HYBRID), (1, "forward", HYBRID)]
    + [(2, use, {}) for use in ("forward", "step", "crop", "rows", "copy", "save", "explain")],
)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_a_prompt_that_is_not_finite_is_taken_back_at_the_latest_at_the_caches_next_use(
    bad: int, side: str, before: int, use: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(**options)
    cache, twin = make_cache(model, codebook="queries"), make_cache(model, codebook="queries")
    for held in (cache, twin):
        if before:
            run(model, held, prompt(before))
    weight = getattr(model.model.layers[bad].self_attn, f"{side[0]}_proj").weight.data
    good = weight.clone()
    weight[0, 0] = float("nan")
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: run(model, cache, prompt(200)),
        "step": lambda: run(model, cache, prompt(1)),
        "crop": lambda: cache.crop(-1),
        "rows": lambda: cache.layers[-1].rows,
        "copy": lambda: copy.deepcopy(cache),
        "save": lambda: cache.save_pretrained(tmp_path),
        "explain": lambda: explain(cache),
    }
    if bad == LAYERS - 1:
        run(model, cache, prompt(200, seed=2))
        weight.copy_(good)
    with pytest.raises(ValueError, match=f"the {side} of layer {bad} hold NaN or Inf; nothing was stored"):
        uses[use]()
    weight.copy_(good)
    assert [layer.get_seq_length() for layer in cache.layers] == [before] * LAYERS
    ids = prompt(200, seed=3)
    assert torch.equal(run(model, cache, ids), run(model, twin, ids))
    assert_same(cache, twin)


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("place", ["feed-forward", "measuring", "packing"])
@pytest.mark.parametrize("before", [0, 300])
def test_a_failure_takes_back_what_waits(before: int, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    cache, twin = make_cache(model, codebook="queries"), make_cache(model, codebook="queries")
    for held in (cache, twin):
        if before:
            run(model, held, prompt(before))
            assert held.layers[-1].rows

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patch:
        if place == "feed-forward":
            patch.setattr(model.model.layers[0].mlp, "forward", fail)
        elif place == "measuring":
            real, calls = statistics_module.RowProbe.measure, []
            patch.setattr(
                statistics_module.RowProbe,
                "measure",
                lambda *args: fail() if calls else calls.append(args) or real(*args),
            )
        else:
            patch.setattr(settling.PackedRows, "_pack", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(model, cache, prompt(200, seed=2))
    if place == "feed-forward":
        assert waiting(cache) == [True, False, False]
        with pytest.raises(RuntimeError, match="was taken back"):
            cache.crop(-1)
    assert waiting(cache) == [False] * LAYERS
    assert [layer.length for layer in cache.layers] == [before] * LAYERS
    ids = prompt(200, seed=3)
    assert torch.equal(run(model, cache, ids), run(model, twin, ids))
    assert_same(cache, twin)


@pytest.mark.usefixtures("ahead")
def test_an_emptied_cache_keeps_nothing_that_waits() -> None:
    model = make_model()
    cache, twin = make_cache(model), make_cache(model)
    run(model, cache, prompt(400, seed=1))
    cache.reset()
    assert waiting(cache) == [False] * LAYERS
    run(model, cache, prompt(300))
    run(model, twin, prompt(300))
    assert_same(cache, twin)
