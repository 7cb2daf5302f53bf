"""Tables of ``results/expert_mlp.json`` and ``results/router.json`` on the kernels' page: ``python moe_report.py``.

A page marks where they go; what stands between the marks is replaced:

    <!-- table: expert_mlp -->
    ...
    <!-- end table -->
"""

import re
from collections.abc import Callable
from pathlib import Path

import results
import typer
from results import Record, shown


_MARK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end table -->)", re.DOTALL)


def _table(header: list[str], rows: list[list[str]], named: int) -> str:
    lines = [header, ["---"] * named + ["---:"] * (len(header) - named), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _conditions(found: Record) -> str:
    conditions, rows = found["conditions"], found["rows"]
    failed = [line for line in rows if line["failed"]]
    lines = "".join(f"\n- {line['model']}, {line['backend']}: {line['failed']}" for line in failed)
    commits = ", ".join(sorted({line["commit"] for line in rows}))
    return (
        f"{conditions['device']}, torch {conditions['torch']}, triton {conditions['triton']}, driver "
        f"{conditions['driver']}, {conditions['date']}, commit {commits}; device copy "
        f"{shown(conditions['copy_gbs'], '.0f')} GB/s, reads and writes counted. {conditions['timing'].capitalize()}. "
        f"{len(failed)} rows failed.{lines}"
    )


def _time(line: Record) -> str:
    return "failed" if line["failed"] else shown(line["us"], ".1f")


def expert_table(found: Record) -> str:
    """Every row, losses and failures included."""
    header = ["experts of", "weights", "kernel", "tokens", "distinct experts", "µs", "again", "share of copy", "error"]
    rows = [
        [
            line["model"],
            line["weights"],
            line["backend"],
            str(line["tokens"]),
            shown(line["distinct"], ".1f"),
            _time(line),
            shown(line["us_again"], ".1f"),
            shown(line["copy_share"], ".0%"),
            shown(line.get("error_ratio"), ".2f"),
        ]
        for line in found["rows"]
    ]
    return f"{_table(header, rows, 3)}\n\nErrors are over those of PyTorch in bf16. {_conditions(found)}"


def router_table(found: Record) -> str:
    """Every row."""
    header = ["router of", "kernel", "tokens", "µs", "again", "48 layers, ms", "same experts"]
    rows = [
        [
            line["model"],
            line["backend"],
            str(line["tokens"]),
            shown(line["us"], ".2f") if not line["failed"] else "failed",
            shown(line["us_again"], ".2f"),
            shown(None if line["us"] is None else 0.048 * line["us"], ".3f"),
            shown(line.get("same_experts"), ".2%"),
        ]
        for line in found["rows"]
    ]
    return f"{_table(header, rows, 2)}\n\n{_conditions(found)}"


_TABLES: dict[str, Callable[[Record], str]] = {"expert_mlp": expert_table, "router": router_table}


def rendered(page: str, folder: Path) -> str:
    """A page with its marked tables made anew.

    Raises:
        KeyError: a mark names no table.
    """

    def made(mark: re.Match[str]) -> str:
        file, table = folder / f"{mark[2]}.json", _TABLES[mark[2]]
        return f"{mark[1]}{table(results.load(file)) if file.exists() else 'Not measured yet.'}\n{mark[3]}"

    return _MARK.sub(made, page)


def main() -> None:
    """Render the tables of experts and routers in kernels/README.md."""
    text = results.README.read_text(encoding="utf-8")
    results.README.write_text(rendered(text, results.RESULTS), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
