"""``hf-subbyte-moe calibrate``: measure once what bits are worth in each head, and write it beside the model."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from hf_subbyte_moe.cli.calibrate_predictor import calibrate_predictor
from hf_subbyte_moe.cli.outputs import writable_sidecar
from hf_subbyte_moe.cli.running import load_model
from hf_subbyte_moe.cli.texts import DataFile, ModelName, beside_model, windows_of
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME
from hf_subbyte_moe.policy import CANDIDATES, SIDECAR_NAME, Calibration, calibrate
from hf_subbyte_moe.policy.calibrate import SCORED_TOKENS


_SHOWN_BITS = (2.0, 2.3, 3.0)


def calibrate_model(
    model: ModelName = None,
    data: DataFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Sidecar to write.", show_default=f"{SIDECAR_NAME} in the model's folder", callback=writable_sidecar
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Texts to measure on.")] = 24,
    context: Annotated[int, typer.Option(min=300, help="Tokens of each before those that are predicted.")] = 1024,
    seed: Annotated[int, typer.Option(help="Chooses texts and labels.")] = 0,
    predictor: Annotated[
        bool,
        typer.Option("--predictor", help=f"Train what foretells experts instead; writes {PREDICTOR_SIDECAR_NAME}."),
    ] = False,
) -> None:
    """Measure what each tier costs in each layer, head and side, for policy and codebook "calibrated".

    Example: hf-subbyte-moe calibrate ./my-model --data texts.jsonl
    """
    console = Console()
    loaded, tokenizer = load_model(model, cpu_dtype=torch.float32)  # faster there than bf16
    if predictor:
        calibrate_predictor(console, loaded, tokenizer, data, out, windows, context, seed)
        return
    out = out or beside_model(loaded, SIDECAR_NAME, "a sidecar")
    ids = windows_of(loaded, tokenizer, data, windows, context + SCORED_TOKENS, seed)
    found = calibrate(loaded, ids, seed, progress="calibration")
    found.save(out)
    console.print(cost_table(found))
    console.print(f"sidecar written to {out} ({out.stat().st_size:,} bytes)")


def cost_table(calibration: Calibration) -> Table:
    """What a budget is expected to cost, beside the same bits for every head."""
    table = Table(title="expected KL to the exact cache, nats a token", title_justify="left")
    for name in ("bits of codes", "calibrated", "uniform", "keys", "values"):
        table.add_column(name, justify="right")
    fmt = CANDIDATES[0].format  # every tier under a budget carries the same scales
    scale = fmt.bits_per_value(int(calibration.model["head_dim"])) - fmt.code_bits_per_value()
    codes = [codec.format.code_bits_per_value() for codec in CANDIDATES]
    uniform = np.stack([errors.sum((0, 1)) for errors in calibration.errors.values()]).sum(0)
    for bits in _SHOWN_BITS:
        policies = calibration.layer_policies(KVCacheConfig(policy="calibrated", bits=bits + scale))
        cost, spent = 0.0, [0.0, 0.0]
        for layer, policy in policies.items():
            for (head, side), tier in np.ndenumerate(policy.choice):
                cost += float(calibration.errors[layer][head, side, tier])
                spent[side] += codes[tier] / (len(policies) * int(calibration.model["num_key_value_heads"]))
        alike = float(np.interp(bits, codes, uniform))
        table.add_row(f"{bits:.1f}", f"{cost:.4f}", f"{alike:.4f}", f"{spent[0]:.2f}", f"{spent[1]:.2f}")
    return table
