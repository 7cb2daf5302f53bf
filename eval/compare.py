"""Two runs of ``hf-subbyte-moe eval`` on the same documents: ``python eval/compare.py A.json B.json``.

Prints paired differences with 95 % intervals (bootstrap over documents). Runs of different tasks, seeds or protocols
are refused (exit code 2). Exits with 1 where B is worse than A by more than the budget.

Example: python eval/compare.py eval/results/ci.json build/eval/report.json --budget 0.05 --budget nll=0.01
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_subbyte_moe.results import Difference, choose_cache, compare, read_rows


_BUDGET = 0.05
_WIDTH = 120


class Budgets:
    """The loss that each metric may have."""

    def __init__(self, given: list[str]) -> None:
        """Read ``X`` and ``METRIC=X``; raises ValueError."""
        self._general, self._own = _BUDGET, {}
        for text in given:
            metric, _, number = text.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = -1.0
            if not value >= 0:
                raise ValueError(f"--budget {text!r} is not possible: a number from 0 on, or METRIC=NUMBER")
            if metric:
                self._own[metric] = value
            else:
                self._general = value

    def of(self, difference: Difference) -> float:
        """The budget of one line."""
        return self._own.get(difference.metric, self._general)


def difference_table(differences: list[Difference], budgets: Budgets) -> Table:
    """A line for each task and length."""
    table = Table(title="B less A, paired", title_justify="left")
    for name in ("task", "length", "metric"):
        table.add_column(name)
    for name in ("A", "B", "B - A", "95 % interval", "loss", "budget", "n"):
        table.add_column(name, justify="right")
    for difference in differences:
        *_, task, length = difference.place
        table.add_row(
            str(task),
            "-" if length is None else f"{length:,}",
            difference.metric,
            f"{difference.before:.4f}",
            f"{difference.after:.4f}",
            f"{difference.change:+.4f}",
            f"{difference.low:+.4f} to {difference.high:+.4f}",
            f"{difference.loss:+.4f}",
            f"{budgets.of(difference):g}",
            str(difference.n),
        )
    return table


def main(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The first run.", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The second run.", exists=True, dir_okay=False)],
    budget: Annotated[
        list[str] | None,
        typer.Option(help="The most that B may lose in a line, in the metric's own units; METRIC=X for one metric."),
    ] = None,
    cache_a: Annotated[str | None, typer.Option(help="Which cache of A, where it holds several.")] = None,
    cache_b: Annotated[str | None, typer.Option(help="Which cache of B, where it holds several.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
) -> None:
    """Compare two runs, pair by pair."""
    console = Console()
    console.width = max(console.width, _WIDTH)
    try:
        budgets = Budgets(budget or [])
        rows = (
            choose_cache(read_rows(before), cache_a, before.name),
            choose_cache(read_rows(after), cache_b, after.name),
        )
        differences = compare(*rows, seed=seed)
    except ValueError as error:
        console.print(f"[red]refused:[/red] {error}", highlight=False)
        raise typer.Exit(2) from None
    console.print(difference_table(differences, budgets))
    worse = [difference for difference in differences if difference.loss > budgets.of(difference)]
    for difference in worse:
        *_, task, length = difference.place
        console.print(f"[red]over the budget:[/red] {task} at {length} loses {difference.loss:.4f}", highlight=False)
    if worse:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
