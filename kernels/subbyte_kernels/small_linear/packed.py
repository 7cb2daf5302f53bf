"""Linear layers of a few tokens whose weights are int4: what they are, and what they compute, in plain PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from subbyte_kernels.expert_mlp.layout import BLOCK_ROWS, ExpertFormat, ExpertLayout


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of int4 codes with a bf16 scale for each 32 of a row: 4.5 bits a value.

    Attributes:
        blocks: ``[bytes]`` uint8 in the layout of packed experts (``expert_mlp/layout.py``).
        rows: N, a multiple of 8.
        columns: K, likewise.
    """

    blocks: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, weight: Tensor) -> "PackedMatrix":
        """Quantize ``[N, K]``.

        Raises:
            ValueError: its rows or columns are no multiple of 8.
        """
        rows, columns = weight.shape
        if rows % BLOCK_ROWS or columns % BLOCK_ROWS:
            raise ValueError(
                f"packed matrices have multiples of {BLOCK_ROWS} rows and columns, not {rows} x {columns}"
            )
        return cls(_layout(rows, columns).pack_matrix(weight[None])[0], rows, columns)

    def unpacked(self) -> Tensor:
        """``[N, K]`` fp32."""
        return _layout(self.rows, self.columns).unpack_matrix(self.blocks[None], self.rows, self.columns)[0]


def _layout(rows: int, columns: int) -> ExpertLayout:
    return ExpertLayout(ExpertFormat.INT4, rows, columns, torch.bfloat16)


def packed_linear_reference(hidden: Tensor, matrices: Sequence[PackedMatrix]) -> Tensor:
    """What packed matrices make of the same states, side by side.

    Args:
        hidden: ``[T, K]``.
        matrices: of K columns and N_i rows each.

    Returns:
        ``[T, sum of N_i]`` in the dtype of ``hidden``.
    """
    wide = hidden.float()
    return torch.cat([functional.linear(wide, matrix.unpacked()) for matrix in matrices], dim=-1).to(hidden.dtype)
