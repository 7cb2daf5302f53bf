"""The CUDA packing kernel against the reference: what it cannot do, and on a GPU the records themselves."""

import pytest
import torch

from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.codecs.rotation import rotation_signs
from subbyte_kernels.formats import TILE_TOKENS, kernel_kind
from subbyte_kernels.lanes import Order, unpack_tile_codes
from subbyte_kernels.pack_tiles import pack_obstacle, pack_tiles_cuda, pack_tiles_reference, unpack_tiles_reference
from support.packing import CPU, gaussian, pack_table, rotation, unpack_table


KERNEL_TIERS = ["fp8", "fp6", "vq4", "vq3", "vq2", "vq175"]


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def test_every_tier_but_three_has_a_kernel() -> None:
    assert sorted(codec.name for codec in codecs() if kernel_kind(codec.format)) == sorted(KERNEL_TIERS)


def test_tensors_on_a_cpu_are_refused() -> None:
    tiles = gaussian(1, TILE_TOKENS, 64, seed=1)
    assert pack_obstacle(tiles, get_codec("vq2").format, rotation_signs(64, CPU)) == (
        "the tensors lie on cpu, not on a CUDA device"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("tier", KERNEL_TIERS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_are_those_of_the_reference(tier: str, head_dim: int, order: Order, dtype: torch.dtype) -> None:
    codec = get_codec(tier)
    fmt = codec.format
    tiles = gaussian(9, TILE_TOKENS, head_dim, seed=2)
    tiles[1] *= torch.logspace(-30, 4, TILE_TOKENS)[:, None] if dtype == torch.float32 else 100
    tiles[2, 5] = 0
    tiles[3, :, 7] += 50
    tiles, mean = tiles.to(dtype), gaussian(9, head_dim, seed=3)
    table, turn = pack_table(codec, tiles), rotation(head_dim)
    signs = rotation_signs(head_dim, CPU)
    expected = pack_tiles_reference(tiles, fmt, table, turn, mean, order)
    moved = on_gpu(tiles, table, mean, signs)
    assert moved[0] is not None
    assert moved[3] is not None
    assert pack_obstacle(moved[0], fmt, moved[3]) is None
    found = pack_tiles_cuda(moved[0], fmt, moved[1], moved[2], order, moved[3]).cpu()
    words = fmt.code_words(head_dim)
    codes = [unpack_tile_codes(record[:, :words], fmt.code_bits, order, head_dim) for record in (expected, found)]
    # an element on the border between two codes may fall to either side
    assert (codes[0] == codes[1]).float().mean() >= 0.9995
    scales = [record[:, words:].contiguous().view(torch.bfloat16).float() for record in (expected, found)]
    close = (scales[1] - scales[0]).abs() <= 2**-7 * scales[0]
    assert close.float().mean() >= 0.998  # a token's scale follows its codes
    tables = unpack_table(codec, table)
    decoded = [unpack_tiles_reference(r, fmt, *tables, turn, mean, torch.float32, order) for r in (expected, found)]
    errors = [float((states - tiles.float()).square().mean()) for states in decoded]
    assert errors[1] == pytest.approx(errors[0], rel=1e-3)
