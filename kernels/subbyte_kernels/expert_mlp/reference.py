"""Experts of a few tokens, in plain PyTorch: what the kernels compute, expert by expert, in fp32.

Experts lie in slots. ``slots`` says in which (None: expert e in slot e); an expert that is none of the model's, or has
no slot, counts for nothing. Weights are read once however many tokens chose an expert, and experts are added in the
order in which they were chosen first, so that a sum does not depend on where they lie.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from subbyte_kernels.expert_mlp.layout import ExpertLayout


MAX_EXPERT_TOKENS = 16
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True)
class SharedExpert:
    """An expert that every token takes, packed as the others.

    Attributes:
        gate_up: ``[2 I, H]``, gate above up, or its bytes.
        down: ``[H, I]``, or its bytes.
        intermediate: I, which need not be the other experts'.
        scale: ``[T]`` fp32 weight of each token, or None for 1.
    """

    gate_up: Tensor
    down: Tensor
    intermediate: int
    scale: Tensor | None = None


@dataclass(frozen=True)
class ExpertCall:
    """What one layer of experts is to compute.

    Attributes:
        hidden: ``[T, H]`` fp16, bf16 or (not in kernels) fp32.
        expert_ids: ``[T, K]`` int32 or int64.
        expert_weights: ``[T, K]`` fp32, fp16 or bf16.
        gate_up: ``[S, 2 I, H]``, gate above up, or ``[S, bytes]`` uint8 as ``layout`` packs it; dim 0 may be strided.
        down: ``[S, H, I]``, or ``[S, bytes]``; likewise.
        layout: of the weights.
        activation: a key of :data:`ACTIVATIONS`.
        slots: ``[E]`` int32 slot of each expert, negative without one; None means expert e lies in slot e.
        shared: expert that every token takes, or None.
        residual: ``[T, H]`` to be added, or None.
    """

    hidden: Tensor
    expert_ids: Tensor
    expert_weights: Tensor
    gate_up: Tensor
    down: Tensor
    layout: ExpertLayout
    activation: str = "silu"
    slots: Tensor | None = None
    shared: SharedExpert | None = None
    residual: Tensor | None = None

    @property
    def experts(self) -> int:
        """Experts of the model: ids from there on are nobody's."""
        return self.gate_up.shape[0] if self.slots is None else self.slots.shape[0]


def expert_mlp_reference(call: ExpertCall) -> Tensor:
    """``[T, H]`` in the tokens' dtype."""
    hidden, ids = call.hidden.float(), call.expert_ids.long()
    output = torch.zeros_like(hidden) if call.residual is None else call.residual.float()
    known = (ids >= 0) & (ids < call.experts)
    weights = call.expert_weights.float()
    for expert in ids[known].unique().tolist():  # by number: where experts lie, and who else chose them, is no matter
        slot = expert if call.slots is None else int(call.slots[expert])
        if slot < 0:
            continue
        weight = torch.where(ids == expert, weights, 0).sum(-1)
        gate_up, down = call.layout.unpack(call.gate_up[slot : slot + 1], call.down[slot : slot + 1])
        output = output + _expert(hidden, gate_up[0], down[0], weight, call.activation)
    if call.shared is not None:
        shared, scale = call.shared, call.shared.scale
        layout = shared_layout(call)
        gate_up, down = layout.unpack(shared.gate_up[None], shared.down[None])
        weight = torch.ones_like(hidden[:, 0]) if scale is None else scale.float()
        output = output + _expert(hidden, gate_up[0], down[0], weight, call.activation)
    return output.to(call.hidden.dtype)


def shared_layout(call: ExpertCall) -> ExpertLayout:
    """How the shared expert lies in memory."""
    layout = call.layout
    assert call.shared is not None
    return ExpertLayout(layout.format, layout.hidden, call.shared.intermediate, layout.dtype, layout.group)


def _expert(hidden: Tensor, gate_up: Tensor, down: Tensor, weight: Tensor, activation: str) -> Tensor:
    """One expert's share: nothing for tokens of weight 0, whatever it makes of them."""
    gate, up = (hidden @ gate_up.float().T).chunk(2, dim=-1)
    act = torch.where(weight[:, None] == 0, 0, weight[:, None] * ACTIVATIONS[activation](gate) * up)
    return act @ down.float().T
