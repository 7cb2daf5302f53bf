"""The table and the waterfall of ``hf-subbyte-moe bench latency``."""

import hashlib
import json
from pathlib import Path
from typing import Any

from hf_subbyte_moe.cli.shapes import SHAPES


Row = dict[str, Any]
Cell = tuple[str, str, int, int, int, int]
_STOCK = ("stock default", "stock static compiled")
_COLUMNS = 4  # of panels in the plot
_ORDER = (*_STOCK, "cache", "+ attention", "+ experts", "+ router", "+ graph", "+ fused kernels", "+ int4 projections")


def load(path: Path) -> dict[str, Any]:
    """Conditions and rows, by cell and then in the order of the systems; no rows where there is no file."""
    if not path.exists():
        return {"conditions": {}, "rows": []}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    result["rows"].sort(key=lambda row: (*_cell(row), _ORDER.index(row["system"])))
    return result


def _cell(row: Row) -> Cell:
    return row["model"], row["weights"], _layers(row), _gpus(row), row["batch"], row["context"]


def _layers(row: Row) -> int:
    """How many a model was cut to; 0 for a whole one."""
    config = SHAPES[row["model"]]() if row["model"] in SHAPES else None
    layers = int(row.get("layers", 0))
    return 0 if config is None or layers == config.num_hidden_layers else layers


def _gpus(row: Row) -> int:
    """How many share the model; rows from before they said so are of one."""
    return int(row.get("gpus", 1))


def is_whole_on_one_gpu(row: Row) -> bool:
    """Whether a row is of a model with all its layers on one GPU, as headlines are."""
    return _gpus(row) == 1 and not _layers(row)


def _label(cell: Cell) -> tuple[str, str]:
    name, weights, layers, gpus, batch, context = cell
    cut = f", {layers} layers" if layers else ""
    several = f", {gpus} GPUs" if gpus > 1 else ""
    return f"{name} {weights}{cut}{several}, batch {batch}", f"{context:,} tokens"


def _policy(row: Row) -> str:
    """What chose the tiers, of a system that has some."""
    return "" if row["system"] in _STOCK else f", `{row['policy']}`"


def table(result: dict[str, Any]) -> str:
    """Every row."""
    if not result["rows"]:
        return "Not measured yet: `hf-subbyte-moe bench latency --json eval/results/latency.json`."
    lines = [
        "| model, batch, context | system | ms a token | mean | a step | of the roofline | first, ms | peak, GB |"
    ]
    lines.append("| --- | --- |" + " ---: |" * 6)
    for row in result["rows"]:
        model, tokens = _label(_cell(row))
        step = "-" if row["ms_step"] is None else f"{row['ms_step']:.2f}"
        peak = "-" if row["peak_gb"] is None else f"{row['peak_gb']:.1f}"
        first = "-" if row["first_ms"] is None else f"{row['first_ms']:.0f}"
        lines.append(
            f"| {model}, {tokens} | {row['system']}{_policy(row)} | "
            f"{row['ms_generate']:.2f} | {row['ms_mean']:.2f} | {step} | {row['share_of_roofline']:.0%} | {first} | "
            f"{peak} |"
        )
    conditions = dict(result["conditions"])
    rate = conditions.pop("copy_bytes_a_second") / 1e12
    text = ", ".join(f"{key} {value}" for key, value in conditions.items())
    devices = ", ".join(sorted({row["device"] for row in result["rows"]}))
    commits = ", ".join(sorted({row["commit"] for row in result["rows"]}))
    return (
        "\n".join(lines) + f"\n\n{devices}, {text}; commit {commits}. Random weights; where there is no time to the "
        f"first token, random keys and values stand for the prompt; medians of `generate()`, mean with "
        f"packing between steps; a step is the forward alone; the roofline copies the step's bytes at {rate:.2f} TB/s."
    )


def digest(rows: list[Row]) -> str:
    """Of what a plot shows."""
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16]


def is_stale(path: Path, rows: list[Row]) -> bool:
    """Whether the plot is not the one of these rows."""
    return not path.exists() or digest(rows).encode() not in path.read_bytes()


def plot(rows: list[Row], path: Path) -> None:
    """A waterfall for each model, batch and context: what each part saves, down to the roofline.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as failed:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from failed
    cells = sorted({_cell(row) for row in rows})
    columns = min(_COLUMNS, len(cells))
    lines = -(-len(cells) // columns)
    figure = Figure(figsize=(4.4 * columns, 4.4 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel in panels[len(cells) :]:
        panel.set_axis_off()
    for panel, cell in zip(panels, cells, strict=False):
        here = [row for row in rows if _cell(row) == cell]
        before = 0.0
        for place, row in enumerate(here):
            ms = row["ms_generate"]
            if row["system"] in _STOCK or not before:
                panel.bar(place, ms, color="tab:gray" if row["system"] in _STOCK else "tab:blue")
            else:
                panel.bar(place, ms, color="tab:blue")
                saved = before - ms
                panel.bar(
                    place, abs(saved), bottom=min(ms, before), color="tab:green" if saved > 0 else "tab:red", alpha=0.4
                )
            if row["system"] not in _STOCK:
                before = ms
            panel.annotate(f"{ms:.1f}", (place, ms), ha="center", va="bottom", fontsize=8)
        limit = here[-1]["share_of_roofline"] * here[-1]["ms_generate"]
        panel.axhline(limit, color="black", linestyle=":", label=f"roofline, {limit:.1f} ms")
        panel.set_yscale("log")
        panel.set_ylim(0.8 * limit, 2 * max(row["ms_generate"] for row in here))  # room for the legend
        panel.set_xticks(range(len(here)), [row["system"] for row in here], rotation=40, ha="right", fontsize=8)
        panel.set(title="\n".join(_label(cell)), ylabel="ms a token of generate()")
        panel.legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Description": digest(rows)})
