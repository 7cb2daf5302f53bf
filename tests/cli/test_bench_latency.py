"""``bench latency``: what can be checked without a GPU, and a small run on one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV2Config, PreTrainedModel
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli import app
from hf_subbyte_moe.cli.bench_latency import STATIC, STOCK, SYSTEMS, _Rows, roofline_ms
from hf_subbyte_moe.cli.generate_timing import cache_bytes, fill, spare_bytes
from hf_subbyte_moe.cli.offload_timing import Decoder
from hf_subbyte_moe.cli.shapes import SHAPES, cached_widths
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.roofline import shape_of
from subbyte_kernels.formats import page_tiers


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_real_shapes_need_a_gpu() -> None:
    result = CliRunner().invoke(app, ["bench", "latency", "--model", "toy", "--model", "Mixtral-8x7B"])
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_on_a_cpu_the_toy_runs_what_needs_no_gpu(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    command = ["bench", "latency", "--model", "toy", "--layers", "2", "--context", "64", "--fill", "--tokens", "16"]
    result = CliRunner().invoke(app, [*command, "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == [STOCK, "cache", "+ attention", "+ experts", "+ router"]
    for row in rows:
        assert (row["device"], row["gpus"], row["layers"], row["peak_gb"]) == ("CPU", 1, 2, None)
        assert row["ms_step"] > 0
        assert 0 < row["share_of_roofline"] < 1
    for name in (STATIC, "+ graph", "+ fused kernels"):
        refused = CliRunner().invoke(app, [*command, "--system", name])
        assert isinstance(refused.exception, ValueError)
        assert "is not possible here" in str(refused.exception)
        assert "on a CUDA device alone" in str(refused.exception)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "+ graph"], "--system '+ graph' is not possible here: the steps of a model whose parts"),
        (["--system", "cache", "--system", "+ fused kernels"], "--system '+ fused kernels' is not possible here"),
        (["--weights", "int4"], "--weights int4 is not possible on several ranks"),
        (["--model", "Mixtral-8x7B"], "--model toy is not possible on 3 ranks: it has 2 KV heads"),
    ],
)
def test_what_ranks_cannot_share_is_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process group is waited for."""
    monkeypatch.setenv("WORLD_SIZE", "3" if "--model" in words else "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refused = CliRunner().invoke(app, ["bench", "latency", "--model", "toy", *words])
    assert isinstance(refused.exception, ValueError)
    assert message in str(refused.exception)


def test_a_step_reads_active_weights_and_the_cache() -> None:
    shape = shape_of(SHAPES["toy"](), "toy")
    expert, layers = 3 * 64 * 96 * 2, 4
    attention = (2 * 64 * 64 + 2 * 64 * 32) * 2
    dense = layers * (attention + 8 * 64 * 2 + 2 * 64 * 2) + (64 + 128 * 64) * 2
    assert roofline_ms(shape, 1, 1000, 1e9) == pytest.approx((dense + layers * 2 * expert + 1000) / 1e6)
    both = 8 * (1 - (6 / 8) ** 2)  # experts that two tokens are expected to choose
    assert roofline_ms(shape, 1, 1000, 1e9, gpus=4) == pytest.approx(((dense + layers * 2 * expert) / 4 + 1000) / 1e6)
    assert roofline_ms(shape, 2, 0, 1e9) == pytest.approx((dense + layers * both * expert) / 1e6)


def test_a_row_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    cell: dict[str, Any] = {"model": "toy", "layers": 4, "weights": "bf16", "context": 8, "batch": 1, "gpus": 1}
    for system, policy, ms in (("a", "error", 1.0), ("b", "error", 2.0), ("a", "uniform", 4.0), ("a", "error", 3.0)):
        _Rows(file, {"torch": "x"}).add({**cell, "system": system, "policy": policy, "ms_generate": ms})
    kept = json.loads(file.read_text())
    assert kept["conditions"] == {"torch": "x"}
    found = [(row["system"], row["policy"], row["ms_generate"]) for row in kept["rows"]]
    assert found == [("b", "error", 2.0), ("a", "uniform", 4.0), ("a", "error", 3.0)]
    first = {**cell, "system": "b", "policy": "error"}
    for other in ({"gpus": 2}, {"layers": 2}):
        _Rows(file, {}).add({**first, **other})
    assert len(json.loads(file.read_text())["rows"]) == 5


def test_rows_from_before_they_named_a_policy_and_gpus_have_what_they_were_measured_with(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    cell: dict[str, Any] = {"model": "toy", "layers": 4, "weights": "bf16", "context": 8, "batch": 1, "system": "a"}
    file.write_text(json.dumps({"rows": [{**cell, "ms_generate": 1.0}]}))
    rows = _Rows(file, {})
    rows.add({**cell, "policy": "error", "gpus": 1, "ms_generate": 2.0})
    assert [(row["policy"], row["gpus"]) for row in rows.rows] == [("uniform:vq2", 1), ("error", 1)]
    rows.add({**cell, "policy": "uniform:vq2", "gpus": 1, "ms_generate": 3.0})
    assert [row["ms_generate"] for row in rows.rows] == [2.0, 3.0]


def deepseek_v2() -> PreTrainedModel:
    """Four heads, whose keys and values are made of one latent of 64."""
    torch.manual_seed(0)
    config = DeepseekV2Config(
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        topk_method="greedy",
        vocab_size=128,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def toy() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(SHAPES["toy"](), dtype=torch.bfloat16)
    return model.eval()


@pytest.mark.parametrize(
    ("make", "sides"), [(deepseek_v2, ((1, 64), (1, 16))), (toy, ((2, 16), (2, 16)))], ids=["latents", "heads"]
)
def test_a_cache_is_filled_with_what_the_model_itself_would_cache(make: Any, sides: Any) -> None:
    model = make()
    assert cached_widths(model) == [sides] * model.config.num_hidden_layers
    ids = torch.ones(2, 700, dtype=torch.int64)
    plain = DynamicCache(config=model.config)
    fill(model, plain, ids[:, 1:])
    random = torch.Generator().manual_seed(0)
    for layer in plain.layers:
        for states, (heads, width) in zip((layer.keys, layer.values), sides, strict=True):
            expected = torch.randn(2, heads, 699, width, dtype=model.dtype, generator=random)
            assert torch.equal(states, expected)
    size = model.config.num_hidden_layers * 2 * 699 * 2 * sum(heads * width for heads, width in sides)
    assert cache_bytes(plain) == size
    assert spare_bytes(plain) == 0

    options: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
    mask = torch.ones_like(ids)
    generate: Any = model.generate
    assert generate(ids, attention_mask=mask, **{CACHE_KW: plain}, **options).shape == (2, 703)
    hf_subbyte_moe.apply(model, {"kv_cache": {"policy": "uniform:vq2"}})
    packed = EntropySubbyteCache(model.config, policy="uniform:vq2")
    fill(model, packed, ids[:, 1:])
    assert packed.get_seq_length() == 699
    assert generate(ids, attention_mask=mask, **{CACHE_KW: packed}, **options).shape == (2, 703)
    assert packed.get_seq_length() == 702


def test_offloaded_experts_are_timed_out_of_such_a_cache_too() -> None:
    model = deepseek_v2()
    with torch.no_grad():
        decoder = Decoder(model, cached_widths(model), DynamicCache(config=model.config))
        assert decoder.step() > 0
    assert not decoder.fused


def test_room_for_more_tiles_is_not_read() -> None:
    model = toy()
    hf_subbyte_moe.apply(model, {"kv_cache": {"policy": "uniform:vq2"}})
    cache = EntropySubbyteCache(model.config, policy="uniform:vq2")
    fill(model, cache, torch.ones(1, 700, dtype=torch.int64))
    store = cache.packed_layers[0].rows.store
    assert sum(store.tile_counts().values()) == 2 * 2 * 4  # sides, heads, tiles
    held, spare = cache.allocated_bytes(), spare_bytes(cache)
    store.make_room(store.pool_keys(0, page_tiers(store.pages(0)[0, :, 0]).numpy()), 1, 50)
    assert cache.allocated_bytes() > held
    assert cache.allocated_bytes() - held == spare_bytes(cache) - spare


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_system_has_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    systems = [name for name in SYSTEMS if name != STATIC]
    command = ["bench", "latency", "--model", "toy", "--context", "300", "--tokens", "24", "--json", str(file)]
    result = CliRunner().invoke(app, [*command, *(part for name in systems for part in ("--system", name))])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == systems
    assert all(0 < row["share_of_roofline"] < 1 and row["ms_step"] <= row["ms_generate"] for row in rows)
