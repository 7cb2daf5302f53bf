"""Two pictures of the result file: speed-up by context, and the roofline."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baselines import fastest
from results import Record, baselines_of, tiers_shown
from shapes import SHAPES, Cell


_LINES = {"vq175/vq175": "-", "vq2/vq2": "--", "mix-2.5": ":"}
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "X"}


def _marker(number: int) -> str:
    return list(_MARKERS.values())[number % len(_MARKERS)]


def _figure(panels: int) -> tuple[Any, list[Any]]:
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from missing
    figure = Figure(figsize=(6.5 * panels, 5), layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False, sharey=True)[0])


def _legend(figure: Any, panels: list[Any]) -> None:
    """One legend for all panels, beside them."""
    entries = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(dict(zip(labels, handles, strict=True)))
    figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize=8)


def _drawn(results: Record) -> list[Record]:
    """Timed rows of one implementation, CUDA's where there are any, of the shapes that are timed in every size."""
    names = {shape.name for shape in SHAPES}
    timed = [line for line in results["rows"] if line["us"] and not line["failed"] and line["shape"] in names]
    backend = "cuda" if any(line["backend"] == "cuda" for line in timed) else "torch"
    return [line for line in timed if line["backend"] == backend]


def _shapes(rows: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(line["shape"] for line in rows))


def plot_speedup(results: Record, path: Path) -> None:
    """Speed-up over the fastest bf16 attention by context, one panel a shape.

    Raises:
        ValueError: matplotlib is not installed, or there is nothing to draw.
    """
    rows = [line for line in _drawn(results) if line["speedup"]]
    if not rows:
        raise ValueError("no row has a speed-up, so there is nothing to draw")
    figure, panels = _figure(len(_shapes(rows)))
    batches = sorted({line["batch"] for line in rows})
    for panel, shape in zip(panels, _shapes(rows), strict=True):
        for tiers, style in _LINES.items():
            for batch in batches:
                points = sorted(
                    (line["context"], line["speedup"])
                    for line in rows
                    if (line["shape"], line["batch"], tiers_shown(line)) == (shape, batch, tiers)
                )
                if points:
                    number = batches.index(batch)
                    panel.plot(
                        *zip(*points, strict=True),
                        style,
                        color=f"C{number}",
                        marker=_marker(number),
                        label=f"{tiers}, batch {batch}",
                    )
        contexts = sorted({line["context"] for line in rows})
        panel.axhline(1.0, color="black", linewidth=1)
        panel.axhspan(0.0, 1.0, color="C3", alpha=0.08)
        panel.annotate("slower than bf16", (contexts[0], 0.98), va="top", color="C3", fontsize=8)
        panel.set_xscale("log", base=2)
        panel.set_xticks(contexts, [f"{context / 1024:.0f}k" for context in contexts])
        panel.set(title=shape, xlabel="tokens of context")
        panel.grid(alpha=0.3)
    _legend(figure, panels)
    panels[0].set_ylim(0.0, 1.1 * max(1.0, *(line["speedup"] for line in rows)))
    panels[0].set_ylabel("speed-up over the fastest bf16 attention")
    figure.suptitle(f"decode attention, {results['conditions']['device']}")
    figure.savefig(path, dpi=150)


def plot_roofline(results: Record, path: Path) -> None:
    """Arithmetic done against arithmetic for each byte read; the roof is the bandwidth of a device copy.

    An attended token costs 4 * D operations for each query head, however it is stored; fewer bits move a point to the
    right and raise its roof. What a point lacks to the roof is not bytes: instructions, launch, merge.

    Raises:
        ValueError: matplotlib is not installed, or there is nothing to draw.
    """
    rows, copy_gbs = _drawn(results), results["conditions"]["copy_gbs"]
    if not rows or not copy_gbs:
        raise ValueError("no row was timed beside a copy, so there is nothing to draw")
    figure, panels = _figure(len(_shapes(rows)))
    shapes = {shape.name: shape for shape in SHAPES}
    names = list(dict.fromkeys(tiers_shown(line) for line in rows))
    batches = sorted({line["batch"] for line in rows})
    contexts = sorted({line["context"] for line in rows})
    for panel, name in zip(panels, _shapes(rows), strict=True):
        shape = shapes[name]
        labelled = set()
        reach = []
        for line in (line for line in rows if line["shape"] == name):
            cell = Cell(shape, line["batch"], line["context"])
            operations = 4 * shape.head_dim * shape.query_heads * cell.batch * cell.context
            best = fastest(baselines_of(cell, results["baselines"]))
            points = [(tiers_shown(line), line["bytes"], line["us"], f"C{names.index(tiers_shown(line))}")]
            points += [("best bf16", cell.plain_bytes, best.us, "black")] if best is not None else []
            for label, size, us, color in points:
                panel.plot(
                    operations / size,
                    operations / us / 1e6,
                    _marker(batches.index(line["batch"])),
                    color=color,
                    markersize=4 + 2 * contexts.index(line["context"]),
                    alpha=0.7,
                    linestyle="none",
                    label=None if label in labelled else label,
                )
                labelled.add(label)
                reach.append(operations / size)
        span = [min(reach) / 1.5, max(reach) * 1.5]
        for share in (1.0, 0.5, 0.25):
            panel.plot(
                span,
                [share * copy_gbs * at / 1e3 for at in span],
                color="gray",
                linestyle="-" if share == 1 else ":",
                label=f"copy, {copy_gbs:.0f} GB/s" if share == 1 else None,
            )
            panel.annotate(f"{share:.0%}", (span[1], share * copy_gbs * span[1] / 1e3), fontsize=8, color="gray")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks([2**n for n in range(1, 8) if span[0] < 2**n < span[1]])
        panel.xaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.set(title=name, xlabel="operations for each byte read")
        panel.grid(alpha=0.3)
    _legend(figure, panels)
    panels[0].set_ylabel("TFLOP/s")
    marks = ", ".join(f"{name}: batch {batch}" for name, batch in zip(_MARKERS, batches, strict=False))
    figure.suptitle(f"decode attention, {results['conditions']['device']}; {marks}; larger: more tokens")
    figure.savefig(path, dpi=150)
