"""README's headline and its tables of peers, memory, latency and offload: sections of ``report.py``.

A section whose result file is not there yet names the command that makes it.
"""

import json
from collections.abc import Callable
from pathlib import Path

import cards
from latency_report import is_whole_on_one_gpu
from quality.report import ONE_PIECE, TEXT, Row, conditions, key_of, missing, name_of, shown, table


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"
ATTENTION = ROOT / "kernels" / "benchmarks" / "results" / "decode_attention.json"
_GIB = 2**30
_SHOWN_BATCHES = (1, 8)
_NO_DISTRIBUTED = (
    "Not measured yet: `torchrun --nproc-per-node 2 eval/distributed.py eval/configs/distributed.json expert`."
)
_MEMORY = {"Mixtral-8x7B": "mixtral-8x7b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "DeepSeek-V2-Lite": "deepseek-v2-lite"}


def _rows(name: str) -> list[Row]:
    path = RESULTS / f"{name}.json"
    found: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return found


def _devices(rows: list[Row]) -> str:
    facts = [", ".join(dict.fromkeys(str(row[key]) for row in rows)) for key in ("device", "commit")]
    return f"{facts[0]}, random weights of real shapes, commit {facts[1]}."


def headline() -> str:
    """What the project gives and what that costs, in one sentence of measured figures."""
    result = json.loads(ATTENTION.read_text(encoding="utf-8"))
    place = {"shape": "Mixtral-8x7B", "batch": 8, "context": 131072, "backend": "cuda"}
    rows = [row for row in result["rows"] if all(row[key] == value for key, value in place.items()) and row["us"]]
    mixed = next(row for row in rows if row["k_tier"] == "mix-2.5")
    left = mixed["bytes"] / (2 * 2 * place["batch"] * 8 * 128 * place["context"])  # of 8 KV heads, head_dim 128
    bits = f"{mixed['code_bits']:.1f} bits of codes ({16 * left:.2f} with everything that is held)"
    found = {
        (row["policy"], row["budget"]): row
        for row in _rows("quality")
        if (row["model"], row["context"], row["protocol"], row["task"])
        == ("subbyte-moe-31m", 4096, "one-piece", "text")
        and row["codebook"] == "universal"
    }
    ours, uniform = found["auto", 2.3], found["uniform", 2.3]
    return (
        f"**On Mixtral's shape at 131,072 tokens and batch 8, a cache of {bits} takes {left:.0%} of the bytes of a "
        f"bf16 cache, and attention over it {mixed['us']:.0f} us a layer where the fastest bf16 attention takes "
        f"{mixed['baseline_us']:.0f} ({mixed['speedup']:.1f} times faster, one {mixed['device']}). With "
        f"{ours['code_bits']:.1f} bits of codes, calibrated, our reference MoE's loss grows by {ours['dnll']:.4f} "
        f"nats at 4,096 tokens; uniform codes of as many bits cost {uniform['dnll']:.4f}.** Short contexts gain "
        "nothing: see "
        "[when not to use it](#when-not-to-use-it)."
    )


def peers() -> str:
    """Other caches beside ours by real bits and by all that they hold, on the models of one run."""
    rows = [row for row in _rows("quality_peers") if row["task"] == TEXT and row["protocol"] == ONE_PIECE]
    if not rows:
        return missing("peers")
    places = list(dict.fromkeys((row["model"], row["context"]) for row in rows))
    found = {(key_of(row), row["model"], row["context"]): row for row in rows}
    first = {key_of(row): row for row in reversed(rows)}
    lines = []
    for key, row in sorted(first.items(), key=lambda item: item[1]["bits"] or 16):
        cells = [found.get((key, *place)) for place in places]
        figures = []
        for cell in cells:
            held = ["-"] * 3
            if cell is not None:
                held = [shown(cell["bits_total_16"], ".2f"), f"{cell['kl']:.4f}", f"{cell['dnll']:+.4f}"]
            figures += held
        lines.append([name_of(row), shown(row["bits"], ".2f"), *figures])
    header = ["cache", "bits"]
    for model, context in places:
        header += [f"{model}, {context:,}: all held", "KL", "loss"]
    masses = [row["mass"] for row in rows if row["mass"] is not None]
    mass = f"At most {max(masses):.0%} of the attention fell on packed tokens; " if masses else ""
    return f"{table(header, lines)}\n\n{mass}{conditions(rows)}"


def memory() -> str:
    """Bytes of one sequence's cache at 2.5 bits, by the formula that tests compare with measured bytes."""
    lines = []
    for name, folder in _MEMORY.items():
        for tokens, plain, packed in list(cards.cache_bytes(folder))[-1:]:
            lines.append(
                [f"{name}, {tokens:,} tokens", f"{plain / _GIB:.2f}", f"{packed / _GIB:.2f}", f"{packed / plain:.0%}"]
            )
    return table(["one sequence", "bf16, GiB", "packed, GiB", "of bf16"], lines)


def latency_short() -> str:
    """``generate``: the fastest stock run of each cell beside our fastest; every step between is in eval/README.md."""
    rows = [row for row in _rows("latency") if row["ms_generate"] is not None and is_whole_on_one_gpu(row)]
    if not rows:
        return "Not measured yet: `hf-subbyte-moe bench latency --json eval/results/latency.json`."
    cells: dict[tuple[str, int, int], tuple[list[Row], list[Row]]] = {}
    for row in rows:
        stock, ours = cells.setdefault((row["model"], row["context"], row["batch"]), ([], []))
        (stock if row["system"].startswith("stock") else ours).append(row)
    lines = [
        [f"{model}, {context:,} tokens, batch {batch}", *_fastest(stock, ours)]
        for (model, context, batch), (stock, ours) in cells.items()
    ]
    header = ["one GPU", "stock, ms a token", "ours", "with", "times faster", "of the roofline", "peak, GB"]
    policies = ", ".join(dict.fromkeys(f"`{row['policy']}`" for row in rows))
    filled = any(row["first_ms"] is None for row in rows)
    prompt = " random keys and values stand for the prompt;" if filled else ""
    if not any(row["system"] == "stock static compiled" for row in rows):
        prompt += " stock runs eagerly (its static cache, compiled, was not run), and launches are most of its time;"
    return f"{table(header, lines)}\n\nMedians of `generate()`, cache {policies};{prompt} {_devices(rows)}"


def _fastest(stock: list[Row], ours: list[Row]) -> list[str]:
    """Cells of a line; a dash where one side did not run."""
    base, best = (min(rows, key=lambda row: row["ms_generate"], default=None) for rows in (stock, ours))
    if best is None:
        return ["-" if base is None else f"{base['ms_generate']:.1f}", *["-"] * 5]
    return [
        "-" if base is None else f"{base['ms_generate']:.1f}",
        f"{best['ms_generate']:.1f}",
        f"{best['system']}, {best['weights']}",
        "-" if base is None else f"{base['ms_generate'] / best['ms_generate']:.1f}",
        shown(best["share_of_roofline"], ".0%"),
        shown(best["peak_gb"], ".1f"),
    ]


def experts() -> str:
    """Decode steps with experts in host memory: a line a cell, a column a system."""
    rows = _rows("experts")
    if not rows:
        return "Not measured yet: `hf-subbyte-moe bench experts`."
    systems = list(dict.fromkeys(row["system"] for row in rows))
    cells: dict[tuple[str, float, str], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["resident"], row["trace"]), {})[row["system"]] = row
    lines = [
        [
            f"{model}, {resident:.0%} resident, {trace}",
            *(_offload_cell(found.get(system)) for system in systems),
        ]
        for (model, resident, trace), found in cells.items()
    ]
    note = "Milliseconds a token (share of what link and computation allow at best)."
    return f"{table(['experts', *systems], lines)}\n\n{note} {_devices(rows)}"


def _offload_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    bound = row["share_of_bound"]
    return f"{row['ms']:.1f}" + ("" if bound is None else f" ({bound:.0%})")


_PLACEMENTS = ("native", "by index", "clustered", "clustered, soft")


def distributed() -> str:
    """Steps on one GPU and on two, and what crosses between them: a line a model and batch, packed cache."""
    cells: dict[tuple[str, int, int], dict[str, Row]] = {}
    rows = _rows("distributed")
    for row in rows:
        if row["cache"] != "bf16":
            mode = row["placement"] if row["mode"] == "expert" else row["mode"]
            cells.setdefault((row["model"], row["layers"], row["batch"]), {})[mode] = row
    if not cells:
        return _NO_DISTRIBUTED
    lines = []
    for (model, layers, batch), found in cells.items():
        spans = [found.get(mode) for mode in ("single", "tensor", *_PLACEMENTS)]
        crossed = [_crossing(found[mode]) for mode in _PLACEMENTS if mode in found]
        lines.append(
            [
                f"{model}, {layers} layers, batch {batch}",
                *("-" if row is None else f"{row['ms']:.1f}" for row in spans),
                " / ".join(crossed),
            ]
        )
    header = ["step, ms", "one GPU", "tensor parallel", *(f"experts {name}" for name in _PLACEMENTS)]
    note = (
        "Two GPUs but for the first column; eager steps, which launches bound, so that more GPUs and more to launch "
        f"take longer; {', '.join(dict.fromkeys(row['cache'] for row in rows if row['cache'] != 'bf16'))}"
    )
    context = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(row["context"] for row in rows))
    return f"{table([*header, 'KB a token across'], lines)}\n\n{note}; {context} tokens a row; {_devices(rows)}"


def distributed_all() -> str:
    """Every step on several GPUs: beside its limit, and bytes across beside what the trace of experts foretells."""
    rows = _rows("distributed")
    if not rows:
        return _NO_DISTRIBUTED
    lines = [
        [
            f"{row['model']}, {row['layers']} layers, batch {row['batch']}, {row['cache']}",
            f"{row['gpus']}, {row['mode']}",
            row["placement"],
            f"{row['ms']:.2f}",
            f"{row['roofline_share']:.0%}",
            shown(row["prompt_ms"], ".0f"),
            _crossing(row),
            "-" if row["expert_bytes_predicted"] is None else f"{row['expert_bytes_predicted'] / 1e3:,.1f}",
            f"{row['expert_bytes'] / 1e3:,.1f}",
        ]
        for row in rows
    ]
    header = ["model", "GPUs, parallel", "experts", "step, ms", "of the roofline"]
    header += [f"{rows[0]['prompt_tokens']:,} tokens read, ms", "KB a token across", "of experts, foretold", "counted"]
    context = ", ".join(f"{tokens:,}" for tokens in dict.fromkeys(row["context"] for row in rows))
    return f"{table(header, lines)}\n\n{context} tokens a row; {_devices(rows)}"


def _crossing(row: Row) -> str:
    return f"{(row['attention_bytes'] + row['expert_bytes']) / 1e3:,.0f}"


SECTIONS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "peers": peers,
    "memory": memory,
    "latency_short": latency_short,
    "experts": experts,
    "distributed": distributed,
    "distributed_all": distributed_all,
}
