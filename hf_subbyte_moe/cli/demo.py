"""``hf-subbyte-moe demo``: one question about a long text, answered out of a plain cache and out of a packed one."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.cli.outputs import JsonFile, PlotFile
from hf_subbyte_moe.cli.plot import plot_choices
from hf_subbyte_moe.cli.prompts import needle_prompt
from hf_subbyte_moe.cli.running import answer, load_model, refuse_over_limit, tensor_bytes
from hf_subbyte_moe.config import AUTO, CALIBRATED, POLICIES, TIERS, UNIFORM, KVCacheConfig
from hf_subbyte_moe.explain import explain


_NEW_TOKENS = 24

Model = Annotated[str | None, typer.Option(help="Hub id or path; default: the reference MoE of the clone.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")]
Bits = Annotated[
    float | None,
    typer.Option(
        help="Bits a packed value, scales included; policies without a budget take none.", show_default="2.5"
    ),
]
PolicyName = Annotated[
    str,
    typer.Option(
        "--policy",
        help="auto, calibrated, error, entropy, uniform:<tier> and others; README lists them.",
        autocompletion=lambda: [AUTO, CALIBRATED, *POLICIES, *(f"{UNIFORM}{tier}" for tier in TIERS)],
    ),
]
Haystack = Annotated[
    Path | None, typer.Option(help="Text around the needle; default: noise sentences.", exists=True, dir_okay=False)
]
Depth = Annotated[float, typer.Option(min=0, max=1, help="Where the needle lies: 0 start, 1 end.")]
Seed = Annotated[int, typer.Option(help="Chooses the needle.")]


def cache_options(policy: str, bits: float | None) -> dict[str, Any]:
    """The options that the command line gives, before a model is loaded.

    Raises:
        ValueError: no model could take them.
    """
    options: dict[str, Any] = {"policy": policy} if bits is None else {"policy": policy, "bits": bits}
    KVCacheConfig(**options)
    return options


def demo(
    model: Model = None,
    context: Context = 16384,
    bits: Bits = None,
    policy: PolicyName = "auto",
    haystack: Haystack = None,
    depth: Depth = 0.35,
    seed: Seed = 0,
    plot: PlotFile = None,
    json_file: JsonFile = None,
) -> None:
    """Ask for a number hidden in a long text, with a plain cache and with ours.

    Example: hf-subbyte-moe demo --context 16384 --bits 2.5 --plot tiers.png
    """
    console = Console()
    options = cache_options(policy, bits)
    loaded, tokenizer = load_model(model)
    refuse_over_limit(loaded, context, _NEW_TOKENS)
    text = None if haystack is None else haystack.read_text(encoding="utf-8")
    prompt = needle_prompt(tokenizer, context, seed, depth, text)
    EntropySubbyteCache(loaded.config.get_text_config(decoder=True), **options)  # wrong options fail before the wait
    # the model's own config may make our cache its default: the plain run names its cache
    plain = answer(loaded, tokenizer, prompt.ids, _NEW_TOKENS, "plain cache", cache_implementation="dynamic")
    plain_row = {"answer": plain.text.strip(), "bytes": tensor_bytes(plain.cache), "tokens_per_s": plain.tokens_per_s}
    del plain
    packed = answer(
        loaded,
        tokenizer,
        prompt.ids,
        _NEW_TOKENS,
        "packed cache",
        cache_implementation=CACHE_NAME,
        cache_config=options,
    )
    explanation = explain(packed.cache)
    size = explanation.size
    assert size is not None
    packed_row = {
        "answer": packed.text.strip(),
        "bytes": size.bytes,
        "tokens_per_s": packed.tokens_per_s,
        "code_bits": size.code_bits,
        "bits": size.bits,
        "bits_total": size.bits_total,
    }
    explanation.render(console)
    console.print(_comparison(prompt.expected, plain_row, packed_row, context, str(loaded.device)))
    if plot is not None:
        plot_choices(explanation, plot)
        console.print(f"plot written to {plot}")
    if json_file is not None:
        report = {"context": context, "expected": prompt.expected, "plain": plain_row, "packed": packed_row}
        json_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        console.print(f"numbers written to {json_file}")


def _comparison(expected: str, plain: dict[str, Any], packed: dict[str, Any], context: int, device: str) -> Table:
    """A line per figure, a column per cache."""
    table = Table(title=f"{context:,} tokens of context on {device}; the hidden number is {expected}")
    table.title_justify = "left"
    table.add_column("")
    table.add_column("plain cache, bf16", justify="right")
    table.add_column(CACHE_NAME, justify="right")
    rows = (plain, packed)

    def line(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    line("answer", *((row["answer"].splitlines() or ["(nothing)"])[0][:24] for row in rows))
    line("right?", *("right" if row["answer"].startswith(expected) else "wrong" for row in rows))
    line("allocated bytes", *(f"{row['bytes']:,}" for row in rows))
    line("of the plain cache", *(f"{row['bytes'] / plain['bytes']:.1%}" for row in rows))
    for key in ("code_bits", "bits", "bits_total"):
        count = packed[key]
        line(key, "16" if key == "bits_total" else "-", "-" if count is None else f"{count:.3f}")
    line("decoded tokens/s", *(f"{row['tokens_per_s']:.1f}" for row in rows))
    return table
