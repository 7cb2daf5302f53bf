"""Experts of up to 16 tokens in two launches, as a function of Transformers' experts interface.

The function computes what fits the kernels: gated experts in one tensor with gate above up, without biases, on a GPU,
without gradients. Everything else, and more tokens, goes to the function that the model had before.

Gives up: sums are taken in another order than in the model's own functions, so outputs differ in their last bits.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from transformers import PreTrainedModel
from transformers.integrations import moe as interface

from hf_subbyte_moe.ops_moe import MAX_EXPERT_TOKENS, expert_mlp


FUSED_NAME = "subbyte_fused"
PREVIOUS_EXPERTS = "_hf_subbyte_moe_experts_before"
_EAGER = "eager"
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELU": "gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}


def fused_activation(experts: Any) -> str | None:
    """The activation of experts that the kernels can compute; None for those that they cannot.

    Args:
        experts: an experts module, or what stands in for one.
    """
    module = getattr(experts, "_module", experts)
    plain = (
        getattr(module, "has_gate", False)
        and not getattr(module, "has_bias", True)
        and not getattr(module, "is_transposed", True)
        and getattr(module, "is_concatenated", False)
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)
        and type(module)._apply_gate is interface._default_apply_gate
    )
    return _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__) if plain else None


def fused_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function of the interface.

    Args:
        self: the experts module, or what stands in for it.
        hidden_states: ``[N, H]``.
        top_k_index: ``[N, K]`` experts of every token.
        top_k_weights: ``[N, K]`` of their outputs.

    Returns:
        ``[N, H]``.
    """
    activation = fused_activation(self) if is_few_on_gpu(hidden_states) else None
    if activation is None or needs_gradients(hidden_states, top_k_weights, self.gate_up_proj, self.down_proj):
        return previous_function(self)(self, hidden_states, top_k_index.long(), top_k_weights)
    return expert_mlp(
        hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj, activation=activation
    )


def is_few_on_gpu(hidden_states: Tensor) -> bool:
    """Whether the kernels are for so many tokens, where they are."""
    return hidden_states.is_cuda and 1 <= hidden_states.shape[0] <= MAX_EXPERT_TOKENS


def needs_gradients(*tensors: Tensor) -> bool:
    """Whether a backward pass will come through one of them."""
    return is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def previous_function(experts: Any) -> Callable[..., Tensor]:
    """The function that experts had before ours."""
    name = getattr(experts, PREVIOUS_EXPERTS, None)
    if name in (None, _EAGER):
        return eager_forward(type(getattr(experts, "_module", experts)))
    found: Callable[..., Tensor] = interface.ALL_EXPERTS_FUNCTIONS[name]
    return found


def eager_forward(cls: type) -> Callable[..., Tensor]:
    """The forward that a class of experts had before the interface was put in front of it."""
    for base in cls.__mro__:
        forward = vars(base).get("forward")
        if hasattr(forward, "__wrapped__"):
            return forward.__wrapped__  # type: ignore[no-any-return, union-attr]
    raise ValueError(f"{cls.__name__} is not run by Transformers' experts interface")


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """A model's experts, those that the interface runs."""
    return [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "is_concatenated")]


def use_fused_experts(model: PreTrainedModel) -> None:
    """Put our function in front of a model's own, if any of its experts can be fused."""
    modules = [module for module in experts_modules(model) if fused_activation(module) is not None]
    if not modules:
        return
    if FUSED_NAME not in interface.ALL_EXPERTS_FUNCTIONS:
        interface.ExpertsInterface.register(FUSED_NAME, fused_experts)
    before = modules[0].config._experts_implementation  # type: ignore[union-attr]
    if before != FUSED_NAME:
        for module in modules:
            setattr(module, PREVIOUS_EXPERTS, before)
        model.set_experts_implementation(FUSED_NAME)


def release_fused_experts(model: PreTrainedModel) -> None:
    """Give a model its own experts function back."""
    for module in experts_modules(model):
        if hasattr(module, PREVIOUS_EXPERTS):
            before = getattr(module, PREVIOUS_EXPERTS)
            delattr(module, PREVIOUS_EXPERTS)
            if module.config._experts_implementation == FUSED_NAME:  # type: ignore[union-attr]
                model.set_experts_implementation(before or _EAGER)
