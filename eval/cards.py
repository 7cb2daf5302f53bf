"""What model cards and the lm-eval section show, for ``eval/report.py``: result files, and formulas on configs."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hf_subbyte_moe.accounting import LayerGeometry, layer_bytes, tiles_of
from hf_subbyte_moe.config import DEFAULT_BITS, KVCacheConfig
from hf_subbyte_moe.results import markdown_table, read_rows


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "eval" / "results" / "lm_eval.json"
CARDS = ROOT / "model_cards"
REFERENCE = "subbyte-moe-31m"
MISSING = "Not measured yet: `python eval/lm_eval_runs.py eval/configs/lm_eval.json`."
_LENGTHS = (8192, 32768, 131072)


def _rows() -> list[dict[str, Any]]:
    return read_rows(RESULTS) if RESULTS.exists() else []


def lm_eval() -> str:
    """Every lm-eval result."""
    rows = _rows()
    if not rows:
        return MISSING
    drawn = "![needles by depth and length](results/lm_eval.png)\n\n" if RESULTS.with_suffix(".png").exists() else ""
    return drawn + markdown_table(rows)


def lm_eval_reference() -> str:
    """Those of the reference model."""
    rows = [row for row in _rows() if row["model"] == REFERENCE]
    return markdown_table(rows) if rows else MISSING


def _kernel(shape: str) -> str:
    """The fused kernel at one model's shape, batch 1."""
    path = ROOT / "kernels" / "benchmarks" / "results" / "decode_attention.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = [
        row
        for row in result["rows"]
        if (row["shape"], row["batch"], row["backend"], row["k_tier"]) == (shape, 1, "cuda", "mix-2.5")
        and row["us"] is not None
    ]
    lines = [
        "| tokens, batch 1 | best bf16, us | packed, 2.5 bits mixed, us | times faster |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['context']:,} | {row['baseline_us']:.1f} | {row['us']:.1f} | {row['speedup']:.2f} |"
        for row in sorted(rows, key=lambda row: int(row["context"]))
    ]
    conditions = result["conditions"]
    return (
        "\n".join(lines) + f"\n\n{conditions['device']}, torch {conditions['torch']}, commit {conditions['commit']}."
    )


def cache_bytes(folder: str) -> Iterator[tuple[int, float, float]]:
    """Tokens, bytes of a plain bf16 cache and of ours: one row by formula, everything of a layer at the budget."""
    config = AutoConfig.from_pretrained(CARDS / folder).get_text_config(decoder=True)
    options = KVCacheConfig.from_dict(config.hf_subbyte_moe["kv_cache"])
    if getattr(config, "kv_lora_rank", None):
        heads, dims = 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    else:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, dims = config.num_key_value_heads, (dim, dim)
    geometry = LayerGeometry(1, heads, *dims, 2, options.window, options.sinks)
    for tokens in _LENGTHS:
        if tokens <= config.max_position_embeddings:
            tiles = tiles_of(tokens, options.sinks, options.window)
            record = round(sum(dims) * 128 * (options.bits or DEFAULT_BITS) / 8)
            packed = config.num_hidden_layers * layer_bytes(geometry, tiles, [(record, heads * tiles)], 0)
            yield tokens, config.num_hidden_layers * tokens * geometry.values_per_token * 2, packed


def _bytes(folder: str) -> str:
    """A card's table of them."""
    lines = ["| tokens | plain bf16, MiB | packed, MiB | of plain |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {tokens:,} | {plain / 2**20:,.0f} | {packed / 2**20:,.0f} | {packed / plain:.1%} |"
        for tokens, plain, packed in cache_bytes(folder)
    ]
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "lm_eval": lm_eval,
    "lm_eval_reference": lm_eval_reference,
    "kernel_mixtral": lambda: _kernel("Mixtral-8x7B"),
    "kernel_qwen3": lambda: _kernel("Qwen3-30B-A3B"),
    "bytes_mixtral": lambda: _bytes("mixtral-8x7b"),
    "bytes_qwen3": lambda: _bytes("qwen3-30b-a3b"),
    "bytes_deepseek": lambda: _bytes("deepseek-v2-lite"),
}
