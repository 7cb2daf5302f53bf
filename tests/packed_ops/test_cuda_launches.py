"""What the CUDA kernel's launcher remembers between calls, with a kernel that only writes down what it was given."""

import gc
import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from subbyte_kernels import nvrtc
from subbyte_kernels.decode_attention import AttentionTiles, ExactTokens, cuda_kernel, cuda_plan, decode_attention
from subbyte_kernels.decode_attention.cuda_kernel import CudaConfig, decode_attention_cuda, repeat_attention_cuda
from subbyte_kernels.formats import TILE_TOKENS
from subbyte_kernels.lanes import Order
from support.packing import gaussian, packed_side


DIM, HEADS, GROUP, EXACT = 64, 2, 2, 5
HEAD = "<Q5if23Q"
STREAM = 77


class Launches:
    """A kernel that writes down how it was launched, and the variants that were asked for."""

    def __init__(self) -> None:
        self.made: list[tuple[tuple[int, int, int], bytes, int]] = []
        self.variants: list[Any] = []
        self.stream = STREAM
        self.checks = 0
        self.capture = 0

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        self.made.append((grid, params, stream))

    def fields(self, call: int = -1) -> tuple[Any, ...]:
        return struct.unpack_from(HEAD, self.made[call][1])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """A machine that seems to have a CUDA device, whose tensors lie on the CPU."""
    seen = Launches()

    def kernel(variant: Any) -> Launches:
        seen.variants.append(variant)
        return seen

    def unchecked(*arguments: object) -> None:
        seen.checks += 1

    def scratch(device: int, stream: int, capture: int, size: int) -> Tensor:
        made.append(torch.zeros(size))  # held, so that each lies elsewhere
        return made[-1]

    made: list[Tensor] = []
    monkeypatch.setattr(cuda_kernel, "_kernel", kernel)
    monkeypatch.setattr(cuda_kernel, "cuda_obstacle", unchecked)
    monkeypatch.setattr(cuda_kernel, "_current_stream", lambda device: seen.stream)
    monkeypatch.setattr(nvrtc, "device_limits", lambda device: (132, 1 << 18))
    monkeypatch.setattr(cuda_kernel, "choose_config", lambda *size: CudaConfig(8, 1))
    monkeypatch.setattr(cuda_kernel, "_partial", cache(scratch))
    monkeypatch.setattr(cuda_kernel, "_arrived", cache(scratch))
    monkeypatch.setattr(nvrtc, "capture_id", lambda stream: seen.capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(seen.capture))
    monkeypatch.setattr(cuda_plan, "NO_TILES", cuda_plan.Plan(None))
    return seen


def tiles(seed: int = 1, tiers: Sequence[str] = ("vq3", "vq3")) -> AttentionTiles:
    """One row with one tile a head; ``tiers``: of each head, for keys and values."""
    states = gaussian(1, HEADS, 1, TILE_TOKENS, DIM, seed=seed)
    mean = torch.zeros(1, HEADS, DIM)
    named = [[[tier] for tier in tiers]]
    keys = packed_side(states, named, mean, order=Order.KEYS)[0]
    return AttentionTiles((keys,), packed_side(states, named, None, order=Order.VALUES)[0])


def step(seed: int = 2, rows: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ExactTokens]:
    """A query and exact tokens of their own."""
    keys, values = (gaussian(rows, HEADS, EXACT, DIM, seed=seed + side).to(dtype) for side in (0, 1))
    visible = torch.ones(rows, 1, EXACT, dtype=torch.bool)
    return gaussian(rows, HEADS * GROUP, 1, DIM, seed=seed + 2).to(dtype), ExactTokens(keys, values, visible)


def test_the_first_call_writes_every_parameter(launches: Launches) -> None:
    packed, (query, exact) = tiles(), step()
    sinks = torch.zeros(HEADS * GROUP)
    result = decode_attention_cuda(query, exact, packed, 0.125, sink_logits=sinks, splits=3)
    grid, params, stream = launches.made[0]
    plan = cuda_plan.plan_of(packed)
    assert (grid, stream) == ((3, HEADS, 1), STREAM)
    assert launches.checks == 1
    fields = launches.fields()
    inputs = [query, exact.keys, exact.values, exact.visible, packed.keys[0].pages, packed.values.pages]
    assert fields[:7] == (0, HEADS, GROUP, EXACT, 1, 3, 0.125)
    assert [fields[place] for place in (11, 16, 17, 18, 7, 8)] == [tensor.data_ptr() for tensor in inputs]
    assert [fields[place] for place in (14, 15, 23)] == plan.pointers[2:]
    assert fields[9:11] == packed.keys[0].pages.stride()[:2]
    assert fields[12:14] == query.stride()[:2]
    assert fields[19:23] == (*exact.keys.stride()[:3], exact.visible.stride(0))
    assert fields[24:27] == (sinks.data_ptr(), result.output.data_ptr(), result.lse.data_ptr())
    partials = HEADS * 3 * 4  # heads, splits, queries
    assert fields[28] - fields[27] == 2 * partials * DIM
    assert params[struct.calcsize(HEAD) :] == struct.pack(f"<{len(plan.ends)}Q", *plan.ends)
    assert result.output.shape == (1, HEADS * GROUP, 1, DIM)
    assert result.lse.shape == (1, HEADS * GROUP, 1)


def test_the_next_call_takes_new_addresses_and_no_checks(launches: Launches) -> None:
    packed = tiles()
    decode_attention(*step(), packed, 0.125, backend="auto")  # a CPU's choice: not remembered
    assert not launches.made
    earlier = step()  # held, so that the next tensors lie elsewhere
    first = decode_attention_cuda(*earlier, packed, 0.125)
    query, exact = step(seed=9)
    second = decode_attention(query, exact, packed, 0.125, backend="cuda")
    assert launches.checks == 1
    assert len(launches.variants) == 1
    before, after = launches.fields(0), launches.fields(1)
    changed = [place for place in range(len(before)) if before[place] != after[place]]
    assert changed == [11, 16, 17, 18, 25, 26]
    given = (query, exact.keys, exact.values, exact.visible, second.output, second.lse)
    assert [after[place] for place in changed] == [tensor.data_ptr() for tensor in given]
    assert first.output.data_ptr() != second.output.data_ptr()
    assert launches.made[0][0] == launches.made[1][0]


@pytest.mark.parametrize(
    "change", ["tiles", "scaling", "splits", "config", "rows", "dtype", "strides", "mask", "softcap", "values"]
)
def test_another_call_is_checked_again(launches: Launches, change: str) -> None:
    packed, (query, exact) = tiles() if change != "rows" else None, step()
    decode_attention_cuda(query, exact, packed, 0.125)
    given: dict[str, Any] = {"query": query, "exact": exact, "tiles": packed, "scaling": 0.125}
    if change == "rows":
        given["query"], given["exact"] = step(rows=2)
    elif change == "dtype":
        given["query"], given["exact"] = step(dtype=torch.float16)
    elif change == "strides":
        wide = torch.zeros(1, HEADS, EXACT, 2 * DIM, dtype=query.dtype)[..., :DIM]
        given["exact"] = replace(exact, keys=wide, values=wide)
    elif change == "values":
        given["exact"] = replace(exact, values=torch.zeros(1, HEADS, EXACT, 2 * DIM, dtype=query.dtype))
    elif change == "mask":
        given["exact"] = replace(exact, visible=torch.ones(1, 1, 2 * EXACT, dtype=torch.bool)[..., :EXACT])
    else:
        other = {"tiles": tiles(seed=5), "scaling": 0.5, "splits": 2, "config": CudaConfig(4, 1), "softcap": 30.0}
        given[change] = other[change]
    assert repeat_attention_cuda(**given) is None
    decode_attention_cuda(**given)
    assert launches.checks == 2
    assert repeat_attention_cuda(query, exact, packed, 0.125) is not None  # the first one is not forgotten


def test_tensors_that_are_copied_for_the_kernel_are_copied_every_time(launches: Launches) -> None:
    packed, (query, exact) = tiles(), step()
    spread = query.repeat_interleave(2, dim=-1)[..., ::2]
    for _ in range(2):
        decode_attention_cuda(spread, exact, packed, 0.125)
        assert launches.fields()[11] != spread.data_ptr()
        assert repeat_attention_cuda(spread, exact, packed, 0.125) is None
    assert launches.checks == 2


def uploaded(launches: Launches, packed: AttentionTiles) -> Tensor:
    """The list of blocks that the last launch was given."""
    held = cuda_plan.plan_of(packed)._held
    return next(tensor for tensor in held if tensor is not None and tensor.data_ptr() == launches.fields()[0])


@pytest.mark.parametrize("on_host", [False, True])
def test_tiers_that_cost_differently_come_as_a_list_of_blocks(launches: Launches, on_host: bool) -> None:
    packed = tiles(tiers=("vq2", "fp6"))
    if on_host:
        sides = [replace(side, host_pages=side.pages.numpy()) for side in (*packed.keys, packed.values)]
        packed = AttentionTiles((sides[0],), sides[1])
    decode_attention_cuda(*step(), packed, 0.125)
    grid, params, _ = launches.made[0]
    assert grid == (HEADS, 1, 1)  # a block for each head: a tile is less than a round of eight warps
    # fp6 first, it takes longer; the other one needs a table
    assert uploaded(launches, packed).tolist() == [[0, 1, 0, 1, 0, 2, 1, 0], [0, 0, 0, 1, 0, 2, 0, 1]]
    assert params[struct.calcsize(HEAD) :]


def test_streams_share_nothing_and_calls_of_one_stream_share_room(launches: Launches) -> None:
    packed = tiles()
    decode_attention_cuda(*step(), packed, 0.125)
    decode_attention_cuda(*step(seed=9), packed, 0.125)
    launches.stream = STREAM + 1
    decode_attention_cuda(*step(), packed, 0.125)
    rooms = [launches.fields(call)[27:30] for call in range(3)]
    assert rooms[0] == rooms[1]
    assert not set(rooms[0]) & set(rooms[2])
    assert [stream for _, _, stream in launches.made] == [STREAM, STREAM, STREAM + 1]


def test_what_a_graph_zeroes_is_shared_within_the_graph_alone(launches: Launches) -> None:
    packed = tiles()
    for launches.capture in (1, 1, 2, 0):
        decode_attention_cuda(*step(), packed, 0.125)
    launches.capture = 3  # its stream was used outside graphs before
    decode_attention_cuda(*step(), packed, 0.125)
    rooms = [launches.fields(call)[27:30] for call in range(5)]
    assert rooms[0] == rooms[1]
    assert len({room[2] for room in rooms}) == 4


def test_sinks_come_and_go(launches: Launches) -> None:
    packed = tiles()
    decode_attention_cuda(*step(), packed, 0.125)
    sinks = torch.zeros(HEADS * GROUP)
    assert repeat_attention_cuda(*step(), packed, 0.125, sink_logits=sinks) is not None
    assert [launches.fields(call)[24] for call in range(2)] == [0, sinks.data_ptr()]


def test_what_is_remembered_is_bounded_and_goes_with_the_tiles(launches: Launches) -> None:
    gc.collect()
    packed = tiles()
    for splits in range(1, cuda_kernel._MAX_LAUNCHES + 3):
        decode_attention_cuda(*step(), packed, 0.125, splits=splits)
    assert len(cuda_plan.plan_of(packed).launches) == 2
    known = len(cuda_plan.plans)
    del packed
    gc.collect()
    assert len(cuda_plan.plans) == known - 1


def test_a_kernel_is_made_for_the_tiers_that_a_side_uses_and_in_one_order(launches: Launches) -> None:
    both = tiles(tiers=("fp6", "vq2"))
    key_side = replace(both.keys[0], host_pages=both.keys[0].pages.numpy())
    only = replace(both.values, host_pages=torch.full_like(both.values.pages, 7 << 24).numpy())  # vq2 alone
    decode_attention_cuda(*step(), AttentionTiles((key_side,), only), 0.125)
    assert [[tier for tier, _, _ in side] for side in launches.variants[0].tiers] == [[2, 7], [7]]


@pytest.mark.parametrize("splits", [-1, 129])
def test_splits_that_the_merge_has_no_room_for_are_refused(launches: Launches, splits: int) -> None:
    with pytest.raises(ValueError, match=f"splits={splits} is not possible: from 1 to 128"):
        decode_attention_cuda(*step(), tiles(), 0.125, splits=splits)


def test_tensors_that_start_between_units_are_copied(launches: Launches) -> None:
    query, exact = step()
    odd = torch.empty(exact.keys.numel() + 1, dtype=exact.keys.dtype)[1:].view_as(exact.keys).copy_(exact.keys)
    decode_attention_cuda(query, ExactTokens(odd, exact.values, exact.visible), tiles(), 0.125)
    fields = launches.fields()
    assert fields[16] != odd.data_ptr()
    assert fields[16] % 16 == fields[17] % 16 == 0


def test_rows_of_different_length_come_as_a_list_of_blocks(launches: Launches) -> None:
    states = gaussian(2, HEADS, 2, TILE_TOKENS, DIM, seed=1)
    named = [[["vq3"] * 2] * HEADS, [["vq3"]] * HEADS]
    keys = packed_side(states, named, torch.zeros(2, HEADS, DIM), order=Order.KEYS)[0]
    packed = AttentionTiles((keys,), packed_side(states, named, None, order=Order.VALUES)[0])
    decode_attention_cuda(*step(rows=2), packed, 0.125)
    blocks = uploaded(launches, packed).tolist()
    ranges = {(row, head): (first, end) for row, head, _, _, first, end, _, _ in blocks}
    assert ranges == {(0, 0): (0, 4), (0, 1): (0, 4), (1, 0): (0, 2), (1, 1): (0, 2)}


def test_tiles_are_sorted_by_their_pair_of_tiers(launches: Launches) -> None:
    states = gaussian(1, HEADS, 5, TILE_TOKENS, DIM, seed=1)
    keys = packed_side(states, [[["vq3", "fp6", "vq3", "fp6", "vq3"], ["fp6"] * 4]], torch.zeros(1, HEADS, DIM))[0]
    values = packed_side(states, [[["vq2", "vq2", "vq4", "vq2", "vq2"], ["vq2"] * 4]], None, order=Order.VALUES)[0]
    packed = AttentionTiles((replace(keys, order=Order.KEYS),), values)
    decode_attention_cuda(*step(), packed, 0.125)
    plan = cuda_plan.plan_of(packed)
    pages = [side.tolist() for side in plan._held[:2] if side is not None]
    assert launches.fields()[7:9] == tuple(side.data_ptr() for side in plan._held[:2] if side is not None)
    for head, tiles_of_head in enumerate((5, 4)):
        pairs = list(zip(*(side[0][head][:tiles_of_head] for side in pages), strict=True))
        before = zip(*(side.pages[0, head, :tiles_of_head].tolist() for side in (keys, values)), strict=True)
        assert sorted(pairs) == sorted(before)  # keys and values of a tile stay together
        tiers = [(key >> 24, value >> 24) for key, value in pairs]
        assert tiers == sorted(tiers)
    assert pages[0][0][1][4] == pages[1][0][1][4] == -1  # a row's end stays its end
