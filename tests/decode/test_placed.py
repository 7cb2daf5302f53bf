"""Fused steps of models whose experts are outside the GPU, launched one by one; on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.decode import fused as fused_file
from hf_subbyte_moe.decode import runner
from hf_subbyte_moe.experts import Engine, engine_of
from hf_subbyte_moe.experts.link import DirectLink
from hf_subbyte_moe.experts.predictor import GATE
from hf_subbyte_moe.experts.replay import Playback, Statistics, draw_trace, played
from support.experts import LazyLink, always, same
from support.models import left_padded, prompt
from support.moe import EXPERTS, TOP_K, tiny_moe


CACHE = {"bits": 4.0, "window": 8, "sinks": 2}
KINDS = ("mixtral", "qwen3_moe")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes steps at fixed addresses, too."""
    monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))


def resident(kind: str, **options: Any) -> Any:
    return hf_subbyte_moe.apply(tiny_moe(kind, **options), {"kv_cache": CACHE, "decode": {}})


def placed(model: Any, slots: int, **options: Any) -> Engine:
    experts = {"placement": "offload", "gpu_slots": slots, **options}
    hf_subbyte_moe.apply(model, {"kv_cache": CACHE, "decode": {}, "experts": experts})
    engine = engine_of(model)
    assert engine is not None
    return engine


def generate(model: Any, ids: Tensor, tokens: int = 40, **options: Any) -> Any:
    settings: dict[str, Any] = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(ids, max_new_tokens=tokens, **settings, **options)


def filled(model: Any, ids: Tensor) -> EntropySubbyteCache:
    """A cache that holds a prompt."""
    cache = EntropySubbyteCache(model.config, **CACHE)
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
    return cache


def taken(model: Any, cache: EntropySubbyteCache, ids: Tensor, found: list[Tensor] | None = None) -> list[Tensor]:
    """Logits of known tokens, one at a time, behind those that were found."""
    found = [] if found is None else found
    with torch.no_grad():
        for token in ids[:, len(found) :].split(1, 1):
            found.append(model(token, **{CACHE_KW: cache}).logits)
    return found


@pytest.mark.parametrize("weights", ["model", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_placed_experts_give_what_resident_ones_give(kind: str, weights: str) -> None:
    model = resident(kind)
    hf_subbyte_moe.apply(model, {"kv_cache": CACHE, "decode": {}, "experts": {"weights": weights}})
    ids = prompt(230)
    expected = generate(model, ids, 150)
    assert model.forward.graphed(cache_of(expected)).is_fused
    for slots in (4, 7, 16):  # a token needs 4 in two layers
        engine = placed(model, slots, weights=weights)
        made = generate(model, ids, 150)
        assert torch.equal(made.sequences, expected.sequences)
        assert same(made.logits, expected.logits)
        steps = model.forward.graphed(cache_of(made))
        assert steps.is_fused
        assert not steps.captures
        assert steps.steps.left < 120  # flushed in between
        assert (engine.counters.total("missed") > 0) == (slots < 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, 16])
def test_rows_together(kind: str, rows: int) -> None:
    """Many rows need more experts than half a layer: these come as a layer, not into slots."""
    model = resident(kind)
    ids, mask = left_padded([prompt(20 + 40 * (row % 4), seed=row) for row in range(rows)])
    expected = generate(model, ids, 24, attention_mask=mask)
    for slots in (4, 11):
        engine = placed(model, slots)
        made = generate(model, ids, 24, attention_mask=mask)
        assert same(made.logits, expected.logits)
        assert model.forward.graphed(cache_of(made)).is_fused
        assert engine.counters.total("streamed_bytes") > 0


def test_more_rows_than_kernels_take_run_through_modules(caplog: pytest.LogCaptureFixture) -> None:
    model = resident("mixtral")
    placed(model, 7)
    made = generate(model, prompt(20, rows=17), 3)
    assert model.forward.graphed(cache_of(made)) is None
    assert "(experts.placement), and kernels take up to 16 rows, not 17" in caplog.text


def test_a_slot_is_read_once_its_copy_was_waited_for() -> None:
    model = resident("mixtral", num_hidden_layers=4)
    cache, ids = filled(model, prompt(60)), prompt(40, seed=1)
    expected = taken(model, cache, ids)
    for slots in (8, 13):
        engine = placed(model, slots, prefetch="gate")
        engine.make_link = LazyLink
        always(engine, GATE)
        assert same(taken(model, filled(model, prompt(60)), ids), expected)
        assert engine.counters.total("ahead_bytes") > 0


@pytest.mark.parametrize("mode", [None, {"mode": "native"}, {"mode": "hard", "clusters": 2, "top_clusters": 1}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_foretells_and_repeats_each_layers_choice(
    kind: str, mode: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = resident(kind, num_hidden_layers=3)
    options = {"kv_cache": CACHE, "decode": {}, "routing": mode}
    hf_subbyte_moe.apply(model, options)
    expected = generate(model, prompt(60))
    experts = {"placement": "offload", "gpu_slots": 9, "prefetch": "gate"}
    hf_subbyte_moe.apply(model, {**options, "experts": experts})
    engine: Any = engine_of(model)
    always(engine, GATE)
    made = generate(model, prompt(60))
    assert same(made.logits, expected.logits)
    assert model.forward.graphed(cache_of(made)).is_fused
    gate = engine.predictors[GATE]
    assert gate.usable
    assert all(gate._checked[:-1])  # the last layer foretells nothing
    assert "does not repeat" not in caplog.text
    sets = engine.counters.counts["sets"].tolist()
    assert sets[0] == 0
    assert min(sets[1:]) >= 37  # from the second step on
    assert engine.counters.total("right") > 0


def test_prediction_asks_the_kernels_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resident("mixtral", num_hidden_layers=3)
    engine = placed(model, 9, prefetch="gate")
    always(engine, GATE)
    cache, ids = filled(model, prompt(60)), prompt(4, seed=1)
    taken(model, cache, ids[:, :2])
    asked: list[int] = []
    route = fused_file.router
    monkeypatch.setattr(fused_file, "router", lambda *given: asked.append(1) or route(*given))
    taken(model, cache, ids[:, 2:])
    assert len(asked) == 2 * (3 + 2)  # three layers, of which two foretell the next


@pytest.mark.parametrize("part", ["gate", "experts", "block", "model"])
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_are_called(kind: str, part: str) -> None:
    model = resident(kind)
    engine = placed(model, 6)
    cache, ids = filled(model, prompt(60)), prompt(12, seed=1)
    expected = taken(model, cache, ids)
    block = model.model.layers[1].mlp
    calls: list[int] = []
    module = {"gate": block.gate, "experts": block.experts, "block": block, "model": model}[part]
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    cache = filled(model, prompt(60))
    calls.clear()
    found = taken(model, cache, ids)
    hook.remove()
    assert len(calls) == 12
    assert model.forward.graphed(cache).is_fused
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert engine.counters.total("calls") > 0


def test_a_hook_on_a_router_overrules_it() -> None:
    model = resident("mixtral")
    placed(model, 6)
    cache = filled(model, prompt(60))
    statistics = Statistics((0.4, 0.3, 0.2, 0.1), 0.4, {}, "a test")
    trace = draw_trace(statistics, "t", 8, 2, EXPERTS, TOP_K)
    chosen: list[Tensor] = []
    hook = model.model.layers[1].mlp.experts.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    with played(model, Playback(trace, model.device)):
        taken(model, cache, prompt(8, seed=1))
    hook.remove()
    assert model.forward.graphed(cache).is_fused
    assert torch.equal(torch.cat(chosen), trace.chosen[:, 1])


def test_hooks_that_would_not_be_called_are_an_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    model = resident("mixtral")
    placed(model, 6)
    calls: list[int] = []
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    cache = filled(model, prompt(60))
    calls.clear()
    taken(model, cache, prompt(5, seed=1))
    hook.remove()
    assert len(calls) == 5
    assert model.forward.graphed(cache) is None
    assert "model.layers.1.self_attn has forward hooks, which fused kernels would not call" in caplog.text
    cache = filled(model, prompt(60))
    taken(model, cache, prompt(2, seed=1))
    assert model.forward.graphed(cache).is_fused


def test_hooks_may_come_and_go_between_steps() -> None:
    model = resident("mixtral")
    placed(model, 6)
    calls: list[int] = []
    cache = filled(model, prompt(60))
    taken(model, cache, prompt(2, seed=1))
    assert model.forward.graphed(cache).is_fused
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    taken(model, cache, prompt(3, seed=2))
    assert len(calls) == 3
    hook.remove()
    taken(model, cache, prompt(2, seed=3))
    assert len(calls) == 3
    assert model.forward.graphed(cache).is_fused


class BrokenLink(DirectLink):
    """Every copy fails, as soon as it is told to."""

    broken = False

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.broken:
            raise OSError("the link is broken")
        super().copy(target, source)


@pytest.mark.parametrize("tokens", [3, 126])  # the second: where a tile is packed next
def test_a_step_that_fails_half_way_is_as_if_it_had_not_begun(tokens: int) -> None:
    model = resident("mixtral", num_hidden_layers=3)
    ids = prompt(180, seed=1)
    expected = taken(model, filled(model, prompt(140)), ids)
    engine, link = placed(model, 6, prefetch="previous"), BrokenLink()
    engine.make_link = lambda: link
    cache = filled(model, prompt(140))
    found = taken(model, cache, ids[:, :tokens])
    link.broken = True
    for _ in range(2):
        with pytest.raises(OSError, match="the link is broken"):  # a step that needs no copy goes through
            taken(model, cache, ids, found)
    assert cache.get_seq_length() == 140 + len(found)
    link.broken = False
    assert same(taken(model, cache, ids, found), expected)
    assert model.forward.graphed(cache).is_fused


def test_what_happens_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = resident("mixtral")
    placed(model, 6)
    for _ in range(2):
        generate(model, prompt(20), 4)
    said = [record.message for record in caplog.records if "CUDA graph" in record.message]
    assert said == [
        "decode steps run without a CUDA graph, through fused kernels: "
        "the host decides which of its experts are on the GPU (experts.placement)"
    ]
    assert len(model.forward.refused) == 1


def test_a_graph_that_is_insisted_on_is_refused() -> None:
    model = tiny_moe("mixtral")
    experts = {"placement": "offload", "gpu_slots": 6}
    hf_subbyte_moe.apply(model, {"kv_cache": CACHE, "decode": {"cuda_graph": True}, "experts": experts})
    with pytest.raises(ValueError, match=r"cuda_graph=True is not possible: the host decides which of its experts"):
        generate(model, prompt(20), 4)


@pytest.mark.parametrize(
    ("kind", "decode", "reason"),
    [
        ("mixtral", {"fused": False}, "decode.fused is false"),
        ("deepseek_v3", {}, "models of type 'deepseek_v3' have no fused step"),
    ],
)
def test_without_fused_kernels_steps_are_the_models_own(
    kind: str, decode: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = hf_subbyte_moe.apply(tiny_moe(kind), {"kv_cache": CACHE})
    expected = generate(plain, prompt(60))
    experts = {"placement": "offload", "gpu_slots": 7}
    hf_subbyte_moe.apply(plain, {"kv_cache": CACHE, "decode": decode, "experts": experts})
    made = generate(plain, prompt(60))
    assert same(made.logits, expected.logits)
    assert plain.forward.graphed(cache_of(made)) is None
    said = [record.message for record in caplog.records if "CUDA graph" in record.message]
    assert said == [
        "decode steps run without a CUDA graph: the host decides which of its experts are on the GPU "
        f"(experts.placement), and {reason}"
    ]


def test_a_layers_map_is_copied_where_it_changed() -> None:
    model = resident("mixtral")
    engine = placed(model, 16, prefetch="off")
    cache, ids = filled(model, prompt(60)), prompt(30, seed=1)
    expected = taken(model, filled(model, prompt(60)), ids)
    taken(model, cache, ids[:, :15])
    device = engine.on(model.device)
    for layer in range(2):
        assert torch.equal(device.slots_of(layer), device.row(layer))
    device.map.neg_()  # as nobody else writes it, this stays until the host's map changes
    assert torch.equal(device.slots_of(0), -device.row(0))
    device.pool.reserve([int(device.row(0).max())])
    assert torch.equal(device.slots_of(0), device.row(0))
    engine.forget()
    assert same(taken(model, filled(model, prompt(60)), ids), expected)


@pytest.mark.parametrize("slots", [4, 16])  # of the first, none is lent to a prompt
def test_what_begins_under_inference_mode_goes_on_without(slots: int) -> None:
    model = resident("mixtral")
    expected = generate(model, prompt(60))
    engine = placed(model, slots)
    with torch.inference_mode():
        model(prompt(60))
        assert engine.counters.total("streamed_bytes") > 0
        assert same(generate(model, prompt(60)).logits, expected.logits)
        model(prompt(60))
    assert same(generate(model, prompt(60)).logits, expected.logits)


def test_prompts_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = resident("mixtral")
    placed(model, 6)
    cache = filled(model, prompt(60))
    taken(model, cache, prompt(2))
    monkeypatch.setattr(fused_file.FusedStep, "__call__", lambda *_: pytest.fail("a prompt is no step"))
    with torch.no_grad():
        model(prompt(5, seed=2), **{CACHE_KW: cache})
    assert cache.get_seq_length() == 67


def test_a_second_apply_is_seen_by_a_cache_in_use() -> None:
    model = resident("mixtral")
    cache, ids = filled(model, prompt(60)), prompt(20, seed=1)
    expected = taken(model, filled(model, prompt(60)), ids)
    found = taken(model, cache, ids[:, :5])
    placed(model, 6)
    taken(model, cache, ids[:, :10], found)
    placed(model, 4)
    taken(model, cache, ids[:, :15], found)
    hf_subbyte_moe.apply(model, {"kv_cache": CACHE, "decode": {}})
    assert same(taken(model, cache, ids, found), expected)
