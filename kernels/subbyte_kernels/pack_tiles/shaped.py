"""Packing with codes chosen under a metric, in CUDA C++ (``shape_tiles.cu``).

The kernel's text says what is minimized and in which order codes are chosen; the caller's plain PyTorch loop over
groups defines it. Sums are fp32 in another order than there: codes differ where two entries cost the same to within
rounding.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.formats import Encoding, TileFormat
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles.cuda_kernel import Places, defined_for, pack_obstacle, placed


_SOURCE = Path(__file__).with_name("shape_tiles.cu")
_WARPS, _UNIT, _STRIP = 2, 64, 16


@dataclass(frozen=True)
class MetricTerms:
    """A metric of each head, laid out for the kernel and one table.

    Attributes:
        feedback: ``[H, D / 16, D, 16]`` what the error of a channel pulls at the channels of later groups.
        others: likewise, the metric without its groups' own blocks.
        metric: likewise, the metric.
        blocks: ``[H, 2, C, d, d]`` the groups' own metrics in the first and in the second search.
        halves: ``[H, 2, C, entries]`` half of what an entry by itself costs there.
    """

    feedback: Tensor
    others: Tensor
    metric: Tensor
    blocks: Tensor
    halves: Tensor


def metric_terms(metric: Tensor, factor: Tensor, table: Tensor) -> MetricTerms:
    """Lay out a metric.

    Args:
        metric: ``[H, D, D]`` fp32, symmetric, positive definite.
        factor: ``[H, D, D]`` lower triangular, ``metric = factor' factor``.
        table: ``[entries, d]`` fp32.
    """
    heads, dim, _ = metric.shape
    width = table.shape[1]
    groups = dim // width
    group = torch.arange(dim, device=metric.device) // width
    own, seen = (_blocks(part, groups) for part in (factor, metric))
    feedback = torch.einsum("hgrc,hgri->hcgi", factor.view(heads, groups, width, dim), own).reshape(heads, dim, dim)
    blocks = torch.stack([own.transpose(-1, -2) @ own, seen], dim=1)
    halves = 0.5 * ((table @ blocks) * table).sum(-1)
    return MetricTerms(
        feedback=_strips(feedback * (group[:, None] < group)),
        others=_strips(metric * (group[:, None] != group)),
        metric=_strips(metric),
        blocks=blocks.contiguous(),
        halves=halves.contiguous(),
    )


def _blocks(matrix: Tensor, groups: int) -> Tensor:
    """``[H, C, d, d]`` blocks on the diagonal."""
    heads, dim, _ = matrix.shape
    split = matrix.view(heads, groups, dim // groups, groups, dim // groups)
    return split.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def _strips(matrix: Tensor) -> Tensor:
    strips: Tensor = matrix.unflatten(-1, (-1, _STRIP)).transpose(1, 2).contiguous()
    return strips


def shape_obstacle(states: Tensor, fmt: TileFormat, signs: Tensor | None) -> str | None:
    """Why the kernel cannot pack these tiles ``[M, 128, D]``, or None; looks at shapes alone."""
    dim = states.shape[-1]
    if fmt.encoding is not Encoding.VECTOR or dim % 64 or dim & (dim - 1):
        return f"it shapes vector codes of 64, 128 or 256 channels, not tier {fmt.name!r} of {dim}"
    return pack_obstacle(states, fmt, signs)


@lru_cache(maxsize=64)
def _kernel(device: int, head_dim: int, fmt: TileFormat, order: Order, dtype: torch.dtype, mean: bool) -> nvrtc.Kernel:
    defined = {**defined_for(head_dim, fmt, order, dtype, mean), "WARPS": _WARPS}
    codes = head_dim // fmt.vector_dim
    shared = 4 * fmt.entries * fmt.vector_dim + 2 * _UNIT * codes + 4 * _UNIT * (head_dim + 4) + 2 * _UNIT
    return nvrtc.Kernel(_SOURCE, "shape_tiles", defined, device, 32 * _WARPS, shared)


def shape_tiles_cuda(
    states: Tensor,
    heads: Tensor,
    fmt: TileFormat,
    table: Tensor,
    mean: Tensor | None,
    order: Order,
    signs: Tensor,
    terms: MetricTerms,
    places: Places | None = None,
) -> Tensor:
    """Quantize whole tiles under a metric and pack their codes.

    Args:
        states: ``[M, 128, D]`` fp16, bf16 or fp32, finite; ``[H, n, 128, D]`` with ``places``.
        heads: ``[M]`` int64 head of each tile.
        fmt: the layout; vector codes.
        table: ``[entries, vector_dim]`` fp32.
        mean: ``[M, D]`` fp32 to remove first, or None.
        order: which lanes own the codes.
        signs: ``[D]`` fp32 of the rotation.
        terms: of the heads' metrics in the rotated space, for this table.
        places: ``[M]`` head and tile of each tile that is packed.

    Returns:
        ``[M, record_words]`` int32.
    """
    states, begins = placed(states, places)
    heads, table = heads.contiguous(), table.float().contiguous()
    tiles, dim = len(heads), states.shape[-1]
    records = torch.empty(tiles, fmt.record_words(dim), dtype=torch.int32, device=states.device)
    mean = None if mean is None else mean.float().contiguous()
    laid = (terms.feedback, terms.others, terms.metric, terms.blocks, terms.halves)
    pointers = (states, begins, mean, signs, table, heads, *laid, records)
    params = struct.pack("<12Q", *(0 if tensor is None else tensor.data_ptr() for tensor in pointers))
    kernel = _kernel(states.device.index, dim, fmt, order, states.dtype, mean is not None)
    kernel.launch((2 * tiles, 1, 1), params, torch.cuda.current_stream(states.device).cuda_stream)
    return records
