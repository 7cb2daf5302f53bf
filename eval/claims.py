"""The documents' claims beside our figures, from result files: ``python eval/claims.py``; ``--check`` only looks.

A claim is quoted and judged by a rule that is stated beside it; verdicts are computed from result rows, not typed
(``findings.py``). README.md shows the claims, eval/README.md the rules. ``report.py`` renders both.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the files beside this one, wherever we are run

import findings
from findings import Finding
from quality.report import table


ROOT = Path(__file__).resolve().parents[1]
MISSING = "not measured yet"


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        document: 1, entropy-guided sub-byte KV compression; 2, hierarchical token routing.
        words: the document's, shortened.
        rule: when it holds.
        judge: looks at the rows; None where there are none.
        source: the file that its figures come from.
    """

    document: int
    words: str
    rule: str
    judge: Callable[[], Finding | None]
    source: str


_QUALITY, _PREMISES = "eval/results/quality.json", "eval/results/premises.json"
_PEERS, _LATENCY, _ROUTING = (f"eval/results/{name}.json" for name in ("quality_peers", "latency", "routing"))
_ATTENTION = "kernels/benchmarks/results/decode_attention.json"
CLAIMS = (
    Claim(
        1,
        "KV cache over 75 % of a step beyond 32,000 tokens",
        "at batch 64, the other document's; in part where another batch up to 256 does",
        findings.cache_share,
        "hf_subbyte_moe/roofline.py",
    ),
    Claim(
        1,
        "128k tokens take up to 40 GB a sequence",
        "the largest of three models takes 20 to 40 GB",
        findings.cache_size,
        "eval/results/roofline.json",
    ),
    Claim(
        1,
        "FP8 degrades accuracy intolerably or saves too little",
        "FP8 costs 1 % of the loss or more",
        findings.fp8,
        _PEERS,
    ),
    Claim(
        1,
        "early layers have high entropy, deep ones low",
        "rank correlation -0.5 or less on every model",
        findings.entropy_by_depth,
        _PREMISES,
    ),
    Claim(
        1,
        "high entropy needs more bits, low entropy few",
        "`entropy_rank` has at most 1/1.1 of the KL of every other way to spend as many bits",
        findings.entropy_rule,
        _QUALITY,
    ),
    Claim(
        1,
        "KV memory 78 % below FP8",
        "everything counted; in part where codes alone do",
        findings.below_fp8,
        _ATTENTION,
    ),
    Claim(
        1,
        "full accuracy on long-context tasks",
        "answers within 0.01 of the exact cache's",
        findings.accuracy,
        _QUALITY,
    ),
    Claim(
        1,
        "prefetch one layer ahead hides the experts' transfer",
        "a step takes half the time or less; in part where one takes 5 % less",
        findings.prefetch,
        "eval/results/experts.json",
    ),
    Claim(
        1,
        "under 5 ms a token, 8x22B, 64k tokens",
        "8x22B; in part where a smaller MoE does",
        lambda: findings.latency(65536, 5.0),
        _LATENCY,
    ),
    Claim(
        2,
        "at 128k tokens speed degrades past 50 ms a token",
        "every stock run takes 50 ms or more",
        findings.stock_at_128k,
        _LATENCY,
    ),
    Claim(2, "80 layers, batch 64, 32k tokens: over 180 GB", "with 8 KV heads", findings.batch_size, "eval/claims.py"),
    Claim(
        2,
        "experts clustered by weight similarity and co-activation",
        "each keeps 5 points more transitions inside than random clusters",
        findings.cluster_signals,
        _ROUTING,
    ),
    Claim(
        2,
        "top 4 clusters first, then top 2 experts",
        "keeps a tenth more transitions inside",
        findings.top_four,
        _ROUTING,
    ),
    Claim(
        2,
        "85 % of transitions inside one domain",
        "for 2, 4 and 8 domains at 0.02 nats or less",
        findings.one_domain,
        _ROUTING,
    ),
    Claim(
        2,
        "routing 3.2 to under 0.4 ms a token",
        "over several nodes, clusters save 2.8 ms a step; in part where the router's kernels take 0.4 ms in 48 layers",
        findings.routing_time,
        "kernels/benchmarks/results/router.json",
    ),
    Claim(
        2,
        "uniform codes below 4 bits fail on keys",
        "quantized keys cost 10 % of the loss or more, 2 and 3 bits, every model",
        findings.uniform_codes,
        _PREMISES,
    ),
    Claim(
        2,
        "outliers beyond 3.5 sigma under 1.8 %",
        "of keys and of values on every model",
        findings.outliers,
        _PREMISES,
    ),
    Claim(
        2,
        "2-bit codebook of 4 centroids keeps perplexity",
        "costs at most 1 % of the loss",
        findings.four_centroids,
        _PEERS,
    ),
    Claim(
        2,
        "memory traffic down by 73 %",
        "2-bit codes, everything that attention reads, from 32k tokens on",
        findings.traffic,
        _ATTENTION,
    ),
    Claim(
        2,
        "under 8 ms a token at 128k tokens",
        "8x22B; in part where a smaller MoE does",
        lambda: findings.latency(131072, 8.0),
        _LATENCY,
    ),
)


def claims() -> str:
    """What the documents say, and what was found."""
    lines = []
    for claim in CLAIMS:
        found = claim.judge() or Finding("-", "-", MISSING)
        figure = found.figure if found.figure == "-" else f"{found.figure} ({found.conditions})"
        name = claim.source.rsplit("/", 1)[-1]
        lines.append([claim.words, str(claim.document), f"**{found.verdict}**", figure, f"[{name}]({claim.source})"])
    return table(["claim", "document", "verdict", "found", "from"], lines)


def claim_rules() -> str:
    """When each claim holds."""
    return table(["claim", "holds when"], [[claim.words, claim.rule] for claim in CLAIMS])


SECTIONS: dict[str, Callable[[], str]] = {"claims": claims, "claim_rules": claim_rules}


def command(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit with 1 where the page differs from its files.")
    ] = False,
) -> None:
    """Render the claims, and all else that README.md shows, from result files."""
    import report  # which imports this module

    raise typer.Exit(report.main(check, [ROOT / "README.md"]))


if __name__ == "__main__":
    typer.run(command)
