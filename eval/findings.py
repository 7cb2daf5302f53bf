"""What result files say about the documents' claims: one function a claim, ``None`` where there are no rows yet.

``claims.py`` says what is claimed and when it counts as held; here rows become figures, conditions and a verdict.

- **beaten**: every case passes what is claimed by a tenth or more,
- **reached**: every case does what is claimed; the most that a premise can get,
- **holds in part**: some cases do, or one that the rule calls a part of the claim,
- **refuted**: none does,
- **not measurable here**: our machines cannot run what the claim is about; what they can run is shown.

Where rows have intervals, a case does what is claimed only if its whole interval does.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from latency_report import is_whole_on_one_gpu

from hf_subbyte_moe.roofline import Shape, read_config, shape_of, step


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results"
KERNELS = ROOT / "kernels" / "benchmarks" / "results"
GPUS_A_NODE = 8
ROUTERS = {
    "Qwen3-30B-A3B": 48,
    "Mixtral-8x7B": 32,
    "DeepSeek-V2-Lite": 26,
    "DeepSeek-V3": 58,
    "gpt-oss-20b": 24,
}  # layers
LARGE = "mixtral-8x22b"  # the documents' "8x22B", in eval/configs/models

BEATEN, REACHED, PART, REFUTED = "beaten", "reached", "holds in part", "refuted"
ELSEWHERE = "not measurable here"
_MARGIN = 1.1
_ROUNDING = 1e-9  # of differences of shares

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One figure beside what a claim asks of it.

    Attributes:
        ours: our figure.
        claimed: what it must be, at least or at most.
        at_most: the claim is an upper limit.
    """

    ours: float
    claimed: float
    at_most: bool = False

    @property
    def passed_by(self) -> float:
        """1 where the claim is just reached, more where it is passed."""
        if self.at_most:
            return self.claimed / self.ours if self.ours > 0 else float("inf")
        return self.ours / self.claimed


@dataclass(frozen=True)
class Finding:
    """What a rule found.

    Attributes:
        figure: ours, in words.
        conditions: of what, and on what.
        verdict: one of this module's.
    """

    figure: str
    conditions: str
    verdict: str


def verdict_of(cases: Sequence[Case], part: bool = False, premise: bool = False) -> str:
    """The verdict of some cases.

    Args:
        cases: at least one.
        part: a part of the claim holds in any event.
        premise: the claim is about the world and not about an achievement, so it can't be beaten.
    """
    reached = [case.passed_by >= 1 for case in cases]
    if all(reached):
        return BEATEN if not premise and all(case.passed_by >= _MARGIN for case in cases) else REACHED
    return PART if part or any(reached) else REFUTED


def saving(left: float, claimed: float) -> Case:
    """A case of "so much less": ``left`` is the share that stays, ``claimed`` the share that goes."""
    return Case(left, 1 - claimed, at_most=True)


def held(name: str, folder: Path | None = None) -> dict[str, Any]:
    """A result file's content; empty where there is no file."""
    path = (folder or RESULTS) / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


def rows_of(name: str, folder: Path | None = None, **wanted: Any) -> list[Row]:
    """Rows of a result file whose columns are as wanted."""
    rows: list[Row] = held(name, folder).get("rows", [])
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def span(values: Iterable[float], form: str) -> str:
    """The least and the most of some figures, as one where they look alike."""
    found = sorted(values)
    ends = dict.fromkeys(format(value, form) for value in (found[0], found[-1]))
    return " to ".join(ends)


def named(rows: Iterable[Row], key: str) -> str:
    """Distinct values of a column."""
    return ", ".join(dict.fromkeys(f"{row[key]:,}" if isinstance(row[key], int) else str(row[key]) for row in rows))


# ------------------------------------------------------------------ bytes and time


@cache
def _large() -> Shape:
    return shape_of(read_config(str(ROOT / "eval" / "configs" / "models" / f"{LARGE}.json")), LARGE)


def cache_share() -> Finding | None:
    """The share of a step's bytes that is cache: a floor's share, as everything is read once."""
    shares = {}
    for batch in (1, 16, 64, 128, 256):
        made = step(_large(), 32768, batch, 1)
        shares[batch] = made.cache_read / (made.cache_read + made.weights_read)
    figure = ", ".join(f"{share:.0%} at batch {batch}" for batch, share in shares.items())
    some = any(share >= 0.75 for share in shares.values())
    verdict = verdict_of([Case(shares[64], 0.75)], some, premise=True)
    return Finding(figure, f"{LARGE}, 32,768 tokens, bf16, computed", verdict)


def cache_size() -> Finding | None:
    """The cache of one sequence."""
    rows = rows_of("roofline", bits=None, batch=1, gpus=1, context=131072)
    if not rows:
        return None
    sizes = {row["model"]: row["cache_read"] / 1e9 for row in rows}
    figure = ", ".join(f"{model} {size:.1f} GB" for model, size in sizes.items())
    cases = [Case(max(sizes.values()), 40.0, at_most=True), Case(max(sizes.values()), 20.0)]
    return Finding(figure, "128k tokens, bf16, computed", verdict_of(cases, premise=True))


def batch_size() -> Finding | None:
    """The second document's own formula with its own numbers; it names no KV heads."""
    layers, width, batch, context = 80, 128, 64, 32768
    sizes = {heads: 2 * layers * heads * width * 2 * batch * context / 1e9 for heads in (2, 4, 8)}
    figure = ", ".join(f"{size:.0f} GB with {heads} KV heads" for heads, size in sizes.items())
    verdict = verdict_of([Case(sizes[8], 180.0)], premise=True)
    return Finding(figure, "head_dim 128, by the document's formula", verdict)


def stock_at_128k() -> Finding | None:
    """What Transformers itself takes."""
    rows = [row for row in _on_one_gpu(131072) if row["system"].startswith("stock")]
    if not rows:
        return None
    figure = ", ".join(f"{row['model']}, {row['system']}: {_ms(row):.1f} ms" for row in rows)
    verdict = verdict_of([Case(_ms(row), 50.0) for row in rows], premise=True)
    return Finding(figure, f"batch 1, {named(rows, 'device')}", verdict)


def _on_one_gpu(context: int) -> list[Row]:
    return [row for row in rows_of("latency", batch=1, context=context) if is_whole_on_one_gpu(row)]


def _ms(row: Row) -> float:
    """Of ``generate``, else of the step alone."""
    return float(row["ms_generate"] if row.get("ms_generate") is not None else row["ms_step"])


def latency(context: int, claimed: float) -> Finding | None:
    """Our fastest system for each model; the claim is about 8x22B, smaller models count where that is not there."""
    best: dict[str, Row] = {}
    for row in _on_one_gpu(context):
        known = best.get(row["model"])
        if not row["system"].startswith("stock") and (known is None or _ms(row) < _ms(known)):
            best[row["model"]] = row
    if not best:
        return None
    figure = ", ".join(f"{model} ({row['weights']}) {_ms(row):.1f} ms" for model, row in best.items())
    large = [Case(_ms(row), claimed, at_most=True) for model, row in best.items() if "8x22" in model]
    small = any(_ms(row) <= claimed for row in best.values())
    verdict = verdict_of(large) if large else PART if small else ELSEWHERE
    return Finding(figure, f"{context:,} tokens, batch 1, one {named(best.values(), 'device')}", verdict)


def traffic() -> Finding | None:
    """Bytes that the fused kernel reads beside those of bf16, exact tokens included."""
    rows = [
        row
        for row in rows_of("decode_attention", KERNELS, backend="cuda", k_tier="vq2", v_tier="vq2")
        if row["us"] is not None and row["context"] >= 32768
    ]
    if not rows:
        return None
    left = [row["bytes"] / _plain_bytes(row) for row in rows]
    faster = span((row["speedup"] for row in rows), ".1f")
    figure = f"{span((1 - share for share in left), '.0%')} fewer bytes, {faster} times faster"
    where = f"2-bit codes, {named(rows, 'shape')}, {named(rows, 'context')} tokens, {named(rows, 'device')}"
    return Finding(figure, where, verdict_of([saving(share, 0.73) for share in left]))


_KV_HEADS = {"Mixtral-8x7B": 8, "Qwen3-30B-A3B": 4}


def _plain_bytes(row: Row) -> float:
    """One layer's cache in bf16, head_dim 128."""
    return float(2 * 2 * row["batch"] * _KV_HEADS[row["shape"]] * 128 * row["context"])


def below_fp8() -> Finding | None:
    """The smallest tier beside FP8 without scales: all that is held, and codes alone."""
    rows = [
        row
        for row in rows_of("decode_attention", KERNELS, backend="cuda", k_tier="vq175", v_tier="vq175", context=131072)
        if row["us"] is not None
    ]
    if not rows:
        return None
    left = [row["bytes"] / (_plain_bytes(row) / 2) for row in rows]
    codes = rows[0]["code_bits"] / 8
    figure = f"{span((1 - share for share in left), '.1%')} less with everything, {1 - codes:.1%} less in codes alone"
    part = codes <= 1 - 0.78
    return Finding(figure, "`vq175` everywhere, 128k tokens", verdict_of([saving(s, 0.78) for s in left], part))


# ------------------------------------------------------------------ quality


def accuracy() -> Finding | None:
    """Answers out of the default policy's cache at 2 to 2.3 bits of codes, any codebook, beside the exact cache's."""
    rows = [
        row
        for name in ("quality", "quality_collapse")
        for row in rows_of(name, policy="auto")
        if row["score"] is not None and row["budget"] is not None and row["budget"] <= 2.3
    ]
    if not rows:
        return None
    cases = [Case(-row["score_difference_interval"][0], 0.01 + _ROUNDING, at_most=True) for row in rows]
    fine = sum(case.passed_by >= 1 for case in cases)
    worst = max(rows, key=lambda row: row["score_exact"] - row["score"])
    figure = (
        f"{fine} of {len(rows)} tasks surely within 0.01; worst {worst['score']:.3f} of {worst['score_exact']:.3f} "
        f"(`{worst['task']}`, {worst['model']}, {worst['budget']:g} bits)"
    )
    where = f"policy `auto`, {span((row['bits'] for row in rows), '.2f')} bits, {named(rows, 'context')} tokens"
    return Finding(figure, where, verdict_of(cases, premise=True))


def entropy_rule() -> Finding | None:
    """More bits where entropy is high, beside other ways to spend as many bits: KL on the same texts and device."""
    cell = ("model", "context", "protocol", "budget", "codebook", "texts", "n", "device")
    ratios: dict[str, list[float]] = {}
    rows = rows_of("quality", policy="entropy_rank", task="text")
    for row in rows:
        for policy in ("uniform", "random", "entropy_rank_inverse"):
            for base in rows_of("quality", policy=policy, task="text", **{key: row[key] for key in cell}):
                ratios.setdefault(policy, []).append(row["kl"] / base["kl"])
    if not ratios:
        return None
    figure = ", ".join(f"{span(found, '.2f')} times `{policy}`" for policy, found in ratios.items())
    where = f"KL of `entropy_rank`, {named(rows, 'budget')} bits of codes, {named(rows, 'model')}"
    cases = [Case(ratio, 1 / _MARGIN, at_most=True) for found in ratios.values() for ratio in found]
    return Finding(figure, where, verdict_of(cases, premise=True))


def fp8() -> Finding | None:
    """What FP8 costs on text."""
    rows = [row for name in ("quality_peers", "quality_collapse") for row in rows_of(name, policy="fp8", task="text")]
    if not rows:
        return None
    figure = ", ".join(f"{row['dnll'] / row['nll_exact']:+.1%} ({row['model']}, {row['n']} texts)" for row in rows)
    cases = [Case(row["dnll_interval"][0] / row["nll_exact"], 0.01) for row in rows]
    return Finding(figure, "loss with FP8 E4M3", verdict_of(cases, premise=True))


def four_centroids() -> Finding | None:
    """The second document's code as printed, and our tier with centroids by k-means."""
    rows = rows_of("quality_peers", policy="literal", task="text")
    rows += rows_of("quality", policy="uniform:nuq2", task="text")
    rows += rows_of("quality_ablations", policy="uniform:nuq2", task="text")
    if not rows:
        return None
    figure = ", ".join(f"{row['dnll'] / row['nll_exact']:+.1%} ({row['policy']}, {row['model']})" for row in rows)
    cases = [Case(row["dnll_interval"][1] / row["nll_exact"], 0.01, at_most=True) for row in rows]
    return Finding(figure, f"loss, {span((row['bits'] for row in rows), '.2f')} bits", verdict_of(cases))


def _premises() -> tuple[list[Row], str]:
    found = held("premises")
    if not found:
        return [], ""
    return found["models"], f"{found['conditions']['n']} texts of {found['conditions']['context']:,} tokens"


def entropy_by_depth() -> Finding | None:
    """Rank correlation of a layer's place and its attention entropy."""
    models, where = _premises()
    if not models:
        return None
    found = {model["model"]: _rank_correlation(model["entropy"]) for model in models}
    figure = ", ".join(f"{name} {value:+.2f}" for name, value in found.items())
    conditions = f"rank correlation of depth and entropy, {where}"
    return Finding(figure, conditions, verdict_of([Case(-value, 0.5) for value in found.values()], premise=True))


def _rank_correlation(values: Sequence[float]) -> float:
    """Spearman's, with the places 0, 1, 2, ...; no ties."""
    count = len(values)
    ranks = {place: rank for rank, place in enumerate(sorted(range(count), key=values.__getitem__))}
    return 1 - 6 * sum((place - rank) ** 2 for place, rank in ranks.items()) / (count * (count**2 - 1))


def outliers() -> Finding | None:
    """Values beyond 3.5 standard deviations of their own token."""
    models, where = _premises()
    if not models:
        return None
    shares = [(model["model"], side["side"], side["token"]) for model in models for side in model["outliers"]]
    figure = ", ".join(f"{side} of {name} {share:.2%}" for name, side, share in shares)
    return Finding(figure, where, verdict_of([Case(share, 0.018, at_most=True) for *_, share in shares], premise=True))


def uniform_codes() -> Finding | None:
    """A tenth of the loss or more, by the keys alone."""
    models, where = _premises()
    if not models:
        return None
    cases, words = [], []
    for model in models:
        for nbits in (3, 2):
            found = {tuple(row["sides"]): row for row in model["uniform"] if row["nbits"] == nbits}
            keys, values = (found[side,]["dnll"] / found[side,]["nll_exact"] for side in ("keys", "values"))
            words.append(f"{model['model']}, {nbits} bits: keys {keys:+.1%}, values {values:+.1%}")
            cases.append(Case(found["keys",]["dnll_interval"][0] / found["keys",]["nll_exact"], 0.1))
    return Finding("; ".join(words), f"loss, uniform codes of one side, {where}", verdict_of(cases, premise=True))


# ------------------------------------------------------------------ routing and experts


def _placed(**wanted: Any) -> list[Row]:
    return [row for row in rows_of("routing", **wanted) if row["clustering"] == "traces"]


def one_domain() -> Finding | None:
    """The most transitions inside a domain for at most 0.02 nats, by number of domains."""
    best: dict[int, Row] = {}
    for row in _placed():
        known = best.get(row["domains"])
        if row["dnll"] <= 0.02 and (known is None or row["transitions_local"] > known["transitions_local"]):
            best[row["domains"]] = row
    if not best:
        return None
    words = [
        f"{domains} domains {row['transitions_local']:.0%} at {row['dnll']:+.4f} nats, {row['replicas']} replicas"
        for domains, row in sorted(best.items())
    ]
    cases = [Case(row["transitions_local"], 0.85) for row in best.values()]
    return Finding("; ".join(words), f"reference MoE, {named(best.values(), 'n_tokens')} tokens", verdict_of(cases))


def top_four() -> Finding | None:
    """Hard routing to the best 4 of 8 clusters, beside the model's own routing on the same clusters."""
    hard = _placed(domains=8, mode="hard", top_clusters=4, replicas=0)
    native = _placed(domains=8, mode="native", replicas=0, balanced_load=True)
    if not hard or not native:
        return None
    ours, own = hard[0]["transitions_local"], native[0]["transitions_local"]
    figure = f"{ours:.1%} of transitions inside, {own:.1%} without"
    return Finding(figure, "reference MoE, 8 clusters", verdict_of([Case(ours, _MARGIN * own)]))


def cluster_signals() -> Finding | None:
    """Transitions inside one of 2 domains, by what clusters are made from, beside random ones."""
    shares: dict[str, list[float]] = {}
    for row in rows_of("routing", domains=2, mode="native", replicas=0):
        shares.setdefault(row["clustering"], []).append(row["transitions_local"])
    if not {"random", "weights", "coactivation"} <= set(shares):
        return None
    mean = {name: sum(found) / len(found) for name, found in shares.items()}
    figure = ", ".join(f"{name} {mean[name]:.0%}" for name in ("weights", "coactivation", "traces", "random"))
    cases = [Case(mean[name], mean["random"] + 0.05) for name in ("weights", "coactivation")]
    return Finding(figure, "transitions inside one of 2 domains", verdict_of(cases))


def routing_time() -> Finding | None:
    """What placing experts by cluster saves a step; and the router's own kernels, which are a part of routing."""
    own: dict[str, float] = {}
    for row in rows_of("router", KERNELS, tokens=1, failed=None):
        if row["backend"] != "stock":
            model = row["model"]
            own[model] = min(own.get(model, float("inf")), ROUTERS[model] * row["us"] / 1e3)
    each = ", ".join(f"{model} {ms:.2f} ms" for model, ms in own.items())
    words = [f"the routers of all layers, kernels alone: {each}"] if own else []
    cells: dict[tuple[Any, ...], dict[str, Row]] = {}
    rows = rows_of("distributed", mode="expert")
    for row in rows:
        cells.setdefault((row["model"], row["layers"], row["batch"]), {})[row["placement"]] = row
    pairs = [(found.get("by index"), found.get("clustered, soft")) for found in cells.values()]
    saved = [index["ms"] - ours["ms"] for index, ours in pairs if index and ours]
    if saved:
        fewer = [1 - ours["expert_bytes"] / index["expert_bytes"] for index, ours in pairs if index and ours]
        words.append(
            f"{span(saved, '+.2f')} ms saved and {span(fewer, '.0%')} fewer bytes on {named(rows, 'gpus')} GPUs"
        )
    if not words:
        return None
    part = any(ms <= 0.4 for ms in own.values())
    nodes = any(row["gpus"] > GPUS_A_NODE for row in rows)  # the claim is about links between nodes
    verdict = verdict_of([Case(ms, 2.8) for ms in saved], part) if nodes else PART if part else ELSEWHERE
    return Finding("; ".join(words), "random weights of real shapes", verdict)


def prefetch() -> Finding | None:
    """Steps with prefetch beside those without, and beside perfect prediction, where experts are offloaded."""
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows_of("experts"):
        cells.setdefault((row["model"], row["resident"], row["trace"]), {})[row["system"]] = row["ms"]
    gains, hidden = [], []
    for systems in cells.values():
        base = systems.get("none")
        ours = [ms for name, ms in systems.items() if name in ("previous", "gate", "head", "auto")]
        if base is not None and ours:
            gains.append(base / min(ours))
            hidden.append(systems.get("oracle", base) / min(ours))
    if not gains:
        return None
    figure = f"{span(gains, '.2f')} times faster than without; {span(hidden, '.0%')} of perfect prediction"
    where = f"{len(gains)} cells, {named(rows_of('experts'), 'model')}, {named(rows_of('experts'), 'device')}"
    return Finding(figure, where, verdict_of([Case(gain, 2.0) for gain in gains], part=max(gains) >= 1.05))
