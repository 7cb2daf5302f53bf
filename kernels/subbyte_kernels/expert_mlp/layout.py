"""How experts lie in memory: one slab of bytes an expert, in the model's dtype, int4 or fp8.

A slab is ``gate_up`` followed by ``down``, so an expert travels in one copy. In the model's dtype both are plain rows,
``[2 I, H]`` (gate above up) and ``[H, I]``. Packed, a matrix is a grid of blocks of 8 rows x 128 columns, one row of
blocks after the other; columns are filled up with zeros to a multiple of 128. A block is its codes, then its scales:
bf16, ``[8, 128 / group]``.

- ``int4``: 512 bytes of codes and a scale for each 32 or 64 columns; value = (code - 8) * scale. Row r has bytes 64 r
  to 64 r + 63: 16 little-endian words of 8 codes, of which word 4 t + q holds columns 32 q + 8 t to 32 q + 8 t + 7.
  In a word, bits 4 i to 4 i + 3 hold column 2 i of the eight and bits 16 + 4 i to 19 + 4 i column 2 i + 1 (i = 0..3).
- ``fp8``: 1,024 bytes of E4M3 codes and one scale a row; value = code * scale. Byte 512 h + 64 r + 16 t + j holds
  column 64 h + 16 t + j of row r, except that the two middle bytes of each aligned word change places.

This is the order in which the lanes of a warp want them: lane 4 r + t reads 16 neighbouring bytes.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor


BLOCK_ROWS, BLOCK_COLUMNS = 8, 128
INT4_GROUPS = (32, 64)
_ALIGNMENT = 16  # bytes: what one lane reads, and what a bulk copy moves at least
_FP8_MAX = 448.0
_SHRINKS = 16  # candidates of an int4 scale


class ExpertFormat(Enum):
    """What the values of a slab are."""

    MODEL = "model"
    INT4 = "int4"
    FP8 = "fp8"


@dataclass(frozen=True)
class ExpertLayout:
    """Bytes of one expert.

    Attributes:
        format: what its values are.
        hidden: H, columns of ``gate_up`` and rows of ``down``.
        intermediate: I; ``gate_up`` has twice as many rows.
        dtype: the model's.
        group: values that share a scale; of ``INT4`` alone.
    """

    format: ExpertFormat
    hidden: int
    intermediate: int
    dtype: torch.dtype
    group: int = 32

    def __post_init__(self) -> None:
        if self.format is ExpertFormat.INT4 and self.group not in INT4_GROUPS:
            raise ValueError(f"int4 weights come in groups of {INT4_GROUPS}, not {self.group}")
        if self.packed and (self.hidden % BLOCK_ROWS or self.intermediate % BLOCK_ROWS):
            raise ValueError(f"packed experts have multiples of 8 rows, not {self.intermediate} and {self.hidden}")

    @property
    def packed(self) -> bool:
        """Whether the values are codes."""
        return self.format is not ExpertFormat.MODEL

    @property
    def scale_columns(self) -> int:
        """Columns that share a scale; 0 without scales."""
        return {ExpertFormat.MODEL: 0, ExpertFormat.INT4: self.group, ExpertFormat.FP8: BLOCK_COLUMNS}[self.format]

    @property
    def block_bytes(self) -> int:
        """Bytes of 8 rows x 128 columns."""
        codes = BLOCK_ROWS * BLOCK_COLUMNS // (2 if self.format is ExpertFormat.INT4 else 1)
        return codes + 2 * BLOCK_ROWS * BLOCK_COLUMNS // self.scale_columns

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one matrix."""
        if not self.packed:
            return rows * columns * self.dtype.itemsize
        return rows // BLOCK_ROWS * -(-columns // BLOCK_COLUMNS) * self.block_bytes

    @property
    def gate_up_bytes(self) -> int:
        """Bytes of ``gate_up``, where ``down`` begins."""
        return self.matrix_bytes(2 * self.intermediate, self.hidden)

    @property
    def slab_bytes(self) -> int:
        """Bytes of an expert."""
        size = self.gate_up_bytes + self.matrix_bytes(self.hidden, self.intermediate)
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def views(self, slabs: Tensor) -> tuple[Tensor, Tensor]:
        """``gate_up`` and ``down`` of slabs, without a copy.

        Args:
            slabs: ``[S, slab_bytes]`` uint8.

        Returns:
            In the model's dtype ``[S, 2 I, H]`` and ``[S, H, I]``; packed ``[S, bytes]`` uint8 each.
        """
        cut, end = self.gate_up_bytes, self.gate_up_bytes + self.matrix_bytes(self.hidden, self.intermediate)
        gate_up, down = slabs[:, :cut], slabs[:, cut:end]
        if self.packed:
            return gate_up, down
        count = slabs.shape[0]
        return (
            gate_up.view(self.dtype).view(count, 2 * self.intermediate, self.hidden),
            down.view(self.dtype).view(count, self.hidden, self.intermediate),
        )

    def pack(self, gate_up: Tensor, down: Tensor) -> Tensor:
        """Slabs of experts.

        Args:
            gate_up: ``[S, 2 I, H]``, gate above up, finite.
            down: ``[S, H, I]``.

        Returns:
            ``[S, slab_bytes]`` uint8.
        """
        count = gate_up.shape[0]
        slabs = torch.zeros(count, self.slab_bytes, dtype=torch.uint8, device=gate_up.device)
        for made, given in zip(self.views(slabs), (gate_up, down), strict=True):
            made.copy_(self.pack_matrix(given) if self.packed else given)
        return slabs

    def pack_matrix(self, weights: Tensor) -> Tensor:
        """Codes and scales of matrices: ``[S, rows, columns]`` -> ``[S, bytes]`` uint8."""
        count, rows, columns = weights.shape
        missing = -columns % BLOCK_COLUMNS
        blocks = torch.nn.functional.pad(weights.float(), (0, missing))
        blocks = blocks.view(count, rows // BLOCK_ROWS, BLOCK_ROWS, -1, BLOCK_COLUMNS).transpose(2, 3)
        grouped = blocks.unflatten(-1, (-1, self.scale_columns))  # [S, rows / 8, blocks, 8, groups, group]
        if self.format is ExpertFormat.INT4:
            scales, codes = quantize_int4(grouped)
            packed = _pack_int4(codes.flatten(-2))
        else:
            scales, codes = quantize_fp8(grouped)
            packed = _pack_fp8(codes.flatten(-2))
        scales = scales.to(torch.bfloat16).contiguous().view(torch.uint8).flatten(-2)
        return torch.cat([packed, scales], dim=-1).flatten(1)

    def unpack_matrix(self, packed: Tensor, rows: int, columns: int) -> Tensor:
        """Values of packed matrices: ``[S, bytes]`` uint8 -> ``[S, rows, columns]`` fp32."""
        count = packed.shape[0]
        blocks = packed.view(count, rows // BLOCK_ROWS, -1, self.block_bytes)
        cut = self.block_bytes - 2 * BLOCK_ROWS * BLOCK_COLUMNS // self.scale_columns
        scales = blocks[..., cut:].contiguous().view(torch.bfloat16).float().unflatten(-1, (BLOCK_ROWS, -1))
        codes = blocks[..., :cut].contiguous()
        plain = _unpack_int4(codes) if self.format is ExpertFormat.INT4 else _unpack_fp8(codes)
        values = plain.unflatten(-1, (-1, self.scale_columns)) * scales[..., None]
        made: Tensor = values.flatten(-2).transpose(2, 3).reshape(count, rows, -1)[..., :columns]
        return made

    def unpack(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        """``[S, 2 I, H]`` and ``[S, H, I]`` that the parts of slabs stand for; fp32 where they are packed."""
        if not self.packed:
            return gate_up, down
        return (
            self.unpack_matrix(gate_up, 2 * self.intermediate, self.hidden),
            self.unpack_matrix(down, self.hidden, self.intermediate),
        )


def quantize_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each group with the least squared error, among some that use all of -8..7 and smaller ones.

    Args:
        values: ``[..., group]`` fp32.

    Returns:
        Scales ``[...]`` fp32 that bf16 holds exactly, and codes ``[..., group]`` uint8 from 0 to 15.
    """
    largest = values.gather(-1, values.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best_scale = torch.zeros_like(largest)
    best_error = torch.full_like(largest, float("inf"))
    for step in range(_SHRINKS):
        scale = (largest / (step / 4 - 8)).to(torch.bfloat16).float()  # its largest value gets -8, -7.75, ... -4.25
        error = (values - _int4_codes(values, scale).float().sub(8) * scale[..., None]).square().sum(-1)
        better = error < best_error
        best_scale, best_error = torch.where(better, scale, best_scale), torch.where(better, error, best_error)
    return best_scale, _int4_codes(values, best_scale)


def _int4_codes(values: Tensor, scale: Tensor) -> Tensor:
    divisor = torch.where(scale == 0, 1, scale)[..., None]
    return (values / divisor).round().clamp(-8, 7).add(8).to(torch.uint8)


def quantize_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 with the largest value of a group at the end of its range.

    Args:
        values: ``[..., group]`` fp32.

    Returns:
        Scales ``[...]`` fp32 that bf16 holds exactly, and codes ``[..., group]`` uint8.
    """
    scale = (values.abs().amax(-1) / _FP8_MAX).to(torch.bfloat16).float()
    divisor = torch.where(scale == 0, 1, scale)[..., None]
    return scale, (values / divisor).clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _pack_int4(codes: Tensor) -> Tensor:
    """``[..., 8, 128]`` codes -> ``[..., 512]`` bytes."""
    words = codes.unflatten(-1, (4, 4, 8)).transpose(-3, -2)  # [..., 8, t, q, 8]
    halves = words.unflatten(-1, (4, 2)).transpose(-2, -1)  # [..., 2, i]: even columns, odd columns
    pairs = halves.unflatten(-1, (2, 2))  # a byte holds two codes, the first in its low bits
    made: Tensor = (pairs[..., 0] | pairs[..., 1] << 4).flatten(-5)
    return made


def _unpack_int4(packed: Tensor) -> Tensor:
    """``[..., 512]`` bytes -> ``[..., 8, 128]`` values from -8 to 7, fp32."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
    words = pairs.flatten(-2).unflatten(-1, (8, 4, 4, 2, 4)).transpose(-2, -1)  # [..., 8, t, q, i, 2]
    made: Tensor = words.flatten(-2).transpose(-3, -2).flatten(-3).float() - 8
    return made


def _middle_bytes_changed(codes: Tensor) -> Tensor:
    made: Tensor = codes.unflatten(-1, (-1, 4))[..., [0, 2, 1, 3]].flatten(-2)
    return made


def _pack_fp8(codes: Tensor) -> Tensor:
    """``[..., 8, 128]`` codes -> ``[..., 1024]`` bytes."""
    made: Tensor = _middle_bytes_changed(codes).unflatten(-1, (2, 64)).transpose(-3, -2).flatten(-3)
    return made


def _unpack_fp8(packed: Tensor) -> Tensor:
    """``[..., 1024]`` bytes -> ``[..., 8, 128]`` values, fp32."""
    rows = packed.unflatten(-1, (2, 8, 64)).transpose(-3, -2).flatten(-2)
    return _middle_bytes_changed(rows).contiguous().view(torch.float8_e4m3fn).float()
