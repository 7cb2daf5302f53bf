"""Mass and weight of tokens against one dense softmax."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from subbyte_kernels.attention_statistics import (
    TokenStatistics,
    attention_statistics,
    attention_statistics_reference,
    probe_attention,
    probe_attention_reference,
    reference,
)
from support.compiling import compiled
from support.packing import gaussian


SCALING = 0.3


def dense(query: Tensor, query_index: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Causal probabilities ``[HQ, S, N]`` and log-sum-exp ``[HQ, S]`` of a whole row, fp64."""
    group = query.shape[0] // keys.shape[0]
    scores = query.double() @ keys.double().repeat_interleave(group, 0).transpose(-1, -2) * SCALING
    index = torch.arange(keys.shape[1])
    scores = scores.masked_fill(index > query_index.unsqueeze(-1), -torch.inf)
    return scores.softmax(-1), scores.logsumexp(-1)


def row(group: int, tokens: int, positions: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    query = 2 * gaussian(2 * group, len(positions), 16, seed=1)
    return query, torch.tensor(positions), gaussian(2, tokens, 16, seed=2)


def expected(probabilities: Tensor, heads: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Mean mass and sum of squares of tokens ``first`` to ``last - 1`` by KV head."""
    chunk = probabilities[:, :, first:last].unflatten(0, (heads, -1))
    return chunk.sum(-1).mean((1, 2)), chunk.square().sum((1, 2))


def assert_same(stats: TokenStatistics, mass: Tensor, weight: Tensor) -> None:
    torch.testing.assert_close(stats.mass.double(), mass, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(stats.weight.double(), weight, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(("first", "last"), [(0, 40), (0, 12), (7, 23), (39, 40)])
def test_mass_and_weight_are_those_of_the_dense_softmax(group: int, first: int, last: int) -> None:
    query, index, keys = row(group, 40, [15, 30, 38, 39])
    probabilities, lse = dense(query, index, keys)
    stats = attention_statistics_reference(query, index, lse.float(), keys[:, first:last], first, SCALING)
    assert stats.mass.shape == (2,)
    assert stats.weight.shape == (2, last - first)
    assert_same(stats, *expected(probabilities, 2, first, last))


def test_the_default_dtype_changes_nothing() -> None:
    query, index, keys = row(2, 40, [39, 10])
    _, lse = dense(query, index, keys)
    before = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    torch.set_default_dtype(torch.bfloat16)
    try:
        after = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(before.mass, after.mass)
    assert torch.equal(before.weight, after.weight)


def test_the_mass_of_everything_is_one() -> None:
    query, index, keys = row(2, 40, [39, 10])
    _, lse = dense(query, index, keys)
    stats = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    torch.testing.assert_close(stats.mass, torch.ones(2))


def test_tokens_after_a_query_count_for_nothing() -> None:
    query, index, keys = row(2, 40, [9, 19])
    _, lse = dense(query, index, keys)
    stats = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    assert not stats.weight[:, 20:].any()
    assert (stats.weight[:, :20] > 0).all()
    later = attention_statistics_reference(query, index, lse.float(), keys[:, 20:], 20, SCALING)
    assert not later.mass.any()


def test_a_query_sees_itself() -> None:
    query, index, keys = row(1, 5, [3])
    _, lse = dense(query, index, keys)
    stats = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    assert (stats.weight[:, 3] > 0).all()
    assert not stats.weight[:, 4].any()


@pytest.mark.parametrize("block", [1, 7, 16, 40, 64])
def test_borders_of_blocks_do_not_show(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    query, index, keys = row(3, 40, [5, 31, 39])
    probabilities, lse = dense(query, index, keys)
    monkeypatch.setattr(reference, "_BLOCK_TOKENS", block)
    stats = attention_statistics_reference(query, index, lse.float(), keys[:, 3:], 3, SCALING)
    assert_same(stats, *expected(probabilities, 2, 3, 40))


def test_chunks_of_a_row_add_up() -> None:
    query, index, keys = row(2, 40, [20, 39])
    _, lse = dense(query, index, keys)
    whole = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    parts = [
        attention_statistics_reference(query, index, lse.float(), keys[:, a:b], a, SCALING)
        for a, b in ((0, 13), (13, 40))
    ]
    torch.testing.assert_close(parts[0].mass + parts[1].mass, whole.mass)
    torch.testing.assert_close(torch.cat([part.weight for part in parts], dim=1), whole.weight)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_states_are_computed_in_fp32(dtype: torch.dtype) -> None:
    query, index, keys = row(2, 40, [20, 39])
    query, keys = query.to(dtype), keys.to(dtype)
    probabilities, lse = dense(query, index, keys)
    stats = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    assert stats.mass.dtype == stats.weight.dtype == torch.float32
    assert_same(stats, *expected(probabilities, 2, 0, 40))


CASES = {
    "plain": (4, 2, 5, 150, 16, 16, None, False, torch.float32),
    "capped, with sinks, 80 wide": (6, 2, 64, 130, 80, 80, 30.0, True, torch.float32),
    "half precision, narrower values": (4, 2, 70, 65, 64, 32, None, False, torch.float16),
    "one token": (3, 1, 1, 1, 96, 96, None, False, torch.float32),
    "bf16": (8, 2, 64, 1000, 128, 128, None, False, torch.bfloat16),
    "256 wide": (4, 2, 64, 200, 256, 256, 20.0, False, torch.bfloat16),
    "256 wide in fp32": (2, 1, 40, 130, 256, 256, 20.0, False, torch.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_compute_what_the_references_do(case: str) -> None:
    query_heads, heads, samples, tokens, dim, value_dim, softcap, sinks, dtype = CASES[case]
    kernels = pytest.importorskip("subbyte_kernels.attention_statistics.triton_kernel")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no products in bf16: needs a CUDA device")
    sizes = ((query_heads, samples, dim), (heads, tokens, dim), (heads, tokens, value_dim))
    states = [gaussian(*size, seed=number).to(device, dtype) for number, size in enumerate(sizes)]
    query, keys, values = states
    reason = kernels.statistics_obstacle(query, keys, values)
    if reason is not None:
        pytest.skip(f"{reason}: needs a CUDA device, or TRITON_INTERPRET=1")
    index = torch.linspace(0, tokens - 1, samples, device=device).long()
    visible = torch.arange(tokens, device=device) <= index[:, None]
    visible[0] = samples == 1  # a query that sees nothing
    logits = gaussian(query_heads, seed=7).to(device) if sinks else None
    scaling = dim**-0.5
    given = (query, keys, values, visible, scaling, softcap, logits)
    expected = probe_attention_reference(*given)
    output, lse, entropy = kernels.probe_attention_triton(*given)
    loose = 1e-5 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(output, expected.output, rtol=loose, atol=loose)
    torch.testing.assert_close(lse, expected.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected.entropy, rtol=1e-4, atol=1e-4)
    first = min(7, tokens - 1)
    finite = expected.lse.masked_fill(expected.lse == -torch.inf, 0)
    given = (query, index, finite, keys[:, first:], first, scaling, softcap)
    stats = attention_statistics_reference(*given)
    mass, weight = kernels.token_statistics_triton(*given)
    torch.testing.assert_close(mass, stats.mass, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight, stats.weight, rtol=1e-4, atol=1e-8)


@pytest.mark.slow
def test_triton_compiles_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    calls: list[tuple[str, tuple[Any, ...]]] = []
    for query_heads, heads, samples, tokens, dim, value_dim, softcap, sinks, dtype in CASES.values():
        if dtype is torch.float32 and dim > 16:
            continue  # products in fp32 are unrolled: one of 256 columns takes the compiler 10 s
        sizes = ((query_heads, samples, dim), (heads, tokens, dim), (heads, tokens, value_dim))
        query, keys, values = (gaussian(*size, seed=1).to(dtype) for size in sizes)
        visible = torch.ones(samples, tokens, dtype=torch.bool)
        logits = torch.zeros(query_heads) if sinks else None
        calls.append(("probe_attention_triton", (query, keys, values, visible, 0.3, softcap, logits)))
        lse = torch.zeros(query_heads, samples)
        calls.append(("token_statistics_triton", (query, torch.arange(samples), lse, keys, 0, 0.3, softcap)))
    found = compiled(tmp_path, "subbyte_kernels.attention_statistics.triton_kernel", calls)
    assert found == {"_probe_kernel": len(calls) // 2, "_statistics_kernel": len(calls) // 2}


def test_a_cpu_measures_by_the_reference() -> None:
    """The interpreter can run the kernels there, to check them; nobody waits for it otherwise."""
    query, index, keys = row(2, 40, [20, 39])
    _, lse = dense(query, index, keys)
    stats = attention_statistics(query, index, lse.float(), keys, 0, SCALING)
    expected = attention_statistics_reference(query, index, lse.float(), keys, 0, SCALING)
    assert torch.equal(stats.weight, expected.weight)
    visible = torch.arange(40) <= index[:, None]
    probed = probe_attention(query, keys, keys, visible, SCALING)
    assert torch.equal(probed.output, probe_attention_reference(query, keys, keys, visible, SCALING).output)
    torch.testing.assert_close(probed.lse.double(), lse)
