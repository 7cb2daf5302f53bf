"""The CUDA packing kernel against the reference: what it cannot do, and on a GPU the records themselves."""

import pytest
import torch

from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.codecs.rotation import rotation_signs
from hf_subbyte_moe.codecs.shaping import Shaping, pack_shaped
from subbyte_kernels import nvrtc
from subbyte_kernels import pack_tiles as pack_module
from subbyte_kernels.formats import TILE_TOKENS, kernel_kind
from subbyte_kernels.lanes import Order, pack_tile_codes, unpack_tile_codes
from subbyte_kernels.pack_tiles import (
    metric_terms,
    pack_obstacle,
    pack_tiles,
    pack_tiles_cuda,
    pack_tiles_reference,
    shape_obstacle,
    shape_tiles_cuda,
    unpack_obstacle,
    unpack_tiles_cuda,
    unpack_tiles_reference,
)
from subbyte_kernels.pack_tiles.reference import e2m3_codes, e2m3_table
from support.packing import CPU, gaussian, pack_table, rotation, unpack_table


KERNEL_TIERS = ["fp8", "fp6", "vq4", "vq3", "vq2", "vq175"]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def test_every_tier_but_three_has_a_kernel() -> None:
    assert sorted(codec.name for codec in codecs() if kernel_kind(codec.format)) == sorted(KERNEL_TIERS)


def test_tensors_on_a_cpu_are_refused() -> None:
    tiles = gaussian(1, TILE_TOKENS, 64, seed=1)
    assert pack_obstacle(tiles, get_codec("vq2").format, rotation_signs(64, CPU)) == (
        "the tensors lie on cpu, not on a CUDA device"
    )


def staged(codes: torch.Tensor, head_dim: int, order: Order) -> list[int]:
    """Bytes of a unit's codes ``[64, C]`` as ``put`` of ``tile.cuh`` lays them into shared memory."""
    lanes = 4 if head_dim % 64 == 0 else 8 if head_dim <= 128 else 16
    count = codes.shape[1]
    stage = [-1] * codes.numel()
    mine = count // 4 if lanes == 4 else 16 * count // head_dim
    for token, row in enumerate(codes.tolist()):
        for part in range(count // mine):
            for place, code in enumerate(row[part * mine : (part + 1) * mine]):
                if lanes != 4:
                    at = token * count + part * mine + place
                elif order is Order.KEYS:
                    word, lane = token // 8 * (mine // 4) + place // 4, token % 8 * 4 + part
                    at = 4 * (32 * word + lane) + place % 4
                else:
                    piece = mine // 2
                    first, owner = token // 4 * piece + place % piece, 8 * part + token % 4 + 4 * (place // piece)
                    at = 4 * (first // 4 * 32 + owner) + first % 4
                stage[at] = code
    return stage


def squeezed(block: list[int], bits: int) -> list[int]:
    """Words of a block's codes, as ``squeeze`` of ``tile.cuh`` makes them of dense pieces of four codes."""
    dense = [sum(code << (bits * i) for i, code in enumerate(block[low : low + 4])) for low in range(0, len(block), 4)]
    if bits == 8:
        return dense
    if bits == 7:
        return [dense[i] | (dense[7] >> (4 * i) & 15) << 28 for i in range(7)]
    last = dense[3] >> 18
    return [
        dense[0] | (dense[1] & 0x3F) << 24 | (last & 3) << 30,
        dense[1] >> 6 | (dense[2] & 0xFFF) << 18 | (last >> 2 & 3) << 30,
        dense[2] >> 12 | (dense[3] & 0x3FFFF) << 12 | (last >> 4) << 30,
    ]


def kernel_words(codes: torch.Tensor, bits: int, head_dim: int, order: Order) -> torch.Tensor:
    """What ``write`` of ``tile.cuh`` makes of a tile's codes ``[128, C]``."""
    block_codes = {7: 32, 6: 16, 8: 4}[bits]
    words = []
    for unit in codes.split(64):
        stage = staged(unit, head_dim, order)
        if head_dim % 64:
            blocks = [stage[low : low + block_codes] for low in range(0, len(stage), block_codes)]
            words += [word for block in blocks for word in squeezed(block, bits)]
            continue
        columns = [
            [stage[4 * (32 * word + lane) + i] for word in range(len(stage) // 128) for i in range(4)]
            for lane in range(32)
        ]
        streams = [
            [
                word
                for low in range(0, len(column), block_codes)
                for word in squeezed(column[low : low + block_codes], bits)
            ]
            for column in columns
        ]
        vector = next(size for size in (4, 2, 1) if len(streams[0]) % size == 0)
        for low in range(0, len(streams[0]), vector):
            words += [word for stream in streams for word in stream[low : low + vector]]
    return torch.tensor(words)


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("bits", "vector_dim"), [(7, 4), (8, 4), (6, 2), (8, 2), (6, 1), (8, 1)])
def test_the_kernel_places_words_as_the_layout_says(bits: int, vector_dim: int, head_dim: int, order: Order) -> None:
    codes = torch.randint(0, 1 << bits, (1, TILE_TOKENS, head_dim // vector_dim), dtype=torch.int32)
    expected = pack_tile_codes(codes, bits, order, head_dim)[0].to(torch.int64) & 0xFFFFFFFF
    assert torch.equal(kernel_words(codes[0], bits, head_dim, order), expected)


def test_where_the_kernel_cannot_be_built_the_reference_packs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: object) -> None:
        raise nvrtc.BuildError("no compiler here")

    monkeypatch.setattr(pack_module, "pack_obstacle", lambda *arguments: None)
    monkeypatch.setattr(pack_module, "pack_tiles_cuda", broken)
    codec, tiles = get_codec("vq2"), gaussian(1, TILE_TOKENS, 64, seed=5)
    given = (tiles, codec.format, pack_table(codec, tiles), rotation(64), None, Order.KEYS)
    signs = rotation_signs(64, CPU)
    assert torch.equal(pack_tiles(*given, signs), pack_tiles_reference(*given, signs))
    assert "no compiler here" in caplog.text


def around_midpoints() -> tuple[torch.Tensor, list[int]]:
    """Values at most 8 steps of fp32 from every midpoint of neighbouring codes of E2M3 below 1; their nearest codes.

    A step is at most 2^-24 there, so that rounding to a multiple of 2^-23 first gives other codes for some.
    """
    bits = ((2 * torch.arange(8) + 1) / 16).view(torch.int32)
    steps = torch.arange(-8, 8, dtype=torch.int32)
    nearest = [code + (step > 0 or (step == 0 and code % 2)) for code in range(8) for step in steps.tolist()]
    return (bits[:, None] + steps).view(torch.float32).flatten(), nearest


def test_the_kernel_rounds_to_six_bits_once() -> None:
    """`encode` of ``pack_tiles.cu``, which adds 2^20 of a value's power of two, against the reference."""
    near, nearest = around_midpoints()
    values = torch.cat([near, torch.linspace(0, 7.5, 10001), e2m3_table()[:32, 0]])
    exponents = (values.view(torch.int32) & 0x7F800000).clamp(min=0x3F800000)
    sums = exponents.view(torch.float32) * 2.0**20 + values
    codes = (sums.view(torch.int32) + (exponents >> 20) + 8) & 31
    assert torch.equal(codes, e2m3_codes(values))
    assert codes[: len(near)].tolist() == nearest


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("device", DEVICES)
def test_six_bits_are_the_nearest_beside_midpoints(device: str, order: Order) -> None:
    """Tokens whose scale is 1 and whose odd channels, once rotated, all have one value beside a midpoint."""
    near, nearest = around_midpoints()
    wanted = near * 8  # the rotation's factor is 1/8
    base = ((59.9 + wanted) / 64).mul(512).round() / 512  # the first channel sums up to almost 60: 7.5 times 8
    tiles = base[:, None].repeat(1, 64)
    tiles[:, 1] -= wanted
    signs = rotation_signs(64, CPU)
    tiles, fmt = (tiles * signs)[None].to(device), get_codec("fp6").format
    given = (tiles, fmt, None, rotation(64).to(device), None, order, signs.to(device))
    if device == "cuda":
        assert pack_obstacle(tiles, fmt, given[-1]) is None
    records = pack_tiles(*given).cpu()
    words = fmt.code_words(64)
    assert (records[:, words:].contiguous().view(torch.bfloat16) == 1).all()
    codes = unpack_tile_codes(records[:, :words], fmt.code_bits, order, 64)[0]
    assert torch.equal(codes[:, 1::2], torch.tensor(nearest)[:, None].expand(-1, 32))


def awkward_tiles(head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Nine tiles with sizes from next to nothing to almost too large, empty tokens, and channels of their own."""
    tiles = gaussian(9, TILE_TOKENS, head_dim, seed=2)
    tiles[1] *= torch.logspace(-30, 4, TILE_TOKENS)[:, None] if dtype == torch.float32 else 100
    tiles[2, 5] = 0
    tiles[3, :, 7] += 50
    tiles[4] = 0
    tiles[4, :, 3] = 1
    return tiles.to(dtype)


@pytest.mark.parametrize("tier", KERNEL_TIERS)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_the_order_of_operations_changes_little(tier: str, head_dim: int) -> None:
    """The rotation as a transform in a stated order, and as a product of matrices: the same to within rounding."""
    codec, tiles, turn = get_codec(tier), gaussian(3, TILE_TOKENS, head_dim, seed=6), rotation(head_dim)
    given = (tiles, codec.format, pack_table(codec, tiles), turn, gaussian(3, head_dim, seed=7), Order.KEYS)
    records = [pack_tiles_reference(*given, signs) for signs in (rotation_signs(head_dim, CPU), None)]
    assert (records[0] != records[1]).float().mean() < 0.01
    tables = unpack_table(codec, given[2])
    decoded = [
        unpack_tiles_reference(records[0], codec.format, *tables, turn, given[4], torch.float32, Order.KEYS, signs)
        for signs in (rotation_signs(head_dim, CPU), None)
    ]
    torch.testing.assert_close(*decoded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("tier", KERNEL_TIERS)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_records_and_states_are_those_of_the_reference(
    tier: str, head_dim: int, order: Order, dtype: torch.dtype
) -> None:
    codec = get_codec(tier)
    fmt = codec.format
    tiles, mean = awkward_tiles(head_dim, dtype), gaussian(9, head_dim, seed=3)
    table, turn, signs = pack_table(codec, tiles), rotation(head_dim), rotation_signs(head_dim, CPU)
    expected = pack_tiles_reference(tiles, fmt, table, turn, mean, order, signs)
    moved = on_gpu(tiles, table, mean, signs)
    assert moved[0] is not None
    assert moved[3] is not None
    assert pack_obstacle(moved[0], fmt, moved[3]) is None
    found = pack_tiles_cuda(moved[0], fmt, moved[1], moved[2], order, moved[3])
    assert torch.equal(found.cpu(), expected)
    assert unpack_obstacle(found, fmt, dtype, moved[3]) is None
    back = unpack_tiles_cuda(found, fmt, moved[1], moved[2], dtype, order, moved[3]).cpu()
    tables = unpack_table(codec, table)
    assert torch.equal(back, unpack_tiles_reference(expected, fmt, *tables, turn, mean, dtype, order, signs))


SHAPED = ["vq4", "vq3", "vq2", "vq175"]


def skewed(head_dim: int) -> torch.Tensor:
    """``[2, D, D]`` moments whose eigenvalues differ by a factor of a thousand."""
    basis = torch.linalg.qr(gaussian(2, head_dim, head_dim, seed=9)).Q
    return (basis * torch.logspace(0, -3, head_dim)) @ basis.transpose(-1, -2)


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("width", [2, 4])
def test_a_metric_laid_out_for_the_kernel_says_what_it_said(dim: int, width: int) -> None:
    """Pulls and costs of entries from the strips, against the metric and its factor themselves."""
    shaping, table = Shaping(skewed(dim)), gaussian(8, width, seed=1)
    metric, factor = shaping.metric, shaping._factor
    terms = metric_terms(metric, factor, table)
    error, group = gaussian(2, 3, dim, seed=2), dim // width // 2
    low, high = group * width, (group + 1) * width
    laid = {
        name: getattr(terms, name).transpose(1, 2).reshape(2, dim, dim) for name in ("feedback", "others", "metric")
    }
    own = factor[:, low:high, low:high]
    first = error[..., :low] @ factor[:, low:high, :low].transpose(-1, -2) @ own
    torch.testing.assert_close(error @ laid["feedback"][..., low:high], first, rtol=1e-4, atol=1e-5)
    second = error @ metric[..., low:high] - error[..., low:high] @ metric[:, low:high, low:high]
    torch.testing.assert_close(error @ laid["others"][..., low:high], second, rtol=1e-4, atol=1e-5)
    assert torch.equal(laid["metric"], metric)
    for number, block in enumerate((own.transpose(-1, -2) @ own, metric[:, low:high, low:high])):
        torch.testing.assert_close(terms.blocks[:, number, group], block)
        halves = 0.5 * ((table @ block) * table).sum(-1)
        torch.testing.assert_close(terms.halves[:, number, group], halves, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tier", SHAPED)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_codes_under_a_metric_cost_what_the_references_do(tier: str, head_dim: int, dtype: torch.dtype) -> None:
    """Most tokens have the same codes; where two entries cost the same, another one and what follows from it."""
    codec, order = get_codec(tier), Order.KEYS
    tiles, mean, heads = awkward_tiles(head_dim, dtype), gaussian(9, head_dim, seed=3), torch.arange(9) % 2
    table, turn, signs = pack_table(codec, tiles), rotation(head_dim), rotation_signs(head_dim, CPU)
    assert table is not None
    shaping = Shaping(skewed(head_dim))
    expected = pack_shaped(tiles, heads, codec, table, turn, mean, order, shaping)
    moved = [part.cuda() for part in (tiles, heads, table, mean, signs)]
    assert shape_obstacle(moved[0], codec.format, moved[4]) is None
    terms = metric_terms(shaping.metric.cuda(), shaping._factor.cuda(), moved[2])
    found = shape_tiles_cuda(*moved[:2], codec.format, moved[2], moved[3], order, moved[4], terms).cpu()
    words = codec.format.code_words(head_dim)
    codes = [
        unpack_tile_codes(r[:, :words].contiguous(), codec.format.code_bits, order, head_dim)
        for r in (expected, found)
    ]
    assert (codes[0] == codes[1]).all(-1).float().mean() > 0.9
    tables = unpack_table(codec, table)
    costs = []
    for records in (expected, found):
        states = unpack_tiles_reference(records, codec.format, *tables, turn, mean, torch.float32, order)
        error = (states - tiles.float()) @ turn.t()
        cost = ((error @ shaping.metric[heads]) * error).sum(-1)
        costs.append((cost / tiles.double().square().sum(-1).clamp(min=1e-60)).mean(-1))  # or the largest are all
    torch.testing.assert_close(costs[1], costs[0], rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_are_packed_where_they_lie(device: str) -> None:
    states = gaussian(2, 5 * TILE_TOKENS + 40, 64, seed=1).to(device, torch.bfloat16)[:, 40:]
    blocks = states.unflatten(1, (-1, TILE_TOKENS))
    places = (torch.tensor([1, 0, 1, 1], device=device), torch.tensor([4, 2, 0, 3], device=device))
    codec, signs = get_codec("vq2"), rotation_signs(64, torch.device(device))
    table = pack_table(codec, states)
    assert table is not None
    given = (codec.format, table.to(device), rotation(64).to(device), None, Order.KEYS, signs)
    assert torch.equal(pack_tiles(blocks, *given, places), pack_tiles(blocks[places], *given))
