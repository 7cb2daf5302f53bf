"""The calculator: parameters as published, bytes as measured, and no measurement faster than its floor."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig
from typer.testing import CliRunner

from hf_subbyte_moe import cli
from hf_subbyte_moe.cli.bench_latency import _WEIGHT_BITS, PACKED, with_packed_projections
from hf_subbyte_moe.cli.shapes import config_of
from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.roofline import H200, LayerCache, Shape, read_config, shape_of, step, steps


ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "eval" / "configs" / "models"
RESULTS = ROOT / "eval" / "results"
KERNEL_ROWS = ROOT / "kernels" / "benchmarks" / "results" / "decode_attention.json"
SCALE_BITS = 16 / 128  # of a token's scale, at head_dim 128


@cache
def shape(name: str, layers: int | None = None) -> Shape:
    config = read_config(str(CONFIGS / f"{name.lower()}.json"))
    config.num_hidden_layers = layers or config.num_hidden_layers
    return shape_of(config, name)


def rows_of(path: Path, key: str = "rows") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))[key]
    return found


@pytest.mark.parametrize(
    ("name", "parameters", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),  # mistral.ai, Mixtral of experts
        ("mixtral-8x22b", 141, 39),  # mistral.ai, Cheaper, better, faster, stronger
        ("qwen3-30b-a3b", 30.5, 3.3),  # arXiv 2505.09388
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),  # arXiv 2412.19437
    ],
)
def test_parameters_are_those_that_were_published(name: str, parameters: float, active: float) -> None:
    made = shape(name)
    assert made.parameters / 1e9 == pytest.approx(parameters, rel=0.005)
    embeddings = made.parameters - made.dense_parameters - made.moe_layers * made.experts * made.expert_parameters
    counted = [made.active_parameters / 1e9, (made.active_parameters + embeddings) / 1e9]  # people count both ways
    assert min(abs(count - active) for count in counted) < 0.02 * active


def test_fp8_weights_are_counted_as_published() -> None:
    made = shape("deepseek-v3")
    assert made.total_bytes / made.parameters == pytest.approx(1, rel=0.01)
    assert made.expert_bytes == pytest.approx(3 * 7168 * 2048, rel=0.001)


def row_bits(row: dict[str, Any]) -> tuple[float, float]:
    if row["k_tier"] == row["v_tier"] == "mix-2.5":
        return (row["code_bits"] + SCALE_BITS,) * 2
    return tuple(get_codec(row[side]).format.bits_per_value(128) for side in ("k_tier", "v_tier"))


def test_every_measured_kernel_row_reaches_the_share_that_is_computed() -> None:
    """Bytes from the model's config alone give the share of copy bandwidth that the benchmark counted, within 15 %."""
    copy_rate = 1e9 * json.loads(KERNEL_ROWS.read_text(encoding="utf-8"))["conditions"]["copy_gbs"]
    assert pytest.approx(copy_rate, rel=0.01) == H200.memory_rate
    rows = [row for row in rows_of(KERNEL_ROWS) if row["us"] is not None]
    assert len(rows) > 50
    for row in rows:
        layer = shape(row["shape"]).layers[0]
        size = row["batch"] * layer.packed_bytes(row["context"], row_bits(row), KVCacheConfig())
        share = size / H200.memory_rate / (row["us"] / 1e6)
        assert share == pytest.approx(row["copy_share"], rel=0.15), row


def test_no_plain_attention_beats_its_floor() -> None:
    """A pure read may pass a copy's rate slightly."""
    rows = [row for row in rows_of(KERNEL_ROWS, "baselines") if row["us"] is not None and row["candidate"]]
    assert rows
    shares = []
    for row in rows:
        size = row["batch"] * shape(row["shape"]).layers[0].plain_bytes(row["context"])
        shares.append(size / H200.memory_rate / (row["us"] / 1e6))
    assert max(shares) < 1.15
    assert max(shares) > 0.85  # and the best of them reach it


def test_no_measured_generation_beats_its_floor() -> None:
    """Rows of whole models, of 4 layers of Mixtral's shape."""
    config = read_config(str(CONFIGS / "mixtral-8x7b.json"))
    config.num_hidden_layers = 4
    made = shape_of(config)
    for row in rows_of(RESULTS / "generate_speed.json"):
        packed = row["cache"] != "dynamic"
        floor = step(made, row["context"], row["batch"], 1, 2.125 if packed else None)
        assert floor.ms < 1.15 * row["ms_mean"], row


def test_every_measured_step_reaches_the_share_that_is_computed() -> None:
    """Of whole models, from their configs alone, beside bytes that were counted while they ran."""
    rows = rows_of(RESULTS / "latency.json")
    assert {row["model"] for row in rows} >= {"Qwen3-30B-A3B", "Mixtral-8x7B", "Mixtral-8x22B"}
    for row in rows:
        made = shape_of(config_of(row["model"], row["layers"]), row["model"])
        made = replace(made, expert_bytes=made.expert_bytes * _WEIGHT_BITS[row["weights"]] / _WEIGHT_BITS["bf16"])
        made = with_packed_projections(made) if row["system"] == PACKED else made
        assert row["policy"] == "uniform:vq2"
        bits = None if row["system"].startswith("stock") else get_codec("vq2").format.bits_per_value(128)
        floor = step(made, row["context"], row["batch"], row.get("gpus", 1), bits)
        assert floor.ms / row["ms_generate"] == pytest.approx(row["share_of_roofline"], rel=0.15), row


def test_no_step_on_several_gpus_beats_its_floor() -> None:
    rows = rows_of(RESULTS / "distributed.json")
    assert {row["gpus"] for row in rows} == {1, 2}
    for row in rows:
        config = read_config(str(CONFIGS / f"{row['model']}.json"))
        config.num_hidden_layers = row["layers"]
        bits = None if row["cache"] == "bf16" else 2.5
        floor = step(shape_of(config, row["model"]), row["context"], row["batch"], row["gpus"], bits)
        assert floor.ms == pytest.approx(row["floor_ms"])
        assert floor.ms < row["ms"]


def test_a_batch_reads_the_experts_that_it_needs() -> None:
    made = shape("mixtral-8x7b")
    assert made.distinct_experts(1) == pytest.approx(2)
    assert made.distinct_experts(2) == pytest.approx(8 * (1 - 0.75**2))
    assert made.distinct_experts(1000) == pytest.approx(8)
    one, many = (step(made, 1024, batch, 1) for batch in (1, 64))
    assert many.weights_read < made.total_bytes
    assert many.weights_read - one.weights_read == pytest.approx(
        made.moe_layers * (made.distinct_experts(64) - 2) * made.expert_bytes
    )
    assert many.cache_read == 64 * one.cache_read


def test_cache_is_split_by_rows_and_heads_and_no_further() -> None:
    made = shape("mixtral-8x7b")  # 8 KV heads
    whole, eighth, more = (step(made, 4096, 1, gpus) for gpus in (1, 8, 64))
    assert eighth.cache_a_gpu == whole.cache_a_gpu / 8
    assert more.cache_a_gpu == eighth.cache_a_gpu
    assert more.weights_a_gpu == whole.weights_a_gpu / 64
    assert whole.sent_a_gpu == 0
    assert eighth.sent_a_gpu == pytest.approx(2 * 32 * 2 * 7 / 8 * 4096 * 2)
    latent = shape("deepseek-v3")
    assert step(latent, 4096, 1, 8).cache_a_gpu == step(latent, 4096, 1, 1).cache_a_gpu
    assert step(latent, 4096, 8, 8).cache_a_gpu == step(latent, 4096, 1, 1).cache_a_gpu


def test_a_layer_with_a_window_keeps_and_reads_no_more() -> None:
    layer = LayerCache(2, (64, 64), 8, window=100)
    assert layer.plain_bytes(1000) == 100 * 2 * 128 * 2
    assert layer.packed_bytes(1000, (2.0, 2.0), KVCacheConfig()) == layer.plain_bytes(1000)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "mxfp4"}, 4.25),
    ],
)
def test_quantized_experts_weigh_what_their_files_do(quantization: dict[str, Any], bits: float) -> None:
    config = MixtralConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=100)
    config.quantization_config = quantization
    made = shape_of(config)
    assert made.expert_bytes == pytest.approx(made.expert_parameters * bits / 8)


def test_what_cannot_be_computed_is_refused() -> None:
    config = MixtralConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, vocab_size=100)
    config.quantization_config = {"quant_method": "sorcery"}
    with pytest.raises(ValueError, match="'sorcery'"):
        shape_of(config)
    with pytest.raises(ValueError, match="gpus=12"):
        step(shape("mixtral-8x7b"), 1, 1, 12)
    with pytest.raises(ValueError, match="batch=0"):
        step(shape("mixtral-8x7b"), 1, 0, 1)


def test_the_command_needs_no_weights(tmp_path: Path) -> None:
    report = tmp_path / "numbers.json"
    file = str(CONFIGS / "mixtral-8x22b.json")
    arguments = ["explain", file, "--context", "131072", "--batch", "4", "--gpus", "8", "--json", str(report)]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "150"})
    assert result.exit_code == 0, result.output
    assert "computed, not measured" in result.output
    plain, packed = json.loads(report.read_text())["steps"]
    wanted = steps(shape("mixtral-8x22b"), 131072, 4, 8)
    assert [plain["ms"], packed["ms"]] == [made.ms for made in wanted]
    assert packed["ms"] < plain["ms"]
    assert CliRunner().invoke(cli.app, ["explain", file, "--text", file]).exit_code == 1


def test_the_committed_table_is_what_the_configs_give() -> None:
    result = json.loads((ROOT / "eval" / "results" / "roofline.json").read_text(encoding="utf-8"))
    assert result["computed"] is True
    for row in result["rows"]:
        assert step(shape(row["model"]), row["context"], row["batch"], row["gpus"], row["bits"]).ms == pytest.approx(
            row["ms"]
        )
