"""Calibration: what is measured, the sidecar, what follows from it, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.config import KVCacheConfig, SubByteConfig
from hf_subbyte_moe.policy import (
    CANDIDATES,
    KEYS,
    SIDECAR_NAME,
    VALUES,
    Calibration,
    calibrate,
    load_calibration,
    remember_sidecar,
)
from hf_subbyte_moe.policy.calibration import model_identity
from hf_subbyte_moe.registration import _bring_sidecars
from support.models import prompt, tiny_model


def made_up(tiny: Any, seed: int = 0, **changes: Any) -> Calibration:
    """A calibration of a tiny model whose numbers are made up."""
    identity = model_identity(tiny.config)
    heads, dim = identity["num_key_value_heads"], identity["head_dim"]
    rng = np.random.default_rng(seed)
    errors = np.array([codec.relative_error for codec in CANDIDATES])
    layers = range(identity["num_hidden_layers"])
    fields: dict[str, Any] = {
        "model": identity,
        "tiers": tuple(codec.name for codec in CANDIDATES),
        "errors": {layer: 10.0 ** rng.uniform(-3, 0, (heads, 2, 1)) * errors for layer in layers},
        "metrics": {layer: torch.eye(dim).repeat(heads, 1, 1) for layer in layers},
        "notes": {"texts": 2},
    }
    return Calibration(**{**fields, **changes})


@pytest.fixture(scope="module")
def measured() -> tuple[Any, Calibration]:
    model = tiny_model("llama").float().eval()
    weight = model.model.layers[0].self_attn.o_proj.weight
    with torch.no_grad():
        weight[:, weight.shape[1] // 2 :] = 0  # nobody reads what the second half of layer 0's query heads say
    windows = torch.cat([prompt(260 + 128, rows=2), prompt(260 + 128, rows=2, seed=7)])
    return model, calibrate(model, windows)


def test_costs_are_positive_and_fall_with_the_bits(measured: tuple[Any, Calibration]) -> None:
    _, found = measured
    for errors in found.errors.values():
        assert np.isfinite(errors).all()
        assert (errors >= 0).all()
    total = np.stack(list(found.errors.values())).sum((0, 1))  # [2, C]
    assert (np.diff(total, axis=-1) < 0).all()


def test_a_head_that_nobody_reads_costs_nothing(measured: tuple[Any, Calibration]) -> None:
    _, found = measured
    read, unread = found.errors[0]
    assert (read > 0).all()
    assert unread.max() < 1e-6 * read.max()


def test_the_cost_is_the_divergence_that_a_small_error_causes() -> None:
    """Against really quantizing one side of one head of a layer, with the labels' noise of a few texts."""
    torch.manual_seed(0)
    model = tiny_model("llama").float().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # predictions that depend on something
    windows = torch.cat([prompt(260 + 128, rows=4, seed=seed) for seed in range(4)])
    found = calibrate(model, windows)
    layer, head, tier = 1, 0, CANDIDATES.index(get_codec("vq3"))
    for side in (KEYS, VALUES):
        true = np.mean([divergence(model, window, layer, head, side) for window in windows[8:]])
        assert 0.4 * true < found.errors[layer][head, side, tier] < 2.5 * true


def divergence(model: Any, window: torch.Tensor, layer: int, head: int, side: int) -> float:
    """Mean KL over the last 128 tokens with one head's packed tokens in ``vq3``."""
    from transformers.cache_utils import DynamicCache

    from hf_subbyte_moe.policy.calibrate import _side

    logs = []
    for quantize in (False, True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(window[None, :-128], **{CACHE_KW: cache})
            if quantize:
                held = cache.layers[layer].keys if side == KEYS else cache.layers[layer].values
                part = held[0, :, 4:132].clone()
                codec = _side(part, side, torch.eye(part.shape[-1]).repeat(part.shape[0], 1, 1))
                held[0, head, 4:132] = codec.round_trip(part, get_codec("vq3"))[head]
            logs.append(model(window[None, -128:], **{CACHE_KW: cache}).logits[0].double().log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def test_calibrating_leaves_the_model_as_it_was() -> None:
    model = tiny_model("llama").float().eval()
    model.lm_head.weight.requires_grad_(False)
    before = {name: (parameter.requires_grad, parameter.clone()) for name, parameter in model.named_parameters()}
    calibrate(model, prompt(260 + 128, rows=2))
    for name, parameter in model.named_parameters():
        wanted, value = before[name]
        assert parameter.requires_grad == wanted
        assert torch.equal(parameter, value)
        assert parameter.grad is None


def test_the_same_seed_gives_the_same_numbers(measured: tuple[Any, Calibration]) -> None:
    model, found = measured
    windows = torch.cat([prompt(260 + 128, rows=2), prompt(260 + 128, rows=2, seed=7)])
    again = calibrate(model, windows)
    for layer, errors in found.errors.items():
        np.testing.assert_allclose(again.errors[layer], errors, rtol=1e-3)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 400), (4, 387)])
def test_too_little_text_is_refused(rows: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"at least 2 texts of 388 tokens, not \\[{rows}, {tokens}\\]"):
        calibrate(tiny_model("llama"), prompt(tokens, rows=rows))


def test_latent_caches_are_refused() -> None:
    with pytest.raises(ValueError, match="'deepseek_v2' caches latents, which cannot be calibrated"):
        calibrate(tiny_model("deepseek_v2"), prompt(400, rows=2))


# ------------------------------------------------------------------------------------------- the sidecar


def test_a_sidecar_brings_back_what_was_saved(tmp_path: Path) -> None:
    model = tiny_model("llama")
    given = made_up(model)
    given.save(tmp_path / "deep" / SIDECAR_NAME)
    read = load_calibration(tmp_path / "deep" / SIDECAR_NAME)
    assert (read.model, read.tiers, read.notes) == (given.model, given.tiers, given.notes)
    for layer, errors in given.errors.items():
        np.testing.assert_allclose(read.errors[layer], errors, rtol=1e-6)
        assert torch.equal(read.metrics[layer].float(), given.metrics[layer])


@pytest.mark.parametrize("bits", [2.25, 2.75, 3.25, 6.25])
def test_one_budget_is_spent_over_all_layers_where_it_helps_most(bits: float) -> None:
    model = tiny_model("llama")
    given = made_up(model)
    dim = int(given.model["head_dim"])
    scale = 16 / dim - 16 / 64
    policies = given.layer_policies(KVCacheConfig(policy="calibrated", bits=bits + scale))
    assert sorted(policies) == sorted(given.errors)
    record = np.array([codec.format.bits_per_value(dim) for codec in CANDIDATES])
    spent = np.stack([record[policy.choice] for policy in policies.values()])
    assert bits + scale - 2.25 / spent.size <= spent.mean() <= bits + scale + 1e-9
    errors = np.stack([given.errors[layer] for layer in policies])
    worst = errors[..., 0].ravel().argsort()
    low, high = spent.ravel()[worst[:2]].mean(), spent.ravel()[worst[-2:]].mean()
    assert low <= high


def packed_tiers(cache: EntropySubbyteCache) -> dict[int, list[list[str]]]:
    tiers: dict[int, list[list[str]]] = {}
    for choice in hf_subbyte_moe.explain(cache).choices:
        tiers.setdefault(choice.layer, []).append([choice.side, choice.tier])
    return tiers


@pytest.mark.parametrize("rows", [1, 2])
def test_the_cache_packs_in_the_tiers_of_the_sidecar(rows: int, tmp_path: Path) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    file = tmp_path / "any.safetensors"
    made_up(model).save(file)
    cache = EntropySubbyteCache(model.config, bits=4.0, sidecar=str(file))
    assert cache.kv_config.policy == "calibrated"
    with torch.no_grad():
        model(prompt(400, rows=rows), **{CACHE_KW: cache})
    policies = load_calibration(file).layer_policies(cache.kv_config)
    found = hf_subbyte_moe.explain(cache).choices
    for choice in found:
        side = ("keys", "values").index(choice.side)
        tier = policies[choice.layer].choice[choice.head, side]
        assert choice.tier == CANDIDATES[tier].name
        assert choice.error == pytest.approx(load_calibration(file).errors[choice.layer][choice.head, side, tier])
        assert choice.entropy is not None
    assert len({choice.tier for choice in found}) > 1
    tiles = cache.layers[0].rows.store.tile_counts()
    assert sum(tiles.values()) == rows * 2 * 2 * policies[0].choice.shape[0]


def test_a_sidecar_in_the_models_folder_is_found(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe={"kv_cache": {"bits": 4.0}})

    def policy() -> str:
        output = model.generate(prompt(5), max_new_tokens=2, return_dict_in_generate=True, do_sample=False)
        return str(cache_of(output).kv_config.policy)

    assert policy() == "error"
    made_up(model).save(tmp_path / SIDECAR_NAME)
    assert policy() == "calibrated"


def test_a_sidecar_that_came_from_the_hub_is_found_by_the_models_name(tmp_path: Path) -> None:
    model = tiny_model("llama")
    made_up(model).save(tmp_path / SIDECAR_NAME)
    model.config.name_or_path = "somebody/some-model"
    assert EntropySubbyteCache(model.config, bits=4.0).kv_config.policy == "error"
    remember_sidecar("somebody/some-model", tmp_path / SIDECAR_NAME)
    assert EntropySubbyteCache(model.config, bits=4.0).kv_config.policy == "calibrated"
    assert EntropySubbyteCache(model.config, bits=4.0, policy="error").kv_config.policy == "error"


def test_another_revision_without_a_sidecar_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    made_up(model).save(tmp_path / SIDECAR_NAME)
    model.config.name_or_path = "somebody/some-model"

    def cached_file(name: str, file: str, revision: str, **_: Any) -> str | None:
        return str(tmp_path / file) if revision == "calibrated" else None

    monkeypatch.setattr("hf_subbyte_moe.registration.cached_file", cached_file)
    options = SubByteConfig(kv_cache=KVCacheConfig(bits=4.0))
    for revision, policy in (("calibrated", "calibrated"), ("main", "error")):
        _bring_sidecars(model, options, {"revision": revision})
        assert EntropySubbyteCache(model.config, bits=4.0).kv_config.policy == policy


def test_a_caller_may_name_another_policy_than_the_models_sidecar_serves(tmp_path: Path) -> None:
    model = tiny_model("llama")
    made_up(model).save(tmp_path / SIDECAR_NAME)
    hf_subbyte_moe.apply(model, {"kv_cache": {"bits": 4.0, "sidecar": str(tmp_path / SIDECAR_NAME)}})
    for config, policy in (
        ({}, "calibrated"),
        ({"policy": "error"}, "error"),
        ({"codebook": "queries"}, "calibrated"),
    ):
        output = model.generate(
            prompt(5),
            max_new_tokens=2,
            return_dict_in_generate=True,
            cache_implementation="entropy_subbyte",
            cache_config=config,
        )
        assert cache_of(output).kv_config.policy == policy


def test_the_calibrated_codebook_chooses_keys_codes_by_the_stored_metric(tmp_path: Path) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    plain = made_up(model)
    heads, dim = plain.model["num_key_value_heads"], plain.model["head_dim"]
    narrow = torch.diag(torch.logspace(0.5, -1.5, dim)).repeat(heads, 1, 1)
    made_up(model, metrics=dict.fromkeys(plain.metrics, narrow)).save(tmp_path / "file.safetensors")
    read = {}
    for codebook in ("universal", "calibrated", "exact"):
        options: dict[str, Any] = {"policy": "uniform:vq2", "codebook": codebook}
        if codebook == "calibrated":
            options["sidecar"] = str(tmp_path / "file.safetensors")
        cache = EntropySubbyteCache(model.config, **(options if codebook != "exact" else {"policy": "uniform:exact"}))
        with torch.no_grad():
            model(prompt(700), **{CACHE_KW: cache})
        read[codebook] = cache.layers[0].dequantize()
    cost = {
        name: float((((read[name][0] - read["exact"][0]) @ narrow) * (read[name][0] - read["exact"][0])).sum())
        for name in ("universal", "calibrated")
    }
    assert cost["calibrated"] < 0.8 * cost["universal"]
    assert torch.equal(read["calibrated"][1], read["universal"][1])


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("options", [{"policy": "calibrated"}, {"codebook": "calibrated"}])
def test_without_a_sidecar_what_needs_one_is_refused(options: dict[str, Any]) -> None:
    (name, _), *_ = options.items()
    with pytest.raises(ValueError, match=f"{name}='calibrated' needs the sidecar .*: hf-subbyte-moe calibrate MODEL"):
        EntropySubbyteCache(tiny_model("llama").config, **options)


def test_a_sidecar_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no sidecar at .*gone.safetensors"):
        EntropySubbyteCache(tiny_model("llama").config, sidecar=str(tmp_path / "gone.safetensors"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"hidden_size": 5}}, "a model with hidden_size 5, not "),
        ({"model": {"model_type": "gpt9"}}, "a model with model_type 'gpt9', not 'llama'"),
        ({"tiers": ("vq2", "vq4")}, r"measured the tiers \['vq2', 'vq4'\], not \['vq175'"),
        ({"errors": {0: np.zeros((1, 2, 3))}}, r"layer 0 holds no finite errors of shape \["),
        ({"errors": {0: np.full((2, 2, 5), np.nan)}}, "layer 0 holds no finite errors"),
        ({"errors": {0: np.ones((2, 2, 5))}}, r"knows the layers \[0\], not \[0, 1\]"),
        (
            {"metrics": {0: torch.eye(3).repeat(2, 1, 1), 1: torch.eye(3).repeat(2, 1, 1)}},
            "layer 0 holds no metric of",
        ),
    ],
)
def test_a_sidecar_of_another_model_or_other_tiers_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    if "model" in change:
        change = {"model": {**model_identity(model.config), **change["model"]}}
    made_up(model, **change).save(tmp_path / SIDECAR_NAME)
    with pytest.raises(ValueError, match=message):
        EntropySubbyteCache(model.config, bits=4.0, sidecar=str(tmp_path / SIDECAR_NAME))


def test_other_files_and_newer_versions_are_refused(tmp_path: Path) -> None:
    model, file = tiny_model("llama"), tmp_path / "file.safetensors"
    file.write_bytes(b"no safetensors at all")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_calibration(file)
    save_file({"x": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match="holds no calibration"):
        load_calibration(file)
    made_up(model).save(file)
    tensors = load_file(file)
    save_file(tensors, file, metadata={"subbyte_calibration": json.dumps({"version": 2})})
    with pytest.raises(ValueError, match="is of version 2; this release reads up to version 1"):
        load_calibration(file)
