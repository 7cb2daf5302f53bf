"""Choose how the experts' two launches are cut: ``python kernels/benchmarks/tune_moe.py``.

For each model, format and number of tokens it starts from the cut in use, tries some from all over, and walks from the
fastest to faster neighbours, of gate_up and of down in turn, until there is none. The two launches overlap, so they
are always timed together. Every cut is checked like a row of ``moe.py`` before it is timed. Winners go to
``expert_mlp/configs.json`` under the device's name, all times to ``results/tuning_moe.json``.
"""

import contextlib
import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import results
import torch
import typer
from baselines import brief, failures
from limits import Budget, check_device
from moe import FORMATS, MODELS, ExpertGate, Experts, Layer, random_layer, random_slabs
from results import Record, error_ratio, not_right
from rich.console import Console
from rich.markup import escape
from timing import Clock
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.expert_mlp import ExpertCall, ExpertFormat, ExpertLayout
from subbyte_kernels.expert_mlp.config import CudaConfig, choose_config
from subbyte_kernels.expert_mlp.cuda_kernel import SOURCE, bucket_of, expert_mlp_cuda, variant_of


CONFIGS = results.FOLDER.parent / "subbyte_kernels" / "expert_mlp" / "configs.json"
DEVICE_BYTES = 228 << 10  # of shared memory of a multiprocessor
_BLOCK_BYTES = 6 << 10  # of a block beside its ring: lists, barriers, what the system takes
_THREADS = 1024  # of a multiprocessor; with more, registers spill
_LEAST_FLIGHT = 24 << 10  # bytes on their way to a multiprocessor; with fewer, latency bounds the copy
_BUDGET_MS = 8.0
_SECONDS = 20.0  # of one cell
_GAIN = 0.997  # a neighbour must be so much faster
_VALUES = {
    "warps": (2, 4, 6, 8, 12),
    "split": (1, 2, 4, 8),
    "producers": (1, 2, 4),
    "stages": (2, 3, 4, 6, 8, 10, 12, 16),
    "blocks_per_sm": (1, 2, 3, 4, 6),
}
_STEPS = {True: (1, 2, 3, 4, 6, 8, 12, 16, 24), False: (4, 6, 8, 12, 16, 20, 24, 32, 48, 64)}  # packed -> chunks
_WHOLE_ROW = 2048  # columns; a longer row is no stage
_SCATTERED = 12
_MOVES: tuple[dict[str, int], ...] = (
    *({name: way} for name in (*_VALUES, "step") for way in (-2, -1, 1, 2)),
    *({"stages": way, "step": -way} for way in (-1, 1)),
    *({"warps": way, "split": way} for way in (-1, 1)),
    *({"blocks_per_sm": way, "stages": -way} for way in (-1, 1)),
    *({"blocks_per_sm": way, "warps": -way} for way in (-1, 1)),
)
_console = Console(highlight=False)

Pair = tuple[CudaConfig, CudaConfig]  # of gate_up, of down


def neighbours(call: ExpertCall, down: bool, config: CudaConfig) -> Iterator[CudaConfig]:
    """Cuts that differ in one number, or in two that pull against each other, and fit a multiprocessor."""
    values = _values(call, down)
    found = {config}
    for move in _MOVES:
        changed = asdict(config)
        for name, way in move.items():
            known = sorted({*values[name], changed[name]})
            place = known.index(changed[name]) + way
            changed[name] = known[place] if 0 <= place < len(known) else None
        if None in changed.values():
            continue
        try:
            made = CudaConfig(**changed)
        except ValueError:
            continue
        if made not in found and fits(call, down, made):
            found.add(made)
            yield made


def scattered(call: ExpertCall, down: bool, fixed: bool, count: int) -> list[CudaConfig]:
    """At most so many cuts from all over, the same in every run."""
    values = _values(call, down)
    draw = random.Random(0)
    found: list[CudaConfig] = []
    for _ in range(100 * count):
        with contextlib.suppress(ValueError):  # teams that do not divide the stages
            made = CudaConfig(**{name: draw.choice(known) for name, known in values.items()}, fixed=fixed)
            if len(found) < count and made not in found and fits(call, down, made):
                found.append(made)
    return found


def _values(call: ExpertCall, down: bool) -> dict[str, tuple[int, ...]]:
    """What the numbers of a cut may be."""
    width = call.layout.intermediate if down else call.layout.hidden
    steps = _STEPS[call.layout.packed]
    if not call.layout.packed:
        whole = [width // 32] if width <= _WHOLE_ROW else []
        steps = tuple(sorted({*(step for step in steps if 32 * step < width), *whole}))
    return {**_VALUES, "step": steps}


def fits(call: ExpertCall, down: bool, config: CudaConfig) -> bool:
    """Whether its blocks lie on a multiprocessor together, and keep enough bytes on their way."""
    variant = variant_of(call, down, config)
    blocks = config.blocks_per_sm
    return (
        blocks * (variant.shared_bytes + _BLOCK_BYTES) <= DEVICE_BYTES
        and blocks * 32 * (config.warps + config.producers) <= _THREADS
        and blocks * config.stages * variant.stage_bytes >= _LEAST_FLIGHT
    )


def build(call: ExpertCall, architecture: str, down: bool, configs: Sequence[CudaConfig]) -> None:
    """Compile cuts at once, on all cores; what does not compile says so when it is timed."""

    def one(config: CudaConfig) -> None:
        with contextlib.suppress(nvrtc.BuildError):
            text = nvrtc.full_text(SOURCE, variant_of(call, down, config).defined())
            nvrtc.built(text, SOURCE.name, architecture)

    with ThreadPoolExecutor() as pool:
        list(pool.map(one, configs))


class Walk:
    """From one pair of cuts to faster ones.

    Attributes:
        lines: every pair that was tried: its numbers, ``us`` (None where it failed or is not right) and why.
    """

    def __init__(
        self,
        call: ExpertCall,
        time_of: Callable[[Pair], tuple[float | None, str | None]],
        build_all: Callable[[bool, Sequence[CudaConfig]], None] = lambda *_: None,
    ) -> None:
        """Begin nothing yet.

        Args:
            call: a step.
            time_of: microseconds of a pair, or None and why.
            build_all: called with what is timed next, of gate_up (False) or down.
        """
        self._call, self._time_of, self._build_all = call, time_of, build_all
        self._known: dict[Pair, float | None] = {}
        self.lines: list[Record] = []

    def time(self, pair: Pair) -> float | None:
        """Microseconds, measured once."""
        if pair not in self._known:
            us, failed = self._time_of(pair)
            self._known[pair] = us
            cuts = {name: asdict(config) for name, config in zip(("gate_up", "down"), pair, strict=True)}
            self.lines.append({**cuts, "us": us, "failed": failed})
        return self._known[pair]

    def go(self, start: Sequence[Pair], allows: Callable[[], bool]) -> tuple[Pair, float] | None:
        """The fastest pair found, or None where nothing that was tried is right.

        Args:
            start: pairs to begin at; the fastest of them counts.
            allows: asked before each pair; False ends the walk.
        """
        right = [(us, pair) for pair in start if (us := self.time(pair)) is not None]
        if not right:
            return None
        best, pair = min(right, key=lambda found: found[0])
        down, turn, still = False, 0, 0
        while still < 2:  # neither launch has a faster neighbour
            still += 1
            near = [*neighbours(self._call, down, pair[down])]
            if turn < 2:
                near += scattered(self._call, down, pair[down].fixed, _SCATTERED)
            self._build_all(down, near)
            for config in near:
                if not allows():
                    return pair, best
                tried = (pair[0], config) if down else (config, pair[1])
                us = self.time(tried)
                if us is not None and us < _GAIN * best:
                    best, pair, still = us, tried, 0
            down, turn = not down, turn + 1
        return pair, best


def tune(
    clock: Clock, model: Experts, name: str, tokens: Sequence[int], budget: Budget, configs: Path
) -> list[Record]:
    """Tune one model's experts in one format; every pair that was tried.

    Args:
        clock: of a CUDA device.
        model: shapes.
        name: key of ``moe.FORMATS``.
        tokens: of a step; each stands for its bucket.
        budget: seconds.
        configs: where winners go, by device; entries of other devices and shapes stay.

    Raises:
        DeviceLostError: a kernel broke the device's context.
    """
    kind, group = FORMATS[name]
    layout = ExpertLayout(kind, model.hidden, model.intermediate, torch.bfloat16, group)
    slabs = layout.views(random_slabs(layout, model.count, clock.device))
    device = slabs[0].device.index
    lines: list[Record] = []
    for count in tokens:
        place = {"model": model.name, "weights": name, "tokens": count}
        title = f"{model.name} {name}, {count} tokens"
        if not budget.allows(_SECONDS, title):
            continue
        layer = random_layer(model, layout, slabs, count)
        gate = ExpertGate(layer.calls[0])
        architecture = "sm_{}{}".format(*nvrtc.capability(device))
        walk = Walk(
            layer.calls[0],
            functools.partial(_time_of, clock, layer, gate),
            functools.partial(build, layer.calls[0], architecture),
        )
        found = walk.go(starts(device, layout, bucket_of(count)), functools.partial(budget.allows, 0.5, title))
        lines += [{**place, **line} for line in walk.lines]
        if found is None:
            _console.print(
                f"{title}: [red]no cut is right[/red]: {escape(str(walk.lines[-1]['failed']))}", soft_wrap=True
            )
            continue
        pair, us = found
        keep_configs(configs, torch.cuda.get_device_name(clock.device), layout, bucket_of(count), pair, us)
        first = next(line["us"] for line in walk.lines if line["us"] is not None)
        _console.print(f"{title}: {first:.1f} -> {us:.1f} us with {len(walk.lines)} pairs: {pair}", soft_wrap=True)
    return lines


def starts(device: int, layout: ExpertLayout, bucket: int) -> list[Pair]:
    """The cuts in use, and others to walk from."""
    packed = layout.format is not ExpertFormat.MODEL
    many = CudaConfig(4, 4, 1, 4, 8, 3) if packed else CudaConfig(8, 8, 2, 4, 16)
    made = [(choose_config(device, layout, bucket, False), choose_config(device, layout, bucket, True)), (many, many)]
    if layout.format is ExpertFormat.INT4 and bucket == 1:
        made += [(replace(gate_up, fixed=True), replace(down, fixed=True)) for gate_up, down in made]
    return made


def _time_of(clock: Clock, layer: Layer, gate: ExpertGate, pair: Pair) -> tuple[float | None, str | None]:
    def run(call: ExpertCall) -> Tensor:
        return expert_mlp_cuda(call, layer.out, layer.room, pair)

    try:
        error = gate.error(run(gate.call))
        if not_right(error_ratio(error, gate.plain_error)):
            return None, f"its error is {error:.1e}"
        return clock.time([functools.partial(run, call) for call in layer.calls], budget_ms=_BUDGET_MS).us, None
    except failures() as problem:
        check_device(clock.device)
        return None, brief(problem)


def keep_configs(path: Path, device: str, layout: ExpertLayout, bucket: int, pair: Pair, us: float) -> None:
    """Put winners into the file; they replace those of the same device, format, shape and bucket."""
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = known.get(device, [])
    for down, config in enumerate(pair):
        size = {
            "format": layout.format.value,
            "hidden": layout.hidden,
            "intermediate": layout.intermediate,
            "tokens": bucket,
            "down": bool(down),
        }
        rows = [row for row in rows if {**row, **size} != row]
        rows.append({**size, **asdict(config), "us": round(us, 2)})
    known[device] = rows
    results.save(known, path)


def main(
    model: Annotated[list[str] | None, typer.Option(help="Of moe.py; repeat. All if it is not given.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="bf16, int4 or fp8; repeat.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, max=16, help="Of a step; repeat.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Seconds after which nothing new begins.")] = None,
    configs: Annotated[Path, typer.Option(help="Where winners go.")] = CONFIGS,
    record: Annotated[Path, typer.Option(help="Where all times go.")] = results.RESULTS / "tuning_moe.json",
) -> None:
    """Tune the experts' kernel for this device. Exits with 1 where a cell has no cut that is right.

    Example: python kernels/benchmarks/tune_moe.py --model Mixtral-8x7B --weights bf16 --tokens 1
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("tuning needs a CUDA device")
    chosen = [known for known in MODELS if not model or known.name in model]
    if not chosen:
        raise typer.BadParameter(f"there are {[known.name for known in MODELS]}", param_hint="--model")
    clock, budget, lines = Clock(torch.device("cuda")), Budget(deadline), []
    with torch.no_grad():
        for known in chosen:
            for name in known.formats:
                if not weights or name in weights:
                    lines += tune(clock, known, name, tokens or (1, 8, 16), budget, configs)
                    results.save({"device": torch.cuda.get_device_name(), "times": lines}, record)
    for what in sorted(set(budget.skipped)):
        _console.print(f"cut short or skipped for want of time: {what}", soft_wrap=True)
    cells = {(line["model"], line["weights"], line["tokens"]) for line in lines}
    right = {(line["model"], line["weights"], line["tokens"]) for line in lines if line["us"] is not None}
    raise typer.Exit(0 if cells == right else 1)


if __name__ == "__main__":
    typer.run(main)
