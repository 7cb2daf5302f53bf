"""Make the result files of this project again, one after the other: ``python eval/reproduce.py``.

``eval/configs/reproduce.json`` says which commands make which file, on what, and about how long that takes. Commands
that measure many rows keep what they have when they are cut off. They say what they measured by ``BENCH_COMMIT``, or
by what git says if that is not set. The pages are rendered at the end.

Example: python eval/reproduce.py --texts heldout.jsonl --on gpu --minutes 30
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the module beside this file, wherever we are run

from commits import commit_of


ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "eval" / "configs" / "reproduce.json"
PLACES = {"cpu": 0, "gpu": 1, "2 gpus": 2}  # and how many GPUs that takes


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        files: result files, relative to the project; ``{file}`` stands for the first.
        on: key of ``PLACES``.
        minutes: that it takes, about; on a GPU, one H200's.
        command: words; ``{texts}`` and ``{calibration}`` stand for files that are given.
        keep: what it wrote, if that is another file than the first result file.
    """

    files: tuple[str, ...]
    on: str
    minutes: float
    command: tuple[str, ...]
    keep: str | None = None

    @property
    def wants(self) -> set[str]:
        """Files of texts that must be given."""
        return {name for name in ("texts", "calibration") if f"{{{name}}}" in self.command}

    @property
    def name(self) -> str:
        """Its result files."""
        return ", ".join(self.files)

    def shown(self) -> str:
        """The command as one would type it."""
        return shlex.join(self.files[0] if word == "{file}" else word for word in self.command)

    def words(self, given: dict[str, Path | None]) -> list[str]:
        """The command with files filled in, by this Python."""
        filled = {f"{{{name}}}": str(path) for name, path in given.items()} | {"{file}": self.files[0]}
        program, *words = [filled.get(word, word) for word in self.command]
        if program == "python":
            return [sys.executable, *words]
        return [str(Path(sys.executable).with_name(program)), *words]


def read_steps(path: Path = STEPS) -> list[Step]:
    """All steps.

    Raises:
        ValueError: a step that runs on something unknown.
    """
    steps = [
        Step(tuple(step["files"]), step["on"], step["minutes"], tuple(shlex.split(step["run"])), step.get("keep"))
        for step in json.loads(path.read_text(encoding="utf-8"))
    ]
    for step in steps:
        if step.on not in PLACES:
            raise ValueError(f"{path.name}: on={step.on!r} is not possible: one of {list(PLACES)}")
    return steps


def reason_to_skip(step: Step, given: dict[str, Path | None], gpus: int, left: float | None) -> str | None:
    """Why a step can't run here and now, or None."""
    if PLACES[step.on] > gpus:
        return f"needs {step.on}"
    missing = sorted(name for name in step.wants if given[name] is None)
    if missing:
        return f"needs --{missing[0]}"
    return "no time left" if left is not None and step.minutes > left else None


def environment() -> dict[str, str]:
    """Ours, with a name for what is measured: asked once, because every step changes files."""
    commit = os.environ.get("BENCH_COMMIT") or commit_of(ROOT)
    return {**os.environ, **({"BENCH_COMMIT": commit} if commit else {})}


def run(step: Step, given: dict[str, Path | None], variables: dict[str, str], console: Console) -> str | None:
    """Run a step; None, or how it failed."""
    console.print(f"[bold]{step.name}[/bold]: {step.shown()}", soft_wrap=True)
    code = subprocess.run(step.words(given), cwd=ROOT, env=variables, check=False).returncode
    if code:
        return f"exit code {code}"
    if step.keep is not None:
        shutil.copy(ROOT / step.keep, ROOT / step.files[0])
    return None


def main(
    file: Annotated[list[str] | None, typer.Option(help="Part of a file's name; repeat. All by default.")] = None,
    on: Annotated[list[str] | None, typer.Option(help='"cpu", "gpu" or "2 gpus"; repeat. All by default.')] = None,
    texts: Annotated[
        Path | None, typer.Option(help='JSON lines with a "text" each, to measure on.', exists=True, dir_okay=False)
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Others, that clusters are made on.", exists=True, dir_okay=False)
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin nothing that would end later.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Show the commands and run none.")] = False,
) -> None:
    """Run the commands behind the result files. Exits with 1 if one fails."""
    console, start, failed = Console(highlight=False), time.monotonic(), False
    given = {"texts": texts and texts.resolve(), "calibration": calibration and calibration.resolve()}
    chosen = [
        step
        for step in read_steps()
        if (not file or any(part in step.name for part in file)) and (not on or step.on in on)
    ]
    if not chosen:
        raise typer.BadParameter("no step is left: --list alone shows all")
    if list_only:
        for step in chosen:
            console.print(f"[bold]{step.name}[/bold] on {step.on}, {step.minutes:g} minutes", soft_wrap=True)
            console.print(f"  {step.shown()}", soft_wrap=True, markup=False)
        return
    variables = environment()
    table = Table("file", "on", "minutes", "how it went")
    for step in chosen:
        begun = time.monotonic()
        left = None if minutes is None else minutes - (begun - start) / 60
        said = reason_to_skip(step, given, torch.cuda.device_count(), left)
        if said is None:
            problem = run(step, given, variables, console)
            failed |= problem is not None
            said = problem or "done"
        table.add_row(step.name, step.on, f"{(time.monotonic() - begun) / 60:.1f}", said)
    console.print(table)
    for pages in ("eval/report.py", "kernels/benchmarks/moe_report.py"):
        failed |= subprocess.run([sys.executable, pages], cwd=ROOT, check=False).returncode != 0
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
