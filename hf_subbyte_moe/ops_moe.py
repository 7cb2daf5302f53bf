"""The seam to the kernels of experts and routers, as ``ops.py`` is to those of the cache."""

from torch import Tensor

from subbyte_kernels.expert_mlp import (
    ACTIVATIONS,
    MAX_EXPERT_TOKENS,
    ExpertCall,
    ExpertFormat,
    ExpertLayout,
    SharedExpert,
    workspace_bytes,
)
from subbyte_kernels.expert_mlp import expert_mlp as selected_experts
from subbyte_kernels.router import MAX_ROUTER_TOKENS, Routed, RouterMatrix, RouterSpec, router_reference
from subbyte_kernels.router import router as selected_router


__all__ = [
    "ACTIVATIONS",
    "MAX_EXPERT_TOKENS",
    "MAX_ROUTER_TOKENS",
    "ExpertCall",
    "ExpertFormat",
    "ExpertLayout",
    "Routed",
    "RouterMatrix",
    "RouterSpec",
    "SharedExpert",
    "expert_mlp",
    "router",
    "router_reference",
    "workspace_bytes",
]


def expert_mlp(
    hidden: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    layout: ExpertLayout | None = None,
    activation: str = "silu",
    slots: Tensor | None = None,
    shared: SharedExpert | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Experts of 1 to 16 tokens, each read once from where it lies.

    No value is read back to the host and nothing is allocated but ``out`` and ``workspace`` where they are not given
    (by ``torch.empty``), so a call that was made before can be captured in a CUDA graph.

    Args:
        hidden: ``[T, H]`` fp16, bf16, or fp32 (then without the CUDA kernel).
        expert_ids: ``[T, K]`` int32 or int64; ids that are no expert's count for nothing.
        expert_weights: ``[T, K]`` fp32, fp16 or bf16.
        gate_up: ``[S, 2 I, H]``, gate above up, or packed ``[S, bytes]`` uint8; experts may lie at any distance.
        down: ``[S, H, I]``, or ``[S, bytes]``; likewise.
        layout: of packed weights; None means the tokens' dtype.
        activation: one of ``ACTIVATIONS``.
        slots: ``[E]`` int32, where each expert lies, negative for nowhere (it then counts for nothing); None means
            expert e lies in slot e.
        shared: an expert that every token takes, or None.
        residual: ``[T, H]`` to be added before the result is rounded, or None.
        out: ``[T, H]`` contiguous, in the tokens' dtype, written.
        workspace: uint8, at least ``workspace_bytes(call)``; calls that follow each other may share it.
        backend: "auto", "cuda", "triton" or "torch".

    Returns:
        ``[T, H]`` in the tokens' dtype.

    Raises:
        ValueError: shapes that do not belong together, or the named backend cannot do this call.
    """
    tokens, width = hidden.shape
    if expert_ids.shape != expert_weights.shape or expert_ids.shape[0] != tokens:
        raise ValueError(
            f"experts {list(expert_ids.shape)} and weights {list(expert_weights.shape)} do not fit {tokens} tokens"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is not possible: one of {sorted(ACTIVATIONS)}")
    if layout is None:
        if gate_up.ndim != 3 or down.ndim != 3 or gate_up.dtype != hidden.dtype:
            raise ValueError(f"weights are [S, 2 I, H] and [S, H, I] in {hidden.dtype}; packed ones need a layout")
        layout = ExpertLayout(ExpertFormat.MODEL, down.shape[1], down.shape[2], hidden.dtype)
    if layout.packed:
        sizes = (layout.gate_up_bytes, layout.matrix_bytes(layout.hidden, layout.intermediate))
        fits = gate_up.shape[1:] == sizes[:1] and down.shape[1:] == sizes[1:]
    else:
        sizes = (2 * layout.intermediate, layout.hidden)
        fits = gate_up.shape[1:] == sizes and down.shape[1:] == (layout.hidden, layout.intermediate)
    if not fits or layout.hidden != width or gate_up.shape[0] != down.shape[0]:
        raise ValueError(
            f"weights {list(gate_up.shape)}, {list(down.shape)} do not fit states of {width} and {layout}"
        )
    if not (gate_up[0].is_contiguous() and down[0].is_contiguous()):
        raise ValueError("an expert's weights must be contiguous")
    call = ExpertCall(hidden, expert_ids, expert_weights, gate_up, down, layout, activation, slots, shared, residual)
    return selected_experts(call, out, workspace, backend)


def router(
    hidden: Tensor,
    matrix: RouterMatrix,
    spec: RouterSpec,
    following: RouterMatrix | None = None,
    following_top_k: int = 0,
    backend: str = "auto",
) -> Routed:
    """Where tokens go: logits, scores, groups, choice and weights in one launch, for 1 to 16 tokens.

    The choice is the one that the family's own router makes from the same logits, ties included. The logits are sums
    in fp32, rounded where the family rounds: in the last bit they may differ from those of another order of summation.

    Args:
        hidden: ``[T, H]`` fp16, bf16 or fp32.
        matrix: the router's weights.
        spec: what it does with its logits.
        following: weights of a router whose choice for the same states is wanted too (a prediction), or None.
        following_top_k: experts of that choice.
        backend: "auto", "cuda", "triton" or "torch".

    Returns:
        Logits, weights, experts, and the other router's experts.

    Raises:
        ValueError: shapes that do not belong together, or the named backend cannot do this call.
    """
    experts, width = matrix.weight.shape
    if hidden.ndim != 2 or hidden.shape[1] != width:
        raise ValueError(f"states {list(hidden.shape)} do not fit a router of {experts} x {width}")
    if experts % spec.groups or spec.groups_kept > spec.groups or not 1 <= spec.top_k <= experts:
        raise ValueError(f"{spec} does not fit {experts} experts")
    if following is not None and not (following.weight.shape == matrix.weight.shape and following_top_k > 0):
        raise ValueError("the following router must have the same shape, and following_top_k say how many experts")
    return selected_router(hidden, matrix, spec, following, following_top_k, backend)
