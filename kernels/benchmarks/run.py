"""Time decode attention over packed tiles beside bf16 attention: ``python kernels/benchmarks/run.py``.

It needs a CUDA device. A full run takes about 8 minutes and writes ``results/decode_attention.json`` after each cell
(a model shape, a batch, a context). What a packed cache is compared with comes first in a cell and takes longest: all
attention of PyTorch, and ours in Triton, which is compiled and tuned. ``--merge --reuse-baselines`` takes it from the
file and begins with rows. ``--smoke`` goes through everything with tiny caches, on a CPU too. ``--tune`` chooses the
CUDA kernel's configurations instead; ``--plot`` and ``--report`` only read the result file.
"""

import datetime
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import plot
import results
import torch
import typer
from baselines import Baseline, brief, failures, fastest, time_baselines, time_quantized_cache
from gate import packed_gate
from inputs import PackedInput, input_sets, packed_bytes
from limits import Budget, DeviceLostError, Only, check_device
from results import Measured, Record, error_ratio, not_right
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from shapes import MIX, MIXTRAL, Cell, Variant, backends, grid, smoke_grid, variants
from timing import DESCRIPTION, Clock
from tune import CONFIGS, tune

from subbyte_kernels.decode_attention import AttentionResult, decode_attention_reference


_SLOW_SETS = 2  # plain PyTorch takes so long that no cache matters
_WIDTH = 150  # of tables, where the output is no terminal
_console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)


def _attention(backend: str, given: PackedInput) -> AttentionResult:
    scaling = given.query.shape[-1] ** -0.5
    if backend == "torch":
        return decode_attention_reference(given.query, given.exact, given.tiles, scaling)
    from subbyte_kernels.decode_attention.select import decode_attention

    return decode_attention(given.query, given.exact, given.tiles, scaling, backend=backend)


def measure(cell: Cell, variant: Variant, backend: str, clock: Clock) -> Measured:
    """Check one variant's output, then time it."""
    sets = input_sets(cell, variant, clock.device)
    gate = packed_gate(cell, sets[0])
    size = packed_bytes(sets[0])
    try:
        error = gate.error(_attention(backend, sets[0]).output)
        ratio = error_ratio(error, gate.plain_error)
        if not_right(ratio):
            reason = f"error {error:.2e} is {results.shown(ratio, '.1f')} times that of bf16 attention"
            return Measured(None, size, error, gate.plain_error, reason)
        graph = backend != "torch"
        timed = sets if graph else sets[:_SLOW_SETS]
        timing = clock.time([functools.partial(_attention, backend, given) for given in timed], graph=graph)
    except failures() as problem:
        return Measured(None, size, None, gate.plain_error, brief(problem))
    return Measured(timing, size, error, gate.plain_error)


def _time_cell_baselines(cell: Cell, clock: Clock, notes: list[str], tell: Callable[[str], None]) -> list[Baseline]:
    """All baselines of a cell, or none with a note where its cache does not fit the device."""
    timed: list[Baseline] = []
    try:
        timed = time_baselines(cell, clock, tell)
        check_device(clock.device)
        if cell.shape is MIXTRAL and cell.batch == 1:
            tell("timing Transformers' QuantizedCache")
            other = time_quantized_cache(cell, clock)
            timed.append(other)
            if other.failed:
                notes.append(f"{cell.name}: {other.name} was not timed: {other.failed}")
    except torch.OutOfMemoryError:
        notes.append(f"{cell.name}: {cell.plain_bytes / 2**30:.0f} GiB of bf16 cache do not fit beside what it needs")
    check_device(clock.device)
    return timed


def conditions_of(device: torch.device, copy_gbs: float | None) -> Record:
    """What a reader needs to know beside the numbers."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "not installed"
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else f"CPU ({torch.get_num_threads()} threads)"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton_version,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_gpu else "none",
        "commit": os.environ.get("BENCH_COMMIT") or _output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "copy_gbs": copy_gbs,
        "timing": DESCRIPTION if on_gpu else "wall clock, calls one by one: only to try the scripts out",
    }


def _output(*command: str) -> str:
    """First line that a program prints, or "unknown"."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, cwd=results.FOLDER, capture_output=True, text=True, check=False)
    return (done.stdout.strip().splitlines() or ["unknown"])[0] if done.returncode == 0 else "unknown"


def planned(cell: Cell, only: Only, smoke: bool, on_gpu: bool) -> list[tuple[Variant, str]]:
    """What is timed in a cell beside its baselines."""
    return [
        (variant, backend)
        for variant in filter(only.variant, variants(cell, smoke))
        for backend in filter(only.backend, backends(cell, variant, smoke) if on_gpu else ["torch"])
    ]


class Run:
    """One run: cells one after the other, the result file written after each."""

    def __init__(
        self, device: torch.device, out: Path, only: Only, budget: Budget, earlier: Record | None, smoke: bool
    ) -> None:
        """``earlier``: results to merge the new ones into, or None. ``smoke``: every variant in every cell."""
        self.clock = Clock(device)
        copy_gbs = self.clock.copy_gbs() if device.type == "cuda" else self.clock.copy_gbs(1 << 24)
        self.conditions = conditions_of(device, copy_gbs)
        self.out, self.only, self.budget, self.earlier, self.smoke = out, only, budget, earlier, smoke
        self.rows: list[Record] = []
        self.baselines: list[Record] = []
        self.notes: list[str] = []
        _console.print(f"{self.conditions['device']}: device copy {copy_gbs:.0f} GB/s")

    def results(self) -> Record:
        skipped = [results.skipped(what) for what in self.budget.skipped]
        found = {
            "conditions": self.conditions,
            "rows": self.rows,
            "baselines": self.baselines,
            "notes": list(dict.fromkeys([*self.notes, *skipped])),
        }
        return found if self.earlier is None else results.merged(self.earlier, found)

    def save(self) -> None:
        results.save(self.results(), self.out)

    def cell(self, cell: Cell, reuse: bool) -> None:
        """Everything in one cell."""
        timed = results.baselines_of(cell, self.earlier["baselines"]) if reuse and self.earlier is not None else []
        if not timed:
            # a pass over all baselines reads the cache some hundred times
            if not self.budget.allows(5 + cell.plain_bytes / 4e9, cell.name):
                return
            tell = functools.partial(self._tell, cell, "bf16")
            time_all = functools.partial(_time_cell_baselines, cell, self.clock, self.notes, tell)
            timed = self.budget.within(cell.name, time_all) or []
            self.baselines += results.baseline_records(cell, timed)
        best = fastest(timed)
        self._tell(cell, "best bf16", "-" if best is None else f"{best.us:8.1f} us  {best.name}")
        for variant, backend in planned(cell, self.only, self.smoke, self.clock.device.type == "cuda"):
            name = f"{cell.name}, {variant.name}, {backend}"
            if self.budget.allows(4 + cell.plain_bytes / 4e10, name):
                if backend not in {line["backend"] for line in self.rows}:
                    self._tell(cell, f"{variant.name} {backend}", "making packed caches, compiling")
                measured = self.budget.within(name, functools.partial(measure, cell, variant, backend, self.clock))
                if measured is not None:
                    self._add(cell, variant, backend, measured, best)
                check_device(self.clock.device)

    def _add(self, cell: Cell, variant: Variant, backend: str, measured: Measured, best: Baseline | None) -> None:
        copy_gbs = self.conditions["copy_gbs"]
        line = results.row(cell, variant, backend, measured, best, copy_gbs, self.conditions)
        if variant is MIX:
            known = self.rows if self.earlier is None else [*self.earlier["rows"], *self.rows]
            line["weighted_mean_us"] = results.weighted_mean_us(cell, variant, backend, known)
        self.rows.append(line)
        name = f"{variant.name} {backend}"
        if line["failed"]:
            self._tell(cell, name, f"[red]FAILED[/red] {escape(line['failed'])}")
            return
        if not line["graph"] and backend != "torch" and self.clock.device.type == "cuda":
            self.notes.append(f"{cell.name}, {name}: no CUDA graph could be captured, launches count")
        self._tell(
            cell,
            name,
            f"{line['us']:8.1f} us  x{results.shown(line['speedup'], '.2f')}  "
            f"{results.shown(line['copy_share'], '.0%')} of copy  error {results.shown(line['error_ratio'], '.2f')}",
        )

    def _tell(self, cell: Cell, name: str, text: str) -> None:
        _console.print(f"{cell.shape.name:14s} {cell.batch:3d} {cell.context:7d}  {name:20s} {text}", soft_wrap=True)


def run_grid(run: Run, cells: list[Cell], reuse: bool) -> bool:
    """Measure; whether everything that was tried is right."""
    good = True
    try:
        for cell in cells:
            try:
                run.cell(cell, reuse)
            finally:
                run.save()
    except DeviceLostError as error:
        run.notes.append(f"the run ended early, the device was lost: {error}")
        _console.print(f"[red]device lost:[/red] {escape(str(error))}")
        good = False
    run.save()
    _console.print(_table(run.results()))
    for note in run.results()["notes"]:
        _console.print(f"note: {escape(note)}", soft_wrap=True)
    _console.print(f"numbers written to {run.out}", soft_wrap=True)
    return good and not any(line["failed"] for line in run.rows)


def _table(found: Record) -> Table:
    conditions = found["conditions"]
    table = Table(title=f"decode attention, {conditions['device']}, torch {conditions['torch']}", title_justify="left")
    for name in ("shape", "batch", "context", "keys", "values", "kernel"):
        table.add_column(name)
    for name in ("us", "again", "bf16 us", "speed-up", "of copy", "error"):
        table.add_column(name, justify="right")
    for line in results.in_order(found["rows"]):
        lost = line["speedup"] is not None and line["speedup"] < 1
        table.add_row(
            *(str(line[key]) for key in ("shape", "batch", "context", "k_tier", "v_tier", "backend")),
            results.time_shown(line),
            results.shown(line["us_again"], ".1f"),
            results.shown(line["baseline_us"], ".1f"),
            results.shown(line["speedup"], ".2f"),
            results.shown(line["copy_share"], ".0%"),
            results.shown(line["error_ratio"], ".2f"),
            style="red" if line["failed"] or lost else None,
        )
    return table


def _smoke_pages(out: Path) -> None:
    """Draw and render the smoke run's numbers beside them."""
    found = results.load(out)
    page = out.with_name("README.md")
    page.write_text("<!-- report: decode_attention -->\n<!-- end report -->\n", encoding="utf-8")
    results.render_readme(page, out)
    if any(line["speedup"] for line in found["rows"]):
        plot.plot_speedup(found, out.with_name("decode_attention.png"))
        plot.plot_roofline(found, out.with_name("roofline.png"))
    _console.print(f"page and pictures are in {out.parent}", soft_wrap=True)


def main(
    out: Annotated[Path | None, typer.Option(help="Result file. [default: results/decode_attention.json]")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="shape=, batch=, context=, pair= or backend=; repeat for more. Example: pair=vq2/vq2."),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="Seconds without imports; what no longer fits is skipped or broken off, and listed."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Keep rows of the result file that this run lacks.")] = False,
    reuse: Annotated[
        bool, typer.Option("--reuse-baselines", help="With --merge: take baselines from the result file.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny caches, seconds; writes to a temporary folder.")
    ] = False,
    tuning: Annotated[bool, typer.Option("--tune", help="Choose the CUDA kernel's configurations instead.")] = False,
    draw: Annotated[bool, typer.Option("--plot", help="Draw the result file instead of measuring.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Render the result file into kernels/README.md.")] = False,
) -> None:
    """Time decode attention over packed tiles beside the fastest bf16 attention.

    Exits with 1 if any output is not right or any kernel cannot run, with 2 if what is asked is not possible.

    Example: run.py --only shape=mixtral --only batch=1 --deadline 120
    """
    budget, wanted = Budget(deadline), Only(only or [])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if smoke and out is None:
        out = Path(tempfile.mkdtemp(prefix="decode_attention_")) / "decode_attention.json"
    target = results.RESULT_FILE if out is None else out
    if draw or report:
        if not target.is_file():  # else the page would lose its numbers
            raise ValueError(f"there is no result file {str(target)!r}")
        if draw:
            plot.plot_speedup(results.load(target), target.with_name("decode_attention.png"))
            plot.plot_roofline(results.load(target), target.with_name("roofline.png"))
        if report:
            results.render_readme(result_file=target)
        return
    cells = [cell for cell in (smoke_grid() if smoke else grid()) if wanted.cell(cell)]
    if not tuning:
        cells = [cell for cell in cells if planned(cell, wanted, smoke, device.type == "cuda" or not smoke)]
    if not cells:
        raise ValueError(f"--only leaves nothing of {[cell.name for cell in grid()]}")
    if device.type != "cuda" and (tuning or not smoke):
        raise ValueError("measuring needs a CUDA device; --smoke goes through everything on a CPU")
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        if tuning:
            configs = target.with_name("configs.json") if smoke else CONFIGS
            good = tune(Clock(device), cells, wanted, budget, configs, target.with_name("tuning.json"))
        else:
            earlier = results.load(target) if (merge or reuse) and target.exists() else None
            good = run_grid(Run(device, target, wanted, budget, earlier, smoke), cells, reuse)
            if smoke:
                _smoke_pages(target)
    raise typer.Exit(0 if good else 1)


def entry() -> None:
    """Run; what a user did wrong is one line on standard error and exit code 2; 1 is for kernels."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    entry()
