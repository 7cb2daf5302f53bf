"""What the processes of the distributed tests run: ``torchrun ranks.py FOLDER``; rank 0 writes FOLDER/RANKS.json."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from hf_subbyte_moe import explain
from hf_subbyte_moe.cache import CACHE_NAME
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.distributed.experts import (
    expert_parallel,
    forget_traffic,
    place_experts,
    predicted_bytes,
    ranks_of_experts,
    traffic_of,
)
from hf_subbyte_moe.routing import Clusters, release, steer
from hf_subbyte_moe.routing.traces import recorded


POLICIES = ("error", "random")
CACHE = {"window": 8, "sinks": 2, "bits": 4.0}
PROMPT, NEW_TOKENS = 518, 8  # a tile falls due while decoding
EXPERTS, LAYERS, STATE_BYTES = 8, 2, 64 * 4


def ids(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(0))


def heads(folder: Path) -> dict[str, Any]:
    """Tokens, logits and choices of tiers with a packed cache, whatever the number of ranks."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {} if ranks == 1 else {"distributed_config": DistributedConfig(tp_plan="auto")}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for policy in POLICIES:
            made = model.generate(
                ids(2, PROMPT),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                cache_implementation=CACHE_NAME,
                cache_config={**CACHE, "policy": policy},
                return_dict_in_generate=True,
            )
            told = explain(made[CACHE_KW])
            kept = [layer.rows.heads for layer in made[CACHE_KW].packed_layers.values()]
            found[policy] = {"tokens": made.sequences.tolist(), "heads": kept, **told.to_dict()}
        found["logits"] = model(ids(1, 40)).logits.tolist()
        half: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
        found["bf16 logits"] = half(ids(1, 40)).logits.float().tolist()
    return found


def random_clusters(ranks: int) -> Clusters:
    generator = torch.Generator().manual_seed(3)
    labels = torch.stack([torch.randperm(EXPERTS, generator=generator) % ranks for _ in range(LAYERS)])
    return Clusters(labels, torch.zeros_like(labels, dtype=torch.bool), ranks)


def experts(folder: Path) -> dict[str, Any]:
    """How far logits are from one process's, and bytes that crossed, for every placement."""
    config = AutoConfig.from_pretrained(folder)
    one: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=expert_parallel(config)
    )
    ranks, found = dist.get_world_size(), {}
    clusters = random_clusters(ranks)
    cases: dict[str, tuple[Clusters | None, RoutingConfig | None]] = {
        "by index": (None, None),
        "clustered": (clusters, None),
        "soft": (clusters, RoutingConfig(mode="soft", strength=2.0, top_clusters=1)),
        "back": (None, None),
    }
    for name, (placed, options) in cases.items():
        place_experts(model, placed)
        for each in (model, one):
            steer(each, options, placed) if options is not None else release(each)
        forget_traffic(model)
        with torch.no_grad(), recorded(model) as trace:
            logits = model(ids(2, 50)).logits
        with torch.no_grad():
            difference = float((logits - one(ids(2, 50)).logits).abs().max())
        owners = ranks_of_experts(placed, LAYERS, EXPERTS, ranks)
        found[name] = {
            "difference": difference,
            "bytes": traffic_of(model).bytes,
            "predicted": predicted_bytes(trace.steps, owners, ranks, STATE_BYTES),
            "all_reduce": 2 * (ranks - 1) * STATE_BYTES * 100 * LAYERS,
        }
    release(model)
    return found


if __name__ == "__main__":
    place, count = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    result = {"heads": heads(place)}
    if count == 2:
        result["experts"] = experts(place)
    if int(os.environ["RANK"]) == 0:
        (place / f"{count}.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()
