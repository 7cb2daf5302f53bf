"""What a model with placed experts still does, what is refused, and how it comes back."""

import copy
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_subbyte_moe
from hf_subbyte_moe.experts import PlacedExperts, engine_of, memory, placing
from hf_subbyte_moe.experts import loading as loading_module
from hf_subbyte_moe.experts import weights as weights_module
from hf_subbyte_moe.experts.weights import DiskBank, HostBank
from support.experts import LazyLink, always, offloaded, same, steps
from support.models import prompt, tiny_model
from support.moe import MOE_CONFIGS, tiny_moe


OFFLOAD = {"experts": {"placement": "offload", "gpu_slots": 5}}
DISK = {"experts": {"placement": "disk", "gpu_slots": 5}}


def placed(model: nn.Module) -> list[PlacedExperts]:
    return [module for module in model.modules() if isinstance(module, PlacedExperts)]


@pytest.mark.parametrize("options", [OFFLOAD, DISK], ids=["offload", "disk"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_restore_leaves_no_trace(family: str, options: dict[str, Any]) -> None:
    model = tiny_moe(family)
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    weights = {name: (weight.clone(), weight.requires_grad) for name, weight in model.named_parameters()}
    config, expected = model.config.to_dict(), steps(model, prompt(12))
    hf_subbyte_moe.apply(model, options)
    assert same(expected, steps(model, prompt(12)))
    state = model.state_dict()
    assert list(state) == list(tiny_moe(family).state_dict())
    assert all(torch.equal(state[name], weight) for name, (weight, _) in weights.items())
    hf_subbyte_moe.restore(model)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config
    for name, weight in model.named_parameters():
        assert torch.equal(weight, weights[name][0])
        assert weight.requires_grad == weights[name][1]
        assert weight.is_contiguous()
    assert same(expected, steps(model, prompt(12)))


@pytest.mark.parametrize("options", [OFFLOAD, DISK], ids=["offload", "disk"])
def test_save_pretrained_writes_the_original(options: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_moe("qwen3_moe")
    model.save_pretrained(tmp_path / "before")
    hf_subbyte_moe.apply(model, options)
    expected = steps(model, prompt(12))
    model.save_pretrained(tmp_path / "after")
    for name in sorted(path.name for path in (tmp_path / "before").iterdir()):
        before, after = ((tmp_path / folder / name).read_bytes() for folder in ("before", "after"))
        if name == "config.json":
            told = json.loads(after)
            assert told.pop("hf_subbyte_moe") == {"version": 1, **options}
            assert told == json.loads(before)
        else:
            assert after == before
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "after").eval()  # its options are in config.json
    assert len(placed(again)) == 2
    bank = engine_of(again).bank  # type: ignore[union-attr]
    assert isinstance(bank, DiskBank if options is DISK else HostBank)
    close(expected, steps(again, prompt(12)))
    hf_subbyte_moe.restore(again)
    close(expected, steps(again, prompt(12)))


def close(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    """Equal but for the products of a CPU, which depend on where in memory a loaded weight begins."""
    torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v2"])
def test_loading_for_disk_keeps_experts_out_of_memory(family: str, tmp_path: Path) -> None:
    model = tiny_moe(family)
    expected = steps(model, prompt(12))
    model.save_pretrained(tmp_path)
    options = {"experts": {"placement": "disk", "gpu_slots": 4}}
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=options, dtype=torch.float32).eval()
    assert not any(hasattr(module, "_hf_hook") for module in again.modules())
    assert not hasattr(again, "hf_device_map")
    assert all(weight.device.type != "meta" for weight in again.parameters())
    close(expected, steps(again, prompt(12)))
    engine = engine_of(again)
    assert engine is not None
    assert isinstance(engine.bank, DiskBank)
    assert engine.bank.reads > 0


def test_files_of_another_dtype_are_written_anew(tmp_path: Path) -> None:
    model = tiny_moe("gpt_oss")  # its checkpoint holds experts as they are, so the loader would leave them there
    model.save_pretrained(tmp_path)
    expected = steps(model.bfloat16(), prompt(12))
    options = {"experts": {"placement": "disk", "gpu_slots": 4}}
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=options, dtype=torch.bfloat16).eval()
    assert {weight.dtype for module in placed(again) for weight in module.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(expected, steps(again, prompt(12)), atol=0.1, rtol=0.1)


def test_disk_with_two_slabs_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_KEPT_SHARE", 0.0)
    model = tiny_moe("mixtral")
    model.set_experts_implementation("batched_mm")
    expected = steps(model, prompt(30))
    hf_subbyte_moe.apply(model, {"experts": {"placement": "disk", "gpu_slots": 4, "prefetch": "gate"}})
    engine = engine_of(model)
    assert engine is not None
    link = LazyLink()
    engine.make_link = lambda: link  # copies come late: a slab that is overwritten before shows
    always(engine, "gate")
    assert same(expected, steps(model, prompt(30)))
    slab = engine.bank.layout.nbytes
    assert engine.bank.host_bytes() == 2 * slab


def test_loading_gives_each_layer_up_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's own weights are gone when the next layer's buffer is made."""
    model = tiny_moe("mixtral", num_hidden_layers=4)
    held = []
    make = memory.HostBuffer.__init__

    def counting(self: memory.HostBuffer, nbytes: int, pin: bool) -> None:
        held.append(sum(module.gate_up_proj.numel() > 0 for module in modules))  # type: ignore[union-attr]
        make(self, nbytes, pin)

    modules = [layer.mlp.experts for layer in model.model.layers]  # type: ignore[attr-defined]
    monkeypatch.setattr(memory.HostBuffer, "__init__", counting)
    offloaded(model, 8)
    assert held == [4, 3, 2, 1]


def _state(model: nn.Module) -> dict[str, Any]:
    names = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    flags = {name: (weight.requires_grad, weight.is_contiguous()) for name, weight in model.named_parameters()}
    return {"modules": names, "parameters": flags}


def _fail_in_layer(layer: int, name: str, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let a step of moving experts fail once it has come to a layer."""
    owners = {"HostBuffer": weights_module, "put": placing.Swap, "to": PreTrainedModel}
    owner: Any = owners.get(name, placing)
    real, calls = getattr(owner, name), iter(range(layer))

    def failing(*given: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return real(*given)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize(
    ("options", "step", "layer"),
    [
        (DISK, "write_files", 0),
        (DISK, "write_files", 2),
        (DISK, "DiskBank", 0),
        (DISK, "put", 1),
        (DISK, "to", 0),
        (OFFLOAD, "HostBuffer", 2),
        (OFFLOAD, "put", 0),
        (OFFLOAD, "put", 2),
        (OFFLOAD, "to", 0),
    ],
)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "stop"])
def test_an_error_while_experts_move_leaves_the_model_as_before(
    options: dict[str, Any], step: str, layer: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_moe("mixtral", num_hidden_layers=3)
    model.get_parameter("model.layers.0.mlp.experts.down_proj").requires_grad_(False)
    expected, before = steps(model, prompt(12)), _state(model)
    options = {"experts": {**options["experts"], "gpu_slots": 8}, "kv_cache": {}, "routing": {}}
    with monkeypatch.context() as broken:
        _fail_in_layer(layer, step, broken, error)
        with pytest.raises(type(error)):
            hf_subbyte_moe.apply(model, options)
    assert _state(model) == before
    assert model.config._attn_implementation == "sdpa"
    assert same(expected, steps(model, prompt(12)))
    hf_subbyte_moe.restore(model)
    assert _state(model) == before
    assert same(expected, steps(model, prompt(12)))
    hf_subbyte_moe.apply(model, options)
    assert same(expected, steps(model, prompt(12)))


@pytest.mark.parametrize(("first", "second", "step"), [(OFFLOAD, DISK, "write_files"), (DISK, OFFLOAD, "HostBuffer")])
def test_an_error_between_two_places_leaves_experts_in_the_first(
    first: dict[str, Any], second: dict[str, Any], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(12))
    hf_subbyte_moe.apply(model, first)
    engine = engine_of(model)
    assert engine is not None
    with monkeypatch.context() as broken:
        _fail_in_layer(1, step, broken, OSError(28, "No space left on device"))
        with pytest.raises(OSError, match="No space left"):
            hf_subbyte_moe.apply(model, second)
    assert engine_of(model) is engine
    assert same(expected, steps(model, prompt(12)))
    hf_subbyte_moe.apply(model, second)
    assert engine_of(model) is not engine
    assert same(expected, steps(model, prompt(12)))
    hf_subbyte_moe.restore(model)
    assert same(expected, steps(model, prompt(12)))


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(12))
    monkeypatch.setattr(weights_module.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 9))
    monkeypatch.setattr(placing, "write_files", None)
    with pytest.raises(ValueError, match=r"the disk is too small: .* need 0.0 GiB and 0.0 GiB are free in .*TMPDIR"):
        hf_subbyte_moe.apply(model, DISK)
    assert not placed(model)
    assert same(expected, steps(model, prompt(12)))


def test_moving_and_converting() -> None:
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(12))
    offloaded(model, 5)
    assert model.to("cpu") is model
    for convert in (model.half, model.bfloat16, lambda: model.to(torch.float16), lambda: model.to("meta")):
        with pytest.raises(ValueError, match=r"experts outside the model stay torch.float32: .*restore\(model\)"):
            convert()
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}  # nothing was half converted
    assert same(expected, steps(model, prompt(12)))
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match=r"restore\(model\) before it is copied or pickled"):
            attempt(model)


def test_loading_weights_empties_the_slots() -> None:
    model, other = tiny_moe("mixtral"), tiny_moe("mixtral", seed=1)
    expected = steps(other, prompt(12))
    offloaded(model, 16)
    steps(model, prompt(12))
    model.load_state_dict(other.state_dict())
    assert same(expected, steps(model, prompt(12)))
    with pytest.raises(ValueError, match=r"copied to them, not assigned: .*restore\(model\) before load_state_dict"):
        model.load_state_dict(tiny_moe("mixtral").state_dict(), assign=True)
    experts = {name: value for name, value in other.state_dict().items() if ".experts." in name}
    others = {name: value for name, value in other.state_dict().items() if ".experts." not in name}
    model.load_state_dict(experts, strict=False)
    model.load_state_dict(others, strict=False, assign=True)  # experts stay what they are
    assert same(expected, steps(model, prompt(12)))
    hf_subbyte_moe.apply(model, DISK)
    with pytest.raises(ValueError, match=r"experts lie in files: .*restore\(model\) before weights are loaded"):
        model.load_state_dict(other.state_dict())


def test_applied_again() -> None:
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(12))
    first = offloaded(model, 5)
    assert offloaded(model, 9) is first  # the bank stays
    assert first.slots == 9
    assert same(expected, steps(model, prompt(12)))
    assert first.on(torch.device("cpu")).slots.shape[0] == 9
    hf_subbyte_moe.apply(model, DISK)
    assert same(expected, steps(model, prompt(12)))
    hf_subbyte_moe.apply(model, {"experts": {"placement": "gpu"}})
    assert not placed(model)
    assert same(expected, steps(model, prompt(12)))
    offloaded(model, 5)
    hf_subbyte_moe.apply(model, {"kv_cache": {}})
    assert not placed(model)


def test_with_routing_and_cache() -> None:
    options = {"routing": {"mode": "soft", "clusters": 2, "strength": 1.0}, "kv_cache": {}}
    plain: Any = hf_subbyte_moe.apply(tiny_moe("mixtral"), options)
    both: Any = hf_subbyte_moe.apply(
        tiny_moe("mixtral"), {**options, "experts": {**OFFLOAD["experts"], "prefetch": "gate"}}
    )
    engine = engine_of(both)
    assert engine is not None
    always(engine, "gate")
    call = {"max_new_tokens": 20, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    assert same(plain.generate(prompt(30), **call).logits, both.generate(prompt(30), **call).logits)
    assert engine.counters.total("foretold") > 0


def test_generate_beams_and_batches() -> None:
    model: Any = tiny_moe("qwen3_moe")
    call = {"max_new_tokens": 12, "do_sample": False, "num_beams": 3}
    expected = model.generate(prompt(10, rows=2), **call)
    offloaded(model, 4)
    assert torch.equal(model.generate(prompt(10, rows=2), **call), expected)


def test_interrupted_generation_leaves_a_usable_model() -> None:
    model: Any = tiny_moe("mixtral", num_hidden_layers=4)
    model.set_experts_implementation("batched_mm")
    expected = steps(model, prompt(20))
    engine = offloaded(model, 8, prefetch="gate")
    engine.make_link = LazyLink
    always(engine, "gate")
    for layer in range(4):
        for after in (1, 5):
            calls = iter(range(after))

            def stop(*_: Any, calls: Any = calls) -> None:
                if next(calls, None) is None:
                    raise KeyboardInterrupt

            hook = model.model.layers[layer].mlp.gate.register_forward_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                steps(model, prompt(20))
            hook.remove()
            assert same(expected, steps(model, prompt(20)))


def test_a_copy_error_surfaces_at_the_call_that_needs_the_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(12))
    engine = offloaded(model, 5)
    read = engine.bank.slab

    def broken(layer: int, expert: int) -> torch.Tensor:
        if layer == 1:
            raise OSError("the disk is gone")
        return read(layer, expert)

    monkeypatch.setattr(engine.bank, "slab", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        steps(model, prompt(12))
    monkeypatch.setattr(engine.bank, "slab", read)
    assert same(expected, steps(model, prompt(12)))


def test_a_disk_that_cannot_be_read_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_KEPT_SHARE", 0.0)
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(12))
    hf_subbyte_moe.apply(model, {"experts": {"placement": "disk", "gpu_slots": 4}})
    engine = engine_of(model)
    assert engine is not None
    bank: Any = engine.bank
    mapped = bank._mapped
    for _ in range(3):
        bank._mapped = [{name: _Unreadable() for name in layer} for layer in mapped]
        with pytest.raises(OSError, match="the disk is gone"):
            steps(model, prompt(12))
        assert len(bank._pool) + len(bank._pool._free) == 2
    bank._mapped = mapped
    assert same(expected, steps(model, prompt(12)))


class _Unreadable:
    def __getitem__(self, expert: int) -> torch.Tensor:
        raise OSError("the disk is gone")


def test_no_gradients() -> None:
    model = tiny_moe("mixtral")
    offloaded(model, 5)
    loss = model(prompt(12), labels=prompt(12)).loss
    with pytest.raises(ValueError, match=r"experts outside the model have no gradients: .*restore\(model\)"):
        loss.backward()


def test_experts_without_tokens() -> None:
    block: Any = tiny_moe("mixtral").get_submodule("model.layers.0.mlp")
    for tokens in (0, 1, 64):
        model: Any = tiny_moe("mixtral")
        with torch.no_grad():
            for module in (block, model.model.layers[0].mlp):
                module.gate.weight.zero_()
                module.gate.weight[3] = 1.0
        hidden = torch.rand(1, tokens, 64)
        engine = offloaded(model, 4)
        with torch.no_grad():
            assert torch.equal(model.model.layers[0].mlp(hidden), block(hidden))
        assert engine.counters.total("asked") <= 2  # expert 3, and one of the others that tie


def test_memory_that_cannot_be_pinned_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        @staticmethod
        def cudaHostRegister(*_: int) -> int:  # noqa: N802 (CUDA's name)
            return 2

    monkeypatch.setattr(memory, "_cudart", Full)
    buffer = memory.HostBuffer(1 << 16, pin=True)
    assert not buffer.pinned
    assert "could not be pinned (CUDA error 2); copies run from pageable memory" in caplog.text
    buffer.tensor.fill_(7)
    assert int(buffer.tensor.sum()) == 7 << 16


@pytest.fixture
def small_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (memory, placing):
        monkeypatch.setattr(module, "available_memory", lambda: 1 << 16)
    return


@pytest.mark.usefixtures("small_host")
def test_too_little_host_memory_is_refused_before_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_moe("mixtral")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"host memory is too small: .* need 0.0 GiB and 0.0 GiB are available"):
        hf_subbyte_moe.apply(model, OFFLOAD)
    assert not placed(model)
    monkeypatch.setattr(type(model), "__init__", _never)
    with pytest.raises(ValueError, match="host memory is too small: the model's weights need"):
        AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=OFFLOAD)


def _never(self: Any, config: Any) -> None:
    assert torch.empty(0).device.type == "meta", "weights were made before memory was checked"
    _REAL(self, config)


_REAL = type(tiny_moe("mixtral")).__init__


def test_refused_by_name(tmp_path: Path) -> None:
    from accelerate import cpu_offload, disk_offload

    for offload in (cpu_offload, lambda model, **kind: disk_offload(model, tmp_path, **kind)):
        model = tiny_moe("mixtral")
        offload(model, execution_device=torch.device("cpu"))
        with pytest.raises(ValueError, match="experts: accelerate's hooks move the weights of MixtralForCausalLM"):
            hf_subbyte_moe.apply(model, OFFLOAD)
    with pytest.raises(ValueError, match="does not support LlamaForCausalLM"):
        hf_subbyte_moe.apply(tiny_model("llama"), OFFLOAD)
    for slots in (3, 0.2):
        with pytest.raises(ValueError, match=rf"gpu_slots={slots} is not possible: 3 slots, .* needs 2 in each of 2"):
            hf_subbyte_moe.apply(tiny_moe("mixtral"), {"experts": {"placement": "offload", "gpu_slots": slots}})
    model = tiny_moe("mixtral")
    model.model.layers[1].mlp.experts._is_expert_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="MixtralExperts is split over several processes"):
        hf_subbyte_moe.apply(model, OFFLOAD)
    model = tiny_moe("mixtral")
    model.model.layers[0].mlp.experts.down_proj.device_mesh = "two ranks"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="MixtralForCausalLM is sharded over several processes"):
        hf_subbyte_moe.apply(model, OFFLOAD)
    with pytest.raises(ValueError, match='prefetch="head" needs a sidecar: hf-subbyte-moe calibrate --predictor'):
        offloaded(tiny_moe("mixtral"), 5, prefetch="head")
    with pytest.raises(ValueError, match="prefetch 'gate' does not support router"):
        offloaded(tiny_moe("afmoe"), 5, prefetch="gate")


def test_accelerate_after_us() -> None:
    """Its hooks leave placeholders outside a forward; experts come from the bank (transformers#48409)."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules

    model = tiny_moe("mixtral")
    expected, state = steps(model, prompt(12)), {name: weight.clone() for name, weight in model.state_dict().items()}
    offloaded(model, 5)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert same(expected, steps(model, prompt(12)))
    remove_hook_from_submodules(model)
    hf_subbyte_moe.restore(model)
    assert same(expected, steps(model, prompt(12)))
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("device_map", "message"),
    [({"": "cpu", "lm_head": "disk"}, "give one device, or none"), ({"a": 0, "b": 1}, "give one device, or none")],
)
def test_device_maps_of_several_devices_are_refused(device_map: Any, message: str, tmp_path: Path) -> None:
    tiny_moe("mixtral").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"experts: device_map={device_map!r} is not possible: {message}")):
        AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=OFFLOAD, device_map=device_map)


def test_one_device_is_taken(tmp_path: Path) -> None:
    model = tiny_moe("mixtral")
    expected = steps(model, prompt(8))
    model.save_pretrained(tmp_path)
    for device_map in (None, "auto", "cpu", {"": "cpu"}):
        again: Any = AutoModelForCausalLM.from_pretrained(tmp_path, hf_subbyte_moe=OFFLOAD, device_map=device_map)
        assert len(placed(again)) == 2
        close(expected, steps(again.eval(), prompt(8)))
    assert loading_module._one_device({"": 0}) == torch.device("cuda", 0)


def test_every_listed_family_can_be_placed() -> None:
    from hf_subbyte_moe.routing import FAMILIES

    assert set(FAMILIES) <= set(MOE_CONFIGS)  # test_exact.py runs them all
