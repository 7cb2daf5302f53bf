"""A router's own forward in one launch: what each family's router does, as a :class:`RouterSpec`.

A family is named by its router's class. Before a spec is used it is compared with the module itself on random states:
logits, weights and experts must be equal bit for bit, or the module keeps its own forward.

Gives up: routers that take more than the states (``lfm2_moe``, ``afmoe``), sparsemixer (``phimoe``), training.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_subbyte_moe.ops_moe import MAX_ROUTER_TOKENS, RouterMatrix, RouterSpec, router, router_reference


_PROBE_TOKENS = 8


def _softmax(router: Any) -> RouterSpec:
    norm = "sum" if getattr(router, "norm_topk_prob", True) else "none"
    return RouterSpec(router.top_k, norm=norm)


def _softmax_float(router: Any) -> RouterSpec:
    return RouterSpec(router.top_k, float_weights=True)


def _deepseek_v2(router: Any) -> RouterSpec:
    grouped = router.topk_method == "group_limited_greedy"
    return RouterSpec(
        router.top_k,
        float_logits=True,
        groups=router.num_group if grouped else 1,
        groups_kept=router.topk_group if grouped else 1,
        masked=0.0,
        norm="none",
        scale=float(router.routed_scaling_factor),
        sorted=False,
        float_weights=True,
    )


def _deepseek_v3(router: Any) -> RouterSpec:
    return RouterSpec(
        router.top_k,
        score="sigmoid",
        float_logits=True,
        groups=router.num_group,
        groups_kept=router.topk_group,
        group_score="top2",
        norm="sum_eps" if router.norm_topk_prob else "none",
        eps=1e-20,
        scale=float(router.routed_scaling_factor),
        sorted=False,
        float_weights=True,
    )


def _logits(router: Any) -> RouterSpec:
    return RouterSpec(router.top_k, score="logits", norm="softmax")


def _float_logits(router: Any) -> RouterSpec:
    return RouterSpec(router.top_k, score="logits", return_float_logits=True, norm="softmax")


def _ernie(router: Any) -> RouterSpec:
    return RouterSpec(router.top_k, float_logits=True, norm="clamped_sum", eps=float(router.norm_min))


_SPECS: dict[str, Callable[[Any], RouterSpec]] = {
    "MixtralTopKRouter": _softmax_float,
    "MiniMaxTopKRouter": _softmax_float,
    "Qwen2MoeTopKRouter": _softmax,
    "Qwen3MoeTopKRouter": _softmax,
    "OlmoeTopKRouter": _softmax,
    "FlexOlmoTopKRouter": _softmax,
    "DeepseekV2TopkRouter": _deepseek_v2,
    "DeepseekV3TopkRouter": _deepseek_v3,
    "Glm4MoeTopkRouter": _deepseek_v3,
    "Dots1TopkRouter": _deepseek_v3,
    "GptOssTopKRouter": _logits,
    "GraniteMoeTopKRouter": _float_logits,
    "Ernie4_5_MoeTopKRouter": _ernie,
}


def router_matrix(module: nn.Module) -> RouterMatrix:
    """A router's weights as they are now; the module may have moved."""
    router: Any = module
    correction = getattr(router, "e_score_correction_bias", None)
    if correction is None and hasattr(router, "moe_statics"):
        correction = router.moe_statics.e_score_correction_bias
    correction = None if correction is None else correction.detach().float().reshape(-1)
    bias = getattr(router, "bias", None)
    return RouterMatrix(router.weight.detach(), None if bias is None else bias.detach(), correction)


@dataclass(frozen=True)
class FusedRouter:
    """What stands for a router's own forward.

    Attributes:
        spec: what the router does.
        reversed: the router returns (indices, weights, logits).
    """

    spec: RouterSpec
    reversed: bool = False

    def __call__(self, module: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the router returns for states; None where it should compute that itself.

        Args:
            module: the router.
            hidden_states: ``[..., H]``.
        """
        if not hidden_states.is_cuda or module.training:
            return None
        states = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not 1 <= states.shape[0] <= MAX_ROUTER_TOKENS:
            return None
        if torch.is_grad_enabled() and (states.requires_grad or any(p.requires_grad for p in module.parameters())):
            return None
        found = router(states, router_matrix(module), self.spec)
        triple = (found.logits, found.weights, found.index)
        return triple[::-1] if self.reversed else triple


def fused_router(module: nn.Module, dtype: torch.dtype) -> FusedRouter | None:
    """What stands for a router, if it is of a known family and does what that family's does.

    Args:
        module: the router; itself or a subclass of its class.
        dtype: of the states that it gets.
    """
    make = next((_SPECS[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in _SPECS), None)
    weight = getattr(module, "weight", None)
    if make is None or not isinstance(weight, Tensor) or weight.device.type == "meta":
        return None
    spec, width = make(module), weight.shape[1]
    states = torch.randn(_PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(weight.device, dtype)
    own: Any = next(cls for cls in type(module).__mro__ if cls.__name__ in _SPECS)
    training = module.training
    try:
        with torch.no_grad():
            told = own.forward(module.eval(), states)
            made = router_reference(states, router_matrix(module), spec)
    finally:
        module.train(training)
    backwards = not told[0].is_floating_point()
    mine = (made.index, made.weights, made.logits) if backwards else (made.logits, made.weights, made.index)
    same = all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(told, mine, strict=True))
    return FusedRouter(spec, backwards) if same else None
