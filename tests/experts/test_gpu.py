"""Placed experts on a GPU: bit for bit, with copies and computations slowed at random."""

import copy
import logging
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.shapes import random_model
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.decode import runner
from hf_subbyte_moe.experts import PlacedExperts, engine_of, memory
from hf_subbyte_moe.experts.link import CudaLink
from support.experts import always, offloaded, same, steps
from support.models import prompt
from support.moe import MOE_CONFIGS, tiny_moe


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", MOE_CONFIGS)
def test_exact(family: str, implementation: str) -> None:
    model = tiny_moe(family).to("cuda", torch.bfloat16)
    model.set_experts_implementation(implementation)
    ids = prompt(14).cuda()
    expected = steps(model, ids)
    for slots in (4, 7, 16):
        engine = offloaded(model, slots)
        assert engine.bank.pinned
        assert same(expected, steps(model, ids))
    hf_subbyte_moe.restore(model)
    assert same(expected, steps(model, ids))


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _keep_busy(device: torch.device, cycles: int = 100_000_000) -> None:
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)


@two_gpus
def test_choices_of_a_device_that_is_not_the_current_one_are_waited_for() -> None:
    second = torch.device("cuda", 1)
    link, numbers = CudaLink(second), torch.zeros(4, dtype=torch.int64, device=second)
    torch.cuda.synchronize(second)
    assert torch.cuda.current_device() == 0
    for number in (7, 8):
        _keep_busy(second)
        numbers.fill_(number)
        assert link.read([numbers]) == [[number] * 4]


@two_gpus
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_a_model_on_a_device_that_is_not_the_current_one(implementation: str) -> None:
    second = torch.device("cuda", 1)
    model = tiny_moe("mixtral", num_hidden_layers=4).to(second, torch.bfloat16)
    model.set_experts_implementation(implementation)
    ids = prompt(20).to(second)
    expected = steps(model, ids)
    engine = offloaded(model, 9, prefetch="gate")
    always(engine, "gate")
    for layer in model.model.layers:  # type: ignore[attr-defined]
        layer.mlp.gate.register_forward_pre_hook(lambda *_: _keep_busy(second, 2_000_000))
    assert torch.cuda.current_device() == 0
    for _ in range(2):
        assert same(expected, steps(model, ids))


class SlowLink(CudaLink):
    """Copies and what follows a choice wait at random."""

    def __init__(self) -> None:
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self.speed = 20e9
        self._random = random.Random(0)

    def copy(self, target: Tensor, source: Tensor) -> None:
        torch.cuda._sleep(self._random.choice((0, 0, 20_000, 400_000)))
        super().copy(target, source)
        torch.cuda._sleep(self._random.choice((0, 0, 20_000, 400_000)))

    def use(self, ticket: Any, timed: bool = False) -> None:
        super().use(ticket, timed)
        torch.cuda._sleep(self._random.choice((0, 20_000, 400_000)))  # the computation reads its slots late


@pytest.mark.parametrize("way", ["off", "gate", "previous"])
@pytest.mark.parametrize("slots", [12, 20])
def test_slowed_copies(slots: int, way: str) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=6).to("cuda", torch.bfloat16)
    model.set_experts_implementation("batched_mm")
    ids = prompt(80).cuda()
    expected = steps(model, ids)
    engine = offloaded(model, slots, prefetch=way)
    engine.make_link = SlowLink
    always(engine, way)
    for _ in range(2):
        assert same(expected, steps(model, ids))
    if way == "gate":
        assert engine.counters.total("ahead_bytes") > 0


def test_slots_of_more_than_two_to_the_31_elements() -> None:
    """Experts alone: the whole model does not repeat itself bit for bit at this size, placed or not."""
    model: Any = random_model("Mixtral-8x7B", 2, torch.device("cuda"))
    model.set_experts_implementation("batched_mm")
    generator = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(40, 1, 4096, device="cuda", generator=generator).bfloat16()
    index = torch.rand(40, 1, 8, device="cuda", generator=generator).topk(2).indices
    weights = torch.rand(40, 1, 2, device="cuda", generator=generator)
    modules = [layer.mlp.experts for layer in model.model.layers]

    def outputs() -> list[Tensor]:
        with torch.no_grad():
            return [module(*call) for call in zip(hidden, index, weights, strict=True) for module in modules]

    expected = outputs()
    for slots in (16, 13):
        engine = offloaded(model, slots)
        assert slots * engine.bank.layout.elements > 2**31
        for _ in range(2):
            assert same(expected, outputs())


def test_generate_follows_the_kernel_path() -> None:
    model: Any = tiny_moe("qwen3_moe").to("cuda", torch.bfloat16)
    ids = prompt(20, rows=2).cuda()
    options = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    offloaded(model, 5)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    assert same(expected.logits, found.logits)
    assert torch.equal(expected.sequences, found.sequences)


@pytest.mark.parametrize("way", ["off", "gate", "previous", "slowed"])
@pytest.mark.parametrize(("kind", "rows"), [("mixtral", 1), ("mixtral", 2), ("qwen3_moe", 1)])
def test_fused_steps_without_a_graph(kind: str, rows: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Placed experts against the resident model in the same kernels, both launched one by one, over flushes."""
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    options = {"kv_cache": {"bits": 3.0}, "decode": {}}
    model: Any = tiny_moe(kind, num_hidden_layers=3, intermediate_size=256, moe_intermediate_size=256, **sizes)
    model.to("cuda", torch.bfloat16).set_experts_implementation("batched_mm")
    hf_subbyte_moe.apply(model, options)
    monkeypatch.setattr(runner, "_GRAPHED", ())
    monkeypatch.setattr(runner, "_UNGRAPHED", ("cuda",))
    start = EntropySubbyteCache(model.config, bits=3.0)
    ids = prompt(300, rows, seed=1).cuda()
    with torch.no_grad():
        model(prompt(300, rows).cuda(), **{CACHE_KW: start})

    def logits() -> tuple[list[Tensor], Any]:
        cache = copy.deepcopy(start)
        with torch.no_grad():
            found = [model(token, **{CACHE_KW: cache}).logits for token in ids.split(1, 1)]
        return found, model.forward.graphed(cache)

    expected, steps_of = logits()
    assert steps_of.is_fused
    monkeypatch.undo()
    placed = {"placement": "offload", "gpu_slots": 0.5, "prefetch": "gate" if way == "slowed" else way}
    hf_subbyte_moe.apply(model, {**options, "experts": placed})
    engine: Any = engine_of(model)
    if way == "slowed":
        engine.make_link = SlowLink
    always(engine, "gate" if way == "slowed" else way)
    found, steps_of = logits()
    assert steps_of.is_fused
    assert not steps_of.captures
    assert model.forward.refused == ["the host decides which of its experts are on the GPU (experts.placement)"]
    assert engine.counters.tokens == 300
    assert engine.counters.total("missed") > 0
    if way in ("gate", "slowed"):
        assert engine.predictors["gate"].usable
        assert engine.counters.total("foretold") > 0
    assert same(found, expected)


def test_everything_else_is_on_the_gpu() -> None:
    model = tiny_moe("mixtral")
    offloaded(model, 5)
    for module in model.modules():
        kind = "cpu" if isinstance(module, PlacedExperts) else "cuda"
        assert all(weight.device.type == kind for weight in module.parameters(recurse=False))
    expected = steps(model, prompt(12).cuda())
    model.to("cpu")
    moved = steps(model, prompt(12))
    torch.testing.assert_close(moved, [logits.cpu() for logits in expected], atol=2e-3, rtol=2e-3)
    model.to("cuda")
    assert same(expected, steps(model, prompt(12).cuda()))


def test_pageable_memory_works_and_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        @staticmethod
        def cudaHostRegister(*_: int) -> int:  # noqa: N802 (CUDA's name)
            return 2

    model = tiny_moe("mixtral").to("cuda")
    expected = steps(model, prompt(12).cuda())
    monkeypatch.setattr(memory, "_cudart", Full)
    with caplog.at_level(logging.WARNING):
        engine = offloaded(model, 4)
    assert not engine.bank.pinned
    assert "could not be pinned (CUDA error 2)" in caplog.text
    assert same(expected, steps(model, prompt(12).cuda()))


def test_link_is_measured_and_stalls_are_counted() -> None:
    torch.manual_seed(0)
    model = tiny_moe("mixtral", hidden_size=512, intermediate_size=2048).to("cuda", torch.bfloat16)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
    engine = offloaded(model, 4, prefetch="off")
    steps(model, prompt(30).cuda())
    assert engine.link_speed is not None
    assert 1e9 < engine.link_speed < 1e12
    assert engine.counters.stall_seconds > 0
