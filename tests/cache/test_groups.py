"""Rows that are alike are packed by the calls that one row takes, and every row as if it were alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_subbyte_moe.cache import EntropySubbyteLayer
from hf_subbyte_moe.cache.groups import RowGroup, group_rows
from hf_subbyte_moe.cache.prompts import PromptQueries
from hf_subbyte_moe.policy import AttentionForm
from hf_subbyte_moe.policy import statistics as statistics_module
from support.layers import make_layer, states
from support.packing import CPU, packed_at_once, shaped_at_once, unpacked_at_once


HEADS, DIM, GROUP = 2, 64, 2


class Operations(TorchDispatchMode):
    """Counts what PyTorch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def prompt_queries(rows: int, tokens: int) -> PromptQueries:
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(rows, GROUP * HEADS, tokens, DIM, generator=generator)
    weight = torch.randn(32, GROUP * HEADS * DIM, generator=generator)
    return PromptQueries(query, AttentionForm(DIM**-0.5), weight)


def part_of(queries: PromptQueries, rows: slice, tokens: slice) -> PromptQueries:
    return PromptQueries(queries.query[rows, :, tokens], queries.form, queries.weight)


def read(layer: EntropySubbyteLayer, key: Tensor, value: Tensor, queries: PromptQueries, starts: list[int]) -> None:
    """Store a piece of a prompt as our attention function would."""
    layer.update(key, value)
    layer.set_starts(np.array(starts))
    seen = layer.dequantize() if layer.rows.lengths.any() else None
    layer.settle(replace(queries, seen=seen))


def operations(rows: int, policy: str, codebook: str) -> list[int]:
    """What it takes to store a prompt, a second piece of it, and to pack the tile that is due later on."""
    layer, counts = make_layer(policy=policy, codebook=codebook), []
    key, value = states(rows, 910)
    queries = prompt_queries(rows, 850)
    for part in (slice(0, 600), slice(600, 850)):
        with Operations() as counted:
            read(layer, key[:, :, part], value[:, :, part], part_of(queries, slice(None), part), [0] * rows)
        counts.append(counted.count)
    for token in range(850, 910):
        if layer.rows.rows_due(1):
            break
        layer.update(key[:, :, token : token + 1], value[:, :, token : token + 1])
    tiles = layer.rows.store.counts.copy()
    with Operations() as counted:
        layer.pack_due()
    assert (layer.rows.store.counts == tiles + 1).all()
    return [*counts, counted.count]


@pytest.mark.parametrize("codebook", ["universal", "queries"])
@pytest.mark.parametrize("policy", ["error", "uniform:vq2", "uniform"])
def test_eight_rows_take_about_as_many_operations_as_one(
    policy: str, codebook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_module, "pack_tiles", packed_at_once)
    monkeypatch.setattr(statistics_module, "pack_shaped", shaped_at_once)
    monkeypatch.setattr(statistics_module, "unpack_tiles", unpacked_at_once)
    one, eight = operations(1, policy, codebook), operations(8, policy, codebook)
    assert all(few < 1000 for few in one)  # packing is stubbed, or this says nothing
    assert [many <= 1.5 * few for few, many in zip(one, eight, strict=True)] == [True] * 3, (one, eight)


@pytest.mark.parametrize(
    ("policy", "codebook"),
    [
        ("error", "universal"),
        ("error", "queries"),
        ("uniform:vq2", "online"),
        ("uniform:nuq2", "universal"),
        ("uniform", "universal"),
    ],
)
def test_rows_of_any_lengths_are_what_they_would_be_alone(policy: str, codebook: str) -> None:
    lengths, later, steps = [400, 330, 400, 20, 330, 400], 150, 90
    columns = max(lengths)
    key, value = states(len(lengths), columns + later + steps)
    key[2, 0, :, 5] *= 64  # this row's keys need factors, those of the rows like it do not
    value[4] *= 1000
    queries = prompt_queries(len(lengths), columns + later)
    together = make_layer(policy=policy, codebook=codebook)
    pieces = (slice(0, columns), slice(columns, columns + later))
    starts = [columns - length for length in lengths]
    for part in pieces:
        read(together, key[:, :, part], value[:, :, part], part_of(queries, slice(None), part), starts)
    for token in range(columns + later, key.shape[2]):
        together.update(key[:, :, token : token + 1], value[:, :, token : token + 1])
    assert together.rows.codecs.balance.factors is not None
    held = together.dequantize()
    for row, start in enumerate(starts):
        alone, own = make_layer(policy=policy, codebook=codebook), slice(row, row + 1)
        for part in (slice(start, columns), pieces[1]):
            read(alone, key[own, :, part], value[own, :, part], part_of(queries, own, part), [0])
        for token in range(columns + later, key.shape[2]):
            alone.update(key[own, :, token : token + 1], value[own, :, token : token + 1])
        assert together.rows.store.counts[row] == alone.rows.store.counts[0] > 0
        for ours, theirs in zip(together.rows.settled[row], alone.rows.settled[0], strict=True):
            assert (ours[0] == theirs[0]).all()
            assert ours[1] == theirs[1]
        for chunk, other in zip(together.statistics.chunks[row], alone.statistics.chunks[0], strict=True):
            np.testing.assert_allclose(chunk.errors, other.errors, rtol=1e-3)
            np.testing.assert_allclose(chunk.entropy, other.entropy, rtol=1e-3)
        for side, states_ in enumerate(alone.dequantize()):
            assert torch.equal(held[side][row, :, start:], states_[0])


def test_groups_hold_rows_of_one_kind() -> None:
    groups = group_rows([(0, "a"), (1, "b"), (2, "b"), (4, "a")], 100, CPU)
    assert [group.rows for group in groups] == [[0, 4], [1, 2]]
    held = torch.arange(10).view(5, 2)
    for group in groups:
        assert torch.equal(held[group.index], held[group.rows])
    assert isinstance(groups[1].index, slice)
    assert groups[0].first == 0
    assert len(RowGroup([3], CPU)) == 1


@pytest.mark.parametrize(("tokens", "most"), [(1, 16), (4096, 16), (8192, 8), (40_000, 1), (1_000_000, 1)])
def test_groups_are_no_larger_than_memory_allows(tokens: int, most: int) -> None:
    groups = group_rows([(row, None) for row in range(20)], tokens, CPU)
    assert max(len(group) for group in groups) == most
    assert [row for group in groups for row in group.rows] == list(range(20))
