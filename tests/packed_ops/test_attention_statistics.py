"""Mass and weight of tokens against one dense softmax."""

import pytest
import torch
from torch import Tensor

from subbyte_kernels.attention_statistics import TokenStatistics, attention_statistics_reference, reference
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
