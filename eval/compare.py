"""Two runs of ``hf-subbyte-moe eval`` on the same documents: ``python eval/compare.py A.json B.json``.

Prints paired differences with 95 % intervals (bootstrap over documents). Runs of different tasks, seeds or protocols
are refused (exit code 2). Exits with 1 where B is worse than A by more than the budget.

Example: python eval/compare.py eval/baselines/ci.json build/eval/report.json --budget 0.05
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_subbyte_moe.results import Difference, choose_cache, compare, read_rows


def difference_table(differences: list[Difference], budget: float) -> Table:
    """A line for each task and length."""
    table = Table(title=f"B less A, paired; the budget is a loss of {budget:g}", title_justify="left")
    for name in ("task", "length", "metric"):
        table.add_column(name)
    for name in ("A", "B", "B - A", "95 % interval", "loss", "n"):
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
            str(difference.n),
        )
    return table


def main(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="The first run.", exists=True, dir_okay=False)],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="The second run.", exists=True, dir_okay=False)],
    budget: Annotated[
        float, typer.Option(min=0, help="The most that B may lose in any line, in the metric's own units.")
    ] = 0.05,
    cache_a: Annotated[str | None, typer.Option(help="Which cache of A, where it holds several.")] = None,
    cache_b: Annotated[str | None, typer.Option(help="Which cache of B, where it holds several.")] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
) -> None:
    """Compare two runs, pair by pair."""
    console = Console(soft_wrap=True)
    try:
        rows = (
            choose_cache(read_rows(before), cache_a, before.name),
            choose_cache(read_rows(after), cache_b, after.name),
        )
        differences = compare(*rows, seed=seed)
    except ValueError as error:
        console.print(f"[red]refused:[/red] {error}", highlight=False)
        raise typer.Exit(2) from None
    console.print(difference_table(differences, budget))
    worse = [difference for difference in differences if difference.loss > budget]
    for difference in worse:
        *_, task, length = difference.place
        console.print(f"[red]over the budget:[/red] {task} at {length} loses {difference.loss:.4f}", highlight=False)
    if worse:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
