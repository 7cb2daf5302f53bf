"""Where the host runs ahead of a GPU, it waits once a layer, when it has queued the next one, and stores the same."""

import copy
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache, attention
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.policy import statistics as statistics_module
from hf_subbyte_moe.transfers import Answers, side_stream
from support.ahead import (
    LAYERS,
    POLICIES,
    assert_same,
    both,
    make_cache,
    make_model,
    pieces,
    run,
    treat_as_gpu,
    waiting,
)
from support.models import left_padded, prompt
from support.packing import packed_at_once, shaped_at_once, unpacked_at_once


POISON, SHAPES = (torch.bfloat16, torch.float32), ((600, 2, 64), (2, 64), (64,), (64, 256))
_MANY_CYCLES = 100_000_000  # about 50 ms
_WAITS = (
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "equal",
    "bincount",
)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU is treated as a GPU is."""
    treat_as_gpu(monkeypatch, True)


class Watch(TorchDispatchMode):
    """What the host does that a GPU would make it wait for."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _WAITS or masks or function is torch.ops.aten.repeat_interleave.Tensor:
            self.events.append(f"hidden wait: {name}")
        return function(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Attention calls, waits for answers, and other waits, in their order."""
    events: list[str] = []
    attend, arrived = attention._prompt, Answers._arrived

    def attention_call(module: Any, *args: Any) -> Any:
        events.append(f"attention {module.layer_idx}")
        return attend(module, *args)

    def wait(answers: Answers) -> Any:
        events.append("wait")
        return arrived(answers)

    def hidden(name: str) -> Callable[..., Any]:
        real = getattr(Tensor, name)

        def call(tensor: Tensor, *args: Any) -> Any:
            events.append(f"hidden wait: {name}")
            return real(tensor, *args)

        return call

    with monkeypatch.context() as patch, Watch(events):
        patch.setattr(attention, "_prompt", attention_call)
        patch.setattr(Answers, "_arrived", wait)
        for name in ("cpu", "item", "tolist", "__bool__", "__int__", "__float__"):
            patch.setattr(Tensor, name, hidden(name))
        yield events


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing is one operation, as with a kernel."""
    monkeypatch.setattr(statistics_module, "pack_tiles", packed_at_once)
    monkeypatch.setattr(statistics_module, "pack_shaped", shaped_at_once)
    monkeypatch.setattr(statistics_module, "unpack_tiles", unpacked_at_once)


@pytest.mark.usefixtures("ahead", "kernels")
@pytest.mark.parametrize("policy", ["auto", "error", "uniform"])
@pytest.mark.parametrize("rows", [1, 3])
def test_each_layer_waits_once_and_after_the_next_ones_attention(
    rows: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    ids, mask = left_padded([prompt(400 + 150 * row) for row in range(rows)])
    run(model, make_cache(model, **POLICIES[policy]), ids, mask)  # uploads what stays
    cache = make_cache(model, **POLICIES[policy])
    with watched(monkeypatch) as events:
        run(model, cache, ids, None if rows == 1 else mask)
        assert waiting(cache) == [False, False, True]
        events = events[events.index("attention 0") :]
        read = [] if rows == 1 else ["hidden wait: cpu"]  # the mask, once for all layers
        assert events == ["attention 0", *read, "attention 1", "wait", "attention 2", "wait"]
    with watched(monkeypatch) as events:
        assert cache.layers[2].rows.store.counts.min() > 0
        assert events == ["wait"]
    assert waiting(cache) == [False] * LAYERS
    assert not cache._journal._before


def test_a_cpu_looks_at_once() -> None:
    model = make_model()
    cache = make_cache(model)
    run(model, cache, prompt(400))
    assert waiting(cache) == [False] * LAYERS


@pytest.mark.parametrize("edges", [(), (40,), (300,), (5, 200, 203, 500)])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_is_stored(policy: str, edges: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    ids, mask = left_padded([prompt(700), prompt(460, seed=1), prompt(700, seed=2)])

    def use() -> tuple[EntropySubbyteCache, Tensor]:
        cache = make_cache(model, **POLICIES[policy])
        return cache, pieces(model, cache, ids, mask, *edges)

    (ours, logits), (plain, others) = both(model, monkeypatch, use)
    assert torch.equal(logits, others)
    assert waiting(ours) == [False, False, True]
    assert_same(ours, plain)


@pytest.mark.parametrize("edges", [(), (60,), (300,)])
@pytest.mark.parametrize("policy", ["auto", "error", "uniform"])
def test_keys_that_need_factors_are_measured_again(
    policy: str, edges: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    for layer in (0, 2):  # of the first head
        attend = model.model.layers[layer].self_attn
        attend.k_proj.weight.data[[3, 11]] *= 64
        attend.q_proj.weight.data[[3, 11, 19, 27]] /= 64
    ids, mask = left_padded([prompt(700), prompt(460, seed=1)])

    def use() -> EntropySubbyteCache:
        cache = make_cache(model, **POLICIES[policy])
        pieces(model, cache, ids, mask, *edges)
        return cache

    ours, plain = both(model, monkeypatch, use)
    assert_same(ours, plain)
    assert [layer.rows.codecs.balance.factors is not None for layer in ours.layers] == [True, False, True]


def saved(cache: EntropySubbyteCache, model: PreTrainedModel, folder: Path) -> EntropySubbyteCache:
    cache.save_pretrained(folder)
    return EntropySubbyteCache.from_pretrained(folder, model.config)


def changed(name: str, *arguments: Any) -> Callable[..., EntropySubbyteCache]:
    def change(cache: EntropySubbyteCache, *_: Any) -> EntropySubbyteCache:
        getattr(cache, name)(*arguments)
        return cache

    return change


USES: dict[str, Callable[..., EntropySubbyteCache]] = {
    "nothing": lambda cache, *_: cache,
    "crop": changed("crop", -30),
    "crop into tiles": changed("crop", -500),
    "reorder": changed("reorder_cache", torch.tensor([1, 0])),
    "repeat": changed("batch_repeat_interleave", 2),
    "select": changed("batch_select_indices", torch.tensor([1])),
    "copy": lambda cache, *_: copy.deepcopy(cache),
    "pickle": lambda cache, *_: pickle.loads(pickle.dumps(cache)),
    "save": saved,
    "record": lambda cache, *_: [layer.activate_past_recording() for layer in cache.layers] and cache,
}


@pytest.mark.parametrize("name", USES)
def test_whatever_follows_a_prompt_finds_it_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    ids, mask = left_padded([prompt(600), prompt(460, seed=1)])

    def use() -> tuple[EntropySubbyteCache, EntropySubbyteCache, Tensor]:
        cache = make_cache(model, codebook="queries")
        run(model, cache, ids, mask)
        made = USES[name](cache, model, tmp_path)
        rows = len(made.layers[0].starts)
        ones = torch.ones(rows, made.get_seq_length() + 150, dtype=torch.long)
        for row, start in enumerate(made.layers[0].starts.tolist()):
            ones[row, :start] = 0
        logits = [run(model, made, prompt(1, rows), ones[:, :-149]), run(model, made, prompt(149, rows, 3), ones)]
        return cache, made, torch.cat(logits, dim=1)

    (*ours, logits), (*plain, others) = both(model, monkeypatch, use)
    assert torch.equal(logits, others)
    for left, right in zip(ours, plain, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"prefill_chunk_size": 150}, {"prompt_lookup_num_tokens": 3}]
)
def test_a_second_turn_goes_on_from_the_first(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    settings = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}

    def use() -> tuple[Tensor, EntropySubbyteCache]:
        kind: dict[str, Any] = {"cache_implementation": CACHE_NAME, "cache_config": {"window": 8, "sinks": 2}}
        ids = prompt(400)
        first = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **options, **kind)
        if options:
            return first.sequences, cache_of(first)
        ids = torch.cat([first.sequences, prompt(200, seed=5)], dim=1)
        second = {CACHE_KW: cache_of(first)}
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **second)
        return made.sequences, cache_of(made)

    (ours, cache), (plain, other) = both(model, monkeypatch, use)
    assert torch.equal(ours, plain)
    assert_same(cache, other)


@pytest.mark.usefixtures("ahead")
def test_layers_that_nobody_measures_pack_what_they_were_given() -> None:
    """As by a model that does not call our attention function."""
    model = make_model()
    cache = make_cache(model, policy="uniform:vq2")
    states = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(LAYERS):
            key, _ = cache.update(states, states, index)
            assert torch.equal(key + 0, states)
    assert cache.layers[0].rows.store.counts.tolist() == cache.layers[2].rows.store.counts.tolist() == [2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("policy", ["auto", "error", "uniform"])
def test_a_gpu_is_not_waited_for_and_stores_the_same(policy: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(head_dim=64).cuda().bfloat16()
    ids, mask = (part.cuda() for part in left_padded([prompt(600 + 150 * row) for row in range(rows)]))
    plain, ours = (make_cache(model, **POLICIES[policy]) for _ in range(2))
    with monkeypatch.context() as patch:
        treat_as_gpu(patch, False)
        run(model, plain, ids, mask)
    attend = attention._prompt

    def watch(module: Any, *args: Any) -> Any:
        if module.layer_idx == 1:  # the first layer has read the mask
            torch.cuda.set_sync_debug_mode("error")
        return attend(module, *args)

    monkeypatch.setattr(attention, "_prompt", watch)
    try:
        run(model, ours, ids, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waiting(ours) == [False, False, True]
    assert_same(ours, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_prompt_may_be_packed_on_another_stream() -> None:
    model, ids = make_model(head_dim=64).cuda().bfloat16(), prompt(600).cuda()
    plain, ours = make_cache(model), make_cache(model)
    run(model, plain, ids)
    states = torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        states @ states  # what packing on another stream must wait for
    run(model, ours, ids)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert waiting(ours) == [False, False, True]
        assert ours.layers[2].rows
    poison = [torch.full_like(states, torch.nan) for _ in range(8)]
    assert_same(ours, plain)
    del poison


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("policy", ["auto", "error", "entropy"])
def test_a_prompt_is_measured_beside_the_model_and_its_numbers_outlive_it(
    policy: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(head_dim=64).cuda().bfloat16()
    ids, mask = (part.cuda() for part in left_padded([prompt(600 + 10 * row) for row in range(rows)]))
    plain, ours = (make_cache(model, **POLICIES[policy]) for _ in range(2))
    run(model, plain, ids, mask)
    expected = [layer.statistics.chunks for layer in plain.layers]
    beside, send = Answers.beside, Answers.send
    measured = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    @contextmanager
    def late(answers: Answers, *read: Tensor, keep: object) -> Iterator[None]:
        with beside(answers, *read, keep=keep):
            torch.cuda._sleep(_MANY_CYCLES)
            yield

    def noted(answers: Answers) -> None:
        send(answers)
        measured[0].record(side_stream(ids.device))

    monkeypatch.setattr(Answers, "beside", late)
    monkeypatch.setattr(Answers, "send", noted)
    statistics = [layer.statistics for layer in ours.layers]
    run(model, ours, ids, mask)
    measured[1].record()
    del ours
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight = None  # as by what holds one layer's weights at a time
    poison = [
        torch.full(shape, torch.nan, device="cuda").to(dtype)
        for shape in SHAPES
        for dtype in POISON
        for _ in range(200)
    ]
    for told, chunks in zip(statistics, expected, strict=True):
        for found, known in zip(itertools.chain(*told.chunks), itertools.chain(*chunks), strict=True):
            for name in ("entropy", "mass", "errors", "tiers"):
                np.testing.assert_array_equal(getattr(found, name), getattr(known, name), err_msg=name)
    torch.cuda.synchronize()
    if (policy, rows) == ("auto", 1):  # the others may allocate, which can wait for all streams
        assert measured[1].elapsed_time(measured[0]) > 0
    del poison
