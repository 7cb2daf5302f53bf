"""Tables, sentences and the plot of ``eval/results/routing.json``; ``report.py`` places them."""

import json
from pathlib import Path
from typing import Any

from quality.report import Row, digest, table


CONFIG = Path(__file__).with_name("configs") / "routing.json"
CLAIM = 0.85  # of transitions, the documents say
_NATIVE, _SOFT, _HARD = "native", "soft", "hard"
_COMPARED = ("random", "index")
_HEADER = [
    "placement and routing",
    "transitions",
    "pairs",
    "loss, nats",
    "needle",
    "bytes across",
    "memory",
    "domain",
    "expert",
]
_SIGNALS = {
    "traces": "transitions and pairs (default)",
    "transitions": "transitions alone",
    "coactivation": "pairs alone",
    "outputs": "outputs on the same tokens",
    "weights": "weights",
    "rows": "rows of the routers",
    "index": "index",
    "random": "random",
}


def load(path: Path) -> dict[str, Any]:
    """Rows of placements and of batches; empty without a file."""
    if not path.exists():
        return {"rows": [], "batch": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def missing() -> str:
    """What stands where nothing is measured."""
    return "Not measured yet: `python eval/routing.py eval/configs/routing.json`."


def short(result: dict[str, Any]) -> str:
    """The lines that decide, and what of the claim holds."""
    rows = [row for row in _averaged(result["rows"]) if _is_default(row)]
    shown = [
        row
        for row in rows
        if (row["mode"] == _NATIVE and row["clustering"] in ("traces", "random") and row["replicas"] == 0)
        or (row["mode"] == _SOFT and row["clustering"] == "traces" and row["strength"] == 0.5)
        or (row["mode"] == _SOFT and row["clustering"] == "traces" and row["strength"] == 1.0 and row["replicas"])
    ]
    return f"{_domain_table(shown)}\n\n{_verdict(rows)}\n\n{_conditions(result['rows'])}"


def full(result: dict[str, Any]) -> str:
    """Every row."""
    rows = _averaged(result["rows"])
    parts = [_signal_table(rows), _domain_table([row for row in rows if row["clustering"] == "traces"])]
    if result.get("batch"):
        parts.append(_batch_table(result["batch"]))
    return "\n\n".join([*parts, _conditions(result["rows"])])


def drawn_rows(result: dict[str, Any]) -> list[Row]:
    """What the plot shows."""
    return [row for row in _averaged(result["rows"]) if row["clustering"] in ("traces", *_COMPARED)]


def plot(rows: list[Row], path: Path) -> None:
    """Loss against the share of transitions that stay in one domain, a panel a number of domains.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as failed:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from failed
    counts = sorted({row["domains"] for row in rows})
    figure = Figure(figsize=(5 * len(counts), 4.4), layout="constrained")
    panels = figure.subplots(1, len(counts), sharey=True, squeeze=False)[0]
    for panel, domains in zip(panels, counts, strict=True):
        here = [row for row in rows if row["domains"] == domains and _is_default(row)]
        for replicas, color in ((0, "tab:blue"), (2, "tab:green")):
            line = [
                row
                for row in here
                if row["clustering"] == "traces" and row["mode"] in (_NATIVE, _SOFT) and row["replicas"] == replicas
            ]
            line.sort(key=lambda row: row["strength"] or 0)
            panel.plot(
                [row["transitions_local"] for row in line],
                [row["dnll"] for row in line],
                marker="o",
                color=color,
                label=f"clusters, soft{f', {replicas} replicas' if replicas else ''}",
            )
            hard = [row for row in here if row["mode"] == _HARD and row["replicas"] == replicas]
            panel.scatter(
                [row["transitions_local"] for row in hard],
                [row["dnll"] for row in hard],
                marker="s",
                color=color,
                label=f"hard{f', {replicas} replicas' if replicas else ''}" if hard else None,
            )
        for name, marker in zip(_COMPARED, ("x", "+"), strict=True):
            alone = [
                row for row in here if row["clustering"] == name and row["mode"] == _NATIVE and row["replicas"] == 0
            ]
            panel.scatter(
                [row["transitions_local"] for row in alone], [0] * len(alone), marker=marker, c="k", label=name
            )
        panel.axvline(CLAIM, color="gray", linestyle=":", linewidth=1)
        panel.set(title=f"{domains} domains", xlabel="transitions inside one domain", xlim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="loss above native, nats a token")
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Description": digest(rows)})


def _is_default(row: Row) -> bool:
    """Not one of the rows that vary what is no trade-off."""
    balanced = row["balanced_load"] or row["clustering"] in _COMPARED
    return bool(balanced and (row["mode"] != _SOFT or (row["follow"] == 0.5 and row["keep"] == 1)))


def _averaged(rows: list[Row]) -> list[Row]:
    """Random placements of several seeds become one row."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        cell = {key: value for key, value in row["cell"].items() if key != "seed" or row["clustering"] != "random"}
        groups.setdefault(json.dumps(cell, sort_keys=True), []).append(row)
    found = []
    for same in groups.values():
        means = {
            key: sum(row[key] for row in same) / len(same)
            for key in ("transitions_local", "pairs_local", "domain_load", "bytes_crossing")
        }
        found.append({**same[0], **means})
    return found


def _name(row: Row) -> str:
    parts = [f"{row['domains']} domains", _SIGNALS[row["clustering"]].removesuffix(" (default)"), row["mode"]]
    if row["clustering"] == "traces":
        parts[1] = "clusters" if row["balanced_load"] else "clusters of any load"
    if row["mode"] == _SOFT:
        parts[2] += f" {row['strength']}"
        parts += [f"{key} {row[key]:g}" for key, usual in (("follow", 0.5), ("keep", 1)) if row[key] != usual]
    if row["mode"] == _HARD:
        parts[2] += f", best {row['top_clusters']}"
    if row["replicas"]:
        parts.append(f"{row['replicas']} replicas")
    return ", ".join(parts)


def _loss(row: Row) -> str:
    return "0" if row["mode"] == _NATIVE else f"{row['dnll']:+.4f} ± {row['dnll_se']:.4f}"


def _domain_table(rows: list[Row]) -> str:
    order = {name: place for place, name in enumerate((_NATIVE, _SOFT, _HARD))}
    ordered = sorted(
        rows,
        key=lambda row: (
            row["domains"],
            row["clustering"] not in _COMPARED,
            row["replicas"],
            order[row["mode"]],
            row["strength"] or 0,
            row["transitions_local"],
        ),
    )
    lines = [
        [
            _name(row),
            f"{row['transitions_local']:.1%}",
            f"{row['pairs_local']:.1%}",
            _loss(row),
            f"{row['needle']:.2f}",
            f"{row['bytes_crossing']:,.0f}",
            f"{row['memory']:.2f}",
            f"{row['domain_load']:.2f}",
            f"{row['load']:.2f}",
        ]
        for row in ordered
    ]
    return table(_HEADER, lines)


def _signal_table(rows: list[Row]) -> str:
    counts = sorted({row["domains"] for row in rows})
    lines = []
    for signal, name in _SIGNALS.items():
        own = [row for row in rows if row["clustering"] == signal and _is_default(row)]
        native = {(row["domains"], row["replicas"]): row for row in own if row["mode"] == _NATIVE}
        soft = next(
            (row for row in own if row["mode"] == _SOFT and (row["domains"], row["strength"]) == (2, 0.5)), None
        )
        shares = [
            f"{native[count, held]['transitions_local']:.1%}" if (count, held) in native else "-"
            for count in counts
            for held in (0, 2)
        ]
        changed = "-" if soft is None else f"{soft['transitions_local']:.1%} at {_loss(soft)}"
        lines.append([name, *shares, changed])
    heads = [f"{count} domains{', 2 replicas' if held else ''}" for count in counts for held in (0, 2)]
    return table(["clusters by", *heads, "2 domains, soft 0.5"], lines)


def _batch_table(rows: list[Row]) -> str:
    lines = [
        [
            f"{row['batch']} tokens, bonus {row['batch_aware']:g}, keep {row['keep']}",
            f"{row['distinct_native']:.2f}",
            f"{row['distinct']:.2f}",
            f"{row['distinct'] / row['distinct_native'] - 1:+.1%}",
            f"{row['dnll']:+.4f} ± {row['dnll_se']:.4f}",
        ]
        for row in sorted(rows, key=lambda row: (row["batch"], row["batch_aware"]))
    ]
    return table(["a step of", "distinct experts, native", "batch-aware", "fewer", "loss, nats"], lines)


def _verdict(rows: list[Row]) -> str:
    """What of the documents' share holds, and at which loss."""
    said = []
    for domains in sorted({row["domains"] for row in rows}):
        own = [row for row in rows if row["domains"] == domains and row["clustering"] == "traces"]
        reached = sorted((row for row in own if row["transitions_local"] >= CLAIM), key=lambda row: row["dnll"])
        free = max((row for row in own if row["mode"] == _NATIVE), key=lambda row: row["transitions_local"])
        best = max(own, key=lambda row: row["transitions_local"])
        copies = f" with {free['replicas']} replicas" if free["replicas"] else ""
        if reached:
            least = reached[0]
            unaided = [row for row in reached if not row["replicas"]]
            held = f" with {least['replicas']} of 16 experts replicated" if least["replicas"] else ""
            said.append(
                f"With {domains} domains it is reached{held} at {least['dnll']:+.4f} nats a token"
                + ("" if unaided or not least["replicas"] else ", and not without replicas")
                + f"; placement alone, which changes no token, gives {free['transitions_local']:.0%}{copies}."
            )
        else:
            said.append(
                f"With {domains} domains it is not reached: {best['transitions_local']:.0%} at {best['dnll']:+.4f} "
                f"nats is the most that was measured, {free['transitions_local']:.0%}{copies} where no token changes."
            )
    return f'The documents\' "{CLAIM:.0%} of transitions inside a node", on this model: ' + " ".join(said)


def _conditions(rows: list[Row]) -> str:
    tokens = sorted({row["n_tokens"] for row in rows})
    commits = ", ".join(sorted({row["commit"] for row in rows}))
    error = "one standard error"
    if any("n_texts" not in row for row in rows):
        error += " over tokens, which is too small: a text's tokens depend on each other"
    asked = json.loads(CONFIG.read_text(encoding="utf-8"))
    prompts = f"of {asked['prompts']} prompts of {asked['needle_context']} tokens"
    native = f"{rows[0]['needle_native']:.2f} {prompts}, busiest expert {rows[0]['load_native']:.2f}"
    return (
        f"Reference model (16 experts, 2 a token, 8 layers), {', '.join(f'{count:,}' for count in tokens)} held-out "
        f"tokens; ± {error}; native: needle {native}; commit {commits}."
    )
