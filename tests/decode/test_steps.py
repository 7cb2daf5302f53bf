"""Steps at fixed addresses without a graph, on the CPU, against the cache's ordinary steps."""

import copy
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, TextStreamer

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache, FixedAddressError, count_packed_reads
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.config import DecodeConfig, SubByteConfig
from hf_subbyte_moe.decode import StepRunner, runner
from hf_subbyte_moe.decode.graph import CaptureError, GraphedStep
from subbyte_kernels.small_linear import PackedMatrix
from support.models import left_padded, prompt, tiny_model


EXACT = {"policy": "uniform:exact", "window": 8, "sinks": 2}
LOSSY = {"bits": 4.0, "window": 8, "sinks": 2}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes steps at fixed addresses, too."""
    monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))


def generate(model: Any, ids: torch.Tensor, **options: Any) -> Any:
    settings: dict[str, Any] = {"max_new_tokens": 80, "do_sample": False, "output_logits": True}
    torch.manual_seed(7)
    return model.generate(ids, return_dict_in_generate=True, **{**settings, **options})


def both(kind: str, cache: dict[str, Any]) -> tuple[Any, Any]:
    """The same model with ordinary steps and with steps at fixed addresses."""
    plain = hf_subbyte_moe.apply(tiny_model(kind), {"kv_cache": cache})
    stepped = hf_subbyte_moe.apply(
        tiny_model(kind), {"kv_cache": cache, "decode": {"cuda_graph": True, "fused": False}}
    )
    return plain, stepped


def assert_same(left: Any, right: Any) -> None:
    assert torch.equal(left.sequences, right.sequences)
    for one, other in zip(left.logits, right.logits, strict=True):
        assert torch.equal(one, other)


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "num_return_sequences": 2},
    "chunked prefill": {"prefill_chunk_size": 60},
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("kind", "mode", "cache"),
    [
        ("llama", "sampling", EXACT),
        ("llama", "chunked prefill", LOSSY),
        ("mixtral", "greedy", LOSSY),
        ("qwen3_moe", "sampling", LOSSY),
        ("deepseek_v2", "greedy", LOSSY),
    ],
)
def test_steps_equal_ordinary_ones_bit_for_bit(kind: str, mode: str, cache: dict[str, Any]) -> None:
    plain, stepped = both(kind, cache)
    ids = prompt(200)
    made = generate(stepped, ids, **MODES[mode])
    assert_same(generate(plain, ids, **MODES[mode]), made)
    steps = stepped.forward.graphed(cache_of(made))
    assert steps is not None
    assert steps.steps.left < 120  # they were taken
    assert cache_of(made).layers[0].rows.store.counts.min() >= 2


@pytest.mark.usefixtures("on_cpu")
def test_rows_of_different_length_pack_at_different_steps() -> None:
    plain, stepped = both("mixtral", LOSSY)
    ids, mask = left_padded([prompt(40, seed=1), prompt(190, seed=2), prompt(3, seed=3)])
    made = generate(stepped, ids, attention_mask=mask, max_new_tokens=140)
    assert_same(generate(plain, ids, attention_mask=mask, max_new_tokens=140), made)
    assert cache_of(made).layers[0].rows.store.counts.tolist() == [1, 2, 1]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen3_moe"])
def test_fused_steps_are_the_models_own_but_for_rounding(kind: str) -> None:
    plain, stepped = both(kind, LOSSY)
    hf_subbyte_moe.apply(stepped, {"kv_cache": LOSSY, "decode": {"cuda_graph": True}})
    ids = prompt(240)
    expected, made = (generate(model, ids, max_new_tokens=40) for model in (plain, stepped))
    assert stepped.forward.graphed(cache_of(made)).is_fused
    assert torch.equal(made.sequences, expected.sequences)
    for left, right in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("rows", "fused"), [(3, True), (16, True), (17, False)])
def test_rows_go_through_fused_kernels_together(rows: int, fused: bool) -> None:
    plain, stepped = both("mixtral", LOSSY)
    hf_subbyte_moe.apply(stepped, {"kv_cache": LOSSY, "decode": {"cuda_graph": True}})
    ids, mask = left_padded([prompt(20 + 40 * (row % 4), seed=row) for row in range(rows)])
    expected, made = (generate(model, ids, attention_mask=mask, max_new_tokens=6) for model in (plain, stepped))
    assert stepped.forward.graphed(cache_of(made)).is_fused == fused
    assert torch.equal(made.sequences, expected.sequences)
    for left, right in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_cpu")
def test_steps_read_int4_copies_of_projections() -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model("mixtral", **sizes)
    ids, steps = prompt(40), prompt(5, seed=1)
    made = {}
    for name in ("int4", "rounded", "model"):
        decode = {"cuda_graph": True, **({"projections": "int4"} if name == "int4" else {})}
        hf_subbyte_moe.apply(model, {"kv_cache": {"policy": "uniform:exact"}, "decode": decode})
        cache = EntropySubbyteCache(model.config, policy="uniform:exact")
        with torch.no_grad():
            model(ids, **{CACHE_KW: cache})
            if name == "rounded":  # what was packed, in the place of the weights, for steps alone
                kept = {name: value.clone() for name, value in model.state_dict().items()}
                for layer in model.model.layers:
                    for side in "qkvo":
                        weight = getattr(layer.self_attn, f"{side}_proj").weight
                        weight.copy_(PackedMatrix.of(weight).unpacked())
            made[name] = torch.cat([model(step, **{CACHE_KW: cache}).logits for step in steps.split(1, 1)], dim=1)
            if name == "rounded":
                model.load_state_dict(kept)
    torch.testing.assert_close(made["int4"], made["rounded"], rtol=1e-4, atol=1e-4)
    assert (made["int4"] - made["model"]).abs().max() > 0.01


@pytest.mark.usefixtures("on_cpu")
def test_copies_follow_weights_that_change() -> None:
    sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = tiny_model("mixtral", **sizes)
    options = {"kv_cache": {"policy": "uniform:exact"}, "decode": {"cuda_graph": True, "projections": "int4"}}
    hf_subbyte_moe.apply(model, options)
    first = generate(model, prompt(40), max_new_tokens=4)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(-1)
    second = generate(model, prompt(40), max_new_tokens=4)
    fresh = hf_subbyte_moe.apply(copy.deepcopy(model), options)
    assert not torch.equal(first.logits[1], second.logits[1])
    torch.testing.assert_close(second.logits[1], generate(fresh, prompt(40), max_new_tokens=4).logits[1])


@pytest.mark.parametrize(
    ("options", "said"), [({"projections": "int3"}, "one of"), ({"fused": False}, "fused is false")]
)
def test_projections_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DecodeConfig(**{"projections": "int4", **options})


@pytest.mark.usefixtures("on_cpu")
def test_projections_that_are_not_packed_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = {"kv_cache": LOSSY, "decode": {"cuda_graph": True, "projections": "int4"}}
    model = hf_subbyte_moe.apply(tiny_model("deepseek_v2"), options)
    with caplog.at_level("WARNING", logger="hf_subbyte_moe"):
        made = generate(model, prompt(40), max_new_tokens=4)
    assert not model.forward.graphed(cache_of(made)).is_fused
    assert any("model's own modules" in record.message for record in caplog.records)


@pytest.mark.usefixtures("on_cpu")
def test_a_model_that_was_changed_keeps_its_modules() -> None:
    model = hf_subbyte_moe.apply(tiny_model("mixtral"), {"kv_cache": LOSSY, "decode": {"cuda_graph": True}})
    model.model.layers[0].self_attn.q_proj = torch.nn.Sequential(model.model.layers[0].self_attn.q_proj)
    made = generate(model, prompt(40), max_new_tokens=4)
    assert not model.forward.graphed(cache_of(made)).is_fused


class _Interrupt(StoppingCriteria):
    """Raises in the middle of generation."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            raise KeyboardInterrupt
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.usefixtures("on_cpu")
def test_generation_goes_on_after_an_interruption() -> None:
    plain, stepped = both("qwen3_moe", LOSSY)
    ids = prompt(200)
    whole = generate(plain, ids)
    cache = EntropySubbyteCache(stepped.config, **LOSSY)
    with pytest.raises(KeyboardInterrupt):
        stepped.generate(
            ids, max_new_tokens=150, do_sample=False, stopping_criteria=[_Interrupt(230)], **{CACHE_KW: cache}
        )
    assert cache.get_seq_length() == 229  # the newest token has not been read
    rest = generate(stepped, whole.sequences[:, :230], max_new_tokens=50, **{CACHE_KW: cache})
    assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.usefixtures("on_cpu")
def test_a_cache_that_changed_between_steps_is_followed() -> None:
    plain, stepped = both("llama", LOSSY)
    ids = prompt(400)
    first, second = (generate(model, ids, max_new_tokens=20) for model in (plain, stepped))
    for made in (first, second):
        cache_of(made).crop(-30)
    again = ids[:, :390]
    left, right = (
        generate(model, again, max_new_tokens=60, **{CACHE_KW: cache_of(made)})
        for model, made in ((plain, first), (stepped, second))
    )
    assert_same(left, right)


@pytest.mark.usefixtures("on_cpu")
def test_two_models_and_two_caches_take_turns() -> None:
    plain, stepped = both("llama", LOSSY)
    other_plain, other = both("qwen3_moe", LOSSY)
    ids = prompt(150)
    caches = [EntropySubbyteCache(model.config, **LOSSY) for model in (stepped, stepped, other)]
    expected = [EntropySubbyteCache(model.config, **LOSSY) for model in (plain, plain, other_plain)]
    with torch.no_grad():
        for models, made in (((stepped, stepped, other), caches), ((plain, plain, other_plain), expected)):
            for model, cache, seed in zip(models, made, range(3), strict=True):
                model(prompt(200, seed=seed), **{CACHE_KW: cache})
        for step in range(70):
            token = ids[:, step : step + 1]
            for index, model in enumerate((stepped, stepped, other)):
                reference = (plain, plain, other_plain)[index]
                left = model(token, **{CACHE_KW: caches[index]}).logits
                right = reference(token, **{CACHE_KW: expected[index]}).logits
                assert torch.equal(left, right)


@pytest.mark.usefixtures("on_cpu")
def test_streamers_and_reads_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    class Ids(TextStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None: ...

    plain, stepped = both("llama", LOSSY)
    seen = []
    for model in (plain, stepped):
        streamer = Ids()
        with count_packed_reads() as reads:
            made = generate(model, prompt(200), streamer=streamer)
        assert streamer.seen == made.sequences[0].tolist()
        seen.append((streamer.seen, reads.tokens))
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("llama", {"num_beams": 2}, "the model is on cpu"),
        ("llama", {"output_hidden_states": True}, "output_hidden_states"),
        ("gpt_oss", {}, "DynamicSlidingWindowLayer"),
        ("llama", {"prompt_lookup_num_tokens": 2}, "may be taken back"),
    ],
)
def test_what_cannot_be_captured_runs_as_before_and_says_so_once(
    kind: str,
    options: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "cpu" not in reason:
        monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))
    plain = hf_subbyte_moe.apply(tiny_model(kind), {"kv_cache": LOSSY})
    model = hf_subbyte_moe.apply(tiny_model(kind), {"kv_cache": LOSSY, "decode": {}})
    options = {"max_new_tokens": 12, **options}
    made, expected = generate(model, prompt(60), **options), generate(plain, prompt(60), **options)
    assert torch.equal(made.sequences, expected.sequences)
    messages = [record.message for record in caplog.records if "without a CUDA graph" in record.message]
    assert len(messages) == 1
    assert reason in messages[0]
    assert model.forward.refused == [messages[0].partition(": ")[2]]
    hf_subbyte_moe.apply(model, {"kv_cache": LOSSY, "decode": {"cuda_graph": True}})
    with pytest.raises(ValueError, match=reason):
        generate(model, prompt(60), **options)


@pytest.mark.usefixtures("on_cpu")
def test_a_model_with_attention_of_its_own_goes_on_without() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"), {"kv_cache": LOSSY, "decode": {}})
    cache = EntropySubbyteCache(model.config, **LOSSY)
    ids = prompt(40)
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
        model.set_attn_implementation("sdpa")
        copied = copy.deepcopy(cache)
        made = model(ids[:, :1], **{CACHE_KW: cache}).logits
        hf_subbyte_moe.apply(model, {"kv_cache": LOSSY})
        model.set_attn_implementation("sdpa")
        expected = model(ids[:, :1], **{CACHE_KW: copied}).logits
    assert torch.equal(made, expected)


def taken(model: Any, tokens: int = 1) -> EntropySubbyteCache:
    """A cache with a prompt and single-token steps behind it."""
    cache = EntropySubbyteCache(model.config, **LOSSY)
    with torch.no_grad():
        for ids in (prompt(40), *prompt(tokens, seed=1).split(1, 1)):
            model(ids, **{CACHE_KW: cache})
    return cache


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "change", [{"experts": {"weights": "int4"}}, {"routing": {"mode": "hard", "clusters": 4, "top_clusters": 1}}]
)
def test_a_second_apply_is_seen_by_a_cache_in_use(change: dict[str, Any]) -> None:
    options = {"kv_cache": LOSSY, "decode": {"cuda_graph": True}}
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data.mul_(20)
    cache = taken(hf_subbyte_moe.apply(model, options))
    assert model.forward.graphed(cache).is_fused
    fresh, token = copy.deepcopy(cache), prompt(1, seed=2)
    before = copy.deepcopy(cache)
    with torch.no_grad():
        old = model(token, **{CACHE_KW: before}).logits
        hf_subbyte_moe.apply(model, {**options, **change})
        used, expected = (model(token, **{CACHE_KW: each}).logits for each in (cache, fresh))
    assert torch.equal(used, expected)
    assert not torch.equal(used, old)


@pytest.mark.usefixtures("on_cpu")
def test_weights_that_moved_are_not_read_where_they_were() -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"), {"kv_cache": LOSSY, "decode": {"cuda_graph": True}})
    cache = taken(model)
    steps = model.forward.graphed(cache)
    model.to(torch.float64).to(torch.float32)
    with torch.no_grad():
        model(prompt(1), **{CACHE_KW: cache})
    assert model.forward.graphed(cache) is not steps


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("problem", [FixedAddressError("odd"), CaptureError("full"), CaptureError("a copy")])
def test_what_one_cache_or_moment_cannot_do_others_can(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what a graph cannot hold is remembered of the model, until the next ``apply``."""
    options = {"kv_cache": LOSSY, "decode": {}}
    model = hf_subbyte_moe.apply(tiny_model("llama"), options)
    if str(problem) == "full":
        problem.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    with monkeypatch.context() as patch:
        patch.setattr(GraphedStep, "__call__", lambda *_: (_ for _ in ()).throw(problem))
        broken = taken(model, 2)
    assert model.forward.refused == [str(problem)]
    with torch.no_grad():
        model(prompt(1), **{CACHE_KW: broken})
    assert model.forward.graphed(broken) is None
    assert (model.forward.graphed(taken(model)) is None) == (str(problem) == "a copy")
    hf_subbyte_moe.apply(model, options)
    assert model.forward.graphed(taken(model)) is not None


def test_a_forward_that_was_replaced_is_refused_before_anything_changes() -> None:
    model = tiny_model("mixtral")
    model.forward = model.forward
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match="was replaced already"):
        hf_subbyte_moe.apply(model, {"kv_cache": LOSSY, "experts": {"weights": "int4"}, "decode": {}})
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert not hasattr(model.config, "hf_subbyte_moe")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("on_cpu")
def test_hooks_are_seen() -> None:
    _, model = both("llama", LOSSY)
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    with pytest.raises(ValueError, match="forward hooks"):
        generate(model, prompt(30), max_new_tokens=4)
    handle.remove()
    assert generate(model, prompt(30), max_new_tokens=4).sequences.shape[1] == 34


@pytest.mark.usefixtures("on_cpu")
def test_other_calls_and_copies_are_the_models_own() -> None:
    model = tiny_model("mixtral")
    ids = prompt(40)
    expected = generate(model, ids, max_new_tokens=8)
    hf_subbyte_moe.apply(model, {"decode": {}})
    assert isinstance(model.forward, StepRunner)
    assert_same(generate(model, ids, max_new_tokens=8), expected)  # DynamicCache
    packed = generate(model, ids, max_new_tokens=8, cache_implementation=CACHE_NAME, cache_config=EXACT)
    assert torch.equal(packed.sequences, expected.sequences)
    copied = copy.deepcopy(model)
    assert copied.forward.model is copied
    assert_same(generate(copied, ids, max_new_tokens=8), expected)
    hf_subbyte_moe.restore(model)
    assert "forward" not in vars(model)


def test_options() -> None:
    assert SubByteConfig.from_dict({"decode": {}}).decode == DecodeConfig()
    options = {"version": 1, "decode": {"cuda_graph": True}}
    assert SubByteConfig.from_dict(options).to_dict() == options
    with pytest.raises(ValueError, match="cuda_graph='yes' is not possible"):
        DecodeConfig.from_dict({"cuda_graph": "yes"})
    with pytest.raises(ValueError, match="unknown key 'graph' in decode"):
        DecodeConfig.from_dict({"graph": True})
