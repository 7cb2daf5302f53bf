"""Render figures from result files into the pages that show them: ``python eval/report.py`` (``--check`` only looks).

A page marks where a table goes; what stands between the marks is replaced:

    <!-- report: NAME -->
    ...
    <!-- end report -->

Every number that a page shows comes from a file; ``--check`` exits with 1 where a page and its files differ. A plot
carries a digest of its rows and is drawn anew where they changed.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_subbyte_moe.codecs import codecs
from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME, Heads


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package beside this file, wherever we are run

import cards
import claims
import experts_report
import latency_report
import readme_report
import routing_report
from quality import report as quality
from quality.report import table


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"
PAGES = (ROOT / "README.md", ROOT / "eval" / "README.md", *sorted((ROOT / "model_cards").glob("*/README.md")))
_SHOWN_BATCHES = (1, 8)
_MARK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end report -->)", re.DOTALL)


def _load(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def demo() -> str:
    """What ``hf-subbyte-moe demo`` printed."""
    result = _load(RESULTS / "demo.json")
    plain, packed = result["plain"], result["packed"]

    def answer(row: dict[str, Any]) -> str:
        first = row["answer"].splitlines()[0]
        return f"`{first}` ({'right' if first.startswith(result['expected']) else 'wrong'})"

    rows = [
        ["answer", answer(plain), answer(packed)],
        ["allocated bytes", f"{plain['bytes']:,}", f"{packed['bytes']:,}"],
        ["of the plain cache", "100 %", f"{packed['bytes'] / plain['bytes']:.1%}"],
        ["bits a packed value: codes; with scales", "-", f"{packed['code_bits']:.2f}; {packed['bits']:.2f}"],
        ["bits a cached value, everything counted", "16", f"{packed['bits_total']:.2f}"],
        ["decoded tokens/s", f"{plain['tokens_per_s']:.1f}", f"{packed['tokens_per_s']:.1f}"],
    ]
    return table([f"{result['context']:,} tokens of context", "plain cache, bf16", "`entropy_subbyte`"], rows)


def bench() -> str:
    """What ``hf-subbyte-moe bench`` printed, with its conditions."""
    result = _load(RESULTS / "bench.json")
    rows = [
        [
            f"{timing['context']:,}",
            f"{timing['plain_prefill_s']:.1f}",
            f"{timing['prefill_ratio'] - 1:+.0%}",
            f"{timing['plain_step_ms']:.1f}",
            f"{timing['packed_step_ms']:.1f}",
            f"{timing['step_ratio']:.2f}",
        ]
        for timing in result["timings"]
    ]
    header = ["context", "prefill, s", "packing adds", "step, ms", "packed step, ms", "ratio"]
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    return f"{table(header, rows)}\n\nMedians of paired runs; {conditions}."


def generate_speed() -> str:
    """``generate`` on a GPU with packed caches and with the plain one."""
    result = _load(RESULTS / "generate_speed.json")
    rows = [
        [
            f"{row['cache']}, batch {row['batch']}, {row['context']:,} tokens",
            f"{row['first_ms']:.0f}",
            f"{row['ms_mean']:.2f}",
            f"{row['ms_median']:.2f}",
            f"{row['speedup']:.2f}",
            f"{row['peak_gb']:.2f}" if row.get("peak_gb") else "-",
            row["commit"],
        ]
        for row in result["rows"]
    ]
    header = ["cache", "first token, ms", "ms a step, mean", "median", "times `dynamic` (mean)", "peak, GB", "commit"]
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    return f"{table(header, rows)}\n\n{conditions}."


def decode_attention() -> str:
    """The fused kernel beside the fastest bf16 attention; all rows are in kernels/README.md."""
    result = _load(ROOT / "kernels" / "benchmarks" / "results" / "decode_attention.json")
    fastest: dict[tuple[str, int, int], dict[str, Any]] = {}
    mixed: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in result["rows"]:
        if row["backend"] != "cuda" or row["us"] is None or row["batch"] not in _SHOWN_BATCHES:
            continue
        key = (row["shape"], row["batch"], row["context"])
        if row["k_tier"] == "mix-2.5":
            mixed[key] = row
        elif row["k_tier"] == row["v_tier"] and (key not in fastest or row["us"] < fastest[key]["us"]):
            fastest[key] = row
    rows = [
        [
            f"{key[0]}, batch {key[1]}, {key[2]:,} tokens",
            f"{row['baseline_us']:.1f}",
            f"{row['us']:.1f} (`{row['k_tier']}`)",
            f"{row['speedup']:.2f}",
            f"{row['copy_share']:.0%}",
            f"{mixed[key]['us']:.1f}" if key in mixed else "-",
            f"{mixed[key]['speedup']:.2f}" if key in mixed else "-",
        ]
        for key, row in sorted(fastest.items())
    ]
    header = ["one layer, one token", "best bf16, us", "one format, us", "times faster", "of copy bandwidth"]
    return table([*header, "formats mixed to 2.5 bits of codes, us", "times faster"], rows)


def tiers() -> str:
    """Every tier and its bits, from the codecs themselves."""
    rows = [
        [
            f"`{codec.name}`",
            f"{codec.format.bits_per_value(128):.2f} ({codec.format.bits_per_value(64):.2f})",
            codec.summary + (", rotated" if codec.format.rotated else ""),
        ]
        for codec in codecs()
    ]
    return table(["tier", "bits a value at head_dim 128 (64)", "how"], rows)


def training() -> str:
    """Losses and needles of the reference model when its training ended."""
    result = _load(ROOT / "model_cards" / "subbyte-moe-31m" / "training_result.json")
    losses = [[key.removeprefix("val/"), f"{value:.2f}"] for key, value in result.items() if key.startswith("val/")]
    needles = [[key.removeprefix("niah@"), f"{value:.2f}"] for key, value in result.items() if key.startswith("niah@")]
    return f"{table(['held-out text', 'loss'], losses)}\n\n{table(['needle: tokens of context', 'right'], needles)}"


def quality_policies() -> str:
    """Policies at equal bits, briefly."""
    rows, _ = quality.load(RESULTS / "quality.json")
    return quality.policies(rows) if rows else quality.missing("quality")


def quality_all() -> str:
    """Everything that was measured about policies."""
    rows, dropped = quality.load(RESULTS / "quality.json")
    found = quality.tables(rows, dropped, quality.full_table)
    return _plot("quality", rows) + found if found else quality.missing("quality")


def quality_peers() -> str:
    """Other caches at equal real bits."""
    rows, dropped = quality.load(RESULTS / "quality_peers.json")
    found = quality.tables(rows, dropped, quality.full_table)
    return _plot("quality_peers", rows) + found if found else quality.missing("peers")


def quality_ablations() -> str:
    """What each part is worth."""
    rows, dropped = quality.load(RESULTS / "quality_ablations.json")
    return quality.tables(rows, dropped, quality.ablation_table) or quality.missing("ablations")


def quality_collapse() -> str:
    """Models whose keys break low-bit caches."""
    rows, _ = quality.load(RESULTS / "quality_collapse.json")
    return quality.collapse(rows) if rows else quality.missing("collapse")


def routing() -> str:
    """Transitions inside a domain and what they cost, briefly."""
    result = routing_report.load(RESULTS / "routing.json")
    return routing_report.short(result) if result["rows"] else routing_report.missing()


def routing_all() -> str:
    """Every placement, mode and batch."""
    result = routing_report.load(RESULTS / "routing.json")
    if not result["rows"]:
        return routing_report.missing()
    return f"![loss against locality](results/routing.png)\n\n{routing_report.full(result)}"


def roofline() -> str:
    """What decode steps must cost on many GPUs: computed, nothing measured."""
    result = _load(RESULTS / "roofline.json")
    machine, gpus = result["machine"], sorted({row["gpus"] for row in result["rows"]})
    cells: dict[tuple[str, int], dict[tuple[int, bool], dict[str, Any]]] = {}
    for row in result["rows"]:
        cells.setdefault((row["model"], row["batch"]), {})[row["gpus"], row["bits"] is None] = row

    def cell(found: dict[tuple[int, bool], dict[str, Any]], count: int) -> str:
        return " / ".join(
            f"{row['ms']:.1f}" if row["fits"] else "-" for row in (found[count, True], found[count, False])
        )

    rows = [[f"{name}, batch {batch}", *(cell(found, one) for one in gpus)] for (name, batch), found in cells.items()]
    bits = next(row["bits"] for row in result["rows"] if row["bits"] is not None)
    computed = table(["ms a step at least, by GPUs", *map(str, gpus)], rows)
    return (
        f"{computed}\n\n**Computed** from published configs, not measured: {result['rows'][0]['context']:,} tokens a "
        f"row, bf16 cache / {bits:g} bits, - where it does not fit; {machine['name']}, every byte read once at "
        f"{machine['memory_rate'] / 1e12:.2f} TB/s, links at {machine['link_rate'] / 1e9:.0f} GB/s inside a node of "
        f"{machine['gpus_a_node']} and {machine['node_rate'] / 1e9:.0f} GB/s a GPU between nodes; launches and "
        "latencies are not in it."
    )


def latency() -> str:
    """Milliseconds a token of ``generate()``, stock and with our parts added one by one."""
    result = latency_report.load(RESULTS / "latency.json")
    picture = "![what each part saves](results/latency.png)\n\n" if result["rows"] else ""
    return picture + latency_report.table(result)


def packed_weights() -> str:
    """What int4 and fp8 weights cost the reference MoE."""
    path = RESULTS / "experts_weights.json"
    if not path.exists():
        return "Not measured yet: `python eval/experts_weights.py TEXTS.jsonl`."
    rows = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| packed | bits a weight | KL, nats a token | loss | top-1 | same experts |", "| --- |" + " ---: |" * 5]
    for row in rows:
        name = row["weights"] if "projections" in row["weights"] else f"experts, {row['weights']}"
        low, high = row["kl_95"]
        lines.append(
            f"| {name} | {row['bits']:.2f} | {row['kl']:.4f} ({low:.4f} to {high:.4f}) | {row['loss']:+.4f} | "
            f"{row['top1']:.1%} | {row['slots']:.1%} |"
        )
    first = rows[0]
    return (
        "\n".join(lines) + f"\n\n{first['model']}, {first['texts']} texts of {first['tokens']:,} tokens, all tokens, "
        f"exact caches, 95 % intervals over texts; own loss {first['loss_own']:.3f}; {first['device']}, commit "
        f"{', '.join(dict.fromkeys(row['commit'] for row in rows))}. Rows are filled up to 128 columns, which costs "
        "narrow models bits."
    )


def experts_all() -> str:
    """Decode steps with experts outside the GPU, every row, and the bars."""
    result = experts_report.load(RESULTS / "experts.json")
    picture = "![milliseconds by resident experts](results/experts.png)\n\n" if result["rows"] else ""
    return picture + experts_report.table(result)


def prediction() -> str:
    """How well the reference MoE's experts are foretold."""
    return experts_report.accuracy_table(_predictor_notes())


def _predictor_notes() -> dict[str, Any]:
    notes: dict[str, Any] = Heads.load(ROOT / "model_cards" / "subbyte-moe-31m" / PREDICTOR_SIDECAR_NAME).notes
    return notes


def _plot(name: str, rows: list[dict[str, Any]]) -> str:
    """A plot's place in eval/README.md, where it has something to show."""
    return f"![KL against real bits](results/{name}.png)\n\n" if quality.drawn_rows(rows) else ""


SECTIONS: dict[str, Callable[[], str]] = {
    "demo": demo,
    "bench": bench,
    "generate_speed": generate_speed,
    "decode_attention": decode_attention,
    "tiers": tiers,
    "training": training,
    "quality_policies": quality_policies,
    "quality_all": quality_all,
    "quality_peers": quality_peers,
    "quality_ablations": quality_ablations,
    "quality_collapse": quality_collapse,
    "routing": routing,
    "routing_all": routing_all,
    "roofline": roofline,
    "latency": latency,
    "packed_weights": packed_weights,
    "experts_all": experts_all,
    "prediction": prediction,
    **cards.SECTIONS,
    **claims.SECTIONS,
    **readme_report.SECTIONS,
}


def rendered(page: str) -> str:
    """A page with its marked parts made anew.

    Raises:
        KeyError: a mark names no section.
    """
    return _MARK.sub(lambda mark: f"{mark[1]}{SECTIONS[mark[2]]()}\n{mark[3]}", page)


def _stale_pages(pages: Sequence[Path], check: bool) -> list[Path]:
    """Pages that differ from their files; they are written unless ``check``."""
    stale = []
    for path in pages:
        page = path.read_text(encoding="utf-8")
        fresh = rendered(page)
        if fresh != page:
            stale.append(path)
            if not check:
                path.write_text(fresh, encoding="utf-8")
    return stale


def _stale_plots(check: bool) -> list[Path]:
    """Plots of other rows; they are drawn anew unless ``check``."""
    stale = []
    for name in ("quality", "quality_peers"):
        rows, path = quality.drawn_rows(quality.load(RESULTS / f"{name}.json")[0]), RESULTS / f"{name}.png"
        if rows and quality.is_stale(path, rows):
            stale.append(path)
            if not check:
                quality.plot_bits(rows, path)
    shown, path = routing_report.drawn_rows(routing_report.load(RESULTS / "routing.json")), RESULTS / "routing.png"
    if shown and quality.is_stale(path, shown):
        stale.append(path)
        if not check:
            routing_report.plot(shown, path)
    timed, path = latency_report.load(RESULTS / "latency.json")["rows"], RESULTS / "latency.png"
    if timed and latency_report.is_stale(path, timed):
        stale.append(path)
        if not check:
            latency_report.plot(timed, path)
    placed, path = experts_report.load(RESULTS / "experts.json")["rows"], RESULTS / "experts.png"
    foretold = _predictor_notes()["accuracy"] if placed else []
    if placed and experts_report.is_stale(path, [placed, foretold]):
        stale.append(path)
        if not check:
            experts_report.plot(placed, foretold, path)
    return stale


def main(check: bool, pages: Sequence[Path] = PAGES) -> int:
    """Rewrite pages, and plots where all pages are asked for; or tell which ones are stale."""
    stale = _stale_pages(pages, check) + (_stale_plots(check) if pages is PAGES else [])
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'differs from its result files' if check else 'rendered'}")
    return int(check and bool(stale))


def command(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where a page or a plot differs from its files.")
    ] = False,
) -> None:
    """Render figures from result files into the pages that show them."""
    raise typer.Exit(main(check))


if __name__ == "__main__":
    typer.run(command)
