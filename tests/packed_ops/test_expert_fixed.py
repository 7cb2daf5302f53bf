"""Products of integers for int4 experts (``FIXED`` in ``expert_mlp.cu``), lane by lane.

A GPU runs the kernel (``test_expert_mlp.py``); here its arithmetic is done again as the instructions define it: where
each lane reads, what m16n8k32 multiplies (PTX ISA, "Matrix Fragments for mma.m16n8k32"), and what a lane's result is.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from subbyte_kernels import nvrtc
from subbyte_kernels.expert_mlp import cuda_kernel, workspace_bytes
from subbyte_kernels.expert_mlp.config import CudaConfig
from support.experts_mlp import expert_call, layout


CHUNK, SCALES, MOST = 320, 256, 127 * 128
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def fixed_chunks(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """``fix_hidden``: ``[width]`` values, eight at a time, to ``[chunks, 320]`` bytes."""
    made = np.zeros((-(-len(values) // 128), CHUNK), np.uint8)
    for group, x in enumerate(values.reshape(-1, 8)):
        most = np.abs(x).max()
        whole = np.rint(x * (MOST / most if most > 1e-30 else 0.0)).astype(np.int32)
        hi = (whole + 64) >> 7
        lo = whole - 128 * hi
        assert hi.min() >= -127
        assert hi.max() <= 127
        assert -64 <= lo.min() <= lo.max() < 64
        chunk, q, t = made[group // 16], group % 16 // 4, group % 4
        for column in range(8):
            place = ((2 * column) & 7) | (column >> 2)
            chunk[64 * t + 8 * q + place] = hi[column] & 255
            chunk[64 * t + 32 + 8 * q + place] = lo[column] & 255
        scale = np.array([most / (16 * MOST)], np.float32)
        chunk[SCALES + 16 * t + 4 * q : SCALES + 16 * t + 4 * q + 4] = scale.view(np.uint8)
    return made


def mma(a: list[NDArray[np.uint32]], b: list[NDArray[np.uint32]]) -> NDArray[np.int64]:
    """mma.m16n8k32.s32.s8.s8.s32: registers of 32 lanes, ``[4][32]`` and ``[2][32]``, to ``[32, 4]``."""
    bytes_of = lambda registers: registers.astype("<u4").view(np.int8).reshape(32, 4).astype(np.int64)  # noqa: E731
    rows, columns = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    for part in range(4):
        rows[(G + 8 * (part % 2))[:, None], (4 * T + 16 * (part // 2))[:, None] + np.arange(4)] = bytes_of(a[part])
    for part in range(2):
        columns[(4 * T + 16 * part)[:, None] + np.arange(4), G[:, None]] = bytes_of(b[part])
    whole = rows @ columns
    return np.stack([whole[G, 2 * T], whole[G, 2 * T + 1], whole[G + 8, 2 * T], whole[G + 8, 2 * T + 1]], axis=1)


def words(data: NDArray[np.uint8], at: NDArray[np.int64], count: int) -> NDArray[np.uint32]:
    """``count`` little-endian words of every lane: ``[32, count]``."""
    return np.stack([data[start : start + 4 * count].view("<u4") for start in at])


def multiply(blocks: list[NDArray[np.uint8]], chunk: NDArray[np.uint8], groups: int) -> NDArray[np.float64]:
    """``load_fixed`` and ``multiply_fixed``: what one chunk adds to rows g and g + 8 of every lane, ``[32, 2]``."""
    own = G // 2 == T
    codes = np.where(own[:, None], words(chunk, 64 * T + G % 2 * 32, 8), 0).astype(np.uint32)
    scales = words(chunk, SCALES + 16 * T, 4).view(np.float32)
    sums = np.zeros((32, 2))
    for q in range(4):
        even, odd, weights = [], [], []
        for block in blocks:
            word = words(block, 16 * LANES, 4)[:, q]
            even.append(((word << 4) & 0xF0F0F0F0) ^ 0x80808080)
            odd.append((word & 0xF0F0F0F0) ^ 0x80808080)
            pairs = words(block, 512 + 2 * groups * G, groups // 2)
            group = groups * q // 4
            pair = pairs[:, group // 2]
            weights.append((pair & 0xFFFF0000 if group % 2 else pair << 16).astype(np.uint32).view(np.float32))
        made = mma([*even, *odd], [codes[:, 2 * q], codes[:, 2 * q + 1]])
        for row in range(2):
            whole = 128 * made[:, 2 * row] + made[:, 2 * row + 1]
            assert np.abs(whole).max() < 2**24  # exact in fp32
            sums[:, row] += weights[row] * scales[:, q] * whole
    return sums


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("width", [128, 208, 384])
def test_sixteen_rows_times_a_token(width: int, group: int) -> None:
    packing = layout("int4" if group == 32 else "int4-g64", width, 16, torch.bfloat16)
    generator = torch.Generator().manual_seed(width)
    packed = packing.pack_matrix(torch.randn(1, 16, width, generator=generator))
    token = (torch.randn(width, generator=generator) * torch.rand(width, generator=generator) ** 8).bfloat16().float()
    right = packing.unpack_matrix(packed, 16, width)[0].double() @ token.double()

    blocks = packed[0].numpy().reshape(2, -1, packing.block_bytes)
    lanes = sum(
        multiply([blocks[0, number], blocks[1, number]], chunk, 128 // group)
        for number, chunk in enumerate(fixed_chunks(token.numpy()))
    )
    rows = np.asarray(lanes).reshape(8, 4, 2).sum(1).T.reshape(16)  # over the four lanes of a row: two shuffles
    error = np.linalg.norm(rows - right.numpy()) / np.linalg.norm(right.numpy())
    assert error < 2**-14  # bf16 rounds by 2**-9


def test_what_a_launch_shares_and_allocates() -> None:
    call = expert_call(layout("int4", 208, 48, torch.bfloat16), top_k=2)
    cut, fixed = CudaConfig(4, 4, 1, 4, 8, 2), CudaConfig(4, 4, 1, 4, 8, 2, fixed=True)
    more = [
        cuda_kernel.variant_of(call, down, fixed).shared_bytes - cuda_kernel.variant_of(call, down, cut).shared_bytes
        for down in (False, True)
    ]
    assert more == [2 * CHUNK + 32, 0]
    assert workspace_bytes(call) == 2 * CHUNK  # a chunk for each of two experts, more than 2 x 48 values in bf16
    three = expert_call(layout("int4", 208, 48, torch.bfloat16), top_k=2, tokens=3)
    assert workspace_bytes(three) == 2 * 3 * 8 * 2 * 48
    for refused, configs in ((call, (cut, fixed)), (three, (fixed, fixed))):
        with pytest.raises(ValueError, match="integers are for one token and int4"):
            cuda_kernel.expert_mlp_cuda(refused, configs=configs)


@pytest.mark.skipif(nvrtc.driver is None, reason="needs cuda-bindings")
@pytest.mark.parametrize("group", ["int4", "int4-g64"])
@pytest.mark.parametrize("down", [False, True])
def test_it_compiles(group: str, down: bool) -> None:
    call = expert_call(layout(group, 256, 144, torch.float16))
    for config in (CudaConfig(4, 4, 1, 4, 8, 4, fixed=True), CudaConfig(8, 2, 2, 8, 3, fixed=True)):
        variant = cuda_kernel.variant_of(call, down, config)
        text = nvrtc.full_text(cuda_kernel.SOURCE, variant.defined())
        assert nvrtc.compile_source(text, "expert_mlp.cu", "sm_90")
