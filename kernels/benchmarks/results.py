"""The result file: rows, what they are computed from, and the tables that show them.

A page marks where the tables go as ``eval/report.py`` does; what stands between the marks is replaced:

    <!-- report: decode_attention -->
    ...
    <!-- end report -->
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baselines import Baseline, fastest
from gate import MAX_ERROR_RATIO
from shapes import MIX, Cell, Variant
from timing import Timing


FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
RESULT_FILE = RESULTS / "decode_attention.json"
README = FOLDER.parent / "README.md"
_MARK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end report -->)", re.DOTALL)
_ROW_KEY = ("shape", "batch", "context", "k_tier", "v_tier", "backend")

Record = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What one variant gave in one cell.

    Attributes:
        timing: None where it failed or was not right.
        bytes: records and exact tokens that a call reads.
        error: relative error against fp32 attention over the dequantized values.
        plain_error: that of bf16 attention over the same values.
        failed: why there is no time, or None.
    """

    timing: Timing | None
    bytes: int
    error: float | None
    plain_error: float | None
    failed: str | None = None


def error_ratio(error: float | None, plain_error: float | None) -> float | None:
    """Our error over that of PyTorch in bf16."""
    return None if error is None or not plain_error else error / plain_error


def not_right(ratio: float | None) -> bool:
    """Whether an output is off by more than it may be; NaN is."""
    return ratio is None or not ratio <= MAX_ERROR_RATIO


def _place(cell: Cell) -> Record:
    return {"shape": cell.shape.name, "batch": cell.batch, "context": cell.context}


def row(
    cell: Cell,
    variant: Variant,
    backend: str,
    measured: Measured,
    baseline: Baseline | None,
    copy_gbs: float | None,
    conditions: Record,
) -> Record:
    """One line of the result file.

    Args:
        cell: cache size.
        variant: tiers.
        backend: implementation.
        measured: what it gave.
        baseline: the fastest right bf16 attention, or None where none was timed.
        copy_gbs: bandwidth of a device copy, or None.
        conditions: of the run.
    """
    timing = measured.timing
    us = None if timing is None else timing.us
    baseline_us = None if baseline is None else baseline.us
    ratio = error_ratio(measured.error, measured.plain_error)
    tiers = variant.tiers
    return {
        **_place(cell),
        "k_tier": tiers[0],
        "v_tier": tiers[1],
        "backend": backend,
        "us": us,
        "us_again": None if timing is None else timing.us_again,
        "baseline": None if baseline is None else baseline.name,
        "baseline_us": baseline_us,
        "speedup": baseline_us / us if us and baseline_us else None,
        "copy_share": measured.bytes / 1e3 / us / copy_gbs if us and copy_gbs else None,
        "error_ratio": ratio,
        "error": measured.error,
        "bytes": measured.bytes,
        "code_bits": variant.code_bits(cell),
        "graph": None if timing is None else timing.graph,
        "failed": measured.failed,
        **{key: conditions[key] for key in ("device", "torch", "triton", "commit")},
    }


def _is_of(line: Record, cell: Cell) -> bool:
    return {**line, **_place(cell)} == line


def weighted_mean_us(cell: Cell, variant: Variant, backend: str, rows: Iterable[Record]) -> float | None:
    """Mean of the pure pairs' times by their share of the tiles; None unless all were timed in this cell."""
    times = {
        f"{line['k_tier']}/{line['v_tier']}": line["us"]
        for line in rows
        if _is_of(line, cell) and line["backend"] == backend and line["us"]
    }
    if any(pair.name not in times for pair in variant.pairs):
        return None
    return sum(share * times[pair.name] for share, pair in zip(variant.shares(cell), variant.pairs, strict=True))


def baseline_records(cell: Cell, timed: list[Baseline]) -> list[Record]:
    """Lines of all baselines of a cell."""
    return [{**_place(cell), **asdict(one)} for one in timed]


def baselines_of(cell: Cell, records: Iterable[Record]) -> list[Baseline]:
    """Back from lines."""
    names = Baseline.__dataclass_fields__
    found = [line for line in records if _is_of(line, cell)]
    return [Baseline(**{name: line[name] for name in names}) for line in found]


def skipped(what: str) -> str:
    """The note about something that a run left out."""
    return f"skipped for want of time: {what}"


def _skipped_names(line: Record) -> tuple[str, str]:
    """Notes that a row makes untrue."""
    cell = f"{line['shape']}, batch {line['batch']}, {line['context']} tokens"
    variant = tiers_shown(line)
    return skipped(cell), skipped(f"{cell}, {variant}, {line['backend']}")


def tiers_shown(line: Record) -> str:
    """A row's variant, as :class:`Variant` names it."""
    tier: str = line["k_tier"]
    return tier if tier == MIX.name else f"{tier}/{line['v_tier']}"


def newest(old: list[Record], new: list[Record], key: Sequence[str]) -> list[Record]:
    """Rows of both; of those that agree in ``key`` the new one."""
    return list({tuple(line.get(name) for name in key): line for line in [*old, *new]}.values())


def merged(old: Record, new: Record) -> Record:
    """A run's results, and those of an earlier run that it did not measure again."""
    fresh_cells = {tuple(line[name] for name in _ROW_KEY[:3]) for line in new["baselines"]}
    rows = newest(old["rows"], new["rows"], _ROW_KEY)
    measured = {name for line in rows for name in _skipped_names(line)}
    kept = [line for line in old["baselines"] if tuple(line[name] for name in _ROW_KEY[:3]) not in fresh_cells]
    return {
        "conditions": new["conditions"],
        "rows": rows,
        "baselines": [*kept, *new["baselines"]],
        "notes": [note for note in dict.fromkeys([*old["notes"], *new["notes"]]) if note not in measured],
    }


def load(path: Path) -> Record:
    """The file's content."""
    result: Record = json.loads(path.read_text(encoding="utf-8"))
    return result


def save(results: Record, path: Path) -> None:
    """Write all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def shown(value: float | None, form: str) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def time_shown(line: Record) -> str:
    """``us`` of a row, or that it failed."""
    return "failed" if line["failed"] else shown(line["us"], ".1f")


def in_order(rows: Iterable[Record]) -> list[Record]:
    """Rows by shape, batch, context, implementation, as tables show them; pairs stay as they were measured."""
    return sorted(rows, key=lambda line: (line["shape"], line["batch"], line["context"], line["backend"]))


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _rows_table(rows: list[Record]) -> str:
    header = ["batch, context", "keys/values", "kernel", "µs", "again", "best bf16, µs", "speed-up"]
    header += ["share of copy", "error against bf16's"]
    lines = []
    for line in rows:
        mean = line.get("weighted_mean_us")
        lines.append(
            [
                f"{line['batch']}, {line['context']:,}",
                tiers_shown(line),
                line["backend"],
                time_shown(line) + (f" (pairs alone: {mean:.1f})" if mean else ""),
                shown(line["us_again"], ".1f"),
                shown(line["baseline_us"], ".1f"),
                shown(line["speedup"], ".2f"),
                shown(line["copy_share"], ".0%"),
                shown(line["error_ratio"], ".2f"),
            ]
        )
    return _table(header, lines)


def _baselines_table(records: list[Record]) -> str:
    """The fastest right bf16 attention of each cell, and what the others took."""
    cells: dict[tuple[Any, ...], list[Record]] = {}
    for line in records:
        cells.setdefault((line["shape"], line["batch"], line["context"]), []).append(line)
    names = list(dict.fromkeys(_family(line["name"]) for line in records))
    lines = []
    for (shape, batch, context), found in sorted(cells.items()):
        best = fastest([Baseline(**{name: line[name] for name in Baseline.__dataclass_fields__}) for line in found])
        times = {_family(line["name"]): shown(line["us"], ".0f") for line in found}
        if best is not None:
            times[_family(best.name)] = f"**{times[_family(best.name)]}**"
        lines.append([f"{shape}, {batch}, {context:,}", *(times.get(name, "-") for name in names)])
    return _table(["µs; shape, batch, context", *names], lines)


def _family(name: str) -> str:
    """A baseline's name without its configuration."""
    return name.split(" (")[0]


def decode_attention_tables(results: Record | None) -> str:
    """All rows with their conditions, losses and failures included."""
    if results is None:
        return "Not measured yet."
    conditions, rows = results["conditions"], in_order(results["rows"])
    parts = []
    for shape in dict.fromkeys(line["shape"] for line in rows):
        parts.append(f"**{shape}**\n\n{_rows_table([line for line in rows if line['shape'] == shape])}")
    compared = [line for line in rows if line["speedup"] and line["backend"] == "cuda"]
    lost = sum(line["speedup"] < 1 for line in compared)
    failed = sum(bool(line["failed"]) for line in rows)
    parts.append(
        f"The CUDA kernel is slower than bf16 in {lost} of the {len(compared)} rows that compare them. "
        f"{failed} rows failed. A speed-up is over the fastest bf16 attention whose output is right; `mix-2.5` gives "
        "heads and runs of tiles different pairs, 2.5 bits of codes on average."
    )
    if results["baselines"]:
        parts.append(f"What bf16 attention takes:\n\n{_baselines_table(results['baselines'])}")
    if results["notes"]:
        parts.append("\n".join(f"- {note}" for note in results["notes"]))
    copy = shown(conditions["copy_gbs"], ".0f")
    versions = sorted({line["commit"] for line in rows})
    parts.append(
        f"{conditions['device']}, torch {conditions['torch']}, triton {conditions['triton']}, driver "
        f"{conditions['driver']}, {conditions['date']}, commit {', '.join(versions)}; device copy {copy} GB/s, reads "
        f"and writes counted. {conditions['timing'].capitalize()}."
    )
    return "\n\n".join(parts)


def rendered(page: str, results: Record | None) -> str:
    """A page with its marked parts made anew.

    Raises:
        KeyError: a mark names no section.
    """
    sections = {"decode_attention": decode_attention_tables}
    return _MARK.sub(lambda mark: f"{mark[1]}{sections[mark[2]](results)}\n{mark[3]}", page)


def render_readme(path: Path = README, result_file: Path = RESULT_FILE) -> bool:
    """Rewrite the page; whether it was stale."""
    page = path.read_text(encoding="utf-8")
    fresh = rendered(page, load(result_file) if result_file.exists() else None)
    if fresh != page:
        path.write_text(fresh, encoding="utf-8")
    return fresh != page
