# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803
"""The router in Triton: a launch for the logits and one for the choice, wherever Triton runs; in its interpreter too.

A program of the first owns BLOCK_EXPERTS experts and one token; one of the second chooses for one token. What the
model rounds is rounded in the same place. Equal scores: the smallest expert first, as ``torch.topk`` chooses on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subbyte_kernels.router.reference import (
    GROUP_SCORES,
    MAX_ROUTER_TOKENS,
    NORMS,
    SCORES,
    Routed,
    RouterMatrix,
    RouterSpec,
)


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BLOCK_EXPERTS, _BLOCK_COLUMNS = 4, 512
_MAX_GROUPS = 32


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _logits_kernel(
    hidden,  # [T, H]
    weight,  # [E, H]
    bias,  # [E]
    logits,  # [T, E] of what they are rounded to
    tokens,
    experts,
    H: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    expert = tl.program_id(0) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    token = tl.program_id(1)
    there = expert < experts
    total = tl.zeros((BLOCK_EXPERTS, BLOCK_COLUMNS), tl.float32)
    for start in range(0, H, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        place = weight + expert.to(tl.int64)[:, None] * H + column[None, :]
        rows = tl.load(place, mask=there[:, None] & (column < H)[None, :], other=0.0).to(tl.float32)
        total += rows * tl.load(hidden + token * H + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
    made = tl.sum(total, 1)
    if HAS_BIAS:
        made += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    tl.store(logits + token * experts + expert, made.to(logits.dtype.element_ty), mask=there)


@_jit
def _order_of(x):
    """Integers in the order of floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@_jit
def _group_score(choice, member, TOP2: tl.constexpr):
    never = float("-inf")
    inside = tl.where(member, choice, never)
    best = tl.max(inside, 0)
    if TOP2:
        index = tl.arange(0, choice.shape[0])
        first = tl.min(tl.where(member & (inside == best), index, choice.shape[0]), 0)
        best += tl.max(tl.where(index == first, never, inside), 0)
    return best


@_jit
def _choose_kernel(
    logits,  # [T, E]
    correction,  # [E]
    returned,  # [T, E] logits in another dtype
    weights,  # [T, K]
    index,  # [T, K]
    experts,
    masked,
    eps,
    scale,
    HAS_CORRECTION: tl.constexpr,
    RETURNS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    NORM: tl.constexpr,
    SORTED: tl.constexpr,
):
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    there = expert < experts
    score = tl.load(logits + token * experts + expert, mask=there, other=float("-inf")).to(tl.float32)
    if RETURNS:
        tl.store(returned + token * experts + expert, score, mask=there)
    if SCORE == 1:
        raised = tl.where(there, tl.exp(score - tl.max(score, 0)), 0.0)
        score = tl.div_rn(raised, tl.sum(raised, 0))
    elif SCORE == 2:
        score = tl.div_rn(1.0, 1.0 + tl.exp(-score))
    choice = score
    if HAS_CORRECTION:
        choice += tl.load(correction + expert, mask=there, other=0.0)
    if GROUPS > 1:
        size = experts // GROUPS
        group = tl.arange(0, GROUPS_PADDED)
        scores = tl.full((GROUPS_PADDED,), float("-inf"), tl.float32)
        for which in range(GROUPS):
            member = there & (expert // size == which)
            scores = tl.where(group == which, _group_score(choice, member, TOP2), scores)
        order = tl.where(group < GROUPS, _order_of(scores), -2147483648)
        kept = tl.zeros((EXPERTS,), tl.int1)
        for _ in range(GROUPS_KEPT):
            best = tl.max(order, 0)
            which = tl.min(tl.where(order == best, group, GROUPS), 0)
            order = tl.where(group == which, -2147483648, order)
            kept = kept | (expert // size == which)
        choice = tl.where(kept, choice, masked)
    order = tl.where(there, _order_of(choice), -2147483648)
    pick = tl.arange(0, PICKS)
    picked = tl.zeros((PICKS,), tl.int32)
    picked_order = tl.full((PICKS,), -2147483648, tl.int32)
    weight = tl.zeros((PICKS,), tl.float32)
    for turn in range(TOP_K):
        best = tl.max(order, 0)
        which = tl.min(tl.where(order == best, expert, EXPERTS), 0)
        value = tl.sum(tl.where(expert == which, score if HAS_CORRECTION else choice, 0.0), 0)
        order = tl.where(expert == which, -2147483648, order)
        picked = tl.where(pick == turn, which, picked)
        picked_order = tl.where(pick == turn, best, picked_order)
        weight = tl.where(pick == turn, value, weight)
    real = pick < TOP_K
    if NORM == 4:
        weight = tl.where(real, tl.exp(weight - tl.max(tl.where(real, weight, float("-inf")), 0)), 0.0)
    total = tl.sum(tl.where(real, weight, 0.0), 0)
    if NORM == 1 or NORM == 4:
        weight = tl.div_rn(weight, total)
    elif NORM == 2:
        weight = tl.div_rn(weight, total + eps)
    elif NORM == 3:
        weight = tl.div_rn(weight, tl.maximum(total, eps))
    place = pick
    if not SORTED:  # first those above the last value, then those equal to it, each by expert
        last = tl.min(tl.where(real, picked_order, 2147483647), 0)
        above = picked_order > last
        both = above[None, :] == above[:, None]
        before = tl.where(both, picked[None, :] < picked[:, None], above[None, :])
        place = tl.sum((before & real[None, :]).to(tl.int32), 1)
    tl.store(index + token * TOP_K + place, picked, mask=real)
    if WEIGHTED:
        tl.store(weights + token * TOP_K + place, (scale * weight).to(weights.dtype.element_ty), mask=real)


def triton_obstacle(
    hidden: Tensor, matrix: RouterMatrix, spec: RouterSpec, following: RouterMatrix | None, following_top_k: int
) -> str | None:
    """Why the kernels cannot compute a call, or None; looks at shapes and types alone."""
    if triton is None:
        return "triton is not installed"
    device = hidden.device.type
    if device == "cpu" and isinstance(_choose_kernel, triton.runtime.JITFunction):
        return "the tensors lie on a CPU"
    if device not in ("cpu", "cuda"):
        return f"the tensors lie on a device of type {device}"
    if hidden.dtype not in _DTYPES or matrix.weight.dtype not in _DTYPES:
        return f"it has no path for {hidden.dtype} states and a {matrix.weight.dtype} matrix"
    if not 1 <= hidden.shape[0] <= MAX_ROUTER_TOKENS:
        return f"it takes 1 to {MAX_ROUTER_TOKENS} tokens, not {hidden.shape[0]}"
    if spec.groups > _MAX_GROUPS:
        return f"it chooses from at most {_MAX_GROUPS} groups"
    return None


def router_triton(
    hidden: Tensor,
    matrix: RouterMatrix,
    spec: RouterSpec,
    following: RouterMatrix | None = None,
    following_top_k: int = 0,
) -> Routed:
    """Logits, weights and experts; arguments and result as in :func:`router_reference`."""
    hidden = hidden.contiguous()
    with torch.cuda.device_of(hidden):  # Triton launches on the current device
        logits, weights, index = _route(hidden, matrix, spec, spec.top_k, True)
        predicted = None if following is None else _route(hidden, following, spec, following_top_k, False)[2]
    return Routed(logits, weights, index, predicted)


def _route(
    hidden: Tensor, matrix: RouterMatrix, spec: RouterSpec, top_k: int, weighted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (tokens, width), experts, device = hidden.shape, matrix.weight.shape[0], hidden.device
    rounded = torch.empty(tokens, experts, dtype=torch.float32 if spec.float_logits else hidden.dtype, device=device)
    returns = spec.return_float_logits and not spec.float_logits
    returned = torch.empty(tokens, experts, dtype=torch.float32, device=device) if returns else rounded
    weights = torch.empty(tokens, top_k, dtype=torch.float32 if spec.float_weights else hidden.dtype, device=device)
    index = torch.empty(tokens, top_k, dtype=torch.int64, device=device)
    _logits_kernel[(triton.cdiv(experts, _BLOCK_EXPERTS), tokens)](
        hidden,
        matrix.weight.contiguous(),
        rounded if matrix.bias is None else matrix.bias,
        rounded,
        tokens,
        experts,
        H=width,
        HAS_BIAS=matrix.bias is not None,
        BLOCK_EXPERTS=_BLOCK_EXPERTS,
        BLOCK_COLUMNS=_BLOCK_COLUMNS,
    )
    _choose_kernel[(tokens,)](
        rounded,
        rounded if matrix.correction is None else matrix.correction.float().contiguous(),
        returned,
        weights,
        index,
        experts,
        spec.masked,
        spec.eps,
        spec.scale,
        HAS_CORRECTION=matrix.correction is not None,
        RETURNS=returns,
        WEIGHTED=weighted,
        TOP_K=top_k,
        PICKS=triton.next_power_of_2(top_k),
        EXPERTS=triton.next_power_of_2(experts),
        SCORE=SCORES.index(spec.score),
        GROUPS=spec.groups,
        GROUPS_PADDED=triton.next_power_of_2(spec.groups),
        GROUPS_KEPT=spec.groups_kept,
        TOP2=spec.group_score == GROUP_SCORES[1],
        NORM=NORMS.index(spec.norm),
        SORTED=spec.sorted,
        num_warps=4,
    )
    return returned, weights, index
