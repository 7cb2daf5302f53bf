"""``hf-subbyte-moe bench cache``: what the packed cache costs beside the plain one, in prefill and in decoding."""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.demo import Bits, Model, PolicyName, cache_options
from hf_subbyte_moe.cli.outputs import JsonFile
from hf_subbyte_moe.cli.prompts import needle_prompt
from hf_subbyte_moe.cli.running import layer_progress, load_model
from hf_subbyte_moe.patching import use_packed_attention
from hf_subbyte_moe.scoring import forward


_WARM_UP = 3
_WARM_UP_TOKENS = 512

Contexts = Annotated[
    list[int] | None, typer.Option("--context", min=1, help="Tokens of the prompt; repeat for several.")
]
Prefills = Annotated[int, typer.Option(min=1, help="Timed pairs of prefills.")]
Pairs = Annotated[int, typer.Option(min=1, help="Timed pairs of decode steps.")]
Quick = Annotated[bool, typer.Option("--quick", help="Two contexts (4096, 16384), one pair of prefills, 12 of steps.")]


@dataclass(frozen=True)
class Timing:
    """One context length; medians of paired runs.

    Attributes:
        context: tokens of the prompt.
        plain_prefill_s: prefill with the plain cache, seconds.
        packed_prefill_s: the same with ours, measuring and packing included.
        prefill_ratio: median of the paired ratios, ours over plain.
        plain_step_ms: a decode step with the plain cache.
        packed_step_ms: the same with ours.
        step_ratio: median of the paired ratios, ours over plain.
    """

    context: int
    plain_prefill_s: float
    packed_prefill_s: float
    prefill_ratio: float
    plain_step_ms: float
    packed_step_ms: float
    step_ratio: float


def _clock(model: PreTrainedModel, run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds of one call, the device's work included."""
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def _prefill(model: PreTrainedModel, ids: Tensor, cache: Cache, name: str) -> tuple[float, Tensor]:
    with layer_progress(model, f"prefill {ids.shape[1]}, {name}"):
        seconds, logits = _clock(model, lambda: forward(model, ids, cache))
    return seconds, logits.argmax(-1)


def _pair(step: Callable[[Cache], float], held: tuple[Cache, Cache], swapped: bool) -> list[float]:
    """One step with each cache; pairs take turns in who goes first."""
    if swapped:
        return [step(cache) for cache in reversed(held)][::-1]
    return [step(cache) for cache in held]


def time_context(model: PreTrainedModel, ids: Tensor, prefills: int, pairs: int, options: dict[str, object]) -> Timing:
    """Time prefills in pairs, then decode steps in pairs, so that drift hits both caches alike.

    Args:
        model: the model, with our attention function in place.
        ids: ``[1, T]`` prompt.
        prefills: timed pairs of prefills.
        pairs: timed pairs of decode steps.
        options: keys of ``cache_config``.
    """
    config = model.config.get_text_config(decoder=True)

    def caches() -> tuple[Cache, Cache]:
        return DynamicCache(config=config), EntropySubbyteCache(config, **options)

    def step(cache: Cache) -> float:
        return _clock(model, lambda: forward(model, token, cache))[0]

    with torch.no_grad():
        for cache in caches():  # warm up
            forward(model, ids[:, :_WARM_UP_TOKENS], cache)
        prefill = []
        for _ in range(prefills):
            held = caches()
            runs = [_prefill(model, ids, cache, name) for cache, name in zip(held, ("plain", "packed"), strict=True)]
            prefill.append([seconds for seconds, _ in runs])
        token = runs[0][1]
        steps = [_pair(step, held, swapped=bool(number % 2)) for number in range(_WARM_UP + pairs)][_WARM_UP:]

    def median(timed: list[list[float]], which: int) -> float:
        return statistics.median(pair[which] for pair in timed)

    return Timing(
        context=ids.shape[1],
        plain_prefill_s=median(prefill, 0),
        packed_prefill_s=median(prefill, 1),
        prefill_ratio=statistics.median(packed / plain for plain, packed in prefill),
        plain_step_ms=1e3 * median(steps, 0),
        packed_step_ms=1e3 * median(steps, 1),
        step_ratio=statistics.median(packed / plain for plain, packed in steps),
    )


def bench_cache(
    model: Model = None,
    context: Contexts = None,
    bits: Bits = None,
    policy: PolicyName = "error",
    prefills: Prefills = 3,
    pairs: Pairs = 40,
    quick: Quick = False,
    json_file: JsonFile = None,
) -> None:
    """Time prefill and decode steps of a model with the packed cache and with the plain one.

    Example: hf-subbyte-moe bench cache --quick
    """
    console = Console()
    options = cache_options(policy, bits)
    loaded, tokenizer = load_model(model)
    use_packed_attention(loaded)
    if quick:
        prefills, pairs = 1, 12
    contexts = context or ([4096, 16384] if quick else [4096, 8192, 16384, 32768])
    timings = []
    for tokens in contexts:
        ids = needle_prompt(tokenizer, tokens, seed=0, depth=0.5).ids.to(loaded.device)
        timings.append(time_context(loaded, ids, prefills, pairs, options))
    console.print(_table(timings, str(loaded.device), policy))
    if json_file is not None:
        report = {"conditions": _conditions(loaded, policy, bits), "timings": [asdict(timing) for timing in timings]}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        console.print(f"numbers written to {json_file}")


def _conditions(model: PreTrainedModel, policy: str, bits: float | None) -> dict[str, object]:
    """What a reader needs to know beside the numbers."""
    on_gpu = model.device.type == "cuda"
    return {
        "model": Path(str(model.config.name_or_path)).name,
        "policy": policy,
        "bits": "default" if bits is None else bits,
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU ({torch.get_num_threads()} threads)",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "package": hf_subbyte_moe.__version__,
    }


def _table(timings: list[Timing], device: str, policy: str) -> Table:
    table = Table(
        title=f"packed cache (policy {policy!r}) beside the plain one; {device}, torch {torch.__version__}",
        title_justify="left",
    )
    for name in ("context", "prefill s", "packed", "added", "step ms", "packed", "ratio"):
        table.add_column(name, justify="right")
    for timing in timings:
        table.add_row(
            f"{timing.context:,}",
            f"{timing.plain_prefill_s:.2f}",
            f"{timing.packed_prefill_s:.2f}",
            f"{timing.prefill_ratio - 1:+.0%}",
            f"{timing.plain_step_ms:.1f}",
            f"{timing.packed_step_ms:.1f}",
            f"{timing.step_ratio:.2f}",
        )
    return table
