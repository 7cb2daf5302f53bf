# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803
"""Sampled queries over exact tokens in Triton: one pass over keys and values, and a second one over keys.

``probe_attention`` gives every sampled query its output, log-sum-exp and entropy: a program takes 64 queries of a head
and a piece of the tokens, PyTorch merges the pieces. ``token_statistics`` then goes over the keys once more, with the
log-sum-exps known: a program takes 64 tokens of a KV head and all queries of its group, so a token's sum of p^2 is
complete when it ends. Products are those of the model's dtype, summed in fp32; fp32 states are multiplied as fp32.

Gives up: probabilities meet the values in the values' dtype, as in any fused attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_QUERIES, _TOKENS = 64, 64  # of a program's step
_MAX_HEAD_DIM = 256
_PROGRAMS_PER_PROCESSOR = 4
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def statistics_obstacle(query: Tensor, *states: Tensor) -> str | None:
    """Why the kernels cannot take these queries ``[HQ, S, D]`` and states ``[H, N, D]``, or None."""
    if triton is None:
        return "triton is not installed"
    interpreted = not isinstance(_probe_kernel, triton.runtime.JITFunction)
    if query.device.type != "cuda" and not interpreted:
        return f"the tensors lie on a device of type {query.device.type}"
    for tensor in (query, *states):
        if tensor.dtype not in _DTYPES:
            return f"it takes fp32, fp16 and bf16, not {tensor.dtype}"
        if tensor.shape[-1] > _MAX_HEAD_DIM:
            return f"it takes head dimensions up to {_MAX_HEAD_DIM}, not {tensor.shape[-1]}"
    return None


if triton is not None:

    @triton.jit
    def _scores(query, keys, scaling, softcap, SOFTCAP: tl.constexpr):
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scaling
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1 - 2 / (tl.exp(2 * scores / softcap) + 1))
        return scores

    @triton.jit
    def _probe_kernel(
        query_ptr,  # [HQ, S, D]
        key_ptr,  # [H, N, D]
        value_ptr,  # [H, N, DV]
        visible_ptr,  # [S, N]
        out_ptr,  # [splits, HQ, S, DV]
        state_ptr,  # [3, splits, HQ, S]: maximum, denominator, weighted scores
        key_head, key_token, value_head, value_token,
        samples, tokens, split_tokens, scaling, softcap,
        GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
        SOFTCAP: tl.constexpr, QUERIES: tl.constexpr, TOKENS: tl.constexpr,
    ):  # fmt: skip
        head, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        heads, splits = tl.num_programs(0), tl.num_programs(2)
        row = block * QUERIES + tl.arange(0, QUERIES)
        dim, value_dim = tl.arange(0, PAD_D), tl.arange(0, PAD_DV)
        query_at = (head.to(tl.int64) * samples + row[:, None]) * D + dim[None, :]
        query = tl.load(query_ptr + query_at, mask=(row[:, None] < samples) & (dim[None, :] < D), other=0.0)
        kv_head = (head // GROUP).to(tl.int64)
        maximum = tl.full([QUERIES], -float("inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        weighted = tl.zeros([QUERIES], tl.float32)
        output = tl.zeros([QUERIES, PAD_DV], tl.float32)
        first = split * split_tokens
        last = tl.minimum(first + split_tokens, tokens)
        for start in range(first, last, TOKENS):
            token = start + tl.arange(0, TOKENS)
            inside = token < last
            at = token.to(tl.int64)
            key = tl.load(
                key_ptr + kv_head * key_head + at[:, None] * key_token + dim[None, :],
                mask=inside[:, None] & (dim[None, :] < D),
                other=0.0,
            )
            seen = tl.load(
                visible_ptr + row[:, None].to(tl.int64) * tokens + token[None, :],
                mask=(row[:, None] < samples) & inside[None, :],
                other=0,
            )
            scores = tl.where(seen != 0, _scores(query, key, scaling, softcap, SOFTCAP), -float("inf"))
            grown = tl.maximum(maximum, tl.max(scores, 1))
            base = tl.where(grown == -float("inf"), 0.0, grown)
            weights = tl.exp(scores - base[:, None])
            keep = tl.exp(maximum - base)
            total = total * keep + tl.sum(weights, 1)
            weighted = weighted * keep + tl.sum(weights * tl.where(seen != 0, scores, 0.0), 1)
            value = tl.load(
                value_ptr + kv_head * value_head + at[:, None] * value_token + value_dim[None, :],
                mask=(inside & (tl.max(seen, 0) != 0))[:, None] & (value_dim[None, :] < DV),  # 0 * NaN is NaN
                other=0.0,
            )
            output = output * keep[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            maximum = grown
        place = (split.to(tl.int64) * heads + head) * samples + row
        part = splits.to(tl.int64) * heads * samples
        real = row < samples
        tl.store(state_ptr + place, maximum, mask=real)
        tl.store(state_ptr + part + place, total, mask=real)
        tl.store(state_ptr + 2 * part + place, weighted, mask=real)
        out_at = place[:, None] * DV + value_dim[None, :]
        tl.store(out_ptr + out_at, output, mask=real[:, None] & (value_dim[None, :] < DV))

    @triton.jit
    def _statistics_kernel(
        query_ptr,  # [HQ, S, D]
        index_ptr,  # [S]
        lse_ptr,  # [HQ, S]
        key_ptr,  # [H, N, D]
        weight_ptr,  # [H, N]
        mass_ptr,  # [H, blocks]
        key_head, key_token, samples, tokens, first_index, scaling, softcap,
        GROUP: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, SOFTCAP: tl.constexpr,
        QUERIES: tl.constexpr, TOKENS: tl.constexpr,
    ):  # fmt: skip
        head, block = tl.program_id(0), tl.program_id(1)
        token = block * TOKENS + tl.arange(0, TOKENS)
        dim = tl.arange(0, PAD_D)
        key = tl.load(
            key_ptr + head.to(tl.int64) * key_head + token[:, None].to(tl.int64) * key_token + dim[None, :],
            mask=(token[:, None] < tokens) & (dim[None, :] < D),
            other=0.0,
        )
        weight = tl.zeros([TOKENS], tl.float32)
        mass = tl.zeros([TOKENS], tl.float32)
        for low in range(0, GROUP * samples, QUERIES):
            row = low + tl.arange(0, QUERIES)  # of the group: its heads' samples one after the other
            real = row < GROUP * samples
            place = head.to(tl.int64) * GROUP * samples + row
            query = tl.load(
                query_ptr + place[:, None] * D + dim[None, :], mask=real[:, None] & (dim[None, :] < D), other=0.0
            )
            lse = tl.load(lse_ptr + place, mask=real, other=0.0)
            index = tl.load(index_ptr + row % samples, mask=real, other=-1)
            seen = (token[None, :] + first_index <= index[:, None]) & (token[None, :] < tokens)
            scores = _scores(query, key, scaling, softcap, SOFTCAP) - lse[:, None]
            share = tl.where(seen, tl.exp(scores), 0.0)
            mass += tl.sum(share, 0)
            weight += tl.sum(share * share, 0)
        tl.store(weight_ptr + head.to(tl.int64) * tokens + token, weight, mask=token < tokens)
        tl.store(mass_ptr + head.to(tl.int64) * tl.num_programs(1) + block, tl.sum(mass, 0))


def _step(row_bytes: int) -> tuple[int, int]:
    """Tokens of a step and its stages: what lies in shared memory must stay below 160 KiB, whatever the width."""
    return (_TOKENS, 3) if row_bytes <= 512 else (_TOKENS // 2, 2)


def _padded(dim: int) -> int:
    return max(16, 1 << (dim - 1).bit_length())


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def probe_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, log-sum-exp and entropy of sampled queries; arguments and result as in :func:`probe_attention`."""
    query_heads, samples, dim = query.shape
    heads, tokens, value_dim = values.shape
    query = query.to(keys.dtype).contiguous()
    keys, values = (part if part.stride(-1) == 1 else part.contiguous() for part in (keys, values))
    blocks = triton.cdiv(samples, _QUERIES)
    wanted = triton.cdiv(_PROGRAMS_PER_PROCESSOR * _processors(keys.device), query_heads * blocks)
    split_tokens = _TOKENS * triton.cdiv(triton.cdiv(tokens, _TOKENS), max(1, wanted))
    splits = max(1, triton.cdiv(tokens, split_tokens))
    step_tokens, stages = _step((_padded(dim) + _padded(value_dim)) * keys.element_size())
    output = keys.new_empty(splits, query_heads, samples, value_dim, dtype=torch.float32)
    state = keys.new_empty(3, splits, query_heads, samples, dtype=torch.float32)
    _probe_kernel[query_heads, blocks, splits](
        query, keys, values, visible.contiguous().view(torch.uint8), output, state,
        keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        samples, tokens, split_tokens, scaling, 0.0 if softcap is None else softcap,
        GROUP=query_heads // heads, D=dim, DV=value_dim, PAD_D=_padded(dim), PAD_DV=_padded(value_dim),
        SOFTCAP=softcap is not None, QUERIES=_QUERIES, TOKENS=step_tokens, num_stages=stages,
    )  # fmt: skip
    return _merged(output, state, sink_logits)


def _merged(output: Tensor, state: Tensor, sink_logits: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Pieces ``[splits, HQ, S, ...]`` of a softmax put together; a sink is one more without a value."""
    maximum, total, weighted = state.unbind(0)
    if sink_logits is not None:
        sink = sink_logits.float()[None, :, None].expand(1, *maximum.shape[1:])
        maximum = torch.cat([maximum, sink])
        total = torch.cat([total, torch.ones_like(sink)])
        weighted = torch.cat([weighted, sink])
        output = torch.cat([output, torch.zeros_like(output[:1])])
    largest = maximum.amax(0)
    share = torch.exp(maximum - largest.masked_fill(largest == -torch.inf, 0))
    whole = (share * total).sum(0)
    denominator = whole.clamp(min=torch.finfo(torch.float32).tiny)
    lse = torch.where(whole > 0, largest + denominator.log(), -torch.inf)
    nats = torch.where(whole > 0, lse - (share * weighted).sum(0) / denominator, 0)
    merged = torch.einsum("ahs,ahsd->hsd", share, output) / denominator.unsqueeze(-1)
    return merged, lse, (nats / math.log(2)).clamp(min=0)


def token_statistics_triton(
    query: Tensor,
    query_index: Tensor,
    lse: Tensor,
    keys: Tensor,
    first_index: int,
    scaling: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Mass ``[H]`` and weights ``[H, N]``; arguments as in :func:`attention_statistics_reference`."""
    query_heads, samples, dim = query.shape
    heads, tokens, _ = keys.shape
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    blocks = triton.cdiv(tokens, _TOKENS)
    weight = keys.new_empty(heads, tokens, dtype=torch.float32)
    mass = keys.new_empty(heads, blocks, dtype=torch.float32)
    _statistics_kernel[heads, blocks](
        query.to(keys.dtype).contiguous(), query_index, lse.float().contiguous(), keys, weight, mass,
        keys.stride(0), keys.stride(1), samples, tokens, first_index, scaling, 0.0 if softcap is None else softcap,
        GROUP=query_heads // heads, D=dim, PAD_D=_padded(dim), SOFTCAP=softcap is not None,
        QUERIES=_QUERIES, TOKENS=_TOKENS, num_stages=_step(_padded(dim) * keys.element_size())[1],
    )  # fmt: skip
    return mass.sum(1) / (query_heads // heads * samples), weight
