"""Every family of MoE models, tiny and random: the conformance test of steered routers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    JetMoeConfig,
    Llama4TextConfig,
    PreTrainedModel,
    SwitchTransformersConfig,
)
from transformers import SwitchTransformersForConditionalGeneration as SwitchTransformers

import hf_subbyte_moe
from hf_subbyte_moe.routing import FAMILIES, SteeredRouter, find_routers
from hf_subbyte_moe.routing.families import as_triple
from support.models import prompt, tiny_model
from support.moe import EXPERTS, MOE_CONFIGS, TOP_K, tiny_moe


EVERY = tuple(MOE_CONFIGS)
NOTHING_CHANGED: dict[str, dict[str, Any]] = {
    "native": {"mode": "native"},
    "hard, all clusters": {"mode": "hard", "clusters": 2, "top_clusters": 2},
    "soft, no bonus": {"mode": "soft", "clusters": 4, "strength": 0},
}


def steered(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    return hf_subbyte_moe.apply(model, {"routing": options})


def ask(model: PreTrainedModel, hidden: Tensor) -> list[tuple[Tensor, ...]]:
    """What every router of a model returns for ``[1, N, H]``."""
    extra = {"afmoe": ("expert_bias",), "lfm2_moe": ("expert_bias",)}.get(model.config.model_type, ())
    found = []
    for place in find_routers(model):
        block: Any = model.get_submodule(place.name.rpartition(".")[0])
        states = hidden if model.config.model_type == "afmoe" else hidden[0]
        returned = place.module(states, *(getattr(block, name) for name in extra))
        found.append(as_triple(returned, place.experts, place.top_k))
    return found


def test_the_listed_families_are_tested() -> None:
    assert set(FAMILIES) <= set(EVERY)


@pytest.mark.parametrize("options", NOTHING_CHANGED.values(), ids=NOTHING_CHANGED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", EVERY)
def test_bit_identical(family: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    model = tiny_moe(family).to(dtype)
    hidden = torch.randn(1, 65, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    hidden = torch.cat([hidden, torch.zeros(1, 3, 64, dtype=dtype)], dim=1)  # all experts tie
    ids = prompt(20, rows=2)
    before = ask(model, hidden)
    logits = model(ids).logits if dtype == torch.float32 else None  # slow otherwise
    with torch.no_grad():
        steered(model, **options)
        after = ask(model, hidden)
    for theirs, ours in zip(before, after, strict=True):
        assert len(ours) == 3
        assert all(torch.equal(left, right) for left, right in zip(theirs, ours, strict=True))
    if logits is not None:
        assert torch.equal(model(ids).logits, logits)


@pytest.mark.parametrize("family", EVERY)
def test_restore_leaves_no_trace(family: str) -> None:
    model = tiny_moe(family)
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    config, logits = model.config.to_dict(), model(prompt(20)).logits
    steered(model, mode="hard", clusters=4, top_clusters=2)
    copied = copy.deepcopy(model)
    assert all(isinstance(place.module, SteeredRouter) for place in find_routers(model))
    changed = model(prompt(20)).logits
    assert torch.equal(copied(prompt(20)).logits, changed)
    hf_subbyte_moe.restore(model)
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config
    assert torch.equal(model(prompt(20)).logits, logits)


@pytest.mark.parametrize("family", EVERY)
def test_modes_choose_and_weigh(family: str) -> None:
    """Hard stays inside the clusters, soft keeps the first expert, and every weight is the true router's."""
    model = tiny_moe(family)
    groups = max(2, int(getattr(find_routers(model)[0].module, "num_group", None) or 1))
    hidden = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(2))
    native = ask(model, hidden)
    steered(model, mode="hard", clusters=groups, top_clusters=1)
    for place, (logits, weights, indices) in zip(find_routers(model), ask(model, hidden), strict=True):
        labels = place.module._hf_subbyte_moe_routing.membership.int().argmax(0)
        assert torch.equal(labels[indices].amin(1), labels[indices].amax(1))
        assert (indices[:, 0] != indices[:, 1]).all()
        assert weights.isfinite().all()
        assert logits.shape == (200, EXPERTS)
    steered(model, mode="soft", clusters=groups, strength=3.0, keep=1)
    changed = 0
    for (logits, _, indices), (true_logits, _, true_indices) in zip(ask(model, hidden), native, strict=True):
        assert torch.equal(logits, true_logits)
        changed += int((indices.sort(1).values != true_indices.sort(1).values).sum())
        if family in ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "granitemoe", "phimoe", "minimax"):
            assert torch.equal(indices[:, 0], true_indices[:, 0])
    assert changed > 0
    # a bonus without limit for one expert beside the first: its weight is what the true router gives that pair
    if family in ("mixtral", "minimax"):
        logits, weights, indices = ask(model, hidden)[0]
        torch.testing.assert_close(weights, logits.gather(1, indices).softmax(1))


@pytest.mark.parametrize("family", EVERY)
def test_router_logits_and_auxiliary_loss(family: str) -> None:
    model = tiny_moe(family)
    ids = prompt(20, rows=2)
    options = {"output_router_logits": True} if hasattr(model.config, "output_router_logits") else {}
    if family == "granitemoe" and Version(transformers.__version__) < Version("5.24"):
        options = {}  # stock 5.17 records the indices as logits and fails
    before = model(ids, labels=ids, **options)
    steered(model, mode="native")
    after = model(ids, labels=ids, **options)
    assert torch.equal(before.loss, after.loss)
    assert (getattr(before, "router_logits", None) is None) == (getattr(after, "router_logits", None) is None)
    if getattr(before, "aux_loss", None) is not None:
        assert torch.equal(before.aux_loss, after.aux_loss)
    steered(model, mode="soft", clusters=4, strength=1.0)
    changed = model(ids, labels=ids, **options)
    assert changed.loss.isfinite()
    if getattr(before, "router_logits", None):
        first = [found.router_logits[0] for found in (before, changed)]
        assert torch.equal(*first)  # the first router sees the same states
        assert len(changed.router_logits) == len(before.router_logits)


@pytest.mark.parametrize("family", EVERY)
def test_save_pretrained_writes_the_original(family: str, tmp_path: Path) -> None:
    model = tiny_moe(family)
    model.save_pretrained(tmp_path / "before")
    steered(model, mode="soft", clusters=4)
    model.save_pretrained(tmp_path / "after")
    for name in sorted(path.name for path in (tmp_path / "before").iterdir()):
        before, after = ((tmp_path / folder / name).read_bytes() for folder in ("before", "after"))
        if name == "config.json":
            told = json.loads(after)
            assert told.pop("hf_subbyte_moe") == {"version": 1, "routing": {"mode": "soft", "clusters": 4}}
            assert told == json.loads(before)
        else:
            assert after == before
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert isinstance(find_routers(again)[0].module, SteeredRouter)
    assert torch.equal(again.eval()(prompt(20)).logits, model(prompt(20)).logits)


@pytest.mark.parametrize("tokens", [0, 1, 64])
def test_experts_without_tokens(tokens: int) -> None:
    model = tiny_moe("mixtral")
    block: Any = model.get_submodule("model.layers.0.mlp")
    with torch.no_grad():
        block.gate.weight.zero_()
        block.gate.weight[3] = 1.0  # every token to expert 3 first
    hidden = torch.rand(1, tokens, 64)
    before = block(hidden)
    steered(model, mode="native")
    assert torch.equal(block(hidden), before)
    steered(model, mode="hard", clusters=2, top_clusters=1)
    assert block(hidden).shape == before.shape


@pytest.mark.parametrize("first", ["routing", "offload"])
def test_offloaded_weights(first: str) -> None:
    from accelerate import cpu_offload

    options = {"mode": "hard", "clusters": 4, "top_clusters": 1}
    plain = tiny_moe("mixtral")
    logits = plain(prompt(20)).logits
    expected = steered(plain, **options)(prompt(20)).logits
    labels = [place.module._hf_subbyte_moe_routing.membership for place in find_routers(plain)]
    model = tiny_moe("mixtral")
    if first == "routing":
        steered(model, **options)
    cpu_offload(model, execution_device=torch.device("cpu"))
    if first == "offload":
        with pytest.raises(ValueError, match="no weights here to cluster by: give a sidecar"):
            steered(model, **options)
        from hf_subbyte_moe.config import RoutingConfig
        from hf_subbyte_moe.routing import Clusters, steer

        count = Clusters(torch.stack([own.int().argmax(0) for own in labels]), torch.zeros(2, 8, dtype=torch.bool), 4)
        steer(model, RoutingConfig.from_dict(options), count)
    assert torch.equal(model(prompt(20)).logits, expected)
    hf_subbyte_moe.restore(model)
    assert torch.equal(model(prompt(20)).logits, logits)


def test_generate() -> None:
    model: Any = tiny_moe("qwen3_moe")
    plain = model.generate(prompt(20), max_new_tokens=10, do_sample=False)
    steered(model, mode="native")
    assert torch.equal(model.generate(prompt(20), max_new_tokens=10, do_sample=False), plain)
    hf_subbyte_moe.apply(model, {"routing": {"mode": "soft", "clusters": 2}, "kv_cache": {}})
    assert model.generate(prompt(20), max_new_tokens=10, do_sample=False).shape == plain.shape


def test_gradients_reach_the_router() -> None:
    model = steered(tiny_moe("mixtral"), mode="soft", clusters=2, strength=1.0).train()
    ids = prompt(20)
    model(ids, labels=ids, output_router_logits=True).loss.backward()
    assert all(place.module.weight.grad.abs().sum() > 0 for place in find_routers(model))


def test_hooks_and_identity() -> None:
    model = tiny_moe("mixtral")
    own = type(find_routers(model)[0].module)
    seen: list[int] = []
    find_routers(model)[0].module.register_forward_hook(lambda *_: seen.append(1))
    steered(model, mode="native")
    model(prompt(4))
    assert seen == [1]
    assert all(isinstance(place.module, own) for place in find_routers(model))
    assert steered(model, mode="hard", clusters=2, top_clusters=1) is model  # applied again: new options
    assert type(find_routers(model)[0].module).__mro__.count(SteeredRouter) == 1


def refused() -> dict[str, PreTrainedModel]:
    common = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    jetmoe = JetMoeConfig(**common, num_key_value_heads=4, kv_channels=16, intermediate_size=64, num_local_experts=4)
    llama4 = Llama4TextConfig(
        **common,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        intermediate_size_mlp=64,
        num_local_experts=4,
        num_experts_per_tok=1,
    )
    switch = SwitchTransformersConfig(
        vocab_size=128, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, num_experts=4
    )
    return {
        "LlamaForCausalLM": tiny_model("llama"),
        "JetMoeForCausalLM": AutoModelForCausalLM.from_config(jetmoe).eval(),
        "Llama4ForCausalLM": AutoModelForCausalLM.from_config(llama4).eval(),
        "SwitchTransformersForConditionalGeneration": SwitchTransformers(switch).eval(),
    }


def test_others_are_refused_by_name() -> None:
    for name, model in refused().items():
        before = [type(module) for module in model.modules()]
        with pytest.raises(ValueError, match=rf"does not support {name} .*Supported are mixtral, qwen2_moe") as error:
            steered(model, mode="native")
        assert all(family in str(error.value) for family in FAMILIES)
        assert [type(module) for module in model.modules()] == before
        assert not hasattr(model.config, "hf_subbyte_moe")


def test_a_router_that_picks_otherwise_is_refused() -> None:
    class SortingRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_experts, self.top_k = EXPERTS, TOP_K
            self.weight = nn.Parameter(torch.randn(EXPERTS, 64))

        def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = hidden_states.reshape(-1, 64) @ self.weight.T
            values, order = logits.sort(dim=-1, descending=True)
            return logits, values[:, :TOP_K].softmax(-1), order[:, :TOP_K]

    model = tiny_moe("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate = SortingRouter()
    steered(model, mode="native")
    model(prompt(4))
    steered(model, mode="hard", clusters=2, top_clusters=1)
    with pytest.raises(ValueError, match="does not support SortingRouter: it does not pick with topk"):
        model(prompt(4))
