"""What packed weights cost: the same texts through a model with its own and with int4 and fp8 experts or projections.

Every token of a text is predicted from those before it, in fp32, with exact caches; only weights of experts differ, or
those of attention's projections (here for all tokens; ``decode.projections`` packs them for generated tokens alone).
KL is that of the next-token distributions, own to packed, in nats; "loss" the difference of the negative log
likelihood; "slots" the share of a token's experts that it still chooses. Intervals are bootstraps over texts.

Example: python eval/experts_weights.py heldout.jsonl --model model_cards/subbyte-moe-31m
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package beside this file, wherever we are run

from commits import commit_of
from quality.tasks import encode, read_texts

import hf_subbyte_moe
from hf_subbyte_moe.config import EXPERT_WEIGHTS, MODEL_WEIGHTS
from hf_subbyte_moe.experts import PackedExperts
from hf_subbyte_moe.ops import PackedMatrix
from hf_subbyte_moe.routing.traces import recorded


ROOT = Path(__file__).resolve().parents[1]
_RESAMPLES = 2000
_PROJECTIONS = "int4 projections"


@dataclass(frozen=True)
class Seen:
    """One model's pass over the texts.

    Attributes:
        logprobs: per text, ``[T, V]`` log-probabilities, fp16 where they are kept.
        nll: per text, ``[T - 1]``.
        chosen: per text, ``[T, L, K]`` experts.
    """

    logprobs: list[Tensor]
    nll: list[Tensor]
    chosen: list[Tensor]


def look(model: PreTrainedModel, texts: list[Tensor], name: str) -> Seen:
    """Read all texts."""
    seen = Seen([], [], [])
    with torch.no_grad():
        for ids in tqdm(texts, desc=name, unit="text"):
            with recorded(model) as traces:
                logits = model(ids[None].to(model.device)).logits[0].float()
            logprobs = logits.log_softmax(-1).cpu()
            seen.logprobs.append(logprobs)
            seen.nll.append(-logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1))
            seen.chosen.append(traces.indices())
    return seen


def expert_bits(model: PreTrainedModel) -> float:
    """Bits that a weight of the experts takes, scales and padding included."""
    taken = values = 0
    for module in model.modules():
        if isinstance(module, PackedExperts):
            layout: Any = module._hf_subbyte_moe_packed.layout
            taken += module.gate_up_proj.numel() + module.down_proj.numel()
            values += module.num_experts * 3 * layout.hidden * layout.intermediate
    return 8 * taken / values


def compare(own: Seen, other: Seen, seed: int) -> dict[str, Any]:
    """Means over tokens, with 95 % intervals over texts."""
    kl, loss, top, slots = [], [], [], []
    for text in range(len(own.nll)):
        left, right = own.logprobs[text], other.logprobs[text]
        kl.append((left.exp() * (left - right)).sum(-1).mean().item())
        loss.append((other.nll[text] - own.nll[text]).mean().item())
        top.append((left.argmax(-1) == right.argmax(-1)).float().mean().item())
        same = (own.chosen[text][..., :, None] == other.chosen[text][..., None, :]).any(-1)
        slots.append(same.float().mean().item())
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(kl), (_RESAMPLES, len(kl)))
    row: dict[str, Any] = {}
    for name, values in (("kl", kl), ("loss", loss), ("top1", top), ("slots", slots)):
        means = np.asarray(values)[picks].mean(1)
        row[name] = float(np.mean(values))
        row[f"{name}_95"] = [float(bound) for bound in np.quantile(means, (0.025, 0.975))]
    return row


def main(
    texts: Annotated[Path, typer.Argument(help="JSON lines with a `text` each, that the model was not trained on.")],
    model: Annotated[str, typer.Option(help="A mixture of experts.")] = str(ROOT / "model_cards" / "subbyte-moe-31m"),
    tokens: Annotated[int, typer.Option(help="Tokens of a piece.")] = 1024,
    limit: Annotated[int, typer.Option(help="Pieces of text.")] = 32,
    out: Annotated[Path, typer.Option(help="Result file.")] = ROOT / "eval" / "results" / "experts_weights.json",
) -> None:
    """Measure what packed weights cost."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    stream = torch.tensor([token for text in read_texts(texts, ROOT) for token in encode(tokenizer, text)])
    pieces = list(stream.split(tokens))[: len(stream) // tokens]
    if not pieces:
        raise typer.BadParameter(f"the texts have {len(stream)} tokens, fewer than one piece")
    given = pieces[:: max(1, len(pieces) // limit)][:limit]
    own_model = _load(model, MODEL_WEIGHTS)
    own = look(own_model, given, MODEL_WEIGHTS)
    rows = []
    for weights in (*EXPERT_WEIGHTS[1:], _PROJECTIONS):
        if weights == _PROJECTIONS:
            packed = _load(model, MODEL_WEIGHTS)
            bits = pack_projections(packed)
        else:
            packed = _load(model, weights)
            bits = expert_bits(packed)
        row = {
            "model": Path(model).name,
            "weights": weights,
            "bits": bits,
            "texts": len(given),
            "tokens": tokens,
            "loss_own": float(torch.cat(own.nll).mean()),
            **compare(own, look(packed, given, weights), seed=0),
            "device": str(packed.device),
            "commit": commit_of(ROOT),
        }
        rows.append(row)
        print(json.dumps(row))
    out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def pack_projections(model: PreTrainedModel) -> float:
    """Give attention's projections the values that int4 copies of them stand for; bits that a weight takes."""
    taken = values = 0
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            weight: Any = module.weight
            packed = PackedMatrix.of(weight.detach())
            weight.data.copy_(packed.unpacked())
            taken += packed.blocks.numel()
            values += weight.numel()
    return 8 * taken / values


def _load(model: str, weights: str) -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, hf_subbyte_moe={"routing": {}})
    if torch.cuda.is_available():
        loaded = loaded.cuda()
    options: dict[str, Any] = {"fused": False} if weights == MODEL_WEIGHTS else {"weights": weights}
    hf_subbyte_moe.apply(loaded, {"experts": options})
    return loaded.eval()


if __name__ == "__main__":
    typer.run(main)
