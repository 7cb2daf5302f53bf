"""What sampled queries of a prompt say about its tokens: their own attention, and what each token weighs in it.

``reference.py`` defines it, ``triton_kernel.py`` computes it on a GPU.
"""

import torch
from torch import Tensor

from subbyte_kernels.attention_statistics.reference import (
    ProbeResult,
    TokenStatistics,
    attention_statistics_reference,
    probe_attention_reference,
)
from subbyte_kernels.attention_statistics.triton_kernel import (
    probe_attention_triton,
    statistics_obstacle,
    token_statistics_triton,
)


__all__ = [
    "ProbeResult",
    "TokenStatistics",
    "attention_statistics",
    "attention_statistics_reference",
    "probe_attention",
    "probe_attention_reference",
    "statistics_obstacle",
]


def _runs(query: Tensor, *states: Tensor) -> bool:
    """Whether the kernels compute this: on a GPU alone, since an interpreter only checks them."""
    alike = all(query.dtype is part.dtype for part in states)
    return query.is_cuda and alike and statistics_obstacle(query, *states) is None


def probe_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> ProbeResult:
    """Attention of sampled queries with the kernel where it can, else the reference; arguments as there."""
    given = (query, keys, values, visible, scaling, softcap, sink_logits)
    if _runs(query, keys, values):
        with torch.cuda.device_of(keys):  # Triton launches on the current device
            return ProbeResult(*probe_attention_triton(*given))
    return probe_attention_reference(*given)


def attention_statistics(
    query: Tensor,
    query_index: Tensor,
    lse: Tensor,
    keys: Tensor,
    first_index: int,
    scaling: float,
    softcap: float | None = None,
) -> TokenStatistics:
    """Mass and weights with the kernel where it can, else the reference; arguments as there."""
    given = (query, query_index, lse, keys, first_index, scaling, softcap)
    if _runs(query, keys):
        with torch.cuda.device_of(keys):
            return TokenStatistics(*token_statistics_triton(*given))
    return attention_statistics_reference(*given)
