"""What an lm-eval run found: a row for each task, length and cache, kept document by document.

Standard errors are those of the mean over documents. Two runs are compared on the same documents, pair by pair, with a
bootstrap over documents; runs whose tasks, seeds, protocols or documents differ are refused.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table


Row = dict[str, Any]

RESAMPLES = 4000
_HASH = 12  # characters of a document's hash that are kept
_SEEDS = ("random_seed", "numpy_seed", "torch_seed", "fewshot_seed")
_PLACE = ("model", "dtype", "prefill", "task", "length")
_SAME = ("model", "dtype", "prefill", "seeds", "metric", "options")  # what runs that are compared must share


def cache_label(cache: str, cache_config: Mapping[str, Any]) -> str:
    """What tables call a cache."""
    return " ".join([cache, *(f"{key}={value}" for key, value in cache_config.items())])


def document_length(doc: Any) -> str:
    """The tokens that a task was asked to make a document of, by the key ``max_length``; empty where it made none.

    RULER's tasks and ours have that key. ``length`` is what data sets call anything: words, "short", a document's own.
    """
    length = doc.get("max_length") if isinstance(doc, Mapping) else None
    return str(length) if isinstance(length, int) and not isinstance(length, bool) else ""


def _mean_and_error(scores: Sequence[float]) -> tuple[float, float | None]:
    mean = sum(scores) / len(scores)
    if len(scores) < 2:
        return mean, None
    variance = sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)
    return mean, math.sqrt(variance / len(scores))


def _score(sample: Mapping[str, Any], length: str) -> tuple[str, float] | None:
    """Name and value of what one document scored; None where a task gives no number for it."""
    names = [name for name in sample["metrics"] if not name.isdigit()]
    if length in sample["metrics"]:  # as RULER's tasks have it, their one metric under the length
        return (names or ["string_match"])[0], float(sample[length])
    for name in names:
        value = sample.get(name)
        if isinstance(value, (int, float)):
            return name, float(value)
        if (
            isinstance(value, (list, tuple))
            and len(value) == 2
            and all(isinstance(part, (int, float)) for part in value)
        ):
            return f"{name} (nats)", -float(value[0]) / max(1.0, float(value[1]))  # log-likelihood and its weight
    return None


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """Rows of what ``simple_evaluate`` returned for the model ``subbyte``, samples included."""
    config = results["config"]
    said = config["subbyte"]
    rows = []
    for task, samples in results["samples"].items():
        first = samples[0]["filter"] if samples else None
        lengths: dict[str, list[Mapping[str, Any]]] = {}
        for sample in sorted(samples, key=lambda sample: int(sample["doc_id"])):
            if sample["filter"] == first:
                lengths.setdefault(document_length(sample["doc"]), []).append(sample)
        for length, chosen in lengths.items():
            scored = [(sample, found) for sample in chosen if (found := _score(sample, length)) is not None]
            if not scored:
                continue
            metric = scored[0][1][0]
            mean, error = _mean_and_error([value for _, (_, value) in scored])
            better = results["higher_is_better"].get(task, {}).get(metric)
            rows.append(
                {
                    **{key: said[key] for key in ("dtype", "prefill", "cache", "cache_config", "version")},
                    "model": Path(said["model"]).name,
                    "label": cache_label(said["cache"], said["cache_config"]),
                    "task": task,
                    "length": int(length) if length else None,
                    "metric": metric,
                    "higher_is_better": better is not False and not metric.endswith("(nats)"),
                    "score": mean,
                    "stderr": error,
                    "n": len(scored),
                    **said["usage"].get(task, {}).get(length, {}),
                    "seeds": [config.get(key) for key in _SEEDS],
                    "options": {"gen_kwargs": config.get("gen_kwargs"), "fewshot": results["n-shot"].get(task)},
                    "commit": os.environ.get("BENCH_COMMIT") or results.get("git_hash"),
                    "documents": [
                        {"prompt": sample["prompt_hash"][:_HASH], "score": value, "depth": sample["doc"].get("depth")}
                        for sample, (_, value) in scored
                    ],
                }
            )
    return rows


class ResultFile:
    """Rows in a JSON file, written as they come.

    Attributes:
        rows: all of them.
    """

    def __init__(self, path: Path) -> None:
        """Read what an earlier run left, if anything.

        Raises:
            ValueError: the file holds something else.
        """
        self._path = path
        self.rows: list[Row] = []
        if path.exists():
            self.rows = read_rows(path)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, in place of those of the same place and cache, and write the file."""
        for row in rows:
            self.rows = [held for held in self.rows if _identity(held) != _identity(row)] + [row]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".tmp")
        fresh.write_text(json.dumps({"rows": self.rows}, indent=1) + "\n", encoding="utf-8")
        fresh.replace(self._path)


def read_rows(path: Path) -> list[Row]:
    """Rows of a result file.

    Raises:
        ValueError: it holds something else; names the file.
    """
    try:
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
        if not all("documents" in row for row in rows):
            raise KeyError("documents")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} holds no results of hf-subbyte-moe eval ({error})") from None
    return rows


def _identity(row: Row) -> str:
    return json.dumps([[row[key] for key in _PLACE], row["label"]])


def place_of(row: Row) -> tuple[Any, ...]:
    """Model, dtype, protocol, task and length."""
    return tuple(row[key] for key in _PLACE)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


_HEADER = ("model", "prefill", "task", "length", "cache", "score", "+-", "n", "bytes", "code bits", "bits", "total")
_SHARED = 2  # columns that the title may hold
_HEADER_END = ("packed tokens read", "tokens/s")


def _cells(row: Row) -> list[str]:
    return [
        str(row["model"]),
        str(row["prefill"]),
        str(row["task"]),
        _shown(row["length"], ",d"),
        str(row["label"]),
        f"{row['score']:.3f}",
        _shown(row["stderr"], ".3f"),
        str(row["n"]),
        _shown(row.get("cache_bytes"), ",.0f"),
        *(_shown(row.get(key), ".2f") for key in ("code_bits", "bits", "bits_total")),
        _shown(row.get("packed_tokens_read"), ",d"),
        _shown(row.get("tokens_per_s"), ".1f"),
    ]


def _ordered(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row["model"], row["prefill"], row["task"], row["length"] or 0))


def result_table(rows: Iterable[Row]) -> Table:
    """Task by length by cache, for a terminal; what all rows share in the first columns goes to the title."""
    ordered = _ordered(rows)
    names, lines = [*_HEADER, *_HEADER_END], [_cells(row) for row in ordered]
    shared = [name for name in _HEADER[:_SHARED] if len({line[names.index(name)] for line in lines}) == 1]
    said = ", ".join(lines[0][names.index(name)] for name in shared) if lines else ""
    table = Table(title=f"{said}; +- is the standard error of the mean".removeprefix("; "), title_justify="left")
    kept = [number for number, name in enumerate(names) if name not in shared]
    for number in kept:
        table.add_column(names[number], overflow="fold", justify="left" if number < len(_PLACE) else "right")
    for line in lines:
        table.add_row(*(line[number] for number in kept))
    return table


def markdown_table(rows: Iterable[Row]) -> str:
    """The same for a page."""
    lines = [[*_HEADER, *_HEADER_END], ["---"] * 5 + ["---:"] * 9, *(_cells(row) for row in _ordered(rows))]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plot_needles(rows: Iterable[Row], path: Path) -> bool:
    """Draw needle depth by length, a panel for each model, task and cache; False where no document has a depth."""
    panels: dict[tuple[str, str, str], dict[tuple[int, float], list[float]]] = {}
    for row in _ordered(rows):
        for document in row["documents"]:
            if document["depth"] is not None and row["length"] is not None:
                cells = panels.setdefault((f"{row['model']}, {row['prefill']}", row["task"], row["label"]), {})
                cells.setdefault((row["length"], document["depth"]), []).append(document["score"])
    if not panels:
        return False
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(3.6 * columns, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    image = None
    for axis, (title, cells) in zip(axes.flat, panels.items(), strict=False):
        lengths, depths = (sorted({place[side] for place in cells}) for side in (0, 1))
        grid = np.full((len(depths), len(lengths)), np.nan)
        for (length, depth), scores in cells.items():
            grid[depths.index(depth), lengths.index(length)] = sum(scores) / len(scores)
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
        axis.set_title("\n".join(title), fontsize=7)
        axis.set_xlabel("tokens")
        axis.set_ylabel("depth")
    assert image is not None
    figure.colorbar(image, ax=axes, label="right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return True


# ------------------------------------------------------------------ two runs


@dataclass(frozen=True)
class Difference:
    """One task and length of two runs.

    Attributes:
        place: model, dtype, protocol, task and length.
        metric: what is scored.
        before: mean of the first run.
        after: mean of the second.
        change: mean of the paired differences, second less first.
        low: lower end of its 95 % interval.
        high: upper end.
        loss: how much worse the second is; negative where it is better.
        n: documents.
    """

    place: tuple[Any, ...]
    metric: str
    before: float
    after: float
    change: float
    low: float
    high: float
    loss: float
    n: int


def choose_cache(rows: Sequence[Row], label: str | None, name: str) -> list[Row]:
    """Rows of one cache.

    Raises:
        ValueError: there are several and none is named, or there is none of that name; lists what there is.
    """
    labels = sorted({row["label"] for row in rows})
    if label is None and len(labels) == 1:
        return list(rows)
    if label not in labels:
        raise ValueError(
            f"{name} holds the caches {labels}: name one of them" + ("" if label is None else f", not {label!r}")
        )
    return [row for row in rows if row["label"] == label]


def _interval(differences: Sequence[float], seed: int) -> tuple[float, float]:
    values = np.asarray(differences)
    picks = np.random.default_rng(seed).integers(0, len(values), size=(RESAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


def compare(before: Sequence[Row], after: Sequence[Row], seed: int = 0) -> list[Difference]:
    """Differences of two runs, each of one cache, on the same documents.

    Args:
        before: rows of the first run.
        after: rows of the second.
        seed: of the bootstrap.

    Raises:
        ValueError: the runs are not of the same tasks, lengths, model, dtype, protocol, seeds, options or documents.
    """
    held = [{(row["task"], row["length"]): row for row in rows} for rows in (before, after)]
    if set(held[0]) != set(held[1]):
        both = [sorted(f"{task} at {length}" for task, length in set(one)) for one in held]
        raise ValueError(f"the runs are of different tasks or lengths: {both[0]} and {both[1]}")
    if not held[0]:
        raise ValueError("the runs hold no results")
    found = []
    for (task, length), first in sorted(held[0].items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        second = held[1][task, length]
        for key in _SAME:
            if first[key] != second[key]:
                raise ValueError(f"the runs differ in {key} for {task}: {first[key]!r} and {second[key]!r}")
        pairs = list(zip(first["documents"], second["documents"], strict=False))
        if len(first["documents"]) != len(second["documents"]) or any(a["prompt"] != b["prompt"] for a, b in pairs):
            raise ValueError(f"the runs are of different documents for {task} at {length}")
        differences = [b["score"] - a["score"] for a, b in pairs]
        change = sum(differences) / len(differences)
        low, high = _interval(differences, seed)
        loss = -change if first["higher_is_better"] else change
        found.append(
            Difference(
                place_of(first), first["metric"], first["score"], second["score"], change, low, high, loss, len(pairs)
            )
        )
    return found
