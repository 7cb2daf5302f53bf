"""The order of requests, copies and uses; slots, streams and governors."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.experts.counters import Counters
from hf_subbyte_moe.experts.governor import Governor, Pace
from hf_subbyte_moe.experts.link import DirectLink
from hf_subbyte_moe.experts.prefetcher import Prefetcher
from hf_subbyte_moe.experts.residency import SlotPool
from hf_subbyte_moe.experts.streaming import LayerStream
from hf_subbyte_moe.experts.weights import Part, SlabLayout
from support.experts import LazyLink, always, offloaded, same, steps
from support.models import prompt
from support.moe import tiny_moe


ELEMENTS = 32


class NumberedBank:
    """A slab is its own key, everywhere."""

    layout = SlabLayout((Part("down_proj", (ELEMENTS,), 0),), ELEMENTS, torch.float32)
    pinned = False
    writable = True

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.broken: set[int] = set()

    def drain(self) -> None: ...

    def slab(self, layer: int, expert: int) -> Tensor:
        key = layer * self.experts + expert
        if key in self.broken:
            raise OSError(f"slab {key} cannot be read")
        return torch.full((ELEMENTS,), float(key))

    def weights(self, layer: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def host_bytes(self) -> int:
        return 0


def make(
    slots: int, layers: int, experts: int, link: Any = None
) -> tuple[Prefetcher, LayerStream, Tensor, NumberedBank]:
    bank, counters = NumberedBank(experts), Counters(layers)
    pool = SlotPool(slots, np.full(layers * experts, -1, dtype=np.int32))
    held = torch.full((slots, ELEMENTS), float("nan"))
    link = link or LazyLink()
    prefetcher = Prefetcher(bank, pool, held, link, experts, counters)
    return prefetcher, LayerStream(bank, pool, held, link, experts, layers, counters), held, bank


def read(prefetcher: Prefetcher, held: Tensor, layer: int, experts: list[int]) -> list[float]:
    keys = [layer * prefetcher.experts + expert for expert in experts]
    slots = [prefetcher.pool.slot(key) for key in keys]
    assert [int(prefetcher.pool.map[key]) for key in keys] == slots
    return [float(held[slot].min()) for slot in slots]


def test_every_copy_is_asked_done_and_used_in_this_order() -> None:
    link = LazyLink()
    model = tiny_moe("mixtral", num_hidden_layers=4)
    model.set_experts_implementation("batched_mm")
    expected = steps(model, prompt(40))
    engine = offloaded(model, 8, prefetch="gate")
    engine.make_link = lambda: link
    always(engine, "gate")
    assert same(expected, steps(model, prompt(40)))
    when = {what: {which: at for name, which, at in link.notes if name == what} for what in ("request", "copy", "use")}
    copied = when["copy"]
    assert len(copied) > 100
    for which, at in copied.items():
        assert when["request"][which] < at
        assert any(use > at for ticket, use in when["use"].items() if ticket > which)
    assert engine.counters.total("ahead_bytes") > 0
    assert engine.counters.total("useful_bytes") > 0
    assert engine.counters.total("demand_bytes") > 0
    totals = {name: engine.counters.total(name) for name in ("ahead_bytes", "useful_bytes", "wasted_bytes")}
    assert totals["useful_bytes"] + totals["wasted_bytes"] <= totals["ahead_bytes"]


def test_demand_goes_before_prediction() -> None:
    prefetcher, _, held, _ = make(8, 2, 8)
    prefetcher.demand(0, [1, 2])
    prefetcher.foretell(1, [5], budget=1e9, keep={1, 2})
    prefetcher.demand(1, [4, 5])
    asked = [int(source[0]) for _, source in prefetcher.link.asked]  # type: ignore[attr-defined]
    assert asked == [1, 2, 13, 12]
    assert read(prefetcher, held, 1, [4, 5]) == [12, 13]


def test_chunks_are_completed_or_given_up() -> None:
    prefetcher, _, held, bank = make(8, 3, 8)
    prefetcher._chunk = 8
    size = bank.layout.dtype.itemsize
    prefetcher.demand(0, [0])
    assert prefetcher.foretell(1, [1, 2], budget=17 * size, keep={0}) == 16 * size  # two chunks of the likeliest
    assert prefetcher.pool.slot(9) < 0  # not known before it is whole
    prefetcher.demand(1, [1])
    assert read(prefetcher, held, 1, [1]) == [9]
    assert prefetcher.counters.total("useful_bytes") == 16 * size
    assert prefetcher.counters.counts["demand_bytes"][1] == 16 * size
    prefetcher.foretell(2, [3], budget=8 * size, keep=set())
    free = len(prefetcher.pool._free)
    prefetcher.demand(2, [4])
    assert len(prefetcher.pool._free) == free  # one slot was given back, one taken
    assert prefetcher.counters.counts["wasted_bytes"][2] == 8 * size


def test_what_was_not_used_goes_first() -> None:
    prefetcher, _, _, _ = make(3, 2, 8)
    prefetcher.demand(0, [0])
    prefetcher.foretell(1, [7], budget=1e9, keep={0})
    prefetcher.demand(1, [1])
    assert next(iter(prefetcher.pool._where)) == 15
    prefetcher.demand(0, [2])
    assert prefetcher.pool.slot(15) < 0


def test_a_failed_copy_fails_the_call_that_needs_it_and_nothing_else() -> None:
    prefetcher, _, held, bank = make(4, 2, 8)
    bank.broken = {10}
    prefetcher.demand(0, [0])
    assert prefetcher.foretell(1, [2, 3], budget=1e9, keep={0}) == 0  # told, not raised
    with pytest.raises(OSError, match="slab 10 cannot be read"):
        prefetcher.demand(1, [1, 2])
    prefetcher.give_all_up()
    bank.broken = set()
    prefetcher.demand(1, [1, 2])  # 1 was copied before the error and is waited for now
    assert read(prefetcher, held, 1, [1, 2]) == [9, 10]
    assert len(prefetcher.pool) + len(prefetcher.pool._free) == 4


@pytest.mark.parametrize("seed", range(4))
def test_random_demands_and_predictions(seed: int) -> None:
    rng = random.Random(seed)
    layers, experts, slots = 5, 8, rng.choice((4, 9, 20))
    prefetcher, stream, held, bank = make(slots, layers, experts)
    prefetcher._chunk = 8
    for _ in range(150):
        for layer in range(layers):
            if rng.random() < 0.1:
                needed = list(range(experts))
                prefetcher.give_all_up()
                rows = stream.bring(layer, needed)
                assert rows.amin(1).tolist() == [layer * experts + expert for expert in needed]
                continue
            stream.close()
            needed = sorted(rng.sample(range(experts), rng.choice((1, 2, 4))))
            prefetcher.demand(layer, needed)
            assert read(prefetcher, held, layer, needed) == [layer * experts + expert for expert in needed]
            likely = rng.sample(range(experts), 3)
            keep = {layer * experts + expert for expert in needed}
            prefetcher.foretell((layer + 1) % layers, likely, rng.choice((0, 40, 100, 1e6)), keep)
            assert read(prefetcher, held, layer, needed) == [layer * experts + expert for expert in needed]
    assert bank.broken == set()


@pytest.mark.parametrize("layers", range(1, 10))
def test_streamed_layers_see_their_own_experts(layers: int) -> None:
    """A buffer is only overwritten after its layer has run in this pass, whatever divides what (vllm#54975)."""
    for slots in (2, 7, 8, 13):
        _, stream, _, _ = make(slots, layers, 4)
        for _ in range(3):
            for layer in range(layers):
                rows = stream.bring(layer, [0, 1, 2, 3])
                assert rows.amin(1).tolist() == [4.0 * layer + expert for expert in range(4)]
                assert rows.amax(1).tolist() == rows.amin(1).tolist()
        stream.close()
        assert len(stream.pool) + len(stream.pool._free) == slots


def test_a_stream_leaves_what_it_brought_in_slots() -> None:
    prefetcher, stream, held, _ = make(8, 2, 4)
    for layer in range(2):
        stream.bring(layer, [0, 1, 2, 3])
    stream.close()
    prefetcher.demand(1, [0, 3])
    assert prefetcher.counters.total("missed") == 0
    assert read(prefetcher, held, 1, [0, 3]) == [4, 7]


def test_pool_keeps_what_it_is_told() -> None:
    pool = SlotPool(2, np.full(8, -1, dtype=np.int32))
    for key in (3, 4):
        pool.put(key, pool.claim())
    pool.touch(3)
    assert pool.claim(keep={3, 4}) == -1
    slot = pool.claim(keep={3})
    assert (pool.slot(4), pool.map[4], pool.slot(3)) == (-1, -1, 1 - slot)
    pool.give_back(slot)
    assert pool.claim() == slot


def settle(governor: Governor, seconds: dict[str, float], count: int = 200) -> None:
    rng = random.Random(0)
    for _ in range(count):
        governor.took(seconds[governor.way] * rng.uniform(0.99, 1.01))
        if governor.settled:
            return


@pytest.mark.parametrize(("gate", "expected"), [(0.8, "gate"), (1.3, "off"), (1.0, "off")])
def test_governor_settles_on_what_is_faster(gate: float, expected: str) -> None:
    governor = Governor(["off", "gate"])
    settle(governor, {"off": 1.0, "gate": gate})
    assert governor.settled == governor.way == expected
    assert Governor(["off"]).settled == "off"


def test_governor_looks_again() -> None:
    governor = Governor(["off", "gate"])
    settle(governor, {"off": 1.0, "gate": 1.5})
    assert governor.way == "off"
    for _ in range(2000):
        governor.took({"off": 1.0, "gate": 0.5}[governor.way])
    assert governor.settled == "gate"


def test_pace_knows_what_the_link_can_carry() -> None:
    pace = Pace(3, 100.0)
    assert pace.budget(0) == 0
    pace.chose(0, 0.0)
    pace.asked(0, 0.0, 50)  # half a second of copies
    pace.chose(1, 2.0)
    assert pace.budget(0) == pytest.approx(150)
    pace.asked(1, 2.0, 400)  # longer than the layer
    pace.chose(2, 3.0)
    assert pace.budget(1) == 0
    pace.asked(2, 3.0, 100)
    pace.chose(0, 6.0)  # the next token
    assert pace.budget(2) == pytest.approx(200)
    pace.asked(0, 6.0, 0)
    pace.chose(2, 9.0)  # not the next layer
    assert pace.budget(0) == pytest.approx(150)
    assert DirectLink().speed == float("inf")
