# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741, N803, SIM108
"""The experts in Triton: gate_up and down, as the CUDA kernel, wherever Triton runs; in its interpreter too.

One program of gate_up owns BLOCK_ROWS rows of gate and of up of one distinct expert, one of down BLOCK_ROWS rows of
the output over all experts. With one token products are elementwise; with several a program of a third kernel first
lists the distinct experts and every token's weight in each, and products are dots with 16 columns, the tokens.

Layout of packed weights: ``layout.py``. Sums are fp32, activations stay fp32 between the two launches (rounded to the
tokens' dtype where they enter a dot).

Gives up: every code loads its own byte, so packed weights cost more instructions than bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from subbyte_kernels.expert_mlp.layout import ExpertFormat, ExpertLayout
from subbyte_kernels.expert_mlp.reference import MAX_EXPERT_TOKENS, ExpertCall


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_FORMATS = {ExpertFormat.MODEL: 0, ExpertFormat.INT4: 1, ExpertFormat.FP8: 2}
_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_COLUMNS = 16  # of a dot: the tokens
_LIST_CHUNK = 32
_ONE_TOKEN_BLOCKS = {False: (4, 512), True: (4, 512)}  # packed -> rows, columns of a program with one token
_TOKENS_BLOCKS = (16, 64)


def _jit(kernel: Any) -> Any:
    return kernel if triton is None else triton.jit(kernel)


@_jit
def _list_kernel(
    index,  # [T, K]
    weight,  # [T, K]
    slots,  # [E]
    distinct,  # [T K] slot, -1 behind the last
    shares,  # [T K, T] weight of each token in each of them
    tokens,
    experts,
    HAS_SLOTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PAIRS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Distinct slots in the order of their first pair."""
    pair = tl.arange(0, PAIRS)
    given = pair < tokens * TOP_K
    slot = _slot(index, slots, pair, given, experts, HAS_SLOTS)
    earlier = tl.zeros((PAIRS,), tl.int32)  # pairs before with the same slot
    share = tl.zeros((PAIRS,), tl.float32)
    for start in tl.static_range(0, PAIRS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < tokens * TOP_K
        same = slot[:, None] == _slot(index, slots, other, there, experts, HAS_SLOTS)[None, :]
        same = same & there[None, :]
        earlier += tl.sum((same & (other[None, :] < pair[:, None])).to(tl.int32), 1)
        mine = same & (other[None, :] // TOP_K == pair[:, None] // TOP_K)
        share += tl.sum(tl.where(mine, tl.load(weight + other, mask=there, other=0.0).to(tl.float32)[None, :], 0.0), 1)
    first = given & (slot >= 0) & (earlier == 0)
    rank = tl.cumsum(first.to(tl.int32), 0) - 1
    first_rank = tl.zeros((PAIRS,), tl.int32)  # rank of the first pair with the same slot
    tl.store(distinct + pair, tl.full((PAIRS,), -1, tl.int32), mask=given)
    column = tl.arange(0, TOKENS)
    cells = given[:, None] & (column < tokens)[None, :]
    tl.store(shares + pair[:, None] * tokens + column[None, :], tl.zeros((PAIRS, TOKENS), tl.float32), mask=cells)
    tl.debug_barrier()
    tl.store(distinct + rank, slot, mask=first)
    tl.debug_barrier()
    count = tl.sum(first.to(tl.int32), 0)
    for entry in range(count):
        first_rank = tl.where(slot == tl.load(distinct + entry), entry, first_rank)
    tl.store(shares + first_rank * tokens + pair // TOP_K, share, mask=given & (slot >= 0))


@_jit
def _slot(index, slots, pair, given, experts, HAS_SLOTS: tl.constexpr):
    """Slots of pairs; -1 where the expert is nobody's."""
    expert = tl.load(index + pair, mask=given, other=-1).to(tl.int64)
    known = (expert >= 0) & (expert < experts)
    if HAS_SLOTS:
        return tl.load(slots + expert, mask=known, other=-1).to(tl.int32)
    return tl.where(known, expert, -1).to(tl.int32)


@_jit
def _weights(base, row, column, row_mask, WIDTH: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """``[rows, columns]`` of a matrix, fp32."""
    inside = row_mask[:, None] & (column < WIDTH)[None, :]
    if FORMAT == 0:
        place = base + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        weights = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    else:  # the compiler goes on after a return: what divides by the group must stand in a branch of its own
        weights = _coded_weights(base, row, column, inside, WIDTH, FORMAT, GROUP)
    return weights


@_jit
def _coded_weights(base, row, column, inside, WIDTH: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """``[rows, columns]`` of a packed matrix, fp32."""
    codes: tl.constexpr = 512 if FORMAT == 1 else 1024
    groups: tl.constexpr = 128 // GROUP
    blocks: tl.constexpr = (WIDTH + 127) // 128
    block = (row.to(tl.int64) // 8)[:, None] * blocks + (column // 128)[None, :]
    start = block * (codes + 16 * groups)
    local = column % 128
    if FORMAT == 1:
        eighth = local % 8
        nibble = eighth // 2 + 4 * (eighth % 2)
        word = (local % 32) // 8 * 4 + local // 32
        byte = (row % 8 * 64)[:, None] + (word * 4 + nibble // 2)[None, :]
        code = tl.load(base + start + byte, mask=inside, other=0).to(tl.int32)
        value = ((code >> (nibble % 2 * 4)[None, :]) & 15).to(tl.float32) - 8.0
    else:
        middle = local % 4
        swapped = local - middle + tl.where(middle == 1, 2, tl.where(middle == 2, 1, middle))
        byte = (row % 8 * 64)[:, None] + (swapped // 64 * 512 + swapped % 64)[None, :]
        code = tl.load(base + start + byte, mask=inside, other=0).to(tl.int32)
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    scale = base + start + codes + 2 * ((row % 8 * groups)[:, None] + (local // GROUP)[None, :])
    low = tl.load(scale, mask=inside, other=0).to(tl.int32)
    high = tl.load(scale + 1, mask=inside, other=0).to(tl.int32)
    return value * ((low | (high << 8)) << 16).to(tl.float32, bitcast=True)


@_jit
def _activation(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return x / (1.0 + tl.exp(-x))
    if ACTIVATION == 1:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == 2:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * inner))
    return tl.maximum(x, 0.0)


@_jit
def _gate_up_kernel(
    hidden,  # [T, H]
    listed,  # T == 1: [K] experts, else [T K] distinct slots
    shares,  # T == 1: [K], else [T K, T]
    slots,
    weights,
    stride,  # of a slot, in elements
    act,  # [entries, T, I] fp32
    tokens,
    experts,
    HAS_SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
    SCALED: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    ONE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < I
    if SHARED:
        slot = 0
    elif ONE:
        slot = _slot(listed, slots, entry, True, experts, HAS_SLOTS)
    else:
        slot = tl.load(listed + entry)
    if slot >= 0:
        base = weights + slot.to(tl.int64) * stride if not SHARED else weights  # type: ignore[attr-defined]
        token = tl.arange(0, 16)
        if ONE:
            gate = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            up = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        else:
            gate = tl.zeros((BLOCK_ROWS, 16), tl.float32)
            up = tl.zeros((BLOCK_ROWS, 16), tl.float32)
        for start in range(0, H, BLOCK_COLUMNS):
            column = start + tl.arange(0, BLOCK_COLUMNS)
            w_gate = _weights(base, row, column, row_mask, H, FORMAT, GROUP)
            w_up = _weights(base, row + I, column, row_mask, H, FORMAT, GROUP)
            if ONE:
                x = tl.load(hidden + column, mask=column < H, other=0.0).to(tl.float32)[None, :]
                gate += w_gate * x
                up += w_up * x
            else:
                inside = (column < H)[:, None] & (token < tokens)[None, :]
                x = tl.load(hidden + token[None, :] * H + column[:, None], mask=inside, other=0.0).to(DOT)
                gate = tl.dot(w_gate.to(DOT), x, gate, input_precision="ieee")
                up = tl.dot(w_up.to(DOT), x, up, input_precision="ieee")
        if ONE:
            share = 1.0
            if SCALED:
                share = tl.load(shares + entry).to(tl.float32)
            made = share * _activation(tl.sum(gate, 1), ACTIVATION) * tl.sum(up, 1)
            tl.store(act + entry * I + row, tl.where(share == 0.0, 0.0, made), mask=row_mask)
        else:
            share = tl.full((16,), 1.0, tl.float32)
            if SCALED:
                share = tl.load(shares + entry * tokens + token, mask=token < tokens, other=0.0).to(tl.float32)
            made = tl.where(share[None, :] == 0.0, 0.0, share[None, :] * _activation(gate, ACTIVATION) * up)
            place = act + (entry * tokens + token)[None, :] * I + row[:, None]
            tl.store(place, made, mask=row_mask[:, None] & (token < tokens)[None, :])


@_jit
def _down_kernel(
    act,  # [entries, T, I] fp32
    listed,
    slots,
    weights,
    stride,
    addend,  # [T, H]
    out,  # [T, H]
    tokens,
    experts,
    entries,
    HAS_SLOTS: tl.constexpr,
    SHARED: tl.constexpr,
    ADDS: tl.constexpr,
    H: tl.constexpr,
    I: tl.constexpr,
    ONE: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row_mask = row < H
    token = tl.arange(0, 16)
    if ONE:
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
    else:
        total = tl.zeros((BLOCK_ROWS, 16), tl.float32)
    for entry in range(entries):
        if SHARED:
            slot = 0
        elif ONE:
            slot = _slot(listed, slots, entry, True, experts, HAS_SLOTS)
        else:
            slot = tl.load(listed + entry)
        if slot >= 0:
            base = weights + slot.to(tl.int64) * stride if not SHARED else weights  # type: ignore[attr-defined]
            for start in range(0, I, BLOCK_COLUMNS):
                column = start + tl.arange(0, BLOCK_COLUMNS)
                w = _weights(base, row, column, row_mask, I, FORMAT, GROUP)
                if ONE:
                    total += w * tl.load(act + entry * I + column, mask=column < I, other=0.0)[None, :]
                else:
                    inside = (column < I)[:, None] & (token < tokens)[None, :]
                    place = act + (entry * tokens + token).to(tl.int64)[None, :] * I + column[:, None]
                    x = tl.load(place, mask=inside, other=0.0)
                    total = tl.dot(w.to(DOT), x.to(DOT), total, input_precision="ieee")
    if ONE:
        made = tl.sum(total, 1)
        if ADDS:
            made += tl.load(addend + row, mask=row_mask, other=0.0).to(tl.float32)
        tl.store(out + row, made.to(out.dtype.element_ty), mask=row_mask)
    else:
        cells = row_mask[:, None] & (token < tokens)[None, :]
        place = token[None, :] * H + row[:, None]
        if ADDS:
            total += tl.load(addend + place, mask=cells, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=cells)


def triton_obstacle(call: ExpertCall) -> str | None:
    """Why the kernels cannot compute a call, or None; looks at shapes and types alone."""
    if triton is None:
        return "triton is not installed"
    device = call.hidden.device.type
    if device == "cpu" and isinstance(_gate_up_kernel, triton.runtime.JITFunction):
        return "the tensors lie on a CPU"
    if device not in ("cpu", "cuda"):
        return f"the tensors lie on a device of type {device}"
    if call.hidden.dtype not in _DTYPES or call.hidden.dtype != call.layout.dtype:
        return f"it takes fp16, bf16 and fp32 in states and weights alike, not {call.hidden.dtype}"
    if not 1 <= call.hidden.shape[0] <= MAX_EXPERT_TOKENS:
        return f"it takes 1 to {MAX_EXPERT_TOKENS} tokens, not {call.hidden.shape[0]}"
    return None


def expert_mlp_triton(call: ExpertCall, out: Tensor | None = None, workspace: Tensor | None = None) -> Tensor:
    """Experts of 1 to 16 tokens; result as from :func:`expert_mlp_reference`.

    Args:
        call: what is to be computed.
        out: ``[T, H]`` in the tokens' dtype, written; allocated if None.
        workspace: not used: what the launches share is allocated.

    Returns:
        ``out``.
    """
    del workspace
    with torch.cuda.device_of(call.hidden):  # Triton launches on the current device
        hidden, layout, shared = call.hidden.contiguous(), call.layout, call.shared
        tokens, top_k = call.expert_ids.shape
        out = torch.empty_like(hidden) if out is None else out
        listed, shares, slots = call.expert_ids.contiguous(), call.expert_weights.contiguous(), call.slots
        if tokens > 1:
            listed, shares, slots = *_list(call), None
        entries = tokens * top_k
        common = {"hidden": hidden, "tokens": tokens, "experts": call.experts, "activation": call.activation}
        act = _gate_up(common, layout, call.gate_up, listed, shares, slots, entries)
        addend = None if call.residual is None else call.residual.contiguous()
        if shared is not None:
            small = ExpertLayout(layout.format, layout.hidden, shared.intermediate, layout.dtype, layout.group)
            shared_act = _gate_up(common, small, shared.gate_up[None], None, shared.scale, None, 1)
            partial = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
            addend = _down(common, small, shared.down[None], shared_act, None, None, 1, addend, partial)
        return _down(common, layout, call.down, act, listed, slots, entries, addend, out)


def _list(call: ExpertCall) -> tuple[Tensor, Tensor]:
    """Distinct slots ``[T K]`` and every token's weight in each ``[T K, T]``."""
    tokens, top_k = call.expert_ids.shape
    pairs, device = tokens * top_k, call.hidden.device
    distinct = torch.empty(pairs, dtype=torch.int32, device=device)
    shares = torch.empty(pairs, tokens, dtype=torch.float32, device=device)
    _list_kernel[(1,)](
        call.expert_ids.contiguous(),
        call.expert_weights.contiguous(),
        call.slots if call.slots is not None else distinct,
        distinct,
        shares,
        tokens,
        call.experts,
        HAS_SLOTS=call.slots is not None,
        TOP_K=top_k,
        PAIRS=max(_LIST_CHUNK, triton.next_power_of_2(pairs)),
        CHUNK=_LIST_CHUNK,
        TOKENS=triton.next_power_of_2(tokens),
        num_warps=8,
    )
    return distinct, shares


def _blocks(layout: ExpertLayout, tokens: int) -> tuple[int, int]:
    return _ONE_TOKEN_BLOCKS[layout.packed] if tokens == 1 else _TOKENS_BLOCKS


def _dot_type(dtype: torch.dtype, device: torch.device) -> Any:
    """Type in which several tokens are multiplied; the interpreter holds bf16 as integers."""
    if device.type == "cpu":
        return tl.float32
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def _options(common: dict[str, Any], layout: ExpertLayout) -> dict[str, Any]:
    hidden: Tensor = common["hidden"]
    rows, columns = _blocks(layout, common["tokens"])
    return {
        "H": layout.hidden,
        "I": layout.intermediate,
        "ONE": common["tokens"] == 1,
        "FORMAT": _FORMATS[layout.format],
        "GROUP": layout.scale_columns,
        "DOT": _dot_type(hidden.dtype, hidden.device),
        "BLOCK_ROWS": rows,
        "BLOCK_COLUMNS": columns,
        "num_warps": 4,
    }


def _gate_up(
    common: dict[str, Any],
    layout: ExpertLayout,
    weights: Tensor,
    listed: Tensor | None,
    shares: Tensor | None,
    slots: Tensor | None,
    entries: int,
) -> Tensor:
    hidden, tokens = common["hidden"], common["tokens"]
    act = torch.empty(entries, tokens, layout.intermediate, dtype=torch.float32, device=hidden.device)
    options = _options(common, layout)
    _gate_up_kernel[(triton.cdiv(layout.intermediate, options["BLOCK_ROWS"]), entries)](
        hidden,
        act if listed is None else listed,
        act if shares is None else shares,
        act if slots is None else slots,
        weights,
        weights.stride(0),
        act,
        tokens,
        common["experts"],
        HAS_SLOTS=slots is not None,
        SHARED=listed is None,
        SCALED=shares is not None,
        ACTIVATION=_ACTIVATIONS[common["activation"]],
        **options,
    )
    return act


def _down(
    common: dict[str, Any],
    layout: ExpertLayout,
    weights: Tensor,
    act: Tensor,
    listed: Tensor | None,
    slots: Tensor | None,
    entries: int,
    addend: Tensor | None,
    out: Tensor,
) -> Tensor:
    options = _options(common, layout)
    _down_kernel[(triton.cdiv(layout.hidden, options["BLOCK_ROWS"]),)](
        act,
        act if listed is None else listed,
        act if slots is None else slots,
        weights,
        weights.stride(0),
        act if addend is None else addend,
        out,
        common["tokens"],
        common["experts"],
        entries,
        HAS_SLOTS=slots is not None,
        SHARED=listed is None,
        ADDS=addend is not None,
        **options,
    )
    return out
