"""The harness's baselines: their codes against plain formulas, their bits, and our simulated codes against ours."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.patching import use_packed_attention
from support.models import CONFIGS, prompt, tiny_model
from support.scripts import EVAL, scripts_of


MODULES = ("simulated", "peers", "ours", "stock")
OPTIONS: dict[str, dict[str, Any]] = {
    "kivi": {"nbits": 2, "group_size": 16},
    "lloyd-max": {"nbits": 3},
    "fp8": {},
    "min-max": {"nbits": 4, "group_size": 16},
    "literal": {},
    "simulated": {"tier": "vq2"},
    "hqq": {"nbits": 4},
    "quanto": {"nbits": 4},
}


@pytest.fixture(scope="module")
def baselines() -> Iterator[Any]:
    with scripts_of(EVAL, "baselines", *(f"baselines.{name}" for name in MODULES)) as found:
        found.BASELINES, found.MissingPackageError = found.baselines.BASELINES, found.baselines.MissingPackageError
        yield found


def states(tokens: int, head_dim: int = 64, rows: int = 2, seed: int = 0) -> Tensor:
    """``[rows, 2, tokens, head_dim]`` with channels of different size and offset."""
    generator = torch.Generator().manual_seed(seed)
    channel = torch.rand(head_dim, generator=generator) * 3 + 0.2
    offset = torch.randn(head_dim, generator=generator)
    return torch.randn(rows, 2, tokens, head_dim, generator=generator) * channel + offset


def logits(model: Any, ids: Tensor, prefill: int, cache: Any) -> Tensor:
    """Logits of every step behind the prompt."""
    with torch.no_grad():
        model(ids[:, :prefill], **{CACHE_KW: cache})
        steps = [model(ids[:, step : step + 1], **{CACHE_KW: cache}).logits for step in range(prefill, ids.shape[1])]
    return torch.cat(steps, dim=1)


# ------------------------------------------------------------------ codes


@pytest.mark.parametrize(("nbits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_lloyd_max_has_the_distortion_of_the_books(baselines: Any, nbits: int, distortion: float) -> None:
    gaussian = torch.randn(1, 1, 1024, 512, generator=torch.Generator().manual_seed(1))
    decoded = baselines.peers.LloydMaxSide(nbits, 4, 128).round_trip(gaussian)
    error = (decoded - gaussian).square().sum() / gaussian.square().sum()
    assert error == pytest.approx(distortion, rel=0.02)


def test_kivi_groups_keys_by_channel_and_values_by_token(baselines: Any) -> None:
    given = states(64)
    for keys in (True, False):
        decoded = baselines.peers.KiviSide(2, 32, 128, 0, keys).round_trip(given)
        for row, head, token, channel in ((0, 0, 0, 0), (1, 1, 63, 63), (0, 1, 32, 31)):
            first = (token if keys else channel) // 32 * 32
            line = given[row, head, :, channel] if keys else given[row, head, token]
            group = line[first : first + 32]
            step = (group.max() - group.min()) / 3
            value = given[row, head, token, channel]
            wanted = group.min() + step * ((value - group.min()) / step).round()
            assert decoded[row, head, token, channel] == pytest.approx(wanted.item(), abs=0.01)


def test_kivis_residual_is_as_published(baselines: Any) -> None:
    keys, values = (baselines.peers.KiviSide(2, 32, 128, 0, side) for side in (True, False))
    assert [keys.due(length) for length in (1, 127, 128, 300, 384)] == [0, 0, 128, 256, 384]
    assert [values.due(length) for length in (1, 128, 129, 300)] == [0, 0, 1, 172]


def test_the_literal_code_is_the_documents(baselines: Any) -> None:
    given = states(256)
    given[0, 1, 7, 3] = 90.0
    decoded = baselines.peers.LiteralSide(2, 3.5, 4, 128).round_trip(given)
    for row in range(2):
        for head in range(2):
            tensor = given[row, head]
            mean, std = tensor.mean(-1, keepdim=True), tensor.std(-1, keepdim=True)
            mask = (tensor - mean).abs() > 3.5 * std
            rest = tensor.clone()
            rest[mask] = 0.0
            centroids = torch.linspace(rest.min(), rest.max(), 4)
            wanted = centroids[(rest.unsqueeze(-1) - centroids).abs().argmin(-1)]
            wanted[mask] = tensor[mask].to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(decoded[row, head], wanted)
    assert decoded[0, 1, 7, 3] == 88.0


def test_fp8_keeps_the_prompts_scale(baselines: Any) -> None:
    side = baselines.peers.Fp8Side()
    given = states(256)
    error = (side.round_trip(given) - given).abs() / given.abs().clamp(min=0.1)
    assert error.max() < 2**-4
    assert side.round_trip(given * 100).abs().max() == pytest.approx(given.abs().max().item())


@pytest.mark.parametrize("tier", ["vq175", "vq3"])
def test_nothing_changed_is_our_own_tier(baselines: Any, tier: str) -> None:
    model = tiny_model("mixtral")
    use_packed_attention(model)
    ids = prompt(500, rows=2)
    for prefill in (380, 400):
        found = logits(model, ids, prefill, baselines.ours.Simulated(tier).cache(model.config))
        ours = EntropySubbyteCache(model.config, policy=f"uniform:{tier}")
        exact = logits(model, ids, prefill, DynamicCache(config=model.config))
        wanted = logits(model, ids, prefill, ours)
        assert (found - wanted).abs().max() < 0.05 * (wanted - exact).abs().max()


def test_what_is_left_out_costs_what_it_should(baselines: Any) -> None:
    given = states(512)
    given[..., 5] += 30

    def error(**options: Any) -> float:
        side = baselines.ours.VectorSide(baselines.ours.Simulated("vq2", **options), "vq2", keys=True)
        return float((side.round_trip(given) - given).square().mean())

    whole = error(scale="least-squares")
    assert error() > whole
    assert error(scale="rms") > whole
    assert error(mean=False) > 5 * whole
    assert error(rotation=False) > whole
    assert error(outlier_sigma=3.0) < error()
    assert error(channel_power=1.0) != error()


# ------------------------------------------------------------------ bits and caches


def test_bits_are_counted_whole(baselines: Any) -> None:
    config = CONFIGS["llama"](head_dim=64)

    def size(name: str, tokens: int, **options: Any) -> Any:
        cache = baselines.BASELINES[name].from_dict("here", options).cache(config)
        cache.update(states(tokens), states(tokens, seed=1), 0)
        cache.update(states(tokens), states(tokens, seed=1), 1)
        return cache.size()

    assert size("lloyd-max", 260, nbits=3).bits == 3.25
    assert size("lloyd-max", 100, nbits=3).bits is None
    kivi = size("kivi", 300, nbits=2)
    assert (kivi.code_bits, kivi.bits) == (2, 3)
    assert kivi.bits_total == pytest.approx((3 * (256 + 172) + 32 * (44 + 128)) / 600)
    assert kivi.bits_total_16 == pytest.approx((3 * (256 + 172) + 16 * (44 + 128)) / 600)
    assert size("fp8", 300).bits_total_16 == pytest.approx(8, abs=0.01)
    assert size("simulated", 512, tier="vq2").bits == 2.25
    mixed = size("simulated", 512, tier="vq3", value_tier="vq175")
    assert mixed.bits == pytest.approx((3.25 + 2.0) / 2)
    assert size("simulated", 512, tier="vq2", protect=1).bits == 4.25
    kept = size("simulated", 512, tier="vq2", outlier_sigma=3.0, rotation=False).bits - 2.25
    assert 0 < kept < 24 * 0.02
    assert 2 < size("literal", 512).bits < 2.2


def test_rows_and_batches_do_not_change_a_baseline(baselines: Any) -> None:
    model = tiny_model("llama")
    use_packed_attention(model)
    ids = prompt(420, rows=3)
    for name in ("kivi", "lloyd-max", "fp8", "literal", "min-max", "simulated"):
        made = baselines.BASELINES[name].from_dict(name, OPTIONS[name])
        whole = logits(model, ids, 400, made.cache(model.config))
        alone = logits(model, ids[1:2], 400, made.cache(model.config))
        torch.testing.assert_close(whole[1:2], alone, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", ["hqq", "quanto"])
def test_stock_caches_run_or_say_what_to_install(baselines: Any, name: str) -> None:
    model = tiny_model("llama", head_dim=64)
    use_packed_attention(model)
    made = baselines.BASELINES[name].from_dict(name, OPTIONS[name])
    package = {"hqq": "hqq", "quanto": "optimum"}[name]
    if importlib.util.find_spec(package) is None:
        with pytest.raises(baselines.MissingPackageError, match="not installed: pip install "):
            made.cache(model.config)
        return
    if name == "quanto":  # min-max is meant to be the same
        given = states(300)
        side = baselines.peers.MinMaxSide(4, 64)
        cache = made.cache(model.config)
        cache.update(given, given, 0)
        apart = (cache.layers[0]._quantized_keys - side.round_trip(given)).abs() > 0.05
        assert apart.float().mean() < 0.01  # where a value lies half-way, and the fp16 step decides
    ids = prompt(410, rows=2)
    cache = made.cache(model.config)
    found = logits(model, ids, 400, cache)
    exact = logits(model, ids, 400, DynamicCache(config=model.config))
    assert 0 < (found - exact).abs().max() < 5
    assert cache.size().bits == 4.5
    torch.testing.assert_close(found[1:], logits(model, ids[1:], 400, made.cache(model.config)), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("kivi", {}, "here lacks 'nbits'"),
        ("kivi", {"nbits": 2, "group": 3}, r"unknown key 'group' in here; there are \['nbits', 'group_size'"),
        ("kivi", {"nbits": 2, "residual": 100}, "here.residual=100 is not possible: a multiple of group_size=32"),
        ("lloyd-max", {"nbits": 5}, r"here.nbits=5 is not possible: one of \[2, 3, 4\]"),
        ("literal", {"sigma": 0}, "here.sigma=0 is not possible"),
        ("simulated", {"tier": "nuq2"}, r"here.tier='nuq2' is not possible: one of \['vq4', 'vq3', 'vq2', 'vq175'\]"),
        ("simulated", {"tier": "vq2", "scale": "max"}, "here.scale='max' is not possible"),
        ("hqq", {"nbits": 5}, "here.nbits=5 is not possible"),
        ("quanto", {"nbits": 4, "axis": 1}, "here.axis=1 is not possible: 0 or -1"),
    ],
)
def test_wrong_options_are_refused(baselines: Any, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        baselines.BASELINES[name].from_dict("here", options)


def test_models_of_other_kinds_are_refused(baselines: Any) -> None:
    for kind in ("gemma2", "deepseek_v2"):
        with pytest.raises(ValueError, match="baselines hold plain keys and values of full attention only"):
            baselines.peers.LloydMax(3).cache(CONFIGS[kind]())
