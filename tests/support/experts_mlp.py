"""Calls of the experts op for tests: random experts in any layout."""

from typing import Any

import torch

from subbyte_kernels.expert_mlp import ExpertCall, ExpertFormat, ExpertLayout


CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LAYOUTS = {
    "model": (ExpertFormat.MODEL, 32),
    "int4": (ExpertFormat.INT4, 32),
    "int4-g64": (ExpertFormat.INT4, 64),
    "fp8": (ExpertFormat.FP8, 32),
}


def layout(name: str, hidden: int, intermediate: int, dtype: torch.dtype) -> ExpertLayout:
    """A layout by name."""
    kind, group = LAYOUTS[name]
    return ExpertLayout(kind, hidden, intermediate, dtype, group)


def expert_call(
    packing: ExpertLayout, experts: int = 4, top_k: int = 2, tokens: int = 1, seed: int = 0, **options: Any
) -> ExpertCall:
    """Random experts, and tokens that choose different ones.

    Args:
        packing: of the experts.
        experts: how many.
        top_k: of a token.
        tokens: how many.
        seed: of everything.
        options: more fields of the call.
    """
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(experts, 2 * packing.intermediate, packing.hidden, generator=generator) * 0.1
    down = torch.randn(experts, packing.hidden, packing.intermediate, generator=generator) * 0.1
    slabs = packing.pack(gate_up.to(packing.dtype), down.to(packing.dtype)).to(DEVICE)
    hidden = torch.randn(tokens, packing.hidden, generator=generator).to(DEVICE, packing.dtype)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(DEVICE)
    weights = torch.rand(tokens, top_k, generator=generator).to(DEVICE)
    given = {"expert_ids": ids, "expert_weights": weights, **options}
    views = packing.views(slabs)
    return ExpertCall(hidden=hidden, gate_up=views[0], down=views[1], layout=packing, **given)
