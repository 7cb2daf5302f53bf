"""What packed caches cost in quality: ``python eval/run.py CONFIG.json``; see ``eval/quality/``.

A run decodes texts and prompts through the real packed cache and through the exact one and writes a row for each
policy, protocol, context and task. It exits with 1 where the control, a code of one bit a value, does not lose.

Example: python eval/run.py eval/configs/smoke.json
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package beside this file, wherever we are run

from commits import commit_of
from pool import job_folder, run_jobs
from quality.caches import CONTROL
from quality.config import ROOT, QualityConfig, read_config
from quality.harness import Keep, Only, Run
from quality.parts import jobs_of, parts_of
from quality.rows import ResultFile, Row, control_failures
from quality.tasks import OWN_TEXTS


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _name(row: Row) -> str:
    parts = [row["policy"], row["codebook"], *(f"{key}={value}" for key, value in row["options"].items())]
    return " ".join(str(part) for part in parts if part is not None) + (" *" if row["default"] else "")


def result_table(rows: list[Row]) -> Table:
    """A line per row; ``*`` marks the shipped default."""
    table = Table(title="packed caches beside the exact one; * is the shipped default", title_justify="left")
    for name in ("model", "protocol", "context", "task", "policy"):
        table.add_column(name, overflow="fold")
    for name in ("codes", "bits", "total", "mass", "KL", "KL p99", "dNLL", "top-1", "score", "exact", "n"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["model"],
            row["protocol"],
            f"{row['context']:,}",
            row["task"],
            _name(row),
            *(_shown(row[key], ".2f") for key in ("code_bits", "bits", "bits_total")),
            _shown(row["mass"], ".0%"),
            f"{row['kl']:.2g}",
            f"{row['kl_p99']:.2g}",
            f"{row['dnll']:+.4f}",
            f"{row['top1']:.3f}",
            _shown(row["score"], ".2f"),
            _shown(row["score_exact"], ".2f"),
            str(row["n"]),
        )
    return table


def refuse_unknown(config: QualityConfig, filters: list[str]) -> None:
    """Refuse filters that fit nothing in a config.

    Raises:
        ValueError: there is one; lists what there is.
    """
    contexts = {str(context) for model in config.models for context in model.contexts or config.contexts}
    known = {
        "model": {model.name for model in config.models},
        "context": contexts,
        "protocol": set(config.protocols),
        "task": set(config.tasks),
        "policy": {CONTROL, *(entry.policy for entry in config.policies)},
    }
    for text in filters:
        key, _, value = text.partition("=")
        if value not in known[key]:
            raise ValueError(f"--only {text!r} fits nothing in the config: one of {sorted(known[key])}")


def _side_by_side(
    config: QualityConfig,
    results: ResultFile,
    at_once: int,
    keep: Keep,
    only: list[str],
    options: tuple[str | None, str],
) -> list[str]:
    """Measure parts of a run in processes of their own; says which failed."""
    device, commit = options
    words = [str(Path(__file__).resolve()), "--commit", commit, *(["--resume"] if keep is Keep.SAME else [])]
    words += [] if device is None else ["--device", device]
    words += [] if config.texts is None else ["--texts", str(Path(config.texts).resolve())]
    texts = OWN_TEXTS if config.texts is None else Path(config.texts).name
    jobs = jobs_of(parts_of(config, results, Only(only), keep, texts), job_folder(), words)
    for job in jobs if keep is Keep.SAME else []:  # a part knows how large its rows must be
        held = [row for row in results.rows if row["commit"] == commit]
        job.out.write_text(json.dumps({"rows": held}), encoding="utf-8")

    def gather(path: Path) -> None:
        found = ResultFile(path)
        for row in found.rows:
            if results.find(row) != row:
                results.add(row)
        for cell in found.dropped:
            results.drop(cell)

    return run_jobs(jobs, at_once, gather)


def main(
    config_file: Annotated[
        Path, typer.Argument(metavar="CONFIG.json", help="What to run.", exists=True, dir_okay=False)
    ],
    texts: Annotated[
        Path | None,
        typer.Option(help='JSON lines with a "text" each, instead of the config\'s.', exists=True, dir_okay=False),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="the GPU if there is one")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many texts, and prompts of a task.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE: model, context, protocol, task or policy; repeat. The control always runs."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep rows of the same commit and size instead of measuring them again.")
    ] = False,
    missing: Annotated[
        bool, typer.Option("--missing", help="Keep all rows, whatever their commit, and measure those that lack.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the device; a small model leaves room.")] = 1,
    commit: Annotated[
        str | None, typer.Option(envvar="BENCH_COMMIT", help="What is measured.", show_default="what git says")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file.", show_default="the config's", dir_okay=False)] = None,
) -> None:
    """Measure what packed caches change: loss, KL, top-1, and answers about long texts."""
    console = Console()
    try:
        config = read_config(config_file)
        if texts is not None:
            config = replace(config, texts=str(texts))
        if limit is not None:
            config = replace(config, windows=min(limit, config.windows), prompts=min(limit, config.prompts))
        results = ResultFile(ROOT / config.out if out is None else out)
        label = commit_of(ROOT) if commit is None else commit
        keep = Keep.ALL if missing else Keep.SAME if resume else Keep.NOTHING
        run = Run(config, results, device, label, Only(only or []), keep)
        refuse_unknown(config, only or [])
        if jobs > 1:
            failed = _side_by_side(config, results, jobs, keep, only or [], (device, label))
            console.print(result_table([row for row in results.rows if row["commit"] == label]))
            for failure in failed:
                console.print(f"[red]failed:[/red] {failure}", markup=True, highlight=False)
            raise typer.Exit(1 if failed else 0)
        run.go()
        if not (run.rows or run.dropped or run.skipped or keep is Keep.ALL):
            raise ValueError(f"--only {' --only '.join(only or [])} together leave nothing to measure")
    except (ValueError, OSError) as error:
        console.print(f"[red]error:[/red] {error}", markup=True, highlight=False)
        raise typer.Exit(2) from None
    console.print(result_table(run.rows))
    for name, reason in run.skipped.items():
        console.print(f"[red]skipped:[/red] {name}: {reason}", highlight=False)
    for cell in run.dropped:
        place = ", ".join(str(cell[key]) for key in ("model", "protocol", "context", "task"))
        console.print(f"dropped: {place}: the exact cache itself scores {cell['score_exact']:.2f}")
    failures = control_failures(run.rows)
    for failure in failures:
        console.print(f"[red]the control does not lose:[/red] {failure}", highlight=False)
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
