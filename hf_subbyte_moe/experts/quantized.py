"""Experts in int4 or fp8: each module's weights become bytes, layer by layer, and the kernels read those.

``gate_up_proj`` and ``down_proj`` become uint8 ``[E, bytes]``, an expert a row, so that slabs, slots and copies treat
them as any other weights. Up to 16 tokens on a GPU are computed from the bytes; more are a prompt, for which the
experts that it uses are unpacked, one layer at a time.

Gives up: gradients, and the exact weights: going back unpacks what was packed.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_subbyte_moe.experts.experts import StandIn
from hf_subbyte_moe.experts.fused import experts_modules, fused_activation, is_few_on_gpu
from hf_subbyte_moe.experts.weights import TensorFile, write_files
from hf_subbyte_moe.ops_moe import ExpertFormat, ExpertLayout, expert_mlp


PACKED = "_hf_subbyte_moe_packed"
_NAMES = ("gate_up_proj", "down_proj")
_ELEMENTS_AT_ONCE = 1 << 27  # packed or unpacked together: what that needs beside the layer


@dataclass(frozen=True)
class Packing:
    """How one module's experts are packed.

    Attributes:
        layout: of an expert.
        activation: of its hidden units.
        own_forward: what the module's class computes, given plain weights.
        trained: names of weights that asked for gradients.
    """

    layout: ExpertLayout
    activation: str
    own_forward: Callable[..., Tensor]
    trained: frozenset[str]


class PackedExperts(nn.Module):
    """In front of an experts module's own class: the same experts, from bytes."""

    gate_up_proj: Tensor
    down_proj: Tensor
    num_experts: int

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, H]`` of ``[N, H]`` states, ``[N, K]`` experts and their weights.

        ``self`` may be what stands in for the module, with bytes that lie elsewhere.
        """
        packing: Packing = getattr(self, PACKED)
        if is_few_on_gpu(hidden_states):
            return expert_mlp(
                hidden_states.detach(),
                top_k_index,
                top_k_weights.detach(),
                self.gate_up_proj,
                self.down_proj,
                layout=packing.layout,
                activation=packing.activation,
            )
        module: nn.Module = getattr(self, "_module", self)
        weights = unpacked(packing.layout, self.gate_up_proj, self.down_proj, top_k_index)
        stand_in = StandIn(module, dict(zip(_NAMES, weights, strict=True)), self.num_experts)
        return packing.own_forward(stand_in, hidden_states, top_k_index.long(), top_k_weights)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Move the bytes; where the model changes its dtype, they stand for weights in the new one."""
        packing: Packing = getattr(self, PACKED)
        dtype = fn(torch.empty(0, dtype=packing.layout.dtype)).dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        object.__setattr__(self, PACKED, replace(packing, layout=replace(packing.layout, dtype=dtype)))
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError("experts are packed: hf_subbyte_moe.restore(model) before it is pickled")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackedExperts":
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        raise ValueError(
            "packed experts are not saved: publish the model's own weights, and the option in its config.json packs "
            "them when it is loaded"
        )


def unpacked(
    layout: ExpertLayout, gate_up: Tensor, down: Tensor, index: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights in the model's dtype: ``[E, 2 I, H]`` and ``[E, H, I]``.

    Args:
        layout: of an expert.
        gate_up: ``[E, bytes]``.
        down: ``[E, bytes]``.
        index: experts that are needed, any shape; others may hold anything. None means all.
    """
    count, device = gate_up.shape[0], gate_up.device
    made = (
        torch.empty(count, 2 * layout.intermediate, layout.hidden, dtype=layout.dtype, device=device),
        torch.empty(count, layout.hidden, layout.intermediate, dtype=layout.dtype, device=device),
    )
    if index is None or index.numel() >= count:  # nearly all: asking costs more than unpacking
        needed = list(range(count))
    else:
        needed = [expert for expert in index.unique().tolist() if 0 <= expert < count]
    together = _at_once(3 * layout.intermediate * layout.hidden)
    for start in range(0, len(needed), together):
        some = needed[start : start + together]
        for target, weights in zip(made, layout.unpack(gate_up[some], down[some]), strict=True):
            target[some] = weights.to(layout.dtype)
    return made


def _at_once(elements: int) -> int:
    """Experts of so many elements that are packed or unpacked together."""
    return max(1, _ELEMENTS_AT_ONCE // elements)


def layout_of(experts: nn.Module, weights: str) -> ExpertLayout:
    """How a module's experts will lie in memory.

    Args:
        experts: an experts module.
        weights: "int4", "int4-g64" or "fp8".

    Raises:
        ValueError: its experts cannot be packed.
    """
    down: Any = experts.down_proj
    return _layout(weights, down.shape[1], down.shape[2], down.dtype)


def _layout(weights: str, hidden: int, intermediate: int, dtype: torch.dtype) -> ExpertLayout:
    kind, _, group = weights.partition("-g")
    return ExpertLayout(ExpertFormat(kind), hidden, intermediate, dtype, int(group or 32))


def refuse_unpackable(model: PreTrainedModel, weights: str) -> None:
    """Check whether a model's experts can be packed.

    Raises:
        ValueError: they cannot; says why.
    """
    modules = experts_modules(model)
    if not modules:
        raise ValueError(f"weights={weights!r} is not possible: {type(model).__name__} has no experts of a known form")
    for module in modules:
        if isinstance(module, PackedExperts):
            known = getattr(module, PACKED).layout
            if known != _layout(weights, known.hidden, known.intermediate, known.dtype):
                raise ValueError(f"experts are packed as {known.format.value}: load the model again for {weights!r}")
            continue
        if fused_activation(module) is None:
            raise ValueError(
                f"weights={weights!r} is not possible: the kernels have no {type(module).__name__} (they have gated "
                "experts without biases, gate above up)"
            )
        layout_of(module, weights)


def pack_experts(
    model: PreTrainedModel, weights: str, through: torch.device | None = None, to: torch.device | None = None
) -> None:
    """Pack all experts of a model, one layer after the other.

    Args:
        model: that :func:`refuse_unpackable` lets through.
        weights: "int4", "int4-g64" or "fp8".
        through: where the bytes are made; None means where each layer is.
        to: where they go; None likewise.
    """
    for module in experts_modules(model):
        if isinstance(module, PackedExperts):
            continue
        layout = layout_of(module, weights)
        plain: list[Tensor] = [getattr(module, name).detach() for name in _NAMES]
        put_packed(module, layout, *_packed_rows(plain, layout, through, to))


def packed_bytes(modules: Sequence[nn.Module], weights: str) -> int:
    """Bytes of modules' experts when they are packed."""
    experts = (module.get_parameter("down_proj").shape[0] for module in modules)
    return sum(count * layout_of(module, weights).slab_bytes for count, module in zip(experts, modules, strict=True))


def pack_files(
    modules: Sequence[nn.Module],
    files: Sequence[Mapping[str, TensorFile]],
    weights: str,
    through: torch.device,
    folder: Path,
) -> list[Mapping[str, TensorFile]]:
    """Pack experts that lie in files, one layer after the other: no more than one is in host memory.

    Args:
        modules: experts whose weights are in files, and on the meta device here; they get bytes mapped into memory.
        files: of every module's weights, in any dtype.
        weights: "int4", "int4-g64" or "fp8".
        through: where the bytes are made.
        folder: where they are written.

    Returns:
        The files of every module's bytes.
    """
    packed: list[Mapping[str, TensorFile]] = []
    for layer, (module, given) in enumerate(zip(modules, files, strict=True)):
        layout = layout_of(module, weights)
        rows = _packed_rows([given[name].map() for name in _NAMES], layout, through, torch.device("cpu"))
        packed.append(write_files(folder, layer, dict(zip(_NAMES, rows, strict=True)), torch.uint8))
        put_packed(module, layout, *(packed[layer][name].map() for name in _NAMES))
    return packed


def _packed_rows(
    plain: Sequence[Tensor], layout: ExpertLayout, through: torch.device | None, to: torch.device | None
) -> tuple[Tensor, Tensor]:
    rows: list[Tensor] = []
    for weight in plain:
        together = _at_once(weight[0].numel())
        some = (
            layout.pack_matrix(weight[start : start + together].to(through or weight.device, layout.dtype)).to(
                to or weight.device
            )
            for start in range(0, weight.shape[0], together)
        )
        rows.append(torch.cat(list(some)))
    return rows[0], rows[1]


_SUBCLASSES: dict[type, type] = {}


def put_packed(module: nn.Module, layout: ExpertLayout, gate_up: Tensor, down: Tensor) -> None:
    """Give an experts module bytes in place of its weights.

    Args:
        module: experts whose weights go, whatever they are (they may be on the meta device).
        layout: of an expert.
        gate_up: ``[E, bytes]`` uint8.
        down: ``[E, bytes]`` uint8.
    """
    activation = fused_activation(module)
    assert activation is not None
    own: Any = type(module)
    if own not in _SUBCLASSES:
        _SUBCLASSES[own] = type(f"Packed{own.__name__}", (PackedExperts, own), {"__module__": __name__})
    trained = frozenset(name for name in _NAMES if module.get_parameter(name).requires_grad)
    for name, rows in zip(_NAMES, (gate_up, down), strict=True):
        module._parameters[name] = nn.Parameter(rows, requires_grad=False)
    module.__class__ = _SUBCLASSES[own]
    object.__setattr__(module, PACKED, Packing(layout, activation, own.forward, trained))


def unpack_experts(model: nn.Module) -> bool:
    """Give every packed module weights in the model's dtype back, those that its bytes stand for; whether any was."""
    found = False
    for module in experts_modules(model):
        if not isinstance(module, PackedExperts):
            continue
        found = True
        packing: Packing = getattr(module, PACKED)
        weights = unpacked(packing.layout, module.gate_up_proj, module.down_proj)
        delattr(module, PACKED)
        module.__class__ = type(module).__mro__[2]
        for name, weight in zip(_NAMES, weights, strict=True):
            module._parameters[name] = nn.Parameter(weight, requires_grad=name in packing.trained)
    return found
