"""What a probe measures against really replacing keys and values and attending again."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hf_subbyte_moe.codecs import Codec, Table, get_codec
from hf_subbyte_moe.codecs.codebooks import universal_table
from hf_subbyte_moe.codecs.rotation import rotation_signs
from hf_subbyte_moe.ops import TILE_TOKENS, ExactTokens
from hf_subbyte_moe.policy import (
    CANDIDATES,
    KEYS,
    VALUES,
    AttentionForm,
    Needs,
    RowProbe,
    SideCodec,
    output_weight,
    sample_positions,
)
from hf_subbyte_moe.policy import statistics as statistics_module
from hf_subbyte_moe.policy.policies import prior_errors
from hf_subbyte_moe.transfers import Answers
from subbyte_kernels.lanes import Order
from support.packing import CPU, gaussian, rotation


HEADS, DIM, SCALING, FIRST = 2, 32, 32**-0.5, 4
NUQ2 = get_codec("nuq2")


def tables(candidates: tuple[Codec, ...]) -> dict[int, Tensor]:
    found = {}
    for codec in candidates:
        if codec.table is not Table.NONE:
            table = universal_table(codec.format, CPU)[0, 0].float()
            centroids = codec.table is Table.CENTROIDS
            found[codec.tier_id] = table.squeeze(-1).expand(HEADS, -1) if centroids else table
    return found


def measure(probe: RowProbe, *chunk: Any, needs: Needs | None = None) -> statistics_module.Measured:
    answers = Answers()
    found = probe.measure(*chunk, answers, needs)
    answers.send()
    return found()[0]


@dataclass
class Row:
    """One row: 4 tokens before the chunk, the chunk, 5 tokens after it, and queries that see them causally."""

    query: Tensor
    index: Tensor
    exact: ExactTokens
    chunk: slice
    weight: Tensor | None
    sides: tuple[SideCodec, SideCodec]

    def probe(self) -> RowProbe:
        return RowProbe(self.query[None], self.index, self.exact, AttentionForm(SCALING), self.weight)

    def measure(self, candidates: tuple[Codec, ...] = CANDIDATES) -> statistics_module.Measured:
        keys, values = self.exact.keys[0, :, self.chunk], self.exact.values[0, :, self.chunk]
        return measure(self.probe(), (keys, values), FIRST, self.sides, 0, 1, candidates)

    def attend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Layer output ``[S, hidden]`` and probabilities ``[HQ, S, E]``, fp64."""
        group = self.query.shape[0] // HEADS
        scores = self.query.double() @ keys.double().repeat_interleave(group, 0).transpose(-1, -2) * SCALING
        weights = scores.masked_fill(~self.exact.visible, -torch.inf).softmax(-1)
        heads = (weights @ values.double().repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
        return (heads if self.weight is None else heads @ self.weight.double().t()), weights

    def true_error(self, head: int, side: int, codec: Codec) -> float:
        """The definition: this head's keys or values of the chunk alone come back from the tier."""
        states = [self.exact.keys[0].clone(), self.exact.values[0].clone()]
        before, _ = self.attend(*states)
        chunk = states[side][:, self.chunk]
        missing = -chunk.shape[1] % TILE_TOKENS
        whole = torch.cat([chunk, chunk[:, -1:].expand(-1, missing, -1)], dim=1)
        states[side][head, self.chunk] = self.sides[side].round_trip(whole, codec)[head, : chunk.shape[1]]
        after, _ = self.attend(*states)
        return float((after - before).square().sum(-1).mean() / before.square().sum(-1).mean())


def make_row(tokens: int, group: int, hidden: int | None = None, candidates: tuple[Codec, ...] = CANDIDATES) -> Row:
    total = FIRST + tokens + 5
    index = torch.tensor([FIRST + tokens // 2, FIRST + tokens - 1, *range(FIRST + tokens, total)])
    mean = gaussian(HEADS, DIM, seed=1)
    exact = ExactTokens(
        gaussian(1, HEADS, total, DIM, seed=2) + mean.unsqueeze(1),
        gaussian(1, HEADS, total, DIM, seed=3),
        (torch.arange(total) <= index.unsqueeze(-1)).unsqueeze(0),
    )
    query = 2 * gaussian(HEADS * group, len(index), DIM, seed=4)
    weight = None if hidden is None else gaussian(hidden, HEADS * group * DIM, seed=5)
    known = tables(candidates)
    turn, signs = rotation(DIM), rotation_signs(DIM, CPU)
    sides = (
        SideCodec(turn, mean, known, Order.KEYS, signs),
        SideCodec(turn, None, known, Order.VALUES, signs),
    )
    return Row(query, index, exact, slice(FIRST, FIRST + tokens), weight, sides)


def true_errors(row: Row, candidates: tuple[Codec, ...] = CANDIDATES) -> np.ndarray:
    return np.array(
        [[[row.true_error(h, side, codec) for codec in candidates] for side in (KEYS, VALUES)] for h in range(HEADS)]
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tokens", [128, 256, 100, 1])
def test_errors_are_those_of_replacing_every_token(tokens: int, group: int) -> None:
    row = make_row(tokens, group)
    errors = row.measure().errors
    assert errors.shape == (HEADS, 2, len(CANDIDATES))
    np.testing.assert_allclose(errors, true_errors(row), rtol=2e-3, atol=1e-9)


def test_errors_pass_through_the_output_projection() -> None:
    row = make_row(128, group=1, hidden=24)
    np.testing.assert_allclose(row.measure().errors, true_errors(row), rtol=2e-3)
    plain = make_row(128, group=1)
    assert not np.allclose(row.measure().errors, plain.measure().errors, rtol=0.05)


def test_errors_of_a_group_add_up_before_they_are_squared() -> None:
    """Query heads that share a KV head share its error, and the projection adds them to one output."""
    row = make_row(128, group=4, hidden=24)
    np.testing.assert_allclose(row.measure().errors, true_errors(row), rtol=2e-3)


def test_per_head_centroids_are_measured_as_well() -> None:
    candidates = (NUQ2, get_codec("exact"))
    row = make_row(128, group=2, candidates=candidates)
    errors = row.measure(candidates).errors
    np.testing.assert_allclose(errors[..., 0], true_errors(row, candidates)[..., 0], rtol=2e-3)
    assert (errors[..., 1] < 1e-10).all()


def test_fewer_bits_err_more() -> None:
    """Tiers two bits apart: closer ones may change places where a softmax hangs on few tokens."""
    errors = make_row(256, group=2).measure(tuple(get_codec(name) for name in ("vq175", "vq4", "fp6"))).errors
    assert (np.diff(errors, axis=-1) < 0).all()


def test_probing_a_part_of_the_tokens_estimates_the_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the tokens, those that weigh most; errors of tokens are independent, so their shares add up."""
    row = make_row(1024, group=2)
    exact = row.measure().errors
    monkeypatch.setattr(statistics_module, "PROBE_TOKENS", 256)
    ratio = row.measure().errors / exact
    assert ((ratio > 0.6) & (ratio < 1.6)).all()
    assert not np.allclose(ratio, 1, rtol=1e-3)
    assert 0.85 < np.exp(np.log(ratio).mean()) < 1.15


def test_the_probe_takes_the_tokens_that_weigh_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_module, "PROBE_TOKENS", 3)
    weight = torch.tensor([[0.1, 5.0, 0.2, 4.0, 3.0], [9.0, 0.0, 8.0, 1.0, 7.0]])
    assert RowProbe._probe_tokens(weight).tolist() == [[1, 3, 4], [0, 2, 4]]
    assert RowProbe._probe_tokens(weight[:, :3]).tolist() == [[0, 1, 2]] * 2


def test_a_chunk_that_nobody_attends_to_has_no_error() -> None:
    row = make_row(128, group=2)
    row.index = torch.tensor([0, 1, 2])
    row.query = row.query[:, :3]
    total = row.exact.keys.shape[2]
    visible = (torch.arange(total) <= row.index.unsqueeze(-1)).unsqueeze(0)
    row.exact = ExactTokens(row.exact.keys, row.exact.values, visible)
    measured = row.measure()
    assert not measured.errors.any()
    assert not measured.mass.any()


def test_mass_is_the_share_of_attention_on_the_chunk() -> None:
    row = make_row(128, group=3)
    _, weights = row.attend(row.exact.keys[0], row.exact.values[0])
    mass = weights[:, :, row.chunk].sum(-1).unflatten(0, (HEADS, -1)).mean((1, 2))
    np.testing.assert_allclose(row.measure().mass, mass, rtol=1e-5)


def test_entropy_is_that_of_the_dense_softmax() -> None:
    row = make_row(128, group=2)
    _, weights = row.attend(row.exact.keys[0], row.exact.values[0])
    entropy = torch.special.entr(weights).sum(-1) / np.log(2)
    np.testing.assert_allclose(row.probe().entropy, entropy, rtol=1e-4, atol=1e-5)


def test_the_entropy_of_a_chunk_is_that_of_its_own_queries() -> None:
    row = make_row(128, group=2)
    entropy = row.probe().entropy.unflatten(0, (HEADS, -1))
    inside = (row.index >= FIRST) & (row.index < FIRST + 128)
    assert int(inside.sum()) == 2
    np.testing.assert_allclose(row.measure().entropy, entropy[:, :, inside].mean((1, 2)), rtol=1e-5)
    keys, values = row.exact.keys[0, :, :FIRST], row.exact.values[0, :, :FIRST]  # no query was sampled in here
    first = measure(row.probe(), (keys, values), 0, row.sides, 7, 3, CANDIDATES)
    np.testing.assert_allclose(first.entropy, entropy.mean((1, 2)), rtol=1e-5)
    assert (first.first_tile, first.tiles) == (7, 3)


@pytest.mark.parametrize("block", [4096, 50])
def test_residual_entropy_is_that_of_the_softmax_over_the_chunk_alone(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics_module, "_ENTROPY_BLOCK", block)
    row = make_row(128, group=2)
    row.index[0] = FIRST - 1  # sees nothing of the chunk, so it has no entropy in it
    keys, values = row.exact.keys[0, :, row.chunk], row.exact.values[0, :, row.chunk]
    scores = row.query.double() @ keys.double().repeat_interleave(2, 0).transpose(-1, -2) * SCALING
    hidden = torch.arange(FIRST, FIRST + 128) > row.index[:, None]
    seen = ~hidden.all(-1)
    entropy = torch.special.entr(scores.masked_fill(hidden, -torch.inf)[:, seen].softmax(-1)).sum(-1) / np.log(2)
    needs = Needs(errors=False, residual=True)
    measured = measure(row.probe(), (keys, values), FIRST, row.sides, 0, 1, CANDIDATES, needs=needs)
    np.testing.assert_allclose(measured.entropy, entropy.unflatten(0, (HEADS, 2)).mean((1, 2)), rtol=1e-4)
    np.testing.assert_allclose(measured.mass, row.measure().mass)
    np.testing.assert_array_equal(measured.errors, prior_errors(CANDIDATES, HEADS))


OUTPUT = torch.zeros(1, 3, 4, 16)  # [B, Sq, HQ, Dv]


@pytest.mark.parametrize("name", ["o_proj", "out_proj", "dense"])
def test_the_output_projection_is_found_under_its_usual_names(name: str) -> None:
    module = nn.Module()
    module.add_module(name, nn.Linear(64, 32))
    weight = output_weight(module, OUTPUT)
    assert weight is not None
    assert torch.equal(weight, getattr(module, name).weight)
    assert not weight.requires_grad


def test_a_conv1d_projection_is_not_taken_the_wrong_way_round() -> None:
    """GPT-2 keeps ``[in, out]``: square, so its shape does not tell."""
    module = nn.Module()
    module.o_proj = Conv1D(64, 64)
    assert output_weight(module, OUTPUT) is None


class Adapted(nn.Module):
    """A wrapper as PEFT makes them: it shows its base layer's weight, and its forward does more."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base

    @property
    def weight(self) -> Tensor:
        return self.base.weight


def test_modules_without_a_plain_projection_have_none() -> None:
    assert output_weight(None, OUTPUT) is None
    assert output_weight(nn.Module(), OUTPUT) is None
    module = nn.Module()
    module.o_proj = nn.Linear(48, 32)
    assert output_weight(module, OUTPUT) is None  # a width of its own
    module.o_proj = nn.Linear(64, 32)
    for dtype in (torch.int8, torch.float8_e4m3fn):  # codes without their scales
        module.o_proj.weight = nn.Parameter(torch.zeros(32, 64).to(dtype), requires_grad=False)
        assert output_weight(module, OUTPUT) is None
    module.o_proj = nn.Linear(64, 32, device="meta")  # offloaded
    assert output_weight(module, OUTPUT) is None
    module.o_proj = Adapted(nn.Linear(64, 32))
    assert output_weight(module, OUTPUT) is None
    module.o_proj = nn.Identity()
    assert output_weight(module, OUTPUT) is None


@pytest.mark.parametrize("queries", [1, 2, 31, 32, 33, 63, 64, 65, 100, 129, 1000, 100_000])
def test_sampled_positions_are_the_last_ones_and_some_of_the_second_half(queries: int) -> None:
    positions = sample_positions(queries)
    assert positions.dtype == torch.int64
    assert (positions.diff() > 0).all()
    assert 1 <= len(positions) <= statistics_module.SAMPLED_QUERIES
    last = min(queries, statistics_module.SAMPLED_QUERIES // 2)
    assert torch.equal(positions[-last:], torch.arange(queries - last, queries))
    before = positions[:-last]
    assert (before >= queries // 2).all()
    if queries >= 4 * statistics_module.SAMPLED_QUERIES:
        assert len(positions) == statistics_module.SAMPLED_QUERIES
        assert int(before[0]) == queries // 2
