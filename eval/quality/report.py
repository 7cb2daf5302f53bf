"""Tables and plots of the harness's result files, for ``eval/report.py``.

What is compared comes from one file: runs differ in size and levels move with the text. A file that is not there yet
makes its section say how to make it.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


Row = dict[str, Any]

CONTROL, TEXT, ONE_PIECE = "control", "text", "one-piece"
PEER_NAMES = {
    "hqq": "stock `QuantizedCache`, hqq",
    "quanto": "stock `QuantizedCache`, quanto",
    "min-max": "min-max a token",
    "kivi": "KIVI",
    "lloyd-max": "rotated Lloyd-Max",
    "fp8": "FP8",
    "literal": "the second document's code",
    "simulated": "simulated",
    CONTROL: "control, one bit",
}
_SHOWN_CONTEXTS = {"subbyte-moe-31m": 4096, "smollm2-135m": 1024}  # in the short table, where they were measured
_OUTLIER_BITS = 24  # of a value that stays in FP8, with its place
_MARKERS = "osD^vPX*<>"
_COLUMNS = 3  # of panels in a plot
_LEAST_COMPARED = 2  # the control and one more


def table(header: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table; everything but the first column to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def load(path: Path) -> tuple[list[Row], list[Row]]:
    """Rows and dropped cells of a result file; none where there is no file."""
    if not path.exists():
        return [], []
    held = json.loads(path.read_text(encoding="utf-8"))
    return held.get("rows", []), held.get("dropped", [])


def shown(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else format(value, form)


def name_of(row: Row) -> str:
    """What a row measured: a policy of ours with its options, or a peer."""
    options = ", ".join(f"{key} {value}" for key, value in row["options"].items())
    if row["policy"] in PEER_NAMES:
        return PEER_NAMES[row["policy"]] + (f": {options}" if options else "")
    budget = "" if row["budget"] is None else f", {row['budget']:g} bits"
    book = "" if row["codebook"] in (None, "universal") else f", {row['codebook']} codebook"
    default = " (default)" if row["default"] else ""
    return f"`{row['policy']}`{budget}{book}{default}" + (f": {options}" if options else "")


def key_of(row: Row) -> str:
    """What tells a policy from another one in a cell."""
    return json.dumps([row[key] for key in ("policy", "codebook", "budget", "options")], sort_keys=True)


def _tasks(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["task"] for row in rows if row["task"] != TEXT))


def _by_policy(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Policy -> task -> row: families in the order of the file, each by its bits."""
    listed = list(rows)
    places = {family: place for place, family in reversed([*enumerate(map(_family, listed))])}
    found: dict[str, dict[str, Row]] = {}
    for row in sorted(listed, key=lambda row: (places[_family(row)], _by_bits(row)[0])):
        found.setdefault(key_of(row), {})[row["task"]] = row
    return found


def _counted(rows: Iterable[Row]) -> Callable[[Row], str]:
    """What stands behind a figure that is of fewer or more texts than most of its table."""
    numbers = [row["n"] for row in rows if row["task"] == TEXT]
    usual = max(numbers, key=numbers.count, default=0)
    return lambda row: "" if row["n"] == usual else f" (n {row['n']})"


def _interval(row: Row, key: str, form: str) -> str:
    low, high = row[f"{key}_interval"]
    return f"{row[key]:{form}} ({low:{form}} to {high:{form}})"


def _score(row: Row | None) -> str:
    return "-" if row is None or row["score"] is None else f"{row['score']:.2f} of {row['score_exact']:.2f}"


def conditions(rows: list[Row]) -> str:
    """How much was measured, and on what."""
    counts = []
    for task in dict.fromkeys(row["task"] for row in rows):
        numbers = sorted({row["n"] for row in rows if row["task"] == task})
        tokens = sorted({row["tokens"] // row["n"] for row in rows if row["task"] == TEXT})
        what = f"texts of {_some(tokens)} scored tokens" if task == TEXT else f"prompts of `{task}`"
        counts.append(f"{_some(numbers)} {what}")
    facts = {key: sorted({str(row[key]) for row in rows}) for key in ("dtype", "texts", "device", "commit")}
    where = ", ".join(f"{key} {_some(values)}" for key, values in facts.items() if values != [""])
    return f"{'; '.join(counts)}; {where}."


def _some(values: list[Any]) -> str:
    return " or ".join(map(str, values))


def tables(rows: list[Row], dropped: list[Row], one: Callable[[list[Row]], str]) -> str:
    """What ``one`` makes of each model, context and protocol, and what is not shown, and why."""
    cells: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["context"], row["protocol"]), []).append(row)
    parts = [
        f"**{model}, {context:,} tokens, {protocol}**\n\n{one(cell)}\n\n{conditions(cell)}"
        for (model, context, protocol), cell in cells.items()
    ]
    for cell in dropped:
        place = f"{cell['model']}, {cell['context']:,} tokens, {cell['protocol']}, `{cell['task']}`"
        parts.append(f"Not shown: {place}: the exact cache itself scores {cell['score_exact']:.2f}.")
    return "\n\n".join(parts)


def full_table(cell: list[Row]) -> str:
    """Everything that was measured, a line a cache."""
    tasks, counted = _tasks(cell), _counted(cell)
    lines = []
    for found in _by_policy(cell).values():
        any_row = found.get(TEXT) or next(iter(found.values()))
        text = found.get(TEXT)
        figures = ["-"] * 4
        if text is not None:
            figures = [
                _interval(text, "kl", ".4f") + counted(text),
                f"{text['kl_p99']:.3f}",
                _interval(text, "dnll", "+.4f"),
                f"{text['top1']:.3f}",
            ]
        lines.append(
            [
                name_of(any_row),
                *(shown(any_row.get(key), ".2f") for key in ("code_bits", "bits", "bits_total_16")),
                shown(any_row["mass"], ".0%"),
                *figures,
                *(_score(found.get(task)) for task in tasks),
            ]
        )
    header = ["cache", "codes", "bits", "all held", "mass", "KL (95 %)", "p99", "loss (95 %)", "top-1"]
    return table([*header, *(f"`{task}`" for task in tasks)], lines)


def missing(config: str) -> str:
    """What a section says before its run."""
    return f"Not measured yet: `python eval/run.py eval/configs/{config}.json`."


def policies(rows: list[Row]) -> str:
    """The short table: policies at equal bits and one codebook, a line each, KL in both protocols, retrieval."""
    rows = [row for row in rows if row["codebook"] in (None, "universal")]
    chosen = []
    for model in dict.fromkeys(row["model"] for row in rows):
        contexts = sorted({row["context"] for row in rows if row["model"] == model})
        wanted = _SHOWN_CONTEXTS.get(model)
        chosen.append((model, wanted if wanted in contexts else contexts[0]))
    kept = [row for row in rows if (row["model"], row["context"]) in chosen]
    protocols = list(dict.fromkeys(row["protocol"] for row in kept))
    task = next((name for name in ("multikey", "needle") if name in _tasks(kept)), None)
    header = ["policy", "codes", "bits"]
    for model, context in chosen:
        place = f"{model}, {context:,}"
        header += [f"{place}: KL {protocol}" for protocol in protocols]
        header += [f"{place}: `{task}`"] if task else []
    lines: dict[str, list[str]] = {}
    for row in sorted(kept, key=_by_bits):
        if key_of(row) not in lines:
            lines[key_of(row)] = [
                name_of(row),
                *(shown(row[key], ".2f") for key in ("code_bits", "bits")),
                *_short_cells([other for other in kept if key_of(other) == key_of(row)], chosen, protocols, task),
            ]
    return f"{table(header, lines.values())}\n\n{conditions(kept)}"


def _by_bits(row: Row) -> tuple[float, float]:
    budget = row["budget"]
    return (budget if budget is not None else row["code_bits"] or 0.0, row["kl"])


def _short_cells(rows: list[Row], chosen: list[tuple[str, int]], protocols: list[str], task: str | None) -> list[str]:
    found = {(row["model"], row["context"], row["protocol"], row["task"]): row for row in rows}
    cells = []
    for place in chosen:
        for protocol in protocols:
            row = found.get((*place, protocol, TEXT))
            cells.append("-" if row is None else f"{row['kl']:.4f}")
        if task:
            cells.append(_score(found.get((*place, ONE_PIECE, task))))
    return cells


def _base_of(row: Row, found: dict[str, dict[str, Row]]) -> Row | None:
    """What a line changes: our default with the same budget, or the simulated codes as they ship."""
    if row["policy"] == "simulated":
        plain: Row = {"tier": row["options"]["tier"]}
    elif row["policy"] == CONTROL or row["budget"] is None:
        return None
    else:
        plain = {}
    wanted = key_of({**row, "options": plain, "codebook": None if plain else "universal"})
    return found.get(wanted, {}).get(TEXT)


def ablation_table(cell: list[Row]) -> str:
    """A line a change: its KL, and how many times that of what it changes."""
    tasks, found = _tasks(cell), _by_policy(cell)
    lines = []
    for tasks_of in found.values():
        text = tasks_of.get(TEXT)
        any_row = text or next(iter(tasks_of.values()))
        base = _base_of(any_row, found)
        share = ""
        if base is not None and any_row["options"].get("outlier_sigma"):
            share = f" ({(any_row['bits'] - base['bits']) / _OUTLIER_BITS:.2%} of values)"
        ratio = "-" if text is None or base is None or not base["kl"] else f"{text['kl'] / base['kl']:.2f}"
        lines.append(
            [
                name_of(any_row) + share,
                *(shown(any_row.get(key), ".2f") for key in ("bits", "bits_total_16")),
                *(["-", "-"] if text is None else [_interval(text, "kl", ".4f"), f"{text['dnll']:+.4f}"]),
                ratio,
                *(_score(tasks_of.get(task)) for task in tasks),
            ]
        )
    header = ["cache", "bits", "all held", "KL (95 %)", "loss", "KL, times unchanged"]
    return table([*header, *(f"`{task}`" for task in tasks)], lines)


def collapse(rows: list[Row]) -> str:
    """A line a cache, for each model how much its loss grows, its KL and its answers."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    tasks, counted = _tasks(rows), _counted(rows)
    header = ["cache", "bits"]
    for model in models:
        header += [f"{model}: loss", "KL", *(f"`{task}`" for task in tasks)]
    lines = []
    by_model = {model: _by_policy(row for row in rows if row["model"] == model) for model in models}
    for key in dict.fromkeys(map(key_of, rows)):
        found = [by_model[model].get(key, {}) for model in models]
        first = next(row for tasks_of in found for row in tasks_of.values())
        line = [name_of(first), shown(first["bits"], ".2f")]
        for tasks_of in found:
            text = tasks_of.get(TEXT)
            figures = ("-", "-")
            if text is not None:
                figures = (f"{text['dnll'] / text['nll_exact']:+.1%}{counted(text)}", f"{text['kl']:.3f}")
            line += figures
            line += [_score(tasks_of.get(task)) for task in tasks]
        lines.append(line)
    exact: dict[str, set[str]] = {}
    for row in rows:
        if row["task"] == TEXT:
            exact.setdefault(row["model"], set()).add(f"{row['nll_exact']:.3f}")
    losses = ", ".join(f"{model} {_some(sorted(found))}" for model, found in exact.items())
    protocol = _some(sorted({row["protocol"] for row in rows}))
    contexts = _some(sorted({f"{row['context']:,}" for row in rows}))
    where = f"{contexts} tokens, {protocol}; {conditions(rows)}"
    return f"{table(header, lines)}\n\nThe exact cache's loss: {losses}. {where}"


# ------------------------------------------------------------------ plots


def drawn_rows(rows: list[Row]) -> list[Row]:
    """What a plot shows: text, in a cache that quantizes."""
    return [row for row in rows if row["task"] == TEXT and row["bits"] and row["policy"] != "uniform:exact"]


def digest(rows: list[Row]) -> str:
    """What a plot of these rows carries in its file, to tell whether it is stale."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def is_stale(path: Path, rows: list[Row]) -> bool:
    """Whether a plot is not the one of these rows."""
    return not path.exists() or digest(rows).encode() not in path.read_bytes()


def _family(row: Row) -> str:
    """Rows of one line in a plot."""
    if row["policy"] in PEER_NAMES:
        own = {key: value for key, value in row["options"].items() if key != "nbits"}
        options = ", ".join(f"{key} {value}" for key, value in own.items())
        return PEER_NAMES[row["policy"]].replace("`", "") + (f", {options}" if options else "")
    book = "" if row["codebook"] in (None, "universal") else f", {row['codebook']}"
    name = "uniform" if row["policy"].startswith("uniform:") else row["policy"]
    return f"ours: {name}{book}"


def _shade(number: int) -> int:
    """The strong half of 20 colours first, then their pale twins."""
    return 2 * number % 20 + number // 10 % 2


def plot_bits(rows: list[Row], path: Path) -> None:
    """KL on text against real bits, a panel a model and protocol: of what is quantized, below of everything held.

    Where one policy alone was measured beside the control there is nothing to compare, and no panel.

    Args:
        rows: :func:`drawn_rows`.
        path: a PNG file.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as failed:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from failed
    measured: dict[tuple[str, int, str], set[str]] = {}
    for row in rows:
        measured.setdefault((row["model"], row["context"], row["protocol"]), set()).add(_family(row))
    cells = [place for place, families in measured.items() if len(families) > _LEAST_COMPARED]
    families = list(dict.fromkeys(map(_family, rows)))
    columns = min(_COLUMNS, len(cells)) if len(cells) % 2 else 2  # as few empty places as may be
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(6 * columns, 8.4 * lines + 1), layout="constrained")
    panels = figure.subplots(2 * lines, columns, squeeze=False)
    kinds = {
        "bits": "bits a quantized value, scales and all",
        "bits_total_16": "bits a cached value, all that is held",
    }
    for block, (key, label) in zip((panels[:lines], panels[lines:]), kinds.items(), strict=True):
        for panel in block.flat[len(cells) :]:
            panel.set_axis_off()
        for panel, place in zip(block.flat, cells, strict=False):
            for number, family in enumerate(families):
                points = sorted(
                    (row.get(key) or row["bits_total"], row["kl"])
                    for row in rows
                    if (row["model"], row["context"], row["protocol"]) == place and _family(row) == family
                )
                if points:
                    ours = family.startswith("ours")
                    panel.plot(
                        *zip(*points, strict=True),
                        color="black" if family == PEER_NAMES[CONTROL] else colormaps["tab20"](_shade(number)),
                        marker=_MARKERS[number % len(_MARKERS)],
                        linewidth=2.5 if ours else 1,
                        linestyle="-" if ours else "--",
                        label=family,
                    )
            panel.set_yscale("log")
            panel.set(
                title=f"{place[0]}, {place[1]:,} tokens, {place[2]}", xlabel=label, ylabel="KL to the exact cache"
            )
            panel.grid(alpha=0.3, which="both")
    entries: dict[str, Any] = {}
    for panel in panels.flat:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2 * columns, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Description": digest(rows)})
