"""Tables of the vector tiers: the universal ones, and those fitted to a prompt.

``universal`` tables are Lloyd-Max solutions for Gaussian vectors, which rotated keys and values are close to; they
come with the package (``universal.safetensors``, made by ``make_universal.py``), so the same codes mean the same
values everywhere. ``online`` starts from them and moves them by k-means on the prompt's own tokens.

Source: coupled codes, CQ (arXiv 2405.03917); shared codebooks after rotation, VecInfer (arXiv 2510.06175).
"""

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_subbyte_moe.ops import TileFormat, nearest_entries


UNIVERSAL_FILE = Path(__file__).with_name("universal.safetensors")
_ONLINE_STEPS = 6
_ONLINE_VECTORS = 1 << 16


@lru_cache(maxsize=1)
@torch.inference_mode(False)
def _universal() -> dict[str, Tensor]:
    return load_file(UNIVERSAL_FILE)


def table_key(entries: int, vector_dim: int) -> str:
    """The name of a table's shape in ``universal.safetensors``."""
    return f"{vector_dim}d{entries}"


@lru_cache(maxsize=64)
@torch.inference_mode(False)
def universal_table(fmt: TileFormat, device: torch.device) -> Tensor:
    """``[1, 1, entries, vector_dim]`` fp16 on ``device``: a constant that everybody shares; never write to it."""
    return _universal()[table_key(fmt.entries, fmt.vector_dim)].to(device)[None, None]


def lloyd(vectors: Tensor, table: Tensor, steps: int) -> Tensor:
    """Lloyd's k-means from a given start; an entry that attracts nothing stays where it is.

    Args:
        vectors: ``[n, d]`` fp32.
        table: ``[entries, d]`` fp32.
        steps: iterations.

    Returns:
        ``[entries, d]`` fp32.
    """
    for _ in range(steps):
        nearest = nearest_entries(vectors, table)
        sums = torch.zeros_like(table).index_add_(0, nearest, vectors)
        counts = torch.bincount(nearest, minlength=table.shape[0]).unsqueeze(-1)
        table = torch.where(counts > 0, sums / counts.clamp(min=1), table)
    return table


def fit_table(unit_states: Tensor, fmt: TileFormat) -> Tensor:
    """A table for these tokens, from the universal one.

    Args:
        unit_states: ``[n, D]`` fp32 rotated tokens with a root mean square of 1.
        fmt: a tier with a codebook.

    Returns:
        ``[entries, vector_dim]`` fp16.
    """
    vectors = unit_states.reshape(-1, fmt.vector_dim)
    stride = max(1, vectors.shape[0] // _ONLINE_VECTORS)
    start = universal_table(fmt, unit_states.device)[0, 0].float()
    return lloyd(vectors[::stride], start, _ONLINE_STEPS).to(torch.float16)


def fit_centroids(unit_values: Tensor, fmt: TileFormat) -> Tensor:
    """A head's own scalar centroids.

    Args:
        unit_values: ``[n]`` fp32 inliers in units of their token's root mean square.
        fmt: a tier with centroids.

    Returns:
        ``[entries, 1]`` fp32, ascending.
    """
    stride = max(1, unit_values.shape[0] // _ONLINE_VECTORS)
    start = universal_table(fmt, unit_values.device)[0, 0].float()
    return lloyd(unit_values[::stride].unsqueeze(-1), start, 2 * _ONLINE_STEPS).sort(dim=0).values
