"""Every policy on made-up measurements."""

import itertools
import re

import numpy as np
import pytest
from numpy.typing import NDArray

from hf_subbyte_moe.codecs import codec_of, get_codec
from hf_subbyte_moe.config import BUDGET_POLICIES, POLICIES, TIERS, KVCacheConfig
from hf_subbyte_moe.policy import (
    CANDIDATES,
    KEYS,
    VALUES,
    Measured,
    Policy,
    budget_bits,
    make_policy,
    side_bits,
    unmeasured,
)
from hf_subbyte_moe.policy.allocation import Floats
from hf_subbyte_moe.policy.policies import prior_errors


HEAD_DIM = 64
HIGH, MIDDLE, LOW = (get_codec(name).tier_id for name in ("fp6", "vq3", "vq175"))


def policy_of(name: str) -> Policy:
    return make_policy(KVCacheConfig(policy=name))


def bits_of(policy: Policy, head_dim: int = HEAD_DIM) -> Floats:
    row = [codec.format.bits_per_value(head_dim) for codec in policy.tiers]
    return np.array([row, row])


def sizes_of(chunks: list[Measured]) -> Floats:
    return np.array([[chunk.tiles * 128.0 * HEAD_DIM] * 2 for chunk in chunks])


def measured(entropy: list[float], errors: Floats | None = None, tiles: int = 4) -> Measured:
    heads = len(entropy)
    if errors is None:
        errors = prior_errors(CANDIDATES, heads)
    return Measured(0, tiles, np.array(entropy), np.full(heads, 0.5), errors, CANDIDATES)


def choose(name: str, chunks: list[Measured], average: float = 2.5) -> NDArray[np.int64]:
    """Tiers under an average of bits a value."""
    policy = policy_of(name)
    sizes = sizes_of(chunks)
    budget = average * float(sizes.sum()) * len(chunks[0].entropy)
    return tier_ids(policy, policy.choose(chunks, bits_of(policy), sizes, budget))


def tier_ids(policy: Policy, chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tier ids of a policy's numbers."""
    return np.array([codec.tier_id for codec in policy.tiers])[chosen]


def spent(tiers: NDArray[np.int64], chunks: list[Measured]) -> float:
    """Average bits a value of a choice."""
    bits = np.vectorize(lambda tier: codec_of(tier).format.bits_per_value(HEAD_DIM))(tiers)
    tiles = np.array([chunk.tiles for chunk in chunks])
    return float((bits.mean((1, 2)) * tiles).sum() / tiles.sum())


def random_errors(heads: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-3, 1, (heads, 2, 1))
    return scale * np.array([codec.relative_error for codec in CANDIDATES])


@pytest.mark.parametrize("name", [*POLICIES, *(f"uniform:{tier}" for tier in TIERS)])
def test_every_policy_chooses_among_its_own_tiers(name: str) -> None:
    policy = policy_of(name)
    chunks = [measured([1.0, 3.0, 6.0]), measured([2.0, 4.0, 5.0], tiles=2)]
    chosen = policy.choose(chunks, bits_of(policy), sizes_of(chunks), 1e7)
    assert chosen.shape == (2, 3, 2)
    assert chosen.dtype == np.int64
    assert set(chosen.flatten()) <= set(range(len(policy.tiers)))


@pytest.mark.parametrize("tier", TIERS)
def test_uniform_gives_one_tier_to_everything(tier: str) -> None:
    chosen = choose(f"uniform:{tier}", [measured([0.0, 9.0, np.nan])])
    assert (chosen == get_codec(tier).tier_id).all()


@pytest.mark.parametrize(
    ("entropy", "tier"),
    [(0.0, LOW), (2.5, LOW), (2.5001, MIDDLE), (4.5, MIDDLE), (4.5001, HIGH), (12.0, HIGH), (np.nan, HIGH)],
)
def test_entropy_follows_the_written_thresholds(entropy: float, tier: int) -> None:
    """Above 4.5 bits fp6, above 2.5 bits vq3, else vq175; what was not measured is on the safe side."""
    chosen = choose("entropy", [measured([entropy, 0.0])])
    assert chosen[0, 0].tolist() == [tier, tier]
    assert chosen[0, 1].tolist() == [LOW, LOW]


def test_entropy_looks_at_each_chunk_by_itself() -> None:
    chosen = choose("entropy", [measured([5.0]), measured([3.0]), measured([1.0])])
    assert chosen[:, 0, KEYS].tolist() == [HIGH, MIDDLE, LOW]


@pytest.mark.parametrize("name", [name for name in BUDGET_POLICIES if name != "uniform"])
@pytest.mark.parametrize("average", [2.0, 2.1, 2.5, 3.0, 4.2, 6.25])
@pytest.mark.parametrize("seed", range(4))
def test_the_budget_is_kept_and_used(name: str, average: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chunks = [
        measured(list(rng.uniform(0, 8, 8)), random_errors(8, seed), tiles=3),
        measured(list(rng.uniform(0, 8, 8)), random_errors(8, seed + 50), tiles=1),
    ]
    used = spent(choose(name, chunks, average), chunks)
    # a step of one unit (3 of 64 tiles, 2.25 bits at most) may not fit any more
    assert average - 2.25 * 3 / 64 <= used <= average + 1e-9


def test_error_gives_bits_where_the_error_is() -> None:
    errors = prior_errors(CANDIDATES, 4) * 1e-6
    errors[2, VALUES] *= 1e6
    chosen = choose("error", [measured([3.0] * 4, errors)], average=2.5)
    bits = np.vectorize(lambda tier: codec_of(tier).format.bits_per_value(HEAD_DIM))(chosen)[0]
    assert bits[2, VALUES] == bits.max() > np.delete(bits.flatten(), 5).max()


def test_error_ignores_entropy() -> None:
    errors = random_errors(4, 1)
    first = choose("error", [measured([0.0, 1.0, 2.0, 3.0], errors)])
    assert np.array_equal(first, choose("error", [measured([np.nan, 8.0, 0.0, 1.0], errors)]))


def test_heads_without_error_get_the_fewest_bits() -> None:
    errors = random_errors(4, 2)
    errors[1] = 0
    chosen = choose("error", [measured([3.0] * 4, errors)], average=6.0)
    assert chosen[0, 1].tolist() == [LOW, LOW]


def test_entropy_rank_never_gives_more_bits_to_less_entropy() -> None:
    entropy = [5.0, 0.5, 3.0, 7.0, 2.0, 6.0]
    chosen = choose("entropy_rank", [measured(entropy)], average=2.75)
    bits = np.vectorize(lambda tier: codec_of(tier).format.bits_per_value(HEAD_DIM))(chosen)[0]
    for side in (KEYS, VALUES):
        ranked = bits[np.argsort(entropy), side]
        assert (np.diff(ranked) >= 0).all()
        assert ranked[-1] > ranked[0]


def test_entropy_rank_ignores_measured_errors() -> None:
    entropy = [5.0, 0.5, 3.0, 7.0]
    first = choose("entropy_rank", [measured(entropy, random_errors(4, 1))])
    assert np.array_equal(first, choose("entropy_rank", [measured(entropy, random_errors(4, 2))]))


@pytest.mark.parametrize("unknown", [np.nan, 3.0])
def test_heads_of_one_entropy_are_treated_alike(unknown: float) -> None:
    """Without an order among them the ranking has nothing to add to the prior."""
    chunks = [measured([unknown] * 4)]
    assert np.array_equal(choose("entropy_rank", chunks), choose("error", chunks))


def test_unmeasured_heads_get_a_choice_from_the_prior() -> None:
    chunks = [unmeasured(CANDIDATES, 3, first_tile=5, tiles=2)]
    assert np.isnan(chunks[0].entropy).all()
    assert np.isnan(chunks[0].mass).all()
    assert (chunks[0].first_tile, chunks[0].tiles) == (5, 2)
    chosen = choose("error", chunks, average=2.75)
    bits = np.vectorize(lambda tier: codec_of(tier).format.bits_per_value(HEAD_DIM))(chosen)[0]
    assert (bits[:, KEYS] >= bits[:, VALUES]).all()
    assert bits[:, KEYS].sum() > bits[:, VALUES].sum()


def test_the_prior_is_the_error_of_each_tier_with_keys_weighing_more() -> None:
    prior = prior_errors(CANDIDATES, 2)
    assert prior.shape == (2, 2, len(CANDIDATES))
    assert prior[1, VALUES].tolist() == [codec.relative_error for codec in CANDIDATES]
    assert (prior[:, KEYS] > prior[:, VALUES]).all()


def test_candidates_are_in_order_of_bits_and_no_policy_picks_registers() -> None:
    bits = [codec.format.bits_per_value(HEAD_DIM) for codec in CANDIDATES]
    assert bits == sorted(bits)
    assert "vq3o" not in [codec.name for codec in CANDIDATES]


@pytest.mark.parametrize("name", ["error", "entropy_rank"])
def test_sides_of_different_width_share_a_budget(name: str) -> None:
    """A latent of 512 channels and a rotary key of 64, which never gets less than 4 bits."""
    policy, dims = policy_of(name), (512, 64)
    bits = side_bits(policy.tiers, dims, latent=True)
    assert bits[1].min() == get_codec("vq4").format.bits_per_value(64)
    chunks = [measured([1.0])]
    sizes = np.array([[4 * 128.0 * dim for dim in dims]])
    budget = budget_bits(KVCacheConfig(policy=name, bits=2.6), dims, latent=True)
    assert budget == 2.6
    chosen = policy.choose(chunks, bits, sizes, 2.6 * float(sizes.sum()))
    spent_bits = sum(bits[side, chosen[0, 0, side]] * sizes[0, side] for side in (0, 1))
    assert 2.2 * sizes.sum() < spent_bits <= 2.6 * sizes.sum()
    with pytest.raises(ValueError, match=r"bits=2 is out of reach at widths 512 and 64: .* give 2\.0"):
        budget_bits(KVCacheConfig(policy=name, bits=2), dims, latent=True)


@pytest.mark.parametrize(("bits", "head_dim"), [(1.9, 64), (6.3, 64), (1.87, 128), (6.2, 128), (16, 128)])
def test_a_budget_out_of_reach_is_refused_with_the_possible_range(bits: float, head_dim: int) -> None:
    low, high = {64: ("2.000", "6.250"), 128: ("1.875", "6.125")}[head_dim]
    message = (
        f"bits={bits} is out of reach at head_dim {head_dim}: the tiers "
        f"['vq175', 'vq2', 'vq3', 'vq4', 'fp6'] give {low} to {high} bits a value"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        budget_bits(KVCacheConfig(bits=bits), (head_dim, head_dim))


@pytest.mark.parametrize("name", BUDGET_POLICIES)
@pytest.mark.parametrize(("bits", "head_dim"), [(2, 64), (6.25, 64), (1.875, 128), (3.1, 72)])
def test_a_budget_within_reach_is_kept_as_given(name: str, bits: float, head_dim: int) -> None:
    kept = budget_bits(KVCacheConfig(policy=name, bits=bits), (head_dim, head_dim))
    assert kept == bits
    assert isinstance(kept, float)


@pytest.mark.parametrize(("head_dim", "bits"), [(8, 3.75), (16, 2.75), (24, 2.5), (64, 2.5), (256, 2.5)])
def test_the_default_budget_gives_way_to_small_heads(head_dim: int, bits: float) -> None:
    """16 bits of scale a token are 2 bits a value at 8 channels: vq175 alone needs 3.75."""
    assert budget_bits(KVCacheConfig(), (head_dim, head_dim)) == bits


@pytest.mark.parametrize("name", ["entropy", "uniform:fp8"])
def test_policies_that_fix_their_own_bits_have_no_budget(name: str) -> None:
    assert budget_bits(KVCacheConfig(policy=name), (8, 8)) is None


def test_the_reverse_ranking_gives_bits_where_the_documents_take_them() -> None:
    entropy = [5.0, 0.5, 3.0, 7.0]
    bits = {}
    for name in ("entropy_rank", "entropy_rank_inverse", "residual_entropy"):
        chosen = choose(name, [measured(entropy)], average=3.0)
        bits[name] = np.vectorize(lambda tier: codec_of(tier).format.bits_per_value(HEAD_DIM))(chosen)[0].sum(-1)
    order = np.argsort(entropy)
    assert (np.diff(bits["entropy_rank"][order]) >= 0).all()
    assert (np.diff(bits["entropy_rank_inverse"][order]) <= 0).all()
    assert bits["entropy_rank_inverse"][order[0]] > bits["entropy_rank_inverse"][order[-1]]
    assert np.array_equal(bits["entropy_rank_inverse"], bits["residual_entropy"])


def test_only_the_residual_policy_asks_for_the_entropy_of_the_chunk_alone() -> None:
    assert [name for name in POLICIES if policy_of(name).needs.residual] == ["residual_entropy"]


def test_random_is_seeded_by_the_layer_and_looks_at_nothing() -> None:
    config = KVCacheConfig(policy="random")
    chunks = [measured([1.0, 9.0, 3.0, 4.0], random_errors(4, 1)), measured([2.0] * 4, random_errors(4, 2))]
    sizes, bits = sizes_of(chunks), bits_of(policy_of("random"))
    budget = 3.0 * float(sizes.sum()) * 4
    chosen = [make_policy(config, layer).choose(chunks, bits, sizes, budget) for layer in (3, 3, 4)]
    assert np.array_equal(chosen[0], chosen[1])
    assert not np.array_equal(chosen[0], chosen[2])
    other = [measured([4.0] * 4, random_errors(4, 5)), measured([7.0] * 4, random_errors(4, 6))]
    assert np.array_equal(make_policy(config, 3).choose(other, bits, sizes, budget), chosen[0])


@pytest.mark.parametrize("average", [2.0, 2.25, 2.55, 3.25, 5.0, 6.25])
def test_uniform_gives_every_head_and_side_the_same_bits(average: float) -> None:
    tiles, heads = 40, 3
    chunks = [unmeasured(CANDIDATES, heads, tile, 1) for tile in range(7, 7 + tiles)]
    chosen = choose("uniform", chunks, average)
    bits = np.vectorize(lambda tier: codec_of(tier).format.bits_per_value(HEAD_DIM))(chosen)
    widest = max(high - low for low, high in itertools.pairwise(np.unique(bits))) if len(np.unique(bits)) > 1 else 0
    assert (abs(bits.mean(0) - average) <= widest / tiles + 1e-9).all()  # a head and side: within one tile's step
    assert len(np.unique(bits)) == (1 if average in (2.0, 2.25, 3.25, 6.25) else 2)
    # every few neighbouring tiles too, over all heads and sides
    windows = np.lib.stride_tricks.sliding_window_view(bits.mean((1, 2)), 5).mean(-1)
    assert (abs(windows - average) <= widest / 3).all()


def test_uniform_differs_between_layers_in_its_turns_alone() -> None:
    config = KVCacheConfig(policy="uniform")
    chunks = [unmeasured(CANDIDATES, 2, tile, 1) for tile in range(30)]
    sizes, bits = sizes_of(chunks), bits_of(policy_of("uniform"))
    first, second = (
        make_policy(config, layer).choose(chunks, bits, sizes, 2.75 * 2 * sizes.sum()) for layer in (0, 1)
    )
    assert not np.array_equal(first, second)
    assert abs(first.mean() - second.mean()) <= 1 / 30
