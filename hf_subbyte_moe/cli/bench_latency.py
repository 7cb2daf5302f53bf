"""``hf-subbyte-moe bench latency``: milliseconds a token of ``generate()``, stock and with our parts added one by one.

Models have real shapes and random weights, because what a step costs hardly depends on what a model has learned. Every
system generates from the same prompt; each one adds a part to the one before. A row says what share of the roofline it
reaches: the time in which the GPU copies as many bytes as the step must read: active weights and what the cache holds,
which is latents where a model caches these.
"""

import functools
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation.streamers import BaseStreamer

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.outputs import JsonFile
from hf_subbyte_moe.cli.shapes import SHAPES, cached_widths, random_model, random_packed_model
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.roofline import Shape, shape_of


STOCK, STATIC = "stock default", "stock static compiled"
_EXPERTS: dict[str, Any] = {"experts": {}}
_ROUTERS: dict[str, Any] = {**_EXPERTS, "routing": {"mode": "native"}}
_OURS: dict[str, dict[str, Any]] = {
    "cache": {"kv_cache": {"backend": "torch"}},
    "+ attention": {"kv_cache": {}},
    "+ experts": {"kv_cache": {}, **_EXPERTS},
    "+ router": {"kv_cache": {}, **_ROUTERS},
    "+ graph": {"kv_cache": {}, **_ROUTERS, "decode": {"cuda_graph": True, "fused": False}},
    "+ fused kernels": {"kv_cache": {}, **_ROUTERS, "decode": {"cuda_graph": True}},
}
SYSTEMS = (STOCK, STATIC, *_OURS)
_WARM_UP = 6  # tokens that are not counted: kernels are built and steps captured
_SLOW_TOKENS = 24  # of systems whose every token takes long
_COPY_BYTES = 4 << 30
_BF16 = "bf16"
_WEIGHT_BITS = {_BF16: 16.0, "int4": 4.5, "int4-g64": 4.25, "fp8": 8.125}  # of an expert's weights, scales included


@dataclass(frozen=True)
class Measured:
    """One run of ``generate``.

    Attributes:
        tokens_ms: spans between tokens, behind the first few.
        steps_ms: of the model's forward on the device, likewise; empty where it cannot be timed alone.
        first_ms: until the first token is there; None where the prompt was not computed.
        peak_bytes: allocated at most.
        cache_bytes: of keys and values at the end.
        read_bytes: of these, what a step reads: room for more is not read.
    """

    tokens_ms: list[float]
    steps_ms: list[float]
    first_ms: float | None
    peak_bytes: int
    cache_bytes: int
    read_bytes: int


class _Clock(BaseStreamer):
    """Notes when each token comes out; ``generate`` brings it to the host before."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """A token, or the prompt, is there."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


@contextmanager
def _timed_steps(model: PreTrainedModel) -> Iterator[Callable[[], list[float]]]:
    """Put events around each single-token forward; what they say, in ms."""
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    inner, own = model.forward, vars(model).get("forward")

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[-1] > 1:
            return inner(*args, **kwargs)
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        output = inner(*args, **kwargs)
        pair[1].record()
        events.append(pair)
        return output

    vars(model)["forward"] = forward
    try:
        yield lambda: [first.elapsed_time(last) for first, last in events[_WARM_UP:]]
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


@contextmanager
def _untimed() -> Iterator[Callable[[], list[float]]]:
    yield list


def measure(
    model: PreTrainedModel, ids: Tensor, tokens: int, options: dict[str, Any], cache: Cache | None = None
) -> Measured:
    """Run ``generate`` once.

    Args:
        model: on a CUDA device.
        ids: ``[B, T]`` prompt.
        tokens: to generate.
        options: of ``generate``.
        cache: empty, to be filled with random keys and values of all tokens but the last; None computes the prompt.
    """
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if cache is not None:
        _fill(model, cache, ids[:, 1:])
        options = {**options, CACHE_KW: cache}
    clock = _Clock()
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    settings = {**lengths, "do_sample": False, "return_dict_in_generate": True, **options}
    compiled = options.get("cache_implementation") == "static"  # and so are functions of ours, which they are not for
    with torch.no_grad(), _untimed() if compiled else _timed_steps(model) as steps:
        generate: Any = model.generate
        made = generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **settings)
        torch.cuda.synchronize()
        steps_ms = steps()
    spans = [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)]
    peak = torch.cuda.max_memory_allocated()
    first_ms = spans[0] if cache is None else None
    used = cache_of(made)
    held = _bytes(used)
    return Measured(spans[1 + _WARM_UP :], steps_ms, first_ms, peak, held, held - _spare_bytes(used))


def _fill(model: PreTrainedModel, cache: Cache, like: Tensor) -> None:
    """Random numbers for all that layers cache of ``like``'s tokens, packed without measuring."""
    widths = cached_widths(model)
    rows, tokens = like.shape
    generator = torch.Generator(like.device).manual_seed(0)
    for index, sides in enumerate(widths):
        keys, values = (
            torch.randn(rows, heads, tokens, width, dtype=model.dtype, device=like.device, generator=generator)
            for heads, width in sides
        )
        cache.update(keys, values, index)
        if isinstance(cache, EntropySubbyteCache):
            cache.packed_layers[index].settle(None)


def _bytes(cache: Any) -> int:
    if hasattr(cache, "allocated_bytes"):
        return int(cache.allocated_bytes())
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)


def _spare_bytes(cache: Any) -> int:
    """Of our cache, bytes of pools that hold nothing yet."""
    if not isinstance(cache, EntropySubbyteCache):
        return 0
    stores = [layer.rows.store for layer in cache.packed_layers.values()]
    return sum(
        store.nbytes() - sum(tensor.nbytes for name, tensor in store.state().items() if name != "counts")
        for store in stores
    )


def copy_rate(device: torch.device) -> float:
    """Bytes/s that the device copies, reads and writes counted."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds: list[float] = []
    for _ in range(8):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return 2 * _COPY_BYTES / min(seconds)


def roofline_ms(shape: Shape, batch: int, cache_bytes: int, rate: float) -> float:
    """The time in which what a step must read is copied."""
    weights = shape.dense_bytes + shape.moe_layers * shape.distinct_experts(batch) * shape.expert_bytes
    return float(1e3 * (weights + cache_bytes) / rate)


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

    _CELL = ("model", "weights", "context", "batch", "system", "policy")
    _FIRST = "uniform:vq2"  # the policy of rows from before they said so

    def __init__(self, path: Path | None, conditions: dict[str, Any]) -> None:
        self.path, self.conditions = path, conditions
        known = path is not None and path.is_file()
        held = json.loads(path.read_text(encoding="utf-8"))["rows"] if path and known else []
        self.rows: list[dict[str, Any]] = [{"policy": self._FIRST, **row} for row in held]

    def add(self, row: dict[str, Any]) -> None:
        """Put a row in the place of an older one."""
        self.rows = [old for old in self.rows if any(old[key] != row[key] for key in self._CELL)] + [row]
        if self.path is not None:
            text = json.dumps({"conditions": self.conditions, "rows": self.rows}, indent=1)
            self.path.write_text(text + "\n", encoding="utf-8")


def _row(measured: Measured, limit_ms: float, commit: str, **cell: Any) -> dict[str, Any]:
    median = statistics.median(measured.tokens_ms)
    return {
        **cell,
        "ms_generate": median,
        "ms_mean": statistics.mean(measured.tokens_ms),
        "ms_step": statistics.median(measured.steps_ms) if measured.steps_ms else None,
        "share_of_roofline": limit_ms / median,
        "first_ms": measured.first_ms,
        "peak_gb": measured.peak_bytes / 1e9,
        "cache_gb": measured.cache_bytes / 1e9,
        "tokens": len(measured.tokens_ms),
        "device": torch.cuda.get_device_name(),
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
    """Time generate(): stock, and with each of our parts added (needs a CUDA device).

    Example: hf-subbyte-moe bench latency --model Qwen3-30B-A3B --context 65536 --fill --json latency.json
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("bench latency needs a CUDA device")
    ours = list(_OURS) if weights != _BF16 else list(SYSTEMS)
    systems = system or ours
    for given, known in ((model or [], list(SHAPES)), (systems, ours), ([weights], list(_WEIGHT_BITS))):
        for name in given:
            if name not in known:
                raise typer.BadParameter(f"{name!r} is not one of {known}")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length of a growing cache
    device, console = torch.device("cuda"), Console()
    rate = copy_rate(device)
    torch.cuda.empty_cache()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    conditions = {**versions, "package": hf_subbyte_moe.__version__, "copy_bytes_a_second": rate}
    rows = _Rows(json_file, conditions)
    for name in model or ["Qwen3-30B-A3B"]:
        loaded = _make(name, weights, layers, device)
        shape = shape_of(SHAPES[name](**({} if layers is None else {"num_hidden_layers": layers})), name)
        shape = replace(shape, expert_bytes=shape.expert_bytes * _WEIGHT_BITS[weights] / _WEIGHT_BITS[_BF16])
        for size, length in itertools.product(batch or [1], context or [1024]):
            generator = torch.Generator().manual_seed(length)
            ids = torch.randint(5, loaded.config.vocab_size, (size, length), generator=generator).to(device)
            for which in systems:
                where = {"model": name, "weights": weights, "context": length, "batch": size}
                cell = {**where, "system": which, "policy": policy}
                try:
                    measured = _run(loaded, which, ids, tokens, {"policy": policy}, weights, fill)
                except torch.cuda.OutOfMemoryError as problem:
                    console.print(f"{cell}: {str(problem).splitlines()[0]}")
                    continue
                limit = roofline_ms(shape, size, measured.read_bytes, rate)
                rows.add(_row(measured, limit, commit, **cell, layers=len(shape.layers)))
                console.print(f"{cell} {rows.rows[-1]['ms_generate']:.2f} ms")
        del loaded
        gc.collect()
        torch.cuda.empty_cache()
    console.print(_table(rows.rows))


def _make(name: str, weights: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    if weights == _BF16:
        return random_model(name, layers, device)
    return random_packed_model(name, weights, layers, device)


def _table(rows: list[dict[str, Any]]) -> Table:
    header = (
        "model",
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
    table = Table(*header)
    for row in rows:
        cell = (str(row[key]) for key in ("model", "batch", "context", "system"))
        numbers = (f"{row[key]:.2f}" for key in ("ms_generate", "ms_mean"))
        step = "-" if row["ms_step"] is None else f"{row['ms_step']:.2f}"
        first = "-" if row["first_ms"] is None else f"{row['first_ms']:.0f}"
        table.add_row(*cell, *numbers, step, f"{row['share_of_roofline']:.0%}", first, f"{row['peak_gb']:.1f}")
    return table
