"""``hf-subbyte-moe bench experts``: decode with experts outside the GPU, beside accelerate and beside the limit.

Models have real shapes and random weights; which experts they use comes from traces (see ``experts/replay.py``). A
cell is one model, share of resident experts and trace. Its bound is what no schedule beats: the larger of the
computation with all experts resident and the time that the link needs for the experts that were not.
"""

import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cli.demo import JsonFile
from hf_subbyte_moe.cli.shapes import SHAPES, random_model
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import OFF
from hf_subbyte_moe.experts import Engine, Heads, engine_of
from hf_subbyte_moe.experts.calibration import gate_of
from hf_subbyte_moe.experts.memory import available_memory
from hf_subbyte_moe.experts.predictor import GATE, HEAD, ORACLE, PREVIOUS, Predictor, PreviousToken, TrainedHead
from hf_subbyte_moe.experts.replay import (
    UNIFORM,
    ExpertTrace,
    Oracle,
    Playback,
    ReplayedPredictor,
    Statistics,
    draw_trace,
    played,
)
from hf_subbyte_moe.routing.families import experts_of_router, find_routers


NONE, ACCELERATE = "none", "accelerate"
REFERENCE = "reference"
SYSTEMS = (NONE, PREVIOUS, GATE, HEAD, ORACLE, ACCELERATE)
_CONTEXT = 256
_RESIDENT_TOKENS = 24
_HOST_SHARE = 0.5
_ACCELERATE_TOKENS = 1


@dataclass
class Results:
    """Rows in a file that is written after each of them.

    Attributes:
        path: the file; None keeps them in memory.
        conditions: of the run.
        rows: the rows.
    """

    path: Path | None
    conditions: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in the place of an older one of the same cell and system."""
        cell = ("model", "resident", "trace", "system")
        self.rows = [old for old in self.rows if any(old[key] != row[key] for key in cell)] + [row]
        if self.path is not None:
            text = json.dumps({"conditions": self.conditions, "rows": self.rows}, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Timed:
    """Some decode steps.

    Attributes:
        ms: mean of a step.
        hit_rate: experts that were on the GPU when they were needed.
        bytes: copied to the GPU a step.
        missed: of these, bytes of experts that were needed and not on the GPU.
    """

    ms: float
    hit_rate: float
    bytes: float
    missed: float


class Decoder:
    """One-token steps of a model, out of a cache that holds a context.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        config = model.config.get_text_config(decoder=True)
        self._cache = DynamicCache(config=config)
        self._token = torch.ones(1, 1, dtype=torch.int64, device=model.device)
        heads, width = config.num_key_value_heads, getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        for layer in range(config.num_hidden_layers):
            states = torch.zeros(1, heads, _CONTEXT, width, dtype=model.dtype, device=model.device)
            self._cache.update(states, states, layer)

    def step(self) -> float:
        """Seconds of one step."""
        _wait(self.model.device)
        start = time.perf_counter()
        self.model(self._token, **{CACHE_KW: self._cache}, use_cache=True)
        _wait(self.model.device)
        return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_steps(model: PreTrainedModel, trace: ExpertTrace, warm_up: int, steps: int, engine: Engine | None) -> Timed:
    """Time decode steps that follow a trace.

    Args:
        model: the model.
        trace: at least as long as the steps.
        warm_up: steps before those that count.
        steps: those that count.
        engine: of its experts; None where they are resident, or accelerate's.
    """
    playback = Playback(trace, model.device)
    if engine is not None:
        _play_to(engine, playback)
    decoder = Decoder(model)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad(), played(model, playback):
            for _ in range(warm_up):
                decoder.step()
            if engine is not None:
                engine.counters.reset()
            seconds = [decoder.step() for _ in range(steps)]
    finally:
        gc.enable()
    ms = 1e3 * sum(seconds) / steps
    if engine is None:
        return Timed(ms, 1.0, 0.0, 0.0)
    counters = engine.counters
    missed = counters.total("demand_bytes") + counters.total("useful_bytes")
    return Timed(ms, counters.hit_rate or 0.0, counters.bytes / steps, missed / steps)


def _play_to(engine: Engine, playback: Playback) -> None:
    """Predictors of an earlier trace follow this one."""
    inner = [getattr(predictor, "_inner", predictor) for predictor in engine.predictors.values()]
    engine.use_predictors([_replayed(predictor, playback, engine.layers) for predictor in inner])


def _replayed(predictor: Predictor, playback: Playback, layers: int) -> Predictor:
    if predictor.name == ORACLE:
        return Oracle(playback, layers)
    return ReplayedPredictor(predictor, playback) if predictor.name in (GATE, HEAD) else PreviousToken(layers)


def use_system(model: PreTrainedModel, engine: Engine, system: str) -> None:
    """Let an engine prefetch as a system does.

    Args:
        model: the model.
        engine: of its experts.
        system: "none" or a predictor's name.
    """
    places = find_routers(model)
    if engine.states is not None:
        engine.states.remove()
    engine.states = None
    predictors: list[Any] = []
    if system == PREVIOUS:
        predictors = [PreviousToken(engine.layers)]
    elif system == GATE:
        gate = gate_of(model, places)
        assert gate is not None
        gate.usable_without_check()
        engine.states = gate.states
        predictors = [gate]
    elif system == HEAD:
        width = model.config.get_text_config(decoder=True).hidden_size
        weights = torch.zeros(len(places) - 1, places[0].experts, width, dtype=model.dtype, device=model.device)
        predictors = [TrainedHead(weights, weights[:, :, 0], places[0].top_k)]
    elif system == ORACLE:
        predictors = [Oracle(Playback(_NO_TRACE, model.device), engine.layers)]
    engine.use_predictors(predictors)


_NO_TRACE = ExpertTrace(UNIFORM, torch.zeros(1, 1, 1, dtype=torch.int64), {})


def time_accelerate(model: PreTrainedModel, resident: float, trace: ExpertTrace) -> Timed:
    """Time accelerate's CPU offload: the last layers' experts are in host memory and come whole."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    places = find_routers(model)
    modules = [experts_of_router(model, place) for place in places]
    away = modules[round(resident * len(modules)) :]
    moved = 0
    for module in away:
        moved += sum(weight.nbytes for weight in module.parameters())
        module.to("cpu")
        add_hook_to_module(module, AlignDevicesHook(execution_device=model.device, offload=True))
    try:
        timed = time_steps(model, trace, 0, _ACCELERATE_TOKENS, None)
    finally:
        for module in away:
            remove_hook_from_module(module)
            module.to(model.device)
    needed = moved * places[0].top_k / places[0].experts
    return Timed(timed.ms, 1 - len(away) / len(modules), moved, needed)


def link_speed(device: torch.device) -> float:
    """Bytes a second of large copies from pinned memory; unlimited without a GPU."""
    if device.type != "cuda":
        return float("inf")
    from hf_subbyte_moe.experts.link import CudaLink
    from hf_subbyte_moe.experts.memory import HostBuffer

    source = HostBuffer(1 << 28, pin=True)
    link = CudaLink(device)
    link.measure(source.tensor, torch.empty_like(source.tensor, device=device))
    return link.speed


def run_model(
    shape: str,
    layers: int | None,
    residents: list[float],
    statistics: dict[str, Statistics],
    systems: list[str],
    steps: tuple[int, int],
    results: Results,
    say: Callable[[str], None],
) -> None:
    """All cells of one model."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = random_model(shape, layers, device)
    model.set_experts_implementation("batched_mm")  # what generate uses for decoding
    places = find_routers(model)
    size = (len(places), places[0].experts, places[0].top_k)
    traces = {
        name: draw_trace(found, name, sum(steps), *size, seed=number)
        for number, (name, found) in enumerate(statistics.items())
    }
    say(f"{shape}, {size[0]} layers: made")
    first = next(iter(traces.values()))
    compute = time_steps(model, first, 4, _RESIDENT_TOKENS, None).ms
    speed = results.conditions["link_gb_s"] * 1e9

    def add(system: str, resident: float, trace: str, timed: Timed) -> None:
        bound = max(compute, 1e3 * timed.missed / speed)
        row = {
            "model": shape,
            "layers": size[0],
            "resident": resident,
            "system": system,
            "trace": trace,
            "ms": round(timed.ms, 3),
            "hit_rate": round(timed.hit_rate, 4),
            "bytes": round(timed.bytes),
            "share_of_bound": round(bound / timed.ms, 4),
            "compute_ms": round(compute, 3),
            **{key: results.conditions[key] for key in ("device", "commit")},
        }
        results.add(row)
        say(f"{shape} {resident:.2f} {trace} {system}: {timed.ms:.1f} ms, {bound / timed.ms:.2f} of the bound")

    say(f"{shape}: {compute:.1f} ms with all experts resident")
    ours = [system for system in systems if system != ACCELERATE]
    if ours:
        for resident in residents:
            hf_subbyte_moe.apply(model, {"experts": {"placement": "offload", "gpu_slots": resident, "prefetch": OFF}})
            engine = engine_of(model)
            assert engine is not None
            for name, trace in traces.items():
                for system in ours:
                    use_system(model, engine, system)
                    add(system, resident, name, time_steps(model, trace, steps[0], steps[1], engine))
        hf_subbyte_moe.restore(model)
    if ACCELERATE in systems:
        for resident in sorted(residents, reverse=True):
            timed = time_accelerate(model, resident, first)
            for name in traces:  # whole layers come, whatever is chosen
                add(ACCELERATE, resident, name, timed)


def reference_statistics(sidecar: Path | None) -> Statistics:
    """Statistics that ``calibrate --predictor`` noted in a sidecar; by default the reference MoE's.

    Raises:
        ValueError: there is none.
    """
    from hf_subbyte_moe.cli.running import default_model
    from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME

    path = sidecar or Path(default_model()) / PREDICTOR_SIDECAR_NAME
    if not path.is_file():
        raise ValueError(f"there is no {str(path)!r}: hf-subbyte-moe calibrate --predictor writes one")
    noted = Heads.load(path).notes["statistics"]
    return Statistics(tuple(noted["popularity"]), noted["repeat"], noted["recall"], noted["source"])


def bench_experts(
    model: Annotated[list[str] | None, typer.Option(help="Shapes; repeat for several.")] = None,
    layers: Annotated[
        list[int] | None, typer.Option(min=2, help="Layers of each shape.", show_default="what half the memory holds")
    ] = None,
    resident: Annotated[list[float] | None, typer.Option(min=0.05, max=1, help="Shares of experts in slots.")] = None,
    trace: Annotated[list[str] | None, typer.Option(help=f"{REFERENCE}, {UNIFORM}.")] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SYSTEMS)}.")] = None,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before those that count.")] = 32,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 24,
    statistics: Annotated[
        Path | None, typer.Option(help="Sidecar of the model that traces imitate.", show_default="the reference MoE's")
    ] = None,
    commit: Annotated[str, typer.Option(envvar="BENCH_COMMIT", help="What is measured.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Time decoding with experts outside the GPU: ours with every predictor, accelerate, and the limit.

    Example: hf-subbyte-moe bench experts --model Qwen3-30B-A3B --layers 24 --resident 0.5 --json experts.json
    """
    console = Console()
    shapes = model or ["Mixtral-8x7B", "Qwen3-30B-A3B"]
    known = reference_statistics(statistics)
    every = {REFERENCE: known, UNIFORM: known.flattened()}
    for name, allowed, given in (("trace", list(every), trace), ("system", list(SYSTEMS), system)):
        wrong = [value for value in given or [] if value not in allowed]
        if wrong:
            raise ValueError(f"--{name} {wrong[0]!r} is not possible: one of {allowed}")
    if layers and len(layers) != len(shapes):
        raise ValueError(f"--layers is given {len(layers)} times for {len(shapes)} shapes")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    conditions = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "link_gb_s": round(min(link_speed(device) / 1e9, 1e6), 2),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "context": _CONTEXT,
        "warm_up": warm_up,
        "steps": steps,
        "statistics": known.source,
        "commit": commit,
    }
    results = Results(json_file, conditions)
    start = time.perf_counter()
    for number, shape in enumerate(shapes):
        run_model(
            shape,
            layers[number] if layers else layers_that_fit(shape),
            resident or [0.25, 0.5, 0.75],
            {name: every[name] for name in trace or every},
            system or list(SYSTEMS),
            (warm_up, steps),
            results,
            lambda text: console.print(f"{time.perf_counter() - start:6.1f} s  {text}", highlight=False),
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    console.print(_table(results.rows, conditions))


def layers_that_fit(shape: str) -> int:
    """How many layers' experts half of the free host memory holds."""
    config = SHAPES[shape]()
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    layer = sum(weight.nbytes for weight in experts_of_router(model, find_routers(model)[0]).parameters())
    every: int = config.num_hidden_layers
    return max(2, min(every, int(_HOST_SHARE * available_memory() / layer)))


def _table(rows: list[dict[str, Any]], conditions: dict[str, Any]) -> Table:
    table = Table(
        title=f"ms a token; {conditions['device']}, link {conditions['link_gb_s']} GB/s", title_justify="left"
    )
    for name in ("model", "resident", "trace", "system", "ms", "hit rate", "MB", "of the bound"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['model']}, {row['layers']} layers",
            f"{row['resident']:.2f}",
            row["trace"],
            row["system"],
            f"{row['ms']:.1f}",
            f"{row['hit_rate']:.1%}",
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['share_of_bound']:.2f}",
        )
    return table
