"""``hf-subbyte-moe explain MODEL_OR_CONFIG``: what a decode step must cost, computed without weights."""

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hf_subbyte_moe.config import DEFAULT_BITS, KVCacheConfig
from hf_subbyte_moe.roofline import H200, Shape, Step, read_config, shape_of, steps


_GB = 1e9


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


def _figure(value: float) -> str:
    """Two decimals, or where that would be nothing two digits."""
    return f"{value:.2f}" if value >= 1 else f"{value:.2g}"


def _counted(number: int, name: str) -> str:
    return f"{number:,} {name}" + ("" if number == 1 else "s")


def _shape_line(shape: Shape) -> str:
    experts = f", {shape.top_k} of {shape.experts} experts in {shape.moe_layers} layers" if shape.experts else ""
    return (
        f"{shape.name}: {_count(shape.parameters)} parameters, {_count(shape.active_parameters)} a token"
        f"{experts}; weights {shape.total_bytes / _GB:.1f} GB"
    )


def _step_table(made: tuple[Step, ...]) -> Table:
    table = Table()
    table.add_column()
    for step in made:
        table.add_column("bf16 cache" if step.bits is None else f"{step.bits:g} bits", justify="right")
    for name, shown in (
        ("weights a GPU, GB", lambda step: _figure(step.weights_a_gpu / _GB)),
        ("cache a GPU, GB", lambda step: _figure(step.cache_a_gpu / _GB)),
        ("fits", lambda step: "yes" if step.fits else "no"),
        ("weights read, GB", lambda step: _figure(step.weights_read / _GB)),
        ("cache read, GB", lambda step: _figure(step.cache_read / _GB)),
        ("sent by a GPU, MB", lambda step: _figure(step.sent_a_gpu / 1e6)),
        ("of a step for links, ms", lambda step: _figure(step.link_ms)),
        ("a step, ms", lambda step: _figure(step.ms)),
    ):
        table.add_row(name, *map(shown, made))
    return table


def explain_shape(
    name: str, context: int, batch: int, gpus: int, bits: float | None, json_file: Path | None, console: Console
) -> None:
    """Print the floor of one decode step, with a plain and with a packed cache."""
    budget = DEFAULT_BITS if bits is None else bits
    KVCacheConfig(bits=budget)  # refuses what no cache takes
    shape = shape_of(read_config(name), name)
    made = steps(shape, context, batch, gpus, budget)
    console.print(_shape_line(shape), highlight=False)
    rows = f"{_counted(batch, 'row')} of {_counted(context, 'token')}"
    console.print(f"one decode step at least: {rows} on {gpus} {H200.name}", highlight=False)
    console.print(_step_table(made))
    console.print(
        f"computed, not measured: every byte is read once, at {H200.memory_rate / 1e12:.2f} TB/s; no launches"
    )
    if json_file is not None:
        numbers = {"model": asdict(shape), "steps": [{**asdict(step), "ms": step.ms} for step in made]}
        json_file.write_text(json.dumps(numbers, indent=2) + "\n", encoding="utf-8")
        console.print(f"numbers written to {json_file}")
