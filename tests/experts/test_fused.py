"""Experts in two launches, and packed ones: put in place and taken back, in every family, resident and in slots."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_subbyte_moe
from hf_subbyte_moe.experts import FUSED_NAME, PackedExperts, PlacedExperts, engine_of
from hf_subbyte_moe.experts import fused as fused_file
from hf_subbyte_moe.experts import quantized as quantized_file
from hf_subbyte_moe.experts.fused import eager_forward, experts_modules, fused_activation
from hf_subbyte_moe.experts.weights import DiskBank
from support.experts import same, steps
from support.models import prompt
from support.moe import MOE_CONFIGS, tiny_moe


OTHERS = ("gpt_oss", "lfm2_moe")  # biases; no activation module
CUDA = torch.cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


def logits(model: Any, tokens: int = 20) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(prompt(tokens).to(model.device)).logits
    return found


@pytest.mark.parametrize("family", MOE_CONFIGS)
def test_on_a_cpu_our_function_hands_over_to_the_models_own(family: str) -> None:
    model = tiny_moe(family)
    before = model.config._experts_implementation
    expected = logits(model)
    assert (fused_activation(experts_modules(model)[0]) is None) == (family in OTHERS)
    hf_subbyte_moe.apply(model, {"experts": {}})
    assert (model.config._experts_implementation == FUSED_NAME) == (family not in OTHERS)
    assert torch.equal(logits(model), expected)
    hf_subbyte_moe.apply(model, {"experts": {"fused": False}})
    assert model.config._experts_implementation == before
    hf_subbyte_moe.apply(model, {"experts": {}})
    hf_subbyte_moe.restore(model)
    assert model.config._experts_implementation == before
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_whatever_the_model_had_before(implementation: str) -> None:
    model = tiny_moe("mixtral")
    model.set_experts_implementation(implementation)
    expected = logits(model)
    for options in ({}, {"placement": "offload", "gpu_slots": 16, "fused": True}):
        hf_subbyte_moe.apply(model, {"experts": options})
        assert model.config._experts_implementation == FUSED_NAME
        assert torch.equal(logits(model), expected)
    hf_subbyte_moe.restore(model)
    assert model.config._experts_implementation == implementation


def test_gradients_take_the_models_own_way() -> None:
    model = tiny_moe("mixtral").train()
    hf_subbyte_moe.apply(model, {"experts": {}})
    ids = prompt(6)
    model(ids, labels=ids).loss.backward()
    experts: Any = experts_modules(model)[0]
    assert experts.gate_up_proj.grad.abs().sum() > 0


def test_eager_forward_is_what_the_interface_hides() -> None:
    experts = experts_modules(tiny_moe("mixtral"))[0]
    assert eager_forward(type(experts)).__qualname__ == "MixtralExperts.forward"
    with pytest.raises(ValueError, match="Linear is not run by Transformers' experts interface"):
        eager_forward(torch.nn.Linear)


@pytest.mark.parametrize("weights", ["int4", "int4-g64", "fp8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "phimoe"])
def test_packed_experts_resident_and_in_slots(family: str, weights: str) -> None:
    model = tiny_moe(family)
    expected = logits(model)
    hf_subbyte_moe.apply(model, {"experts": {"weights": weights}})
    assert all(isinstance(module, PackedExperts) for module in experts_modules(model))
    packed = logits(model)
    change = float((packed - expected).norm() / expected.norm())
    assert 0 < change < (1e-3 if weights == "fp8" else 5e-3)
    ids = prompt(10)
    one_by_one = steps(model, ids)
    for slots in (4, 7):
        placed = {"weights": weights, "placement": "offload", "gpu_slots": slots}
        hf_subbyte_moe.apply(model, {"experts": placed})
        assert all(isinstance(module, PlacedExperts) for module in experts_modules(model))
        assert same(steps(model, ids), one_by_one)
    hf_subbyte_moe.apply(model, {"experts": {"weights": weights}})
    assert torch.equal(logits(model), packed)


def test_going_back_says_what_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_moe("mixtral")
    model.get_parameter("model.layers.1.mlp.experts.down_proj").requires_grad_(False)
    trained = [weight.requires_grad for weight in model.parameters()]
    hf_subbyte_moe.apply(model, {"experts": {"weights": "int4"}})
    packed = logits(model)
    hf_subbyte_moe.apply(model, {"experts": {"weights": "int4", "placement": "offload", "gpu_slots": 5}})
    hf_subbyte_moe.restore(model)
    assert [weight.requires_grad for weight in model.parameters()] == trained
    assert "experts were packed: their weights are now those that the bytes stand for" in caplog.text
    assert not any(isinstance(module, PackedExperts) for module in model.modules())
    assert torch.equal(logits(model), packed)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("placement", ["gpu", "offload"])
def test_packed_experts_follow_the_models_dtype(placement: str, implementation: str) -> None:
    model = tiny_moe("mixtral")
    model.set_experts_implementation(implementation)
    options = {"experts": {"weights": "int4", "placement": placement, "gpu_slots": 5}}
    hf_subbyte_moe.apply(model, options)
    expected = logits(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model.to(dtype)
        assert logits(model).dtype == dtype
        for module in experts_modules(model):
            assert {weight.dtype for weight in module.parameters()} == {torch.uint8}
    assert float((logits(model) - expected).norm() / expected.norm()) < 0.03  # the rest was rounded to bf16
    hf_subbyte_moe.restore(model.bfloat16())
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16


def test_they_are_packed_when_a_model_is_loaded(tmp_path: Path) -> None:
    model = tiny_moe("qwen3_moe")
    model.save_pretrained(tmp_path)
    hf_subbyte_moe.apply(model, {"experts": {"weights": "int4"}})
    options: Any = {"experts": {"weights": "int4"}}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=options)
    assert loaded.config.hf_subbyte_moe["experts"] == {"weights": "int4"}
    assert torch.equal(logits(loaded.cpu()), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", ["int4", "fp8"])
def test_they_are_packed_from_files_when_a_model_is_loaded_onto_disk(
    weights: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny_moe("qwen3_moe").save_pretrained(tmp_path)
    options: Any = {"experts": {"weights": weights}}
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=options, dtype=dtype).cpu()
    options = {"experts": {"weights": weights, "placement": "disk", "gpu_slots": 5}}
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=options, dtype=dtype)
    engine = engine_of(loaded)
    assert engine is not None
    assert isinstance(engine.bank, DiskBank)
    for module, other in zip(experts_modules(loaded), experts_modules(model), strict=True):
        assert isinstance(module, PackedExperts)
        assert same(list(module.parameters()), list(other.parameters()))
    assert same(steps(loaded.cpu(), prompt(10)), steps(model, prompt(10)))
    assert engine.bank.reads > 0


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "mixtral",
            {"weights": "int3"},
            "weights='int3' is not possible: one of ['model', 'int4', 'int4-g64', 'fp8']",
        ),
        ("mixtral", {"fused": "no"}, "fused='no' is not possible: true or false"),
        ("gpt_oss", {"weights": "int4"}, "weights='int4' is not possible: the kernels have no GptOssExperts"),
        ("llama", {"weights": "fp8"}, "weights='fp8' is not possible: LlamaForCausalLM has no experts"),
    ],
)
def test_errors(family: str, options: dict[str, Any], message: str) -> None:
    from support.models import tiny_model

    model = tiny_moe(family) if family != "llama" else tiny_model(family)
    with pytest.raises(ValueError, match="is not possible") as error:
        hf_subbyte_moe.apply(model, {"experts": options})
    assert message in str(error.value)
    assert not hasattr(model.config, "hf_subbyte_moe")


def test_what_packed_experts_refuse(tmp_path: Path) -> None:
    model = tiny_moe("mixtral")
    hf_subbyte_moe.apply(model, {"experts": {"weights": "int4"}})
    with pytest.raises(ValueError, match="packed experts are not saved"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="experts are packed as int4: load the model again for 'fp8'"):
        hf_subbyte_moe.apply(model, {"experts": {"weights": "fp8"}})
    with pytest.raises(ValueError, match=r"experts are packed: .*restore\(model\) before it is pickled"):
        pickle.dumps(model)


def test_a_copy_of_packed_experts_is_its_own() -> None:
    model = tiny_moe("mixtral")
    hf_subbyte_moe.apply(model, {"experts": {"weights": "int4"}})
    expected = logits(model)
    again = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.zero_()  # type: ignore[attr-defined, operator]
    assert torch.equal(logits(again), expected)
    assert torch.equal(logits(hf_subbyte_moe.restore(again)), expected)
    hf_subbyte_moe.apply(model, {"experts": {"weights": "int4", "placement": "offload", "gpu_slots": 5}})
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"restore\(model\) before it is copied or pickled"):
            attempt(model)


@pytest.mark.parametrize("case", [pytest.param(family, marks=gpu) for family in MOE_CONFIGS if family not in OTHERS])
@pytest.mark.parametrize("weights", ["model", "int4", "fp8"])
def test_on_a_gpu(case: str, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps through the kernels differ from the prompt's way by roundings."""
    model = tiny_moe(case).to("cuda", torch.bfloat16)
    if weights != "model":
        hf_subbyte_moe.apply(model, {"experts": {"weights": weights}})
    ids = prompt(6).cuda()
    monkeypatch.setattr(quantized_file, "is_few_on_gpu", lambda states: False)
    expected = steps(model, ids, 4)
    monkeypatch.undo()
    used: list[int] = []
    place = fused_file if weights == "model" else quantized_file
    call = place.expert_mlp
    monkeypatch.setattr(place, "expert_mlp", lambda *given, **named: used.append(1) or call(*given, **named))
    hf_subbyte_moe.apply(model, {"experts": {"weights": weights}})
    found = steps(model, ids, 4)
    assert len(used) == 3 * len(experts_modules(model))
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 2e-2
