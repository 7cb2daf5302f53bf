"""The table, the bars and the plot of ``hf-subbyte-moe bench experts``, and of what foretells experts."""

import hashlib
import json
from pathlib import Path
from typing import Any


Row = dict[str, Any]
SYSTEMS = ("none", "previous", "gate", "head", "oracle", "accelerate")
PREDICTORS = ("previous", "gate", "head")
TIMES_ACCELERATE, SHARE_OF_BOUND, NEVER_BELOW = 20.0, 0.85, 0.99  # the bars
_HALF = 0.5
_FIRST_STEP = "modules"  # of rows from before they said so
_BAR = 0.14  # of the width between two cells in the plot


def load(path: Path) -> dict[str, Any]:
    """Conditions and rows, by cell and then in the order of the systems; no rows where there is no file."""
    if not path.exists():
        return {"conditions": {}, "rows": []}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    result["rows"].sort(key=lambda row: (*_cell(row), SYSTEMS.index(row["system"])))
    return result


def _cell(row: Row) -> tuple[str, float, str]:
    return row["model"], row["resident"], row["trace"]


def cells(rows: list[Row]) -> dict[tuple[str, float, str], dict[str, Row]]:
    """Rows of each cell by system."""
    found: dict[tuple[str, float, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(_cell(row), {})[row["system"]] = row
    return found


def table(result: dict[str, Any]) -> str:
    """Every row, and how the bars stand."""
    if not result["rows"]:
        return "Not measured yet: `hf-subbyte-moe bench experts --json eval/results/experts.json`."
    lines = ["| model, resident, trace | system | step | ms a token | hit rate | MB a token | of the bound |"]
    lines.append("| --- | --- | --- |" + " ---: |" * 4)
    for row in result["rows"]:
        model, resident, trace = _cell(row)
        lines.append(
            f"| {model}, {row['layers']} layers, {resident:.0%}, {trace} | {row['system']} | "
            f"{row.get('step', _FIRST_STEP)} | {row['ms']:.1f} | "
            f"{row['hit_rate']:.0%} | {row['bytes'] / 1e6:,.0f} | {row['share_of_bound']:.2f} |"
        )
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    return "\n".join([*lines, "", *bars(result["rows"]), "", f"{conditions}."])


def bars(rows: list[Row]) -> list[str]:
    """A line for each bar: what was measured, and whether it holds."""
    every = cells(rows)
    times = [
        cell["accelerate"]["ms"] / cell["none"]["ms"] for cell in every.values() if {"accelerate", "none"} <= {*cell}
    ]
    shares = [
        max(cell[system]["share_of_bound"] for system in ("none", *PREDICTORS) if system in cell)
        for (_, resident, _), cell in every.items()
        if resident == _HALF
    ]
    gains = [
        cell["none"]["ms"] / cell[system]["ms"]
        for cell in every.values()
        for system in PREDICTORS
        if {"none", system} <= {*cell}
    ]
    lines = []
    for name, found, bar in (
        ("times faster than accelerate", times, TIMES_ACCELERATE),
        (f"of the bound at {_HALF:.0%} resident, the best of ours", shares, SHARE_OF_BOUND),
        ("with prefetch, over without", gains, NEVER_BELOW),
    ):
        if found:
            held = "holds" if min(found) >= bar else f"missed in {sum(one < bar for one in found)} of {len(found)}"
            lines.append(f"- {name}: {min(found):.2f} to {max(found):.2f}; bar {bar:g} {held}.")
    return lines


def accuracy_table(notes: dict[str, Any]) -> str:
    """How well each predictor foretells the reference MoE's experts, means over layers."""
    lines = ["| predictor | found with k | k + 1 | k + 2 | exact set | worst layer |", "| --- |" + " ---: |" * 5]
    for name in dict.fromkeys(found["predictor"] for found in notes["accuracy"]):
        own = [found for found in notes["accuracy"] if found["predictor"] == name]
        shares = [sum(found["found"][extra] for found in own) / len(own) for extra in range(3)]
        exact = sum(found["exact"] for found in own) / len(own)
        worst = min(own, key=lambda found: found["found"][0])
        cells = [f"{share:.3f}" for share in (*shares, exact)]
        lines.append(f"| {name} | {' | '.join(cells)} | {worst['layer']}: {worst['found'][0]:.3f} |")
    return "\n".join(lines)


def digest(shown: Any) -> str:
    """Of what a plot shows."""
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()[:16]


def is_stale(path: Path, shown: Any) -> bool:
    """Whether a plot is not the one of these numbers."""
    return not path.exists() or digest(shown).encode() not in path.read_bytes()


def plot(rows: list[Row], accuracy: list[dict[str, Any]], path: Path) -> None:
    """A panel a model: milliseconds of each system, a group of bars a cell; and how well each layer is foretold.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as failed:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from failed
    models = sorted({row["model"] for row in rows})
    figure = Figure(figsize=(5 * (len(models) + 1), 4.2), layout="constrained")
    panels = figure.subplots(1, len(models) + 1, squeeze=False)[0]
    for panel, model in zip(panels[:-1], models, strict=True):
        groups = [(place, found) for place, found in cells(rows).items() if place[0] == model]
        for number, system in enumerate(SYSTEMS):
            timed = [(at, found[system]) for at, (_, found) in enumerate(groups) if system in found]
            places = [at + (number - (len(SYSTEMS) - 1) / 2) * _BAR for at, _ in timed]
            drawn = panel.bar(places, [row["ms"] for _, row in timed], 0.9 * _BAR, color=f"C{number}", label=system)
            panel.bar_label(drawn, fmt="%.0f", fontsize=7)
            bounds = [row["ms"] * row["share_of_bound"] for _, row in timed]
            panel.hlines(bounds, [p - _BAR / 2 for p in places], [p + _BAR / 2 for p in places], color="black", lw=1)
        panel.set_xticks(range(len(groups)), [f"{share:.0%}, {trace}" for (_, share, trace), _ in groups])
        panel.set(
            title=model,
            xlabel="share of experts on the GPU, trace",
            ylabel="ms a token (black line: the bound)",
            yscale="log",
        )
        panel.legend(fontsize=8)
    panel = panels[-1]
    for name in dict.fromkeys(found["predictor"] for found in accuracy):
        own = [found for found in accuracy if found["predictor"] == name]
        panel.plot([found["layer"] for found in own], [found["found"][0] for found in own], marker="o", label=name)
    panel.set(title="reference MoE: found with k", xlabel="MoE layer", ylim=(0, 1.03))
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Description": digest([rows, accuracy])})
