"""The result file: a row for each policy, protocol, context and task of a model, and what was dropped.

Rows are written one by one, so a run that is cut off keeps what it has; a later run replaces the rows that it measures
again.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from quality.caches import CONTROL


CELL_KEYS = ("model", "dtype", "texts", "protocol", "context", "task")
POLICY_KEYS = ("policy", "codebook", "budget", "options")

Row = dict[str, Any]


def cell_of(row: Row) -> str:
    """What rows that may be compared have in common."""
    return json.dumps([row[key] for key in CELL_KEYS])


def identity(row: Row) -> str:
    """What tells a row from all others."""
    return json.dumps([[row[key] for key in CELL_KEYS], [row[key] for key in POLICY_KEYS]], sort_keys=True)


class ResultFile:
    """Rows in a JSON file.

    Attributes:
        rows: measured.
        dropped: cells that even the exact cache fails.
    """

    def __init__(self, path: Path) -> None:
        """Read what an earlier run left, if anything."""
        self._path = path
        held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.rows: list[Row] = held.get("rows", [])
        self.dropped: list[Row] = held.get("dropped", [])

    def add(self, row: Row) -> None:
        """Add a row in place of one with the same identity, and write the file."""
        known = [identity(held) for held in self.rows]
        if identity(row) in known:
            self.rows[known.index(identity(row))] = row
        else:
            self.rows.append(row)
        self.dropped = [held for held in self.dropped if cell_of(held) != cell_of(row)]
        self._write()

    def drop(self, cell: Row) -> None:
        """Say that a cell is not measured, remove what an earlier run had there, and write the file."""
        self.rows = [row for row in self.rows if cell_of(row) != cell_of(cell)]
        self.dropped = [held for held in self.dropped if cell_of(held) != cell_of(cell)] + [cell]
        self._write()

    def is_dropped(self, cell: Row) -> bool:
        """Whether an earlier run found that the exact cache fails in a cell."""
        return any(cell_of(held) == cell_of(cell) for held in self.dropped)

    def find(self, wanted: Row) -> Row | None:
        """The row with the same identity."""
        return next((row for row in self.rows if identity(row) == identity(wanted)), None)

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"rows": self.rows, "dropped": self.dropped}
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self._path)


def control_failures(rows: Iterable[Row]) -> list[str]:
    """Cells in which the control does not lose.

    Prompt by prompt its KL must be larger than that of the shipped default (of the best other policy where the default
    is not measured): the whole interval of the mean difference must lie above 0.
    """
    cells: dict[str, list[Row]] = {}
    for row in rows:
        if row["policy"] != CONTROL:
            cells.setdefault(cell_of(row), []).append(row)
    failures = []
    for measured in cells.values():
        held = [row for row in measured if row["default"]] or [min(measured, key=lambda row: float(row["kl"]))]
        for row in held:
            low, high = row["control_margin"]
            if not low > 0:
                place = ", ".join(str(row[key]) for key in CELL_KEYS)
                mass = "" if row["mass"] is None else f"attention on packed tiles: {row['mass']:.1%}, "
                failures.append(
                    f"{place}: its KL less that of {row['policy']!r} lies between {low:.1e} and {high:.1e} "
                    f"({mass}{row['n']} texts or prompts)"
                )
    return failures
