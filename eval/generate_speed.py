"""Time to the first token, milliseconds a token and peak memory of ``generate``, with packed caches and a plain one.

A model of Mixtral-8x7B's shape with few layers and random weights: what a layer costs does not depend on what it has
learned, and a few layers fit any GPU. So few layers are bound by the host, unless decode steps are captured in a CUDA
graph: one row shows that.

Example: python eval/generate_speed.py --json eval/results/generate_speed.json
"""

import gc
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME


_WARM_UP = 4
# what ``generate`` is given, and what is applied to the model before
_CACHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dynamic": ({"cache_implementation": "dynamic"}, {}),
    "uniform:vq2": ({"cache_implementation": CACHE_NAME, "cache_config": {"policy": "uniform:vq2"}}, {}),
    "uniform:vq2, captured": ({}, {"kv_cache": {"policy": "uniform:vq2"}, "decode": {"cuda_graph": "auto"}}),
    "error, 2.5 bits": ({"cache_implementation": CACHE_NAME}, {}),
}


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token comes out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """A token, or the prompt, is there."""
        if value.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


def mixtral_shaped(layers: int, device: torch.device) -> PreTrainedModel:
    """Mixtral-8x7B's layer shapes, random bf16 weights."""
    config = MixtralConfig(num_hidden_layers=layers, max_position_embeddings=1 << 18, sliding_window=None)
    with device:
        torch.manual_seed(0)
        return MixtralForCausalLM(config).to(torch.bfloat16).eval()


@contextmanager
def prepared(model: PreTrainedModel, cache: str) -> Iterator[dict[str, Any]]:
    """Options of ``generate`` for one of the caches; what it changes in the model is taken back afterwards.

    Raises:
        ValueError: steps should have been captured and were not.
    """
    options, applied = _CACHES[cache]
    if applied:
        hf_subbyte_moe.apply(model, applied)
    try:
        yield options
        refused = vars(model)["forward"].refused if "decode" in applied else []
    finally:
        hf_subbyte_moe.restore(model)
    if refused:
        raise ValueError(f"steps of {cache!r} were not captured: {refused[0]}")


def token_times(
    model: PreTrainedModel, ids: torch.Tensor, tokens: int, options: dict[str, Any]
) -> tuple[float, list[float], int]:
    """Milliseconds to the first token, and of each later one after a few to warm up; bytes allocated at most."""
    clock = _Clock()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=clock, **options)
    spans = [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return spans[0], spans[1 + _WARM_UP :], torch.cuda.max_memory_allocated()


def main(
    context: Annotated[list[int] | None, typer.Option(min=256, help="Tokens of the prompt; repeat.")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens to decode.")] = 160,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; repeat.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each cache, in turn.")] = 2,
    commit: Annotated[str, typer.Option(envvar="BENCH_COMMIT", help="What was measured.")] = "",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers here, beside those of other sizes.")
    ] = None,
) -> None:
    """Time decoding with DynamicCache and with packed caches."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length of a growing cache
    device = torch.device("cuda")
    model = mixtral_shaped(layers, device)
    for name in _CACHES:  # kernels are compiled here
        with torch.no_grad(), prepared(model, name) as options:
            token_times(model, torch.randint(5, 30000, (1, 1024), device=device), 16, options)
    rows: list[dict[str, Any]] = []
    sizes = [(rows_at_once, length) for rows_at_once in batch or [1] for length in context or [8192, 32768, 131072]]
    for rows_at_once, length in sizes:
        ids = torch.randint(5, 30000, (rows_at_once, length), generator=torch.Generator().manual_seed(1)).to(device)
        times: dict[str, list[float]] = {name: [] for name in _CACHES}
        first: dict[str, list[float]] = {name: [] for name in _CACHES}
        peaks: dict[str, int] = {}
        for _ in range(rounds):
            for name in _CACHES:
                with torch.no_grad(), prepared(model, name) as options:
                    started, steps, peak = token_times(model, ids, tokens, options)
                first[name].append(started)
                times[name] += steps
                peaks[name] = max(peaks.get(name, 0), peak)
        plain = statistics.mean(times["dynamic"])
        for name, values in times.items():
            rows.append(
                {
                    "cache": name,
                    "batch": rows_at_once,
                    "context": length,
                    "tokens": tokens,
                    "first_ms": min(first[name]),
                    "peak_gb": peaks[name] / 1e9,
                    "ms_mean": statistics.mean(values),
                    "ms_median": statistics.median(values),
                    "speedup": plain / statistics.mean(values),
                    "commit": commit,
                }
            )
    table = Table("cache", "batch", "context", "first token, ms", "ms, mean", "median", "times dynamic", "peak, GB")
    for row in rows:
        mean, median, speedup = (f"{row[key]:.2f}" for key in ("ms_mean", "ms_median", "speedup"))
        place = (str(row[key]) for key in ("cache", "batch", "context"))
        table.add_row(*place, f"{row['first_ms']:.0f}", mean, median, speedup, f"{row['peak_gb']:.2f}")
    Console().print(table)
    if json_file is not None:
        conditions = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "package": hf_subbyte_moe.__version__,
            "model": f"{layers} layers of Mixtral-8x7B's shape, random bf16 weights",
        }
        known = json.loads(json_file.read_text()) if json_file.exists() else {"rows": []}
        if known.get("conditions", conditions) != conditions:
            raise ValueError(f"{json_file} holds rows of other conditions: give another file")
        sizes_now = {(row["batch"], row["context"]) for row in rows}
        rows += [row for row in known["rows"] if (row["batch"], row["context"]) not in sizes_now]
        rows.sort(key=lambda row: (row["batch"], row["context"]))
        json_file.write_text(json.dumps({"conditions": conditions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
