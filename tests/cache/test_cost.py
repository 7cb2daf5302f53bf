"""What measuring and packing cost, counted in operations: linear in the prompt, and never a full attention matrix."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.cache_utils import Cache, DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.policy.policies import CANDIDATES
from hf_subbyte_moe.policy.statistics import PROBE_TOKENS, SAMPLED_QUERIES
from support.models import prompt, tiny_model


HEADS, QUERY_HEADS, DIM, LAYERS = 2, 4, 16, 2


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def count(model: Any, ids: torch.Tensor, cache: Cache) -> tuple[int, int]:
    """Multiply-adds (times two) and the largest tensor of a prefill."""
    with torch.no_grad(), FlopCounterMode(display=False) as flops, Largest() as largest:
        model(ids, logits_to_keep=1, **{CACHE_KW: cache})
    return flops.get_total_flops(), largest.elements


def added(tokens: int, **options: Any) -> tuple[int, int]:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    ids = prompt(tokens)
    plain, _ = count(model, ids, DynamicCache(config=model.config))
    packed, largest = count(model, ids, EntropySubbyteCache(model.config, **options))
    return packed - plain, largest


def bound(tokens: int) -> int:
    """Flops that measuring and packing may add, by what they are made of."""
    sampled = 2 * QUERY_HEADS * SAMPLED_QUERIES * DIM
    attend = 2 * sampled * tokens  # scores and weighted values of the sampled queries
    weigh = sampled * tokens  # their scores again, for each token's weight
    per_tier = (
        2 * sampled * PROBE_TOKENS + 2 * HEADS * PROBE_TOKENS * DIM * 2 * 256 + 4 * HEADS * PROBE_TOKENS * DIM**2
    )
    project = 2 * QUERY_HEADS * SAMPLED_QUERIES * DIM * 64
    probe = len(CANDIDATES) * 2 * (per_tier + project)
    search = 2 * HEADS * tokens * (DIM * 2 * 256 + 2 * DIM**2)  # 256 entries, one multiply-add a value; rotation
    return LAYERS * (attend + weigh + probe + 2 * sampled * PROBE_TOKENS + project + search)


@pytest.mark.parametrize("policy", ["error", "entropy", "uniform:vq2"])
def test_cost_is_bounded_and_linear_and_no_attention_matrix_is_formed(policy: str) -> None:
    short, _ = added(2048, policy=policy)
    long, largest = added(4096, policy=policy)
    assert 0 < short <= bound(2048)
    assert long <= bound(4096)
    assert long <= 2.05 * short
    assert largest < 4096 * 4096 / 4  # one head's attention matrix, a quarter of it


def test_a_decode_step_never_rebuilds_the_cache() -> None:
    """The largest tensor of a step is a block of tiles, whatever the context."""
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    sizes = []
    for tokens in (4500, 9000):
        cache = EntropySubbyteCache(model.config, policy="uniform:vq2")
        count(model, prompt(tokens), cache)
        steps = [count(model, prompt(1, seed=step), cache)[1] for step in range(3)]
        sizes.append(max(steps))
    assert sizes[0] == sizes[1] < HEADS * 9000 * DIM / 2
