"""Codes chosen under a metric: what is minimized, what stays as it was, and what comes out of a real cache."""

import pytest
import torch
from torch import Tensor

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.codecs.codebooks import universal_table
from hf_subbyte_moe.codecs.shaping import Shaping, pack_shaped, second_moment, shapes
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.ops import Order, nearest_entries, normalize_tokens, pack_codes, pack_tiles, unpack_tiles
from support.models import prompt, tiny_model
from support.packing import CPU, gaussian, rotation


TIERS = [codec.name for codec in codecs() if shapes(codec)]
HEADS = torch.tensor([1, 0, 1])


def table_of(tier: str) -> Tensor:
    return universal_table(get_codec(tier).format, CPU)[0, 0].float()


def anisotropic(dim: int) -> Tensor:
    """``[2, D, D]`` moments whose eigenvalues differ by a factor of a thousand, in other directions for each head."""
    basis = torch.linalg.qr(gaussian(2, dim, dim, seed=9)).Q
    sizes = torch.logspace(0, -3, dim)
    return (basis * sizes) @ basis.transpose(-1, -2)


def costs(error: Tensor, metric: Tensor) -> Tensor:
    """``[M]`` mean cost of ``[M, 128, D]`` errors."""
    return ((error @ metric) * error).sum(-1).mean(-1)


def decoded(tier: str, records: Tensor, dim: int, order: Order = Order.KEYS) -> Tensor:
    fmt = get_codec(tier).format
    return unpack_tiles(records, fmt, table_of(tier)[None], None, rotation(dim), None, torch.float32, order)


def test_all_vector_tiers_without_registers_can_be_shaped() -> None:
    assert sorted(TIERS) == ["vq175", "vq2", "vq3", "vq4"]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("order", [Order.KEYS, Order.VALUES])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_the_plain_metric_gives_the_nearest_codes(tier: str, order: Order, dim: int) -> None:
    codec, tiles, mean = get_codec(tier), gaussian(3, 128, dim, seed=1) + 2, gaussian(3, dim, seed=2)
    plain = Shaping(torch.eye(dim).repeat(2, 1, 1))
    shaped = pack_shaped(tiles, HEADS, codec, table_of(tier), rotation(dim), mean, order, plain)
    unit, rms = normalize_tokens((tiles - mean[:, None]) @ rotation(dim).t())
    table = table_of(tier)
    codes = nearest_entries(unit.reshape(-1, table.shape[1]), table).view(3, 128, -1)
    scale = rms * unit.norm(dim=-1, keepdim=True) / table[codes].flatten(2).norm(dim=-1, keepdim=True)
    nearest = pack_codes(codes, scale, codec.format, order, dim)
    assert shaped.shape == nearest.shape
    assert (shaped != nearest).float().mean() < 1e-3  # ties, and scales that round the other way


@pytest.mark.parametrize("tier", TIERS)
def test_errors_cost_much_less_under_their_metric(tier: str) -> None:
    dim, codec = 64, get_codec(tier)
    moment = anisotropic(dim)
    tiles = gaussian(3, 128, dim, seed=3)
    shaping = Shaping(moment)
    shaped = pack_shaped(tiles, HEADS, codec, table_of(tier), rotation(dim), None, Order.KEYS, shaping)
    nearest = pack_tiles(tiles, codec.format, table_of(tier), rotation(dim), None, Order.KEYS, None)
    metric = rotation(dim).t() @ moment[HEADS] @ rotation(dim)  # of what is not rotated
    cost = [costs(decoded(tier, records, dim) - tiles, metric) for records in (shaped, nearest)]
    assert (cost[0] < {"vq175": 0.75, "vq2": 0.7, "vq3": 0.5, "vq4": 0.4}[tier] * cost[1]).all()
    # each head by its own metric: with the other's, the gain is gone
    wrong = pack_shaped(tiles, 1 - HEADS, codec, table_of(tier), rotation(dim), None, Order.KEYS, shaping)
    assert (costs(decoded(tier, wrong, dim) - tiles, metric) > cost[1]).all()


def test_no_single_code_could_be_better() -> None:
    """After the second pass, the last group's codes are the best with all others as they are."""
    dim, table = 16, table_of("vq175")
    shaping = Shaping(anisotropic(dim))
    unit, _ = normalize_tokens(gaussian(3, 128, dim, seed=4))
    codes, _ = shaping.encode(unit, HEADS, table)
    chosen = table[codes].flatten(2)
    best = costs_of_tokens(chosen - unit, shaping.metric[HEADS])
    for entry in range(0, len(table), 7):
        other = chosen.clone()
        other[..., -4:] = table[entry]
        assert (costs_of_tokens(other - unit, shaping.metric[HEADS]) >= best - 1e-4).all()


def costs_of_tokens(error: Tensor, metric: Tensor) -> Tensor:
    return ((error @ metric) * error).sum(-1)


def test_the_scale_keeps_the_length_under_the_metric() -> None:
    dim, table = 32, table_of("vq2")
    shaping = Shaping(anisotropic(dim))
    unit, _ = normalize_tokens(gaussian(3, 128, dim, seed=5))
    codes, scale = shaping.encode(unit, HEADS, table)
    lengths = [costs_of_tokens(states, shaping.metric[HEADS]) for states in (unit, scale * table[codes].flatten(2))]
    torch.testing.assert_close(lengths[0], lengths[1])


def test_tiles_are_independent_of_their_neighbours() -> None:
    dim, table = 64, table_of("vq2")
    shaping = Shaping(anisotropic(dim))
    unit, _ = normalize_tokens(gaussian(40, 128, dim, seed=6))
    heads = torch.arange(40) % 2
    codes, scale = shaping.encode(unit, heads, table)
    alone = shaping.encode(unit[33:34], heads[33:34], table)
    assert torch.equal(alone[0], codes[33:34])
    torch.testing.assert_close(alone[1], scale[33:34])


@pytest.mark.parametrize("fill", [0.0, 1e-30, 3.0])
def test_degenerate_moments_and_tokens_stay_finite(fill: float) -> None:
    dim = 64
    moment = second_moment(torch.full((2, 50, dim), fill))
    assert torch.isfinite(moment).all()
    torch.testing.assert_close(moment.diagonal(dim1=-2, dim2=-1).mean(-1), torch.ones(2))
    codec = get_codec("vq2")
    for size in (0.0, 1e-30, 65504.0):
        tiles = size * gaussian(3, 128, dim, seed=7).clamp(-1, 1)
        records = pack_shaped(tiles, HEADS, codec, table_of("vq2"), rotation(dim), None, Order.KEYS, Shaping(moment))
        back = decoded("vq2", records, dim)
        assert torch.isfinite(back).all()
        assert (back.norm(dim=-1) <= 3 * tiles.norm(dim=-1) + 1e-30).all()


def test_codes_that_belong_to_another_layout_are_refused() -> None:
    codes, scales = torch.zeros(1, 128, 16, dtype=torch.int64), torch.ones(1, 128, 1)
    with pytest.raises(ValueError, match=r"codes must be \[1, 128, 32\], not \[1, 128, 16\]"):
        pack_codes(codes, scales, get_codec("vq3").format, Order.KEYS, 64)
    with pytest.raises(ValueError, match="tier 'fp6' stores more than codes and scales"):
        pack_codes(codes, scales, get_codec("fp6").format, Order.KEYS, 64)


def read_prompt(codebook: str, rows: int = 1) -> tuple[EntropySubbyteCache, EntropySubbyteCache]:
    """A packed cache and an exact one that read the same prompt."""
    model = hf_subbyte_moe.apply(tiny_model("llama"), {"kv_cache": {}})
    weight = model.model.layers[0].self_attn.q_proj.weight  # queries that are large in few directions
    with torch.no_grad():
        weight.mul_(torch.logspace(0.5, -1.5, 16).repeat(len(weight) // 16)[:, None])
    caches = []
    for options in ({"policy": "uniform:vq2", "codebook": codebook}, {"policy": "uniform:exact"}):
        cache = EntropySubbyteCache(model.config, **options)
        with torch.no_grad():
            model(prompt(700, rows=rows), **{CACHE_KW: cache})
        caches.append(cache)
    return caches[0], caches[1]


def test_a_prompts_own_queries_choose_its_keys_codes_and_not_its_values() -> None:
    plain, exact = read_prompt("universal")
    shaped, _ = read_prompt("queries")
    rows = [cache.layers[0].rows for cache in (plain, shaped, exact)]
    held = (cache.layers[0].dequantize() for cache in (plain, shaped, exact))
    keys, values = zip(*((key[0], value[0]) for key, value in held), strict=True)
    assert torch.equal(values[0], values[1])
    assert not torch.equal(keys[0], keys[1])
    moments = rows[1].codecs._moments[0].float()
    metric = rotation(keys[0].shape[-1]).t() @ moments @ rotation(keys[0].shape[-1])
    cost = [costs(keys[number] - keys[2], metric).sum() for number in (0, 1)]
    assert cost[1] < 0.8 * cost[0]


def test_rows_have_moments_of_their_own_that_move_with_them() -> None:
    cache, _ = read_prompt("queries", rows=2)
    before = cache.layers[0].rows.codecs._moments.clone()
    assert not torch.equal(before[0], before[1])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(cache.layers[0].rows.codecs._moments, before[[1, 0]])
