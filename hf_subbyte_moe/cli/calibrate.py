"""``hf-subbyte-moe calibrate``: measure once what bits are worth in each head, and write it beside the model."""

import json
import random
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_subbyte_moe.cli.running import load_model
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.policy import CANDIDATES, SIDECAR_NAME, Calibration, calibrate
from hf_subbyte_moe.policy.calibrate import SCORED_TOKENS


_SHOWN_BITS = (2.0, 2.3, 3.0)


def read_texts(path: Path) -> list[str]:
    """Texts of a file: JSON lines with a key "text" each, or one plain text.

    Raises:
        ValueError: a line of JSON without a text; names the file and the line.
    """
    content = path.read_text(encoding="utf-8")
    if path.suffix not in (".jsonl", ".json"):
        return [content]
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'{path.name}, line {number}: not {{"text": ...}}') from None
    return texts


def text_windows(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int, tokens: int, seed: int
) -> torch.Tensor:
    """``[count, tokens]`` pieces of texts, each from another text as long as there are enough long ones.

    Raises:
        ValueError: the texts hold fewer pieces that do not overlap.
    """
    rng = random.Random(seed)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    body = tokens - len(start)
    order = list(texts)
    rng.shuffle(order)
    pieces: list[list[list[int]]] = []  # by text, shuffled
    for text in tqdm(order, desc="tokens", unit="text", leave=False):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        own = [start + ids[low : low + body] for low in range(0, len(ids) - body + 1, body)]
        rng.shuffle(own)
        pieces.append(own)
    turns = max(map(len, pieces), default=0)
    taken = [own[turn] for turn in range(turns) for own in pieces if turn < len(own)][:count]
    if len(taken) < count:
        raise ValueError(f"the texts hold {len(taken)} pieces of {tokens} tokens, not {count}: give more of them")
    return torch.tensor(taken)


def written_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
) -> torch.Tensor:
    """``[count, tokens]`` that the model writes itself, sampled at temperature 1."""
    first = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), 0)
    torch.manual_seed(seed)
    prompt = torch.full((count, 1), first, device=model.device)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        min_new_tokens=tokens - 1,
        max_new_tokens=tokens - 1,
        cache_implementation="dynamic",
        pad_token_id=first,
        eos_token_id=tokenizer.eos_token_id,
    )
    with tqdm(total=tokens - 1, desc="the model writes", unit="token", leave=False) as bar:

        def advance(*_: object) -> None:
            bar.update()

        hook = model.register_forward_hook(advance)
        try:
            written: torch.Tensor = model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config
            )
        finally:
            hook.remove()
    return written.cpu()


def calibrate_model(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, folder or .gguf file.", show_default="the reference MoE")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help='Plain text, or JSON lines with a "text" each; without it the model writes its own.',
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Sidecar to write.", show_default=f"{SIDECAR_NAME} in the model's folder")
    ] = None,
    windows: Annotated[int, typer.Option(min=2, help="Texts to measure on.")] = 24,
    context: Annotated[int, typer.Option(min=300, help="Tokens of each before those that are predicted.")] = 1024,
    seed: Annotated[int, typer.Option(help="Chooses texts and labels.")] = 0,
) -> None:
    """Measure what each tier costs in each layer, head and side, for policy and codebook "calibrated".

    Example: hf-subbyte-moe calibrate ./my-model --data texts.jsonl
    """
    console = Console()
    loaded, tokenizer = load_model(model, cpu_dtype=torch.float32)  # faster there than bf16
    if out is None:
        folder = Path(str(loaded.config.name_or_path))
        if not folder.is_dir():
            raise ValueError(
                f"{loaded.config.name_or_path!r} is no folder that a sidecar could lie in: give --out FILE"
            )
        out = folder / SIDECAR_NAME
    tokens = context + SCORED_TOKENS
    if data is None:
        ids = written_windows(loaded, tokenizer, windows, tokens, seed)
    else:
        ids = text_windows(tokenizer, read_texts(data), windows, tokens, seed)
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
