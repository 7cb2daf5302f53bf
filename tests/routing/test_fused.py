"""A router's own forward and what stands for it, in every family."""

from typing import Any

import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.routing import SteeredRouter, find_routers
from hf_subbyte_moe.routing.families import FAMILIES, as_triple
from hf_subbyte_moe.routing.fused import FusedRouter, fused_router
from support.models import prompt
from support.moe import EXPERTS, MOE_CONFIGS, TOP_K, tiny_moe


OWN_FORWARD = ("phimoe", "lfm2_moe", "afmoe")  # sparsemixer; the others' take more than states
CUDA = torch.cuda.is_available()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MOE_CONFIGS)
def test_every_known_family_has_a_spec_that_is_its_routers(family: str, dtype: torch.dtype) -> None:
    """``fused_router`` itself compares logits, weights and experts bit for bit."""
    model = tiny_moe(family).to(dtype)
    places = find_routers(model)
    assert all((fused_router(place.module, dtype) is None) == (family in OWN_FORWARD) for place in places)


def test_the_families_that_are_named_are_fused_but_one() -> None:
    assert set(FAMILIES) & set(OWN_FORWARD) == {"phimoe"}


def test_a_router_that_differs_keeps_its_own_forward() -> None:
    router: Any = find_routers(tiny_moe("deepseek_v3"))[0].module
    assert isinstance(fused_router(router, torch.float32), FusedRouter)

    class Other(type(router)):  # type: ignore[misc]
        pass

    Other.__name__ = "MixtralTopKRouter"
    router.__class__ = Other
    assert fused_router(router, torch.float32) is None


def test_a_router_in_training_is_its_own_and_fused_afterwards() -> None:
    router: Any = find_routers(tiny_moe("mixtral").train())[0].module
    fused = fused_router(router, torch.float32)
    assert router.training
    assert isinstance(fused, FusedRouter)
    states = torch.zeros(1, router.weight.shape[1], device="cuda" if CUDA else "cpu")
    assert fused(router.to(states.device), states) is None


def test_on_a_cpu_native_routing_is_the_models_own() -> None:
    model = tiny_moe("qwen3_moe")
    before = model(prompt(3)).logits
    hf_subbyte_moe.apply(model, {"routing": {}})
    router: Any = find_routers(model)[0].module
    assert isinstance(router, SteeredRouter)
    assert isinstance(router._hf_subbyte_moe_routing.fused, FusedRouter)
    assert torch.equal(model(prompt(3)).logits, before)
    hf_subbyte_moe.apply(model, {"routing": {"fused": False}})
    assert router._hf_subbyte_moe_routing.fused is None


@pytest.mark.parametrize("fused", [1, "yes", None])
def test_wrong_options(fused: object) -> None:
    with pytest.raises(ValueError, match=r"fused=.* is not possible: true or false"):
        hf_subbyte_moe.apply(tiny_moe("mixtral"), {"routing": {"fused": fused}})


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("family", [family for family in MOE_CONFIGS if family not in OWN_FORWARD])
@pytest.mark.parametrize("tokens", [1, 5, 16, 17])
def test_on_a_gpu(family: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are the router's own wherever logits are; 17 tokens are too many for one launch."""
    model: Any = tiny_moe(family).to("cuda", torch.bfloat16)
    own = [place.module for place in find_routers(model)]
    states = torch.randn(tokens, 64, device="cuda").to(torch.bfloat16)
    with torch.no_grad():
        expected = [router(states) for router in own]
        hf_subbyte_moe.apply(model, {"routing": {}})
        used = []
        call = FusedRouter.__call__
        monkeypatch.setattr(FusedRouter, "__call__", lambda *given: used.append(call(*given)) or used[-1])
        found = [router(states) for router in own]
    assert all((entry is None) == (tokens > 16) for entry in used)
    assert len(used) == len(own)
    for left, right in zip(found, expected, strict=True):
        assert [tensor.dtype for tensor in left] == [tensor.dtype for tensor in right]
        one, other = (as_triple(triple, EXPERTS, TOP_K) for triple in (left, right))
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one[0], other[0], rtol=8e-3, atol=1e-2)
        same = (one[0] == other[0]).all(-1)
        assert torch.equal(one[2][same].sort(-1).values, other[2][same].sort(-1).values)
        torch.testing.assert_close(one[1][same].sort(-1).values, other[1][same].sort(-1).values, rtol=1e-2, atol=1e-5)
