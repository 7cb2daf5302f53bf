"""Times decode steps of models whose experts follow a trace: resident, in slots, and as accelerate moves them.

Ours are steps of the packed cache through fused kernels, as a model takes them with the options :data:`OPTIONS`;
accelerate's are the model's own, with the plain cache. Hooks on the routers make experts follow a trace; a model that
holds its experts is timed with its own choice, so that its step is the captured one. On a CPU, and of families without
such steps, all run through the model's modules.

Machines drift, so the systems of a cell take turns: each plays the same steps of the trace in every round, and the
median round counts. Their governors settle before, on the steps before these. Every round begins with the last of
those steps, repeated: its experts lie in slots and nothing is copied, so this is the computation alone, in its turn. A
turn has a cache of its own, whose first step, which prepares the others, does not count, and no tile is due in it.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.generate_timing import fill, fused_steps
from hf_subbyte_moe.cli.shapes import Widths, cached_widths
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import OFF
from hf_subbyte_moe.decode import FUSED_FAMILIES
from hf_subbyte_moe.experts import Engine
from hf_subbyte_moe.experts.calibration import gate_of
from hf_subbyte_moe.experts.governor import Governor
from hf_subbyte_moe.experts.predictor import (
    GATE,
    HEAD,
    ORACLE,
    PREVIOUS,
    Predictor,
    PreviousToken,
    States,
    TrainedHead,
)
from hf_subbyte_moe.experts.replay import ExpertTrace, Oracle, Playback, ReplayedPredictor, played
from hf_subbyte_moe.routing.families import experts_of_router, find_routers


NONE, ACCELERATE = "none", "accelerate"
RESIDENT = "resident"
CONTEXT = 400  # two packed tiles, and 115 steps until the next is due
OPTIONS: dict[str, Any] = {"kv_cache": {}, "routing": {"mode": "native"}, "decode": {}}
_FUSED = ("cuda",)  # devices that must compute steps of our cache by fused kernels
_RESIDENT_WARM_UP, _RESIDENT_STEPS = 12, 20


def with_slots(slots: float) -> dict[str, Any]:
    """:data:`OPTIONS` with experts in host memory, and slots for a share or a number of them."""
    return {**OPTIONS, "experts": {"placement": "offload", "gpu_slots": slots, "prefetch": OFF}}


@dataclass(frozen=True)
class Timed:
    """Some decode steps.

    Attributes:
        ms: mean of a step, of the median round.
        hit_rate: experts that were on the GPU when they were needed.
        bytes: copied to the GPU a step.
        missed: of these, bytes of experts that were needed and not on the GPU.
        fused: computed by fused kernels, not by the model's modules.
    """

    ms: float
    hit_rate: float
    bytes: float
    missed: float
    fused: bool


class Decoder:
    """One-token steps of a model, out of a cache that holds a context.

    Args:
        model: the model.
        widths: of what its layers cache; see :func:`cached_widths`.
        cache: empty, to be filled with random keys and values.
    """

    def __init__(self, model: PreTrainedModel, widths: Widths, cache: Cache) -> None:
        self.model, self._cache = model, cache
        self._token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        fill(model, cache, self._token.expand(1, CONTEXT), widths)

    def step(self) -> float:
        """Seconds of one step.

        Raises:
            RuntimeError: fused kernels should have computed it, and did not.
        """
        _wait(self.model.device)
        start = time.perf_counter()
        self.model(self._token, **{CACHE_KW: self._cache}, use_cache=True)
        _wait(self.model.device)
        seconds = time.perf_counter() - start
        due = self.model.device.type in _FUSED and self.model.config.model_type in FUSED_FAMILIES
        if due and isinstance(self._cache, EntropySubbyteCache) and not self.fused:
            reasons = "; ".join(getattr(self.model.forward, "refused", []))
            raise RuntimeError(f"a step of our cache ran through the model's own modules: {reasons or 'no runner'}")
        return seconds

    @property
    def fused(self) -> bool:
        """Whether fused kernels computed the steps so far."""
        return bool(fused_steps(self.model, self._cache))


def _packed(model: PreTrainedModel, widths: Widths) -> Decoder:
    return Decoder(model, widths, EntropySubbyteCache(model.config))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _undisturbed() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            yield
    finally:
        gc.enable()


def time_resident(model: PreTrainedModel, trace: ExpertTrace | None = None) -> float:
    """Milliseconds of a step that copies nothing, the median.

    Args:
        model: with all experts on the device once each was used.
        trace: whose choices routers are made to follow; None leaves them their own.
    """
    decoder = _packed(model, cached_widths(model))
    with _undisturbed(), nullcontext() if trace is None else played(model, Playback(trace, model.device)):
        for _ in range(_RESIDENT_WARM_UP):
            decoder.step()
        return 1e3 * statistics.median(decoder.step() for _ in range(_RESIDENT_STEPS))


@dataclass
class System:
    """One way to prefetch, with what it has learned.

    Attributes:
        name: "none" or a predictor's.
        predictors: what it uses.
        states: what these read.
        governor: that chooses; None before the first step.
        seconds: of a step, by round.
        hits: experts needed, and missed.
        copied: bytes, and of these bytes of experts that were needed.
        steps: counted.
        fused: all of them computed by fused kernels.
    """

    name: str
    predictors: list[Predictor]
    states: States | None = None
    governor: Governor | None = None
    seconds: list[float] = field(default_factory=list)
    hits: tuple[int, int] = (0, 0)
    copied: tuple[int, int] = (0, 0)
    steps: int = 0
    fused: bool = True

    def timed(self) -> Timed:
        """What was measured."""
        asked, missed = self.hits
        ms = 1e3 * statistics.median(self.seconds)
        return Timed(ms, 1 - missed / asked, self.copied[0] / self.steps, self.copied[1] / self.steps, self.fused)

    def count(self, engine: Engine, seconds: list[float], fused: bool) -> None:
        """A round is over."""
        counters = engine.counters
        self.seconds.append(sum(seconds) / len(seconds))
        self.hits = (self.hits[0] + counters.total("asked"), self.hits[1] + counters.total("missed"))
        needed = counters.total("demand_bytes") + counters.total("useful_bytes")
        self.copied = (self.copied[0] + counters.bytes, self.copied[1] + needed)
        self.steps += len(seconds)
        self.fused = self.fused and fused


def make_system(model: PreTrainedModel, playback: Playback, name: str, layers: int) -> System:
    """A system whose predictions are a trace's.

    Args:
        model: the model.
        playback: of the trace.
        name: "none" or a predictor's.
        layers: MoE layers.
    """
    places = find_routers(model)
    if name == PREVIOUS:
        return System(name, [PreviousToken(layers)])
    if name == ORACLE:
        return System(name, [Oracle(playback, layers)])
    if name == GATE:
        gate = gate_of(model, places)
        assert gate is not None
        gate.usable_without_check()
        return System(name, [ReplayedPredictor(gate, playback)], gate.states)
    if name == HEAD:
        width = model.config.get_text_config(decoder=True).hidden_size
        weights = torch.zeros(layers - 1, places[0].experts, width, dtype=model.dtype, device=model.device)
        head = TrainedHead(weights, weights[:, :, 0], places[0].top_k)
        return System(name, [ReplayedPredictor(head, playback)])
    return System(NONE, [])


def time_cell(
    model: PreTrainedModel, engine: Engine, trace: ExpertTrace, names: list[str], steps: tuple[int, int], rounds: int
) -> dict[str, Timed]:
    """Time several systems on the same steps.

    Args:
        model: the model.
        engine: of its placed experts.
        trace: as long as all steps.
        names: of the systems.
        steps: to settle, and to count in every round.
        rounds: how many.

    Returns:
        Each system's times, and as "resident" those of a step that is repeated: nothing is missed, unless slots are
        given away sooner than a step needs them again.
    """
    playback, widths = Playback(trace, model.device), cached_widths(model)
    systems = [make_system(model, playback, name, engine.layers) for name in names]
    resident = System(RESIDENT, [])
    settle, counted = steps
    with _undisturbed(), played(model, playback):
        for system in systems:
            _use(engine, system)
            _play(_packed(model, widths), playback, 0, settle)
            system.governor = engine.governor
        for number in range(rounds):
            _turn(engine, resident, _packed(model, widths), playback, settle - 1, counted, again=True)
            for system in systems[number:] + systems[:number]:
                _turn(engine, system, _packed(model, widths), playback, settle, counted)
                gc.collect(0)
    for system in systems:
        if system.states is not None:
            system.states.remove()
    return {system.name: system.timed() for system in (*systems, resident)}


def _use(engine: Engine, system: System) -> None:
    engine.states = system.states
    engine.use_predictors(system.predictors)
    if system.governor is not None:
        engine.governor = system.governor


def _turn(
    engine: Engine, system: System, decoder: Decoder, playback: Playback, first: int, counted: int, again: bool = False
) -> None:
    """A system's steps of a round, behind one or two that do not count; ``again``: the first choice at all of them."""
    _use(engine, system)
    _play(decoder, playback, first if again else first - 1, 2 if again else 1, again)
    engine.counters.reset()
    seconds = _play(decoder, playback, first, counted, again)
    system.count(engine, seconds, decoder.fused)


def _play(decoder: Decoder, playback: Playback, first: int, steps: int, again: bool = False) -> list[float]:
    """Seconds of each step; ``again``: the first choice at all of them."""
    playback.token = first - 1
    seconds = []
    for _ in range(steps):
        if again:
            playback.token = first - 1
        seconds.append(decoder.step())
    return seconds


def time_accelerate(model: PreTrainedModel, resident: float, trace: ExpertTrace) -> Timed:
    """Time one step of accelerate's CPU offload: the last layers' experts are in host memory and come whole."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    places = find_routers(model)
    plain = DynamicCache(config=model.config.get_text_config(decoder=True))
    decoder = Decoder(model, cached_widths(model), plain)
    modules = [experts_of_router(model, place) for place in places]
    away = modules[round(resident * len(modules)) :]
    moved = 0
    for module in away:
        moved += sum(weight.nbytes for weight in module.parameters())
        module.to("cpu")
        add_hook_to_module(module, AlignDevicesHook(execution_device=model.device, offload=True))
    playback = Playback(trace, model.device)
    try:
        with _undisturbed(), played(model, playback):
            seconds = _play(decoder, playback, 0, 1)
    finally:
        for module in away:
            remove_hook_from_module(module)
            vars(module).pop("forward", None)
            module.to(model.device)
    needed = moved * places[0].top_k / places[0].experts
    return Timed(1e3 * seconds[0], 1 - len(away) / len(modules), moved, needed, decoder.fused)
