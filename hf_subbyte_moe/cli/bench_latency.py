"""``hf-subbyte-moe bench latency``: milliseconds a token of ``generate()``, stock and with our parts added one by one.

Models have real shapes and random weights, because what a step costs hardly depends on what a model has learned. Every
system generates from the same prompt; each one adds a part to the one before. A row says what share of the roofline it
reaches: the time in which the GPU copies as many bytes as the step must read: active weights and what the cache holds,
which is latents where a model caches these.

Under torchrun all ranks share one model by Transformers' own tensor parallelism: a rank makes, fills and reads its
share. A row then is the first rank's, and its roofline is one GPU's: its part of the weights and its own cache,
without what GPUs send each other. The toy shape runs on a CPU too, to try a command; its times say nothing of a GPU.
"""

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.distributed.configuration_utils import DistributedConfig

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.clock import DeviceClock
from hf_subbyte_moe.cli.generate_timing import Measured, measure
from hf_subbyte_moe.cli.outputs import JsonFile
from hf_subbyte_moe.cli.shapes import SHAPES, TOY, config_of, random_model_of, random_packed_model
from hf_subbyte_moe.distributed.launch import grouped, rank, rank_device, ranks
from hf_subbyte_moe.roofline import Shape, shape_of


STOCK, STATIC = "stock default", "stock static compiled"
PACKED = "+ int4 projections"  # beside packed experts alone: it is another model
_EXPERTS: dict[str, Any] = {"experts": {}}
_ROUTERS: dict[str, Any] = {**_EXPERTS, "routing": {"mode": "native"}}
_OURS: dict[str, dict[str, Any]] = {
    "cache": {"kv_cache": {"backend": "torch"}},
    "+ attention": {"kv_cache": {}},
    "+ experts": {"kv_cache": {}, **_EXPERTS},
    "+ router": {"kv_cache": {}, **_ROUTERS},
    "+ graph": {"kv_cache": {}, **_ROUTERS, "decode": {"cuda_graph": True, "fused": False}},
    "+ fused kernels": {"kv_cache": {}, **_ROUTERS, "decode": {"cuda_graph": True, "fused": True}},
    PACKED: {"kv_cache": {}, **_ROUTERS, "decode": {"cuda_graph": True, "fused": True, "projections": "int4"}},
}
SYSTEMS = (STOCK, STATIC, *_OURS)
_INT4_BITS = 4.5
_SLOW_TOKENS = 24  # of systems whose every token takes long
_BF16 = "bf16"
# of an expert's weights, scales included
_WEIGHT_BITS = {_BF16: 16.0, "int4": _INT4_BITS, "int4-g64": 4.25, "fp8": 8.125}


def roofline_ms(shape: Shape, batch: int, cache_bytes: int, rate: float, gpus: int = 1) -> float:
    """The time in which a GPU copies what it must read in a step.

    Args:
        shape: of the model.
        batch: rows.
        cache_bytes: of its own cache.
        rate: bytes/s that it copies.
        gpus: that share the weights evenly.
    """
    weights = shape.dense_bytes + shape.moe_layers * shape.distinct_experts(batch) * shape.expert_bytes
    return float(1e3 * (weights / gpus + cache_bytes) / rate)


def with_packed_projections(shape: Shape) -> Shape:
    """The same model with int4 in attention's projections: of queries and output, keys and values."""
    values = sum((layer.query_heads + layer.heads) * sum(layer.widths) for layer in shape.layers)
    saved = shape.hidden_size * values * (_WEIGHT_BITS[_BF16] - _INT4_BITS) / 8
    return replace(shape, dense_bytes=shape.dense_bytes - saved)


def _run(
    model: PreTrainedModel, system: str, ids: Tensor, tokens: int, cache: dict[str, Any], weights: str, fill: bool
) -> Measured:
    """One system: the model as it has to be for it, and as it was afterwards."""
    slow = min(tokens, _SLOW_TOKENS)
    if system == STOCK:
        plain = DynamicCache(config=model.config)
        return measure(model, ids, slow, {} if fill else {"cache_implementation": "dynamic"}, plain if fill else None)
    if system == STATIC:
        return measure(model, ids, tokens, {"cache_implementation": "static"})
    options = {**_OURS[system], "kv_cache": {**cache, **_OURS[system]["kv_cache"]}}
    if weights != _BF16:
        options["experts"] = {"weights": weights}
    hf_subbyte_moe.apply(model, options)
    try:
        packed = EntropySubbyteCache(model.config, **options["kv_cache"]) if fill else None
        return measure(model, ids, tokens if "decode" in options else slow, {}, packed)
    finally:
        if weights == _BF16:  # packed weights would be unpacked
            hf_subbyte_moe.restore(model)


class _Rows:
    """Rows in a file that is written after each of them."""

    _CELL = ("model", "weights", "context", "batch", "system", "policy", "gpus", "layers")
    _FIRST = MappingProxyType({"policy": "uniform:vq2", "gpus": 1})  # of rows from before they said so

    def __init__(self, path: Path | None, conditions: dict[str, Any]) -> None:
        self.path, self.conditions = path, conditions
        known = path is not None and path.is_file()
        held = json.loads(path.read_text(encoding="utf-8"))["rows"] if path and known else []
        self.rows: list[dict[str, Any]] = [{**self._FIRST, **row} for row in held]

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in the place of an older one."""
        self.rows = [old for old in self.rows if any(old[key] != row[key] for key in self._CELL)] + [row]
        if self.path is not None:
            text = json.dumps({"conditions": self.conditions, "rows": self.rows}, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")


def _row(measured: Measured, limit_ms: float, device: str, commit: str, **cell: Any) -> dict[str, Any]:
    median = statistics.median(measured.tokens_ms)
    return {
        **cell,
        "ms_generate": median,
        "ms_mean": statistics.mean(measured.tokens_ms),
        "ms_step": statistics.median(measured.steps_ms) if measured.steps_ms else None,
        "share_of_roofline": limit_ms / median,
        "first_ms": measured.first_ms,
        "peak_gb": None if measured.peak_bytes is None else measured.peak_bytes / 1e9,
        "cache_gb": measured.cache_bytes / 1e9,
        "tokens": len(measured.tokens_ms),
        "device": device,
        "commit": commit,
    }


def bench_latency(
    model: Annotated[list[str] | None, typer.Option(help=f"Shape: one of {list(SHAPES)}; repeat for several.")] = None,
    context: Annotated[list[int] | None, typer.Option(min=1, help="Tokens of the prompt; repeat for several.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; repeat for several.")] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"One of {list(SYSTEMS)}; repeat. All by default.")] = None,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens to generate.")] = 96,
    policy: Annotated[str, typer.Option(help="What chooses the cache's tiers.")] = "error",
    weights: Annotated[str, typer.Option(help=f"Of experts: one of {list(_WEIGHT_BITS)}.")] = _BF16,
    fill: Annotated[
        bool, typer.Option("--fill", help="Random keys and values stand for the prompt, which is not computed.")
    ] = False,
    layers: Annotated[int | None, typer.Option(min=1, help="So many of the model's layers; all by default.")] = None,
    commit: Annotated[str, typer.Option(envvar="BENCH_COMMIT", help="What was measured.")] = "",
    json_file: JsonFile = None,
) -> None:
    """Time generate(): stock, and with each of our parts added (needs a CUDA device, but for the shape toy).

    Example: hf-subbyte-moe bench latency --model Qwen3-30B-A3B --context 65536 --fill --json latency.json
    """
    models = model or ["Qwen3-30B-A3B"]
    asked = _Asked(_checked(models, layers, system, weights), tokens, policy, weights, fill)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length of a growing cache
    device, console = DeviceClock(rank_device()), Console()
    with grouped(device.device):
        rate = device.copy_rate()
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        conditions = {**versions, "package": hf_subbyte_moe.__version__, "copy_bytes_a_second": rate}
        rows = _Rows(json_file if rank() == 0 else None, conditions)
        for name in models:
            device.clear()
            loaded = _make(name, weights, layers, device.device)
            shape = shape_of(config_of(name, layers), name)
            shape = replace(shape, expert_bytes=shape.expert_bytes * _WEIGHT_BITS[weights] / _WEIGHT_BITS[_BF16])
            for size, length in itertools.product(batch or [1], context or [1024]):
                for cell, measured in _time(loaded, name, size, length, asked, console):
                    read = with_packed_projections(shape) if cell["system"] == PACKED else shape
                    limit = roofline_ms(read, size, measured.read_bytes, rate, ranks())
                    rows.add(_row(measured, limit, device.name, commit, **cell, layers=len(shape.layers)))
                    console.print(f"{cell} {rows.rows[-1]['ms_generate']:.2f} ms")
            del loaded
        console.print(_table(rows.rows))


@dataclass(frozen=True)
class _Asked:
    """Of every model, batch and context."""

    systems: list[str]
    tokens: int
    policy: str
    weights: str
    fill: bool


def _time(
    model: PreTrainedModel, name: str, batch: int, context: int, asked: _Asked, console: Console
) -> Iterator[tuple[dict[str, Any], Measured]]:
    """What each system takes of the same prompt; one that does not fit on one GPU is left out."""
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(5, model.config.vocab_size, (batch, context), generator=generator).to(model.device)
    for system in asked.systems:
        where = {"model": name, "weights": asked.weights, "context": context, "batch": batch}
        cell = {**where, "system": system, "policy": asked.policy, "gpus": ranks()}
        try:
            measured = _run(model, system, ids, asked.tokens, {"policy": asked.policy}, asked.weights, asked.fill)
            if _OURS.get(system, {}).get("decode", {}).get("fused", False) and not measured.fused:
                console.print(f"{cell}: left out, fused kernels do not compute these steps")
                continue
            yield cell, measured
        except torch.cuda.OutOfMemoryError as problem:
            if ranks() > 1:  # others may have room, and would wait for this one
                raise
            console.print(f"{cell}: {str(problem).splitlines()[0]}")


def _checked(models: list[str], layers: int | None, systems: list[str] | None, weights: str) -> list[str]:
    """The systems that run, in this order.

    Raises:
        ValueError: what cannot run on these ranks or this device.
        BadParameter: an unknown name, or real shapes without a CUDA device.
    """
    known = list(_OURS) if weights != _BF16 else [name for name in SYSTEMS if name != PACKED]
    for given, possible in ((models, list(SHAPES)), (systems or [], known), ([weights], list(_WEIGHT_BITS))):
        for name in given:
            if name not in possible:
                raise typer.BadParameter(f"{name!r} is not one of {possible}")
    if not torch.cuda.is_available() and set(models) != {TOY}:
        raise typer.BadParameter(f"bench latency needs a CUDA device for real shapes; {TOY!r} runs on a CPU")
    if weights != _BF16 and ranks() > 1:
        raise ValueError(f"--weights {weights} is not possible on several ranks, which share {_BF16} experts alone")
    for name in models:
        heads = config_of(name, layers).num_key_value_heads
        if heads % ranks():
            raise ValueError(f"--model {name} is not possible on {ranks()} ranks: it has {heads} KV heads")
    for name in systems or []:
        reason = _obstacle(name)
        if reason is not None:
            raise ValueError(f"--system {name!r} is not possible here: {reason}")
    return systems or [name for name in known if _obstacle(name) is None]


def _obstacle(system: str) -> str | None:
    """Why a system cannot run on these ranks or this device."""
    if "decode" in _OURS.get(system, {}):
        if ranks() > 1:
            return "the steps of a model whose parts lie on several ranks are not captured"
        if not torch.cuda.is_available():
            return "steps are captured on a CUDA device alone"
    if system == STATIC and not torch.cuda.is_available():
        return "Transformers compiles steps on a CUDA device alone"
    return None


def _make(name: str, weights: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    if weights == _BF16:
        parallel = DistributedConfig(tp_plan="auto") if ranks() > 1 else None
        return random_model_of(config_of(name, layers), device, parallel)
    return random_packed_model(name, weights, layers, device)


def _table(rows: list[dict[str, Any]]) -> Table:
    header = (
        "model",
        "GPUs",
        "batch",
        "context",
        "system",
        "ms a token",
        "mean",
        "ms a step",
        "of roofline",
        "first, ms",
        "GB",
    )
    table = Table(*header, title=", ".join(sorted({row["device"] for row in rows})))
    for row in rows:
        cell = (str(row[key]) for key in ("model", "gpus", "batch", "context", "system"))
        numbers = (f"{row[key]:.2f}" for key in ("ms_generate", "ms_mean"))
        step = "-" if row["ms_step"] is None else f"{row['ms_step']:.2f}"
        first = "-" if row["first_ms"] is None else f"{row['first_ms']:.0f}"
        peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
        table.add_row(*cell, *numbers, step, f"{row['share_of_roofline']:.0%}", first, peak)
    return table
