"""The reference against a dense softmax in fp64 over tiles that were unpacked one by one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.codecs import get_codec
from subbyte_kernels.decode_attention import (
    AttentionResult,
    AttentionTiles,
    ExactTokens,
    decode_attention_reference,
    reference,
)
from subbyte_kernels.formats import NO_PAGE, TILE_TOKENS, PackedTiles, page_slots
from subbyte_kernels.lanes import Order
from support.packing import TIERS, gaussian, generator, packed_side, rotation


PAIRS = [
    *((tier, tier) for tier in TIERS),
    ("vq4", "vq175"),
    ("fp6", "vq2"),
    ("vq175", "exact"),
    ("nuq2", "vq3o"),
    ("fp8", "nuq2"),
]


class Case:
    """Two rows, the second with one tile less; keys with a mean, exact tokens with a ragged mask."""

    def __init__(
        self,
        key_tier: str | list[str],
        value_tier: str | list[str],
        *,
        heads: int = 2,
        group: int = 2,
        queries: int = 1,
        dims: tuple[int, int] = (64, 64),
        counts: tuple[int, int] = (2, 1),
        exact: int = 9,
        spare_slots: int = 0,
    ) -> None:
        key_dim, value_dim = dims
        self.scaling = key_dim**-0.5
        self.query = 2 * gaussian(2, heads * group, queries, key_dim, seed=1)
        mean = 2 * gaussian(2, heads, key_dim, seed=2)
        shape = (2, heads, max(counts), TILE_TOKENS)
        keys = gaussian(*shape, key_dim, seed=3) + mean[:, :, None, None]
        values = gaussian(*shape, value_dim, seed=4) + 0.5
        self.keys, self.dense_keys = packed_side(keys, self.tiers(key_tier, heads, counts), mean, spare_slots)
        self.values, self.dense_values = packed_side(
            values, self.tiers(value_tier, heads, counts), None, spare_slots, order=Order.VALUES
        )
        visible = torch.rand(2, queries, exact, generator=generator(5)) < 0.7
        visible[..., 0] = True
        self.exact = ExactTokens(
            gaussian(2, heads, exact, key_dim, seed=6) + mean.unsqueeze(2),
            gaussian(2, heads, exact, value_dim, seed=7),
            visible,
        )

    @staticmethod
    def tiers(tier: str | list[str], heads: int, counts: tuple[int, int]) -> list[list[list[str]]]:
        """One tier everywhere, or a list that head and tile walk through."""
        cycle = [tier] if isinstance(tier, str) else tier
        return [
            [[cycle[(row + 2 * head + tile) % len(cycle)] for tile in range(count)] for head in range(heads)]
            for row, count in enumerate(counts)
        ]

    @property
    def tiles(self) -> AttentionTiles:
        return AttentionTiles((self.keys,), self.values)

    def run(self, softcap: float | None = None) -> AttentionResult:
        return decode_attention_reference(self.query, self.exact, self.tiles, self.scaling, softcap)

    def oracle(self, softcap: float | None = None) -> AttentionResult:
        return dense_attention(
            self.query, self.exact, self.keys, self.dense_keys, self.dense_values, self.scaling, softcap
        )


def dense_attention(
    query: Tensor,
    exact: ExactTokens,
    side: PackedTiles,
    dense_keys: Tensor,
    dense_values: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionResult:
    """Everything in one matrix, fp64; every row must see something."""
    heads = exact.keys.shape[1]
    group = query.shape[1] // heads
    keys = torch.cat([exact.keys, dense_keys.flatten(2, 3)], dim=2).double().repeat_interleave(group, 1)
    values = torch.cat([exact.values, dense_values.flatten(2, 3)], dim=2).double().repeat_interleave(group, 1)
    present = (side.pages[:, 0] >= 0).repeat_interleave(TILE_TOKENS, -1)[:, None, None]
    seen = exact.visible.unsqueeze(1).expand(-1, 1, query.shape[2], -1)
    visible = torch.cat([seen, present.expand(-1, 1, query.shape[2], -1)], dim=-1)
    scores = query.double() @ keys.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1) / torch.tensor(2.0, dtype=torch.float64).log()
    return AttentionResult(weights @ values, scores.logsumexp(-1), entropy)


def assert_same(result: AttentionResult, expected: AttentionResult) -> None:
    """Outputs within a few roundings of fp32."""
    assert result.output.dtype == result.lse.dtype == result.entropy.dtype == torch.float32
    torch.testing.assert_close(result.output.double(), expected.output.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.lse.double(), expected.lse.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropy.double(), expected.entropy.double(), rtol=1e-4, atol=1e-4)


def assert_identical(result: AttentionResult, expected: AttentionResult) -> None:
    assert torch.equal(result.output, expected.output)
    assert torch.equal(result.lse, expected.lse)
    assert torch.equal(result.entropy, expected.entropy)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("key_tier", "value_tier"), PAIRS)
def test_every_pair_of_tiers_equals_dense_attention(key_tier: str, value_tier: str, head_dim: int) -> None:
    case = Case(key_tier, value_tier, dims=(head_dim, head_dim))
    assert_same(case.run(), case.oracle())


@pytest.mark.parametrize("queries", [1, 2, 7])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_mixed_tiers_per_head_and_tile_at_every_group_size(group: int, queries: int) -> None:
    case = Case(["vq175", "fp6", "exact", "nuq2"], ["vq2", "fp8", "vq3"], group=group, queries=queries, counts=(3, 1))
    assert len(case.keys.pools) >= 3
    assert (case.keys.pages < 0).any()
    assert_same(case.run(), case.oracle())


@pytest.mark.parametrize("dims", [(128, 64), (64, 80), (96, 128)])
def test_keys_and_values_may_differ_in_width(dims: tuple[int, int]) -> None:
    case = Case(["vq3", "nuq2"], ["vq175", "fp8"], dims=dims, queries=2)
    result = case.run()
    assert result.output.shape == (2, 4, 2, dims[1])
    assert_same(result, case.oracle())


@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap_bounds_exact_and_packed_scores_alike(softcap: float) -> None:
    case = Case(["vq4", "fp8"], "vq4", queries=2)
    capped = case.run(softcap)
    assert_same(capped, case.oracle(softcap))
    assert not torch.allclose(capped.output, case.run().output, atol=1e-4)


def test_tiles_cross_the_border_of_a_block() -> None:
    count = reference.BLOCK_TILES + 1
    case = Case("vq2", "vq2", heads=1, group=1, counts=(count, 2))
    assert_same(case.run(), case.oracle())


@pytest.mark.parametrize("block", [1, 2, 3])
def test_the_size_of_a_block_does_not_matter(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(["vq2", "fp6", "nuq2"], ["vq175", "vq3"], counts=(4, 2), exact=300, queries=2)
    whole = case.run()
    monkeypatch.setattr(reference, "BLOCK_TILES", block)
    assert_same(case.run(), whole)
    assert_same(case.run(), case.oracle())


def test_one_mask_for_all_queries_equals_the_same_mask_for_each() -> None:
    case = Case("vq3", "vq3", queries=3, group=3)
    one = case.exact.visible[:, :1]
    case.exact = ExactTokens(case.exact.keys, case.exact.values, one)
    single = case.run()
    case.exact = ExactTokens(case.exact.keys, case.exact.values, one.expand(-1, 3, -1))
    assert_same(single, case.run())
    assert_same(single, case.oracle())


def test_without_tiles_only_exact_tokens_count() -> None:
    case = Case("vq3", "vq3", queries=2)
    result = decode_attention_reference(case.query, case.exact, None, case.scaling)
    case.keys = replace(case.keys, pages=torch.full_like(case.keys.pages, NO_PAGE))
    assert_same(result, case.oracle())
    case.keys, case.values = (replace(side, pages=side.pages[:, :, :0]) for side in (case.keys, case.values))
    assert_identical(case.run(), result)


def test_a_block_in_which_no_row_has_a_tile_counts_for_nothing() -> None:
    case = Case("vq3", "vq3", queries=2)
    expected = decode_attention_reference(case.query, case.exact, None, case.scaling)
    missing = torch.full_like(case.keys.pages, NO_PAGE)
    case.keys, case.values = (replace(side, pages=missing) for side in (case.keys, case.values))
    assert_same(case.run(), expected)


def test_exact_tokens_that_nobody_sees_leave_the_tiles() -> None:
    case = Case("fp6", "vq2")
    case.exact.visible.fill_(False)
    assert_same(case.run(), case.oracle())


@pytest.mark.parametrize("with_tiles", [True, False])
def test_a_row_that_sees_nothing_gives_zeros(with_tiles: bool) -> None:
    case = Case("vq3", "vq3", queries=2, counts=(2, 0))
    case.exact.visible[1] = False
    case.exact.visible[0, 0] = True
    result = decode_attention_reference(case.query, case.exact, case.tiles if with_tiles else None, case.scaling)
    assert not result.output[1].any()
    assert (result.lse[1] == -torch.inf).all()
    assert not result.entropy[1].any()
    for part in (result.output[0], result.lse[0], result.entropy[0]):
        assert torch.isfinite(part).all()
        assert part.abs().sum() > 0


def test_a_single_query_that_sees_nothing_does_not_disturb_the_others() -> None:
    case = Case("vq3", "vq3", queries=3)
    expected = decode_attention_reference(case.query, case.exact, None, case.scaling)
    case.exact.visible[0, 1] = False
    result = decode_attention_reference(case.query, case.exact, None, case.scaling)
    assert not result.output[0, :, 1].any()
    assert (result.lse[0, :, 1] == -torch.inf).all()
    others = [0, 2]
    torch.testing.assert_close(result.output[:, :, others], expected.output[:, :, others])


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 1e30])
def test_what_lies_in_masked_exact_slots_changes_nothing(poison: float) -> None:
    case = Case("vq3", "fp6", queries=2)
    case.exact.visible[:, :, 4:7] = False
    clean = case.run()
    case.exact.keys[:, :, 4:7] = poison
    case.exact.values[:, :, 4:7] = poison
    assert_identical(case.run(), clean)


@pytest.mark.parametrize("tier", TIERS)
def test_what_lies_in_unused_slots_changes_nothing(tier: str) -> None:
    """0xFF bytes are NaN in bf16 scales, in FP8 and in the model's dtype."""
    clean = Case(tier, tier).run()
    poisoned = Case(tier, tier, spare_slots=1)
    pool = poisoned.keys.pools[get_codec(tier).tier_id]
    assert int((pool == -1).all(1).sum()) >= 3
    assert_identical(poisoned.run(), clean)


def test_a_missing_tile_is_not_read_from_slot_zero() -> None:
    case = Case("vq2", "vq2", counts=(2, 1))
    clean = case.run()
    assert (case.keys.pages[1, :, 1] < 0).all()
    assert int(page_slots(case.keys.pages[0, 0, 0])) == 0
    case.keys.pools[get_codec("vq2").tier_id][0] = -1
    poisoned = case.run()
    assert torch.equal(poisoned.output[1], clean.output[1])
    assert not torch.equal(poisoned.output[0], clean.output[0])


@pytest.mark.parametrize("max_scores", [1, 1 << 16])
def test_splitting_queries_gives_the_same_result(max_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(["vq175", "fp6"], "vq2", queries=7, group=3)
    whole = case.run(softcap=20.0)
    shared = ExactTokens(case.exact.keys, case.exact.values, case.exact.visible[:, :1])
    one_mask = decode_attention_reference(case.query, shared, case.tiles, case.scaling)
    lengths = []
    absorb = reference._absorb_tiles

    def counting(softmax: reference._Softmax, rows: Tensor, *rest: object) -> None:
        lengths.append(rows.shape[2])
        absorb(softmax, rows, *rest)

    monkeypatch.setattr(reference, "_absorb_tiles", counting)
    monkeypatch.setattr(reference, "_MAX_SCORES", max_scores)
    assert_same(case.run(softcap=20.0), whole)
    assert len(lengths) == 7
    assert set(lengths) == {3}
    assert_same(decode_attention_reference(case.query, shared, case.tiles, case.scaling), one_mask)


def test_large_scores_neither_overflow_nor_lose_the_lse() -> None:
    case = Case("fp6", "fp6")
    case.scaling = 40.0
    result, expected = case.run(), case.oracle()
    assert float(expected.lse.abs().max()) > 500
    torch.testing.assert_close(result.lse.double(), expected.lse, rtol=1e-5, atol=1e-3)
    assert torch.isfinite(result.output).all()
    assert (result.entropy >= 0).all()


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_each_row_and_head_reads_its_own_table(rows: int, heads: int) -> None:
    centroids, entries = get_codec("nuq2"), get_codec("vq2")
    own = {
        centroids.tier_id: gaussian(rows, heads, 4, 1, seed=8),
        entries.tier_id: gaussian(rows, heads, 256, 4, seed=9).to(torch.float16),
    }
    case = Case("vq3", "vq3", queries=2)
    states = gaussian(2, 2, 2, TILE_TOKENS, 64, seed=10)
    tiers = Case.tiers(["nuq2", "vq2"], 2, (2, 1))
    mean = gaussian(2, 2, 64, seed=11)
    case.keys, case.dense_keys = packed_side(states, tiers, mean, own_tables=own)
    case.values, case.dense_values = packed_side(states, tiers, None, own_tables=own)
    assert_same(case.run(), case.oracle())


@pytest.mark.parametrize("tier", TIERS)
def test_gathered_tiles_are_the_unpacked_ones_in_the_rotated_space(tier: str) -> None:
    case = Case(tier, tier, counts=(3, 1))
    codes, scales = reference.gather_block(case.values, 1, 3, torch.float32)
    back = (codes * scales.transpose(-1, -2)) @ rotation(64)
    torch.testing.assert_close(back.unflatten(2, (2, TILE_TOKENS)), case.dense_values[:, :, 1:], rtol=1e-5, atol=1e-5)
    assert not codes[1].any()  # row 1 has no tile 1 or 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_queries_are_computed_in_fp32(dtype: torch.dtype) -> None:
    case = Case("vq4", "fp6", queries=2)
    case.query = case.query.to(dtype)
    case.exact = ExactTokens(case.exact.keys.to(dtype), case.exact.values.to(dtype), case.exact.visible)
    assert_same(case.run(), case.oracle())


@pytest.mark.parametrize("queries", [1, 3])
def test_sinks_in_the_softmax_take_their_share(queries: int) -> None:
    case = Case("fp6", "vq2", queries=queries)
    sinks = torch.tensor([-20.0, 0.0, 2.0, 30.0])
    result = decode_attention_reference(case.query, case.exact, case.tiles, case.scaling, None, sinks)
    plain = case.run()
    left = torch.sigmoid(plain.lse - sinks[:, None])
    torch.testing.assert_close(result.output, plain.output * left.unsqueeze(-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(result.lse, torch.logaddexp(plain.lse, sinks[:, None].expand_as(plain.lse)))
    shares = torch.stack([left, 1 - left])
    mixed = torch.special.entr(shares).sum(0) / torch.log(torch.tensor(2.0)) + left * plain.entropy
    torch.testing.assert_close(result.entropy, mixed, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("first", "second"), [("fp6", "vq4"), ("vq2", "fp6"), ("exact", "nuq2"), ("vq175", "exact")])
def test_a_latent_is_value_and_part_of_the_key(first: str, second: str) -> None:
    """Keys of two parts, the first of which is the value too, mean and all."""
    case = Case(first, second, heads=1, group=4, queries=2, dims=(64, 16))
    query = 2 * gaussian(2, 4, 2, 80, seed=11)
    exact = ExactTokens(torch.cat([case.exact.keys, case.exact.values], dim=-1), case.exact.keys, case.exact.visible)
    tiles = AttentionTiles((case.keys, case.values), case.keys)
    result = decode_attention_reference(query, exact, tiles, case.scaling)
    dense_keys = torch.cat([case.dense_keys, case.dense_values], dim=-1)
    assert_same(result, dense_attention(query, exact, case.keys, dense_keys, case.dense_keys, case.scaling, None))
