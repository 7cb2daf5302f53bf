"""``hf-subbyte-moe bench experts``: decode with experts outside the GPU, beside accelerate and beside the limit.

Models have real shapes and random weights; which experts they use comes from traces (see ``experts/replay.py``). Steps
are those that users get: of the packed cache, through fused kernels. A row says so, and a GPU that takes others is an
error. A cell is one model, share of resident experts and trace. Its bound is what no schedule beats: the larger of the
computation and the time that the link needs for the experts that were not resident.

Short steps wait for the host, whose speed drifts, so one measurement of the computation would not do. Steps that copy
nothing take turns with the systems of every cell, a model with all experts on the device is timed before and after,
and the smallest of a run's times counts. Those of the systems are among them, since a step that also waits for experts
contains the computation. All rows of a model share it: one that was measured in slower minutes shows less of its bound
than it reached, never more.
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

import hf_subbyte_moe
from hf_subbyte_moe.cli.offload_timing import (
    ACCELERATE,
    CONTEXT,
    NONE,
    OPTIONS,
    RESIDENT,
    Timed,
    time_accelerate,
    time_cell,
    time_resident,
    with_slots,
)
from hf_subbyte_moe.cli.outputs import JsonFile
from hf_subbyte_moe.cli.running import reference_folder
from hf_subbyte_moe.cli.shapes import SHAPES, TOY, random_model
from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME, Heads, engine_of
from hf_subbyte_moe.experts.memory import available_memory
from hf_subbyte_moe.experts.predictor import GATE, HEAD, ORACLE, PREVIOUS
from hf_subbyte_moe.experts.replay import UNIFORM, Statistics, draw_trace
from hf_subbyte_moe.routing.families import experts_of_router, find_routers


REFERENCE = "reference"
SYSTEMS = (NONE, PREVIOUS, GATE, HEAD, ORACLE, ACCELERATE)
_HOST_SHARE = 0.5


@dataclass
class Results:
    """Rows in a file that is written after each of them.

    Attributes:
        path: the file; None keeps them in memory.
        conditions: of the run.
        rows: the rows.
        measured: of these, the ones of this run.
    """

    path: Path | None
    conditions: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            self.rows = json.loads(self.path.read_text(encoding="utf-8"))["rows"]

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in the place of an older one of the same cell and system."""
        cell = ("model", "resident", "trace", "system")
        self.rows = [old for old in self.rows if any(old[key] != row[key] for key in cell)] + [row]
        self.measured.append(row)

    def bound_by(self, shape: str, compute: float) -> dict[tuple[float, str, str], float]:
        """Relate this run's rows of a model to a computation, and write the file; shares by cell and system."""
        shares = {}
        for row in self.measured:
            if row["model"] == shape:
                link = row["missed_bytes"] / (1e6 * self.conditions["link_gb_s"])
                row["compute_ms"] = round(compute, 3)
                row["share_of_bound"] = round(max(compute, link) / row["ms"], 4)
                shares[row["resident"], row["trace"], row["system"]] = row["share_of_bound"]
        self._write()
        return shares

    def _write(self) -> None:
        if self.path is not None:
            text = json.dumps({"conditions": self.conditions, "rows": self.rows}, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")


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


@dataclass(frozen=True)
class Run:
    """What is measured of every model.

    Attributes:
        residents: shares of experts in slots.
        statistics: that traces are drawn from, by name.
        systems: names.
        steps: to settle, and to count in every round.
        rounds: how many.
        results: where rows go.
        say: tells people.
    """

    residents: list[float]
    statistics: dict[str, Statistics]
    systems: list[str]
    steps: tuple[int, int]
    rounds: int
    results: Results
    say: Callable[[str], None]

    def model(self, shape: str, layers: int | None) -> None:
        """All cells of one model."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = random_model(shape, layers, device)
        model.set_experts_implementation("batched_mm")  # what generate uses for decoding
        places = find_routers(model)
        size = (len(places), places[0].experts, places[0].top_k)
        traces = {
            name: draw_trace(found, name, sum(self.steps), *size, seed=number)
            for number, (name, found) in enumerate(self.statistics.items())
        }
        first = next(iter(traces.values()))
        hf_subbyte_moe.apply(model, OPTIONS)
        compute = time_resident(model)
        self.say(f"{shape}, {size[0]} layers: {compute:.1f} ms with all experts resident")
        ours = [system for system in self.systems if system != ACCELERATE]
        for resident in self.residents if ours else []:
            hf_subbyte_moe.apply(model, with_slots(resident))
            engine = engine_of(model)
            assert engine is not None
            for name, trace in traces.items():
                cell = time_cell(model, engine, trace, ours, self.steps, self.rounds)
                compute = min(compute, *(timed.ms for timed in cell.values()))
                self._tell_resident(f"{shape} {resident:.2f} {name}", cell.pop(RESIDENT))
                for system, timed in cell.items():
                    self._add(shape, size[0], compute, (resident, name, system), timed)
        # launched one by one, as with fewer slots, and captured: a bound is the fastest of all ways
        hf_subbyte_moe.apply(model, with_slots(1.0))
        compute = min(compute, time_resident(model, first))
        hf_subbyte_moe.apply(model, OPTIONS)
        compute = min(compute, time_resident(model))
        hf_subbyte_moe.restore(model)
        self.say(f"{shape}: {compute:.1f} ms for the computation, the fastest of all")
        self.results.bound_by(shape, compute)
        for resident in sorted(self.residents, reverse=True) if ACCELERATE in self.systems else []:
            timed = time_accelerate(model, resident, first)
            compute = min(compute, timed.ms)
            for name in traces:  # whole layers come, whatever is chosen
                self._add(shape, size[0], compute, (resident, name, ACCELERATE), timed)

    def _tell_resident(self, cell: str, timed: Timed) -> None:
        copied = f", {timed.missed / 1e6:.0f} MB missed" if timed.missed else ""
        self.say(f"{cell}: {timed.ms:.1f} ms where a step is repeated{copied}")

    def _add(self, shape: str, layers: int, compute: float, cell: tuple[float, str, str], timed: Timed) -> None:
        resident, trace, system = cell
        row = {
            "model": shape,
            "layers": layers,
            "resident": resident,
            "system": system,
            "trace": trace,
            "ms": round(timed.ms, 3),
            "hit_rate": round(timed.hit_rate, 4),
            "bytes": round(timed.bytes),
            "missed_bytes": round(timed.missed),
            "step": "fused" if timed.fused else "modules",
            **{key: self.results.conditions[key] for key in ("device", "commit")},
        }
        self.results.add(row)
        share = self.results.bound_by(shape, compute)[resident, trace, system]
        self.say(f"{shape} {resident:.2f} {trace} {system}: {timed.ms:.1f} ms, {share:.2f} of the bound")


def reference_statistics(sidecar: Path | None) -> Statistics:
    """Statistics that ``calibrate --predictor`` noted in a sidecar; by default the reference MoE's.

    Raises:
        ValueError: there is none.
    """
    path = sidecar or reference_folder() / PREDICTOR_SIDECAR_NAME
    if not path.is_file():
        whose = (
            "outside a clone of the project there are no statistics"
            if sidecar is None
            else f"there is no {str(path)!r}"
        )
        raise ValueError(f"{whose}: give --statistics FILE; hf-subbyte-moe calibrate --predictor writes one")
    noted = Heads.load(path).notes["statistics"]
    return Statistics(tuple(noted["popularity"]), noted["repeat"], noted["recall"], noted["source"])


def bench_experts(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Shapes, of {', '.join(SHAPES)}; repeat for several.")
    ] = None,
    layers: Annotated[
        list[int] | None, typer.Option(min=2, help="Layers of each shape.", show_default="what half the memory holds")
    ] = None,
    resident: Annotated[list[float] | None, typer.Option(min=0.05, max=1, help="Shares of experts in slots.")] = None,
    trace: Annotated[list[str] | None, typer.Option(help=f"{REFERENCE}, {UNIFORM}.")] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(SYSTEMS)}.")] = None,
    settle: Annotated[int, typer.Option(min=1, help="Steps in which governors settle.")] = 26,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count in a round.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds in which systems take turns; the median counts.")] = 3,
    statistics: Annotated[
        Path | None, typer.Option(help="Sidecar of the model that traces imitate.", show_default="the reference MoE's")
    ] = None,
    commit: Annotated[str, typer.Option(envvar="BENCH_COMMIT", help="What is measured.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Time decoding with experts outside the GPU: every predictor, accelerate, the limit (needs a CUDA device).

    Example: hf-subbyte-moe bench experts --model Qwen3-30B-A3B --layers 24 --resident 0.5 --json experts.json
    """
    console = Console()
    shapes = model or ["Mixtral-8x7B", "Qwen3-30B-A3B"]
    for name in shapes:
        if name not in SHAPES:
            raise ValueError(f"--model {name!r} is not possible: one of {list(SHAPES)}")
    if not torch.cuda.is_available() and shapes != [TOY]:
        raise ValueError(f"bench experts needs a CUDA device; without one only --model {TOY} is timed, to try it")
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
        "context": CONTEXT,
        "settle": settle,
        "steps": steps,
        "rounds": rounds,
        "statistics": known.source,
        "commit": commit,
    }
    results = Results(json_file, conditions)
    start = time.perf_counter()
    run = Run(
        resident or [0.25, 0.5, 0.75],
        {name: every[name] for name in trace or every},
        system or list(SYSTEMS),
        (settle, steps),
        rounds,
        results,
        lambda text: console.print(f"{time.perf_counter() - start:6.1f} s  {text}", highlight=False),
    )
    for number, shape in enumerate(shapes):
        run.model(shape, layers[number] if layers else layers_that_fit(shape))
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
