"""A model's experts modules, made to run out of slots: each becomes an instance of a subclass of its class.

Parameters stay where a state dict finds them, as views of the bank in host memory.

Gives up: gradients, copies of the model, and a change of dtype while experts are away. A parameter that is edited in
place is read when an expert is brought next: one in a slot stays what it was, and so does one from disk that is kept
in host memory. ``load_state_dict`` empties the slots; for other edits ``hf_subbyte_moe.restore(model)`` first.
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_subbyte_moe.experts.experts import Engine
from hf_subbyte_moe.experts.weights import SlabLayout


STATE = "_hf_subbyte_moe_experts"


class _Untrained(torch.autograd.Function):
    """Lets a graph pass, and refuses to go back through it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor) -> Tensor:
        """The result."""
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        """Refuse."""
        raise ValueError("experts outside the model have no gradients: hf_subbyte_moe.restore(model) before training")


class PlacedExperts(nn.Module):
    """In front of an experts module's own class: the same experts, brought when they are needed."""

    config: Any
    _hf_subbyte_moe_experts: tuple[Engine, int]

    @property
    def own_forward(self) -> Callable[..., Tensor]:
        """The forward of the model's class, to be called with a stand-in for the module."""
        own: Any = type(self).__mro__[2]
        return own.forward  # type: ignore[no-any-return]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, H]`` of ``[N, H]`` states, ``[N, K]`` experts and their weights."""
        engine, layer = self._hf_subbyte_moe_experts
        if not torch.is_grad_enabled():
            return engine.run(layer, self, hidden_states, top_k_index, top_k_weights)
        with torch.no_grad():
            found = engine.run(layer, self, hidden_states, top_k_index, top_k_weights)
        if hidden_states.requires_grad or top_k_weights.requires_grad:
            found = _Untrained.apply(found, hidden_states, top_k_weights)  # type: ignore[no-untyped-call]
        return found

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError("experts are outside the model: hf_subbyte_moe.restore(model) before it is copied or pickled")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(memo)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move what is not in slabs; slots follow the hidden states."""
        engine, _ = self._hf_subbyte_moe_experts
        refuse_conversion(fn, engine.bank.layout)
        names = [part.name for part in engine.bank.layout.parts]
        held = dict(self._parameters)
        for name in names:
            del self._parameters[name]
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters.update({name: self._parameters.get(name, held[name]) for name in held})
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        engine, _ = self._hf_subbyte_moe_experts
        if any(prefix + part.name in state_dict for part in engine.bank.layout.parts):
            if not engine.bank.writable:
                raise ValueError("experts lie in files: hf_subbyte_moe.restore(model) before weights are loaded")
            if local_metadata.get("assign_to_params_buffers", False):
                raise ValueError(
                    "experts are outside the model, and weights are copied to them, not assigned: "
                    "hf_subbyte_moe.restore(model) before load_state_dict(assign=True)"
                )
            engine.forget()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def refuse_conversion(fn: Callable[[Tensor], Tensor], layout: SlabLayout) -> None:
    """Refuse what would convert slabs.

    Raises:
        ValueError: ``fn`` changes the dtype, or takes weights away.
    """
    probe = fn(torch.empty(0, dtype=layout.dtype))
    if probe.dtype != layout.dtype or probe.device.type == "meta":
        wanted = probe.dtype if probe.dtype != layout.dtype else probe.device
        raise ValueError(
            f"experts outside the model stay {layout.dtype}: hf_subbyte_moe.restore(model) before it goes to {wanted}"
        )


class Guard:
    """A model's ``_apply``, which refuses before anything has changed.

    Args:
        model: the model.
        layout: of its slabs.
    """

    def __init__(self, model: nn.Module, layout: SlabLayout) -> None:
        self._model, self._layout = model, layout

    def __call__(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """As ``nn.Module._apply``."""
        refuse_conversion(fn, self._layout)
        changed: nn.Module = type(self._model)._apply(self._model, fn, recurse)
        return changed


_SUBCLASSES: dict[type, type] = {}


def _is_trained(experts: nn.Module, name: str) -> bool:
    return experts._parameters[name].requires_grad  # type: ignore[union-attr]


class Swap:
    """Makes experts modules placed ones and back."""

    @staticmethod
    def put(experts: nn.Module, engine: Engine, layer: int) -> None:
        """Place a module's experts; its parameters become views of the bank."""
        own = type(experts)
        if own not in _SUBCLASSES:
            _SUBCLASSES[own] = type(f"Placed{own.__name__}", (PlacedExperts, own), {"__module__": __name__})
        Swap.point(experts, engine, layer)
        experts.__class__ = _SUBCLASSES[own]

    @staticmethod
    def point(experts: nn.Module, engine: Engine, layer: int) -> None:
        """Let a module's parameters be views of an engine's bank, and that engine run it."""
        for name, weight in engine.bank.weights(layer).items():
            experts._parameters[name] = nn.Parameter(weight, requires_grad=_is_trained(experts, name))
        object.__setattr__(experts, STATE, (engine, layer))

    @staticmethod
    def own(experts: nn.Module, weights: Mapping[str, Tensor], device: torch.device) -> None:
        """Give a module weights of its own on a device, copies of these."""
        for name, weight in weights.items():
            own = torch.empty(weight.shape, dtype=weight.dtype, device=device)
            experts._parameters[name] = nn.Parameter(own.copy_(weight), requires_grad=_is_trained(experts, name))

    @staticmethod
    def take_back(experts: nn.Module, device: torch.device) -> None:
        """Give a module its class, and weights of its own on a device."""
        engine, layer = getattr(experts, STATE)
        Swap.own(experts, engine.bank.weights(layer), device)
        Swap.leave(experts)

    @staticmethod
    def leave(experts: nn.Module) -> None:
        """Give a module its class; its parameters stay what they are."""
        delattr(experts, STATE)
        experts.__class__ = type(experts).__mro__[2]
        for name in ("forward", "_old_forward"):  # accelerate's hooks, set after us, remember or leave ours behind
            if getattr(vars(experts).get(name), "__func__", None) is PlacedExperts.forward:
                setattr(experts, name, MethodType(type(experts).forward, experts))
