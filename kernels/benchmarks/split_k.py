"""Decode attention over a bf16 cache in Triton: what the packed kernels are compared with, beside PyTorch's own.

One program owns the query heads of one KV head (16 rows of a tensor-core tile, those past the group are zero) and one
contiguous split of its tokens; a second kernel merges the splits by their log-sum-exp. Contexts are whole blocks, so
the loop masks nothing. Scores and sums are fp32; probabilities are rounded to the cache's dtype before they meet the
values, as in PyTorch's kernels.

Source: flash-decoding, https://pytorch.org/blog/flash-decoding; online softmax (arXiv 1805.02867).
"""

# ruff: noqa: N803 - compile-time arguments are in upper case

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class SplitKConfig:
    """How the work is cut.

    Attributes:
        block: tokens a step.
        warps: warps a program.
        stages: blocks in flight.
        programs: programs that an SM should get.
    """

    block: int
    warps: int
    stages: int
    programs: int

    @property
    def name(self) -> str:
        return f"{self.block} tokens, {self.warps} warps, {self.stages} stages, {self.programs} a multiprocessor"


CONFIGS = (
    SplitKConfig(64, 4, 3, 2),
    SplitKConfig(64, 4, 3, 3),
    SplitKConfig(64, 4, 3, 6),
    SplitKConfig(64, 4, 4, 2),
    SplitKConfig(64, 4, 2, 4),
    SplitKConfig(64, 2, 3, 3),
    SplitKConfig(128, 4, 3, 1),
    SplitKConfig(128, 4, 2, 2),
    SplitKConfig(128, 8, 3, 1),
    SplitKConfig(128, 8, 2, 3),
    SplitKConfig(32, 4, 4, 4),
)


@triton.jit(do_not_specialize=["splits"])
def _split_k_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,  # [B * H, splits, GROUP, D] fp32
    lse_ptr,  # [B * H, splits, GROUP] fp32, base 2
    tokens,
    split_tokens,
    splits,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    first = split * split_tokens
    last = tl.minimum(first + split_tokens, tokens)
    rows = tl.arange(0, 16)
    dims = tl.arange(0, DIM)
    used = rows < GROUP
    within = tl.arange(0, BLOCK)[:, None] * DIM + dims[None, :]
    query_at = (unit * GROUP + rows[:, None]) * DIM + dims[None, :]
    query = tl.load(query_ptr + query_at, mask=used[:, None], other=0.0)
    maximum = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    output = tl.zeros([16, DIM], tl.float32)
    for start in tl.range(first, last, BLOCK, num_stages=STAGES):
        at = (unit * tokens + start) * DIM + within
        keys = tl.load(key_ptr + at)
        scores = tl.dot(query, tl.trans(keys)) * scale
        highest = tl.maximum(maximum, tl.max(scores, 1))
        keep = tl.exp2(maximum - highest)
        weights = tl.exp2(scores - highest[:, None])
        total = total * keep + tl.sum(weights, 1)
        maximum = highest
        values = tl.load(value_ptr + at)
        output = tl.dot(weights.to(values.dtype), values, output * keep[:, None])
    place = (unit * splits + split) * GROUP + rows
    tl.store(partial_ptr + place[:, None] * DIM + dims[None, :], output / total[:, None], mask=used[:, None])
    tl.store(lse_ptr + place, maximum + tl.log2(total), mask=used)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial_ptr,
    lse_ptr,
    output_ptr,  # [B * H, GROUP, D]
    splits,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    dims = tl.arange(0, DIM)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    output = tl.zeros([DIM], tl.float32)
    for start in range(0, splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        place = (unit * splits + split) * GROUP + row
        real = split < splits
        lse = tl.load(lse_ptr + place, mask=real, other=float("-inf"))
        partial = tl.load(partial_ptr + place[:, None] * DIM + dims[None, :], mask=real[:, None], other=0.0)
        highest = tl.maximum(maximum, tl.max(lse, 0))
        keep = tl.exp2(maximum - highest)
        weights = tl.exp2(lse - highest)
        total = total * keep + tl.sum(weights, 0)
        output = output * keep + tl.sum(partial * weights[:, None], 0)
        maximum = highest
    at = (unit * GROUP + row) * DIM + dims
    tl.store(output_ptr + at, (output / total).to(output_ptr.dtype.element_ty))


def split_k_triton(
    query: Tensor, keys: Tensor, values: Tensor, scaling: float, config: SplitKConfig, multiprocessors: int
) -> Tensor:
    """Attention of one query a row.

    Args:
        query: ``[B, HQ, 1, D]`` contiguous; at most 16 query heads share a KV head; D a power of two.
        keys: ``[B, H, N, D]`` contiguous; N a multiple of ``config.block``.
        values: ``[B, H, N, D]`` contiguous.
        scaling: factor of the scores.
        config: how to cut the work.
        multiprocessors: of the device.

    Returns:
        ``[B, HQ, 1, D]`` in the query's dtype.

    Raises:
        ValueError: N is no whole number of blocks.
    """
    batch, heads, tokens, dim = keys.shape
    if tokens % config.block:
        raise ValueError(f"{tokens} tokens are no whole number of blocks of {config.block}")
    units, group, blocks = batch * heads, query.shape[1] // heads, tokens // config.block
    wanted = max(1, min(blocks, multiprocessors * config.programs // units))
    split_blocks = -(-blocks // wanted)
    splits = -(-blocks // split_blocks)
    partial = torch.empty(units, splits, group, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(units, splits, group, dtype=torch.float32, device=query.device)
    output = torch.empty_like(query)
    _split_k_kernel[(units, splits)](
        query,
        keys,
        values,
        partial,
        lse,
        tokens,
        split_blocks * config.block,
        splits,
        scaling * math.log2(math.e),
        GROUP=group,
        DIM=dim,
        BLOCK=config.block,
        STAGES=config.stages,
        num_warps=config.warps,
    )
    _merge_kernel[(units, group)](partial, lse, output, splits, GROUP=group, DIM=dim, CHUNK=16, num_warps=4)
    return output
