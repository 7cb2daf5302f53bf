"""What the modes choose, against brute force; a router of the package's own formula stands in for every family."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_subbyte_moe
from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.routing import Clusters, find_routers, steer
from hf_subbyte_moe.routing.modes import cluster_scores, needed_experts, with_bonus
from hf_subbyte_moe.routing.router import RouterState, Trail
from hf_subbyte_moe.routing.selection import LOGIT, PROBABILITY, SIGMOID, ChooseExperts, Scores
from support.moe import tiny_moe


EXPERTS, GROUPS, KEPT, TOP_K = 16, 4, 2, 4


def v3(groups: int, kept: int) -> PreTrainedModel:
    return tiny_moe(
        "deepseek_v3", n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K, n_group=groups, topk_group=kept
    )


def contiguous(layers: int, count: int = GROUPS) -> Clusters:
    labels = (torch.arange(EXPERTS) * count // EXPERTS).expand(layers, -1).contiguous()
    return Clusters(labels, torch.zeros(layers, EXPERTS, dtype=torch.bool), count)


def states(tokens: int = 1000, seed: int = 3) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [None, -2.0], ids=["trained bias", "bias -2"])
@pytest.mark.parametrize("ties", [False, True])
def test_hard_is_deepseek_v3s_own_routing(bias: float | None, ties: bool) -> None:
    """Its groups as clusters give exactly its result, from a router that has none and from one that has them."""
    theirs, ours, both = v3(GROUPS, KEPT), v3(1, 1), v3(GROUPS, KEPT)
    for model in (theirs, ours, both):
        for place in find_routers(model):
            router: Any = place.module
            if bias is not None:
                router.e_score_correction_bias.fill_(bias)
            if ties:
                router.weight.data[4:8] = router.weight.data[0]  # all experts of a group alike
    options = RoutingConfig(mode="hard", clusters=GROUPS, top_clusters=KEPT)
    layers = len(find_routers(ours))
    steer(ours, options, contiguous(layers))
    hf_subbyte_moe.apply(both, {"routing": {"mode": "hard", "top_clusters": KEPT}})  # the model's own groups
    hidden = states()
    for layer in range(layers):
        expected = find_routers(theirs)[layer].module(hidden)
        for model in (ours, both):
            found = find_routers(model)[layer].module(hidden)
            assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))


@pytest.mark.parametrize("bias", [0.0, -2.0])
def test_hard_against_brute_force(bias: float) -> None:
    model = v3(1, 1)
    router: Any = find_routers(model)[0].module
    router.e_score_correction_bias.fill_(bias)
    clusters = Clusters(
        torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(0)).remainder(5).expand(2, -1).contiguous(),
        torch.zeros(2, EXPERTS, dtype=torch.bool),
        5,
    )
    for how in ("top2", "max"):
        steer(model, RoutingConfig(mode="hard", top_clusters=2, cluster_score=how), clusters)
        logits, weights, indices = router(states(200))
        scores = (logits.sigmoid() + bias).detach()
        for token in range(200):
            best = {}
            for cluster in range(5):
                inside = sorted(scores[token, clusters.labels[0] == cluster].tolist(), reverse=True)
                best[cluster] = sum(inside[:2]) if how == "top2" else inside[0]
            kept = sorted(best, key=lambda cluster: best[cluster], reverse=True)[:2]
            allowed = [expert for expert in range(EXPERTS) if int(clusters.labels[0, expert]) in kept]
            expected = sorted(allowed, key=lambda expert: float(scores[token, expert]), reverse=True)[:TOP_K]
            assert set(indices[token].tolist()) == set(expected)
        chosen = logits.sigmoid().gather(1, indices)  # unbiased
        expected_weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
        torch.testing.assert_close(weights, expected_weights)


def test_hierarchical_preset() -> None:
    model = tiny_moe("mixtral")
    hf_subbyte_moe.apply(model, {"routing": {"preset": "hierarchical"}})
    state = find_routers(model)[0].module._hf_subbyte_moe_routing
    assert (state.config.mode, state.config.top_clusters, len(state.membership)) == ("hard", 4, 8)
    assert model.config.hf_subbyte_moe["routing"] == {"mode": "hard", "top_clusters": 4}
    with pytest.raises(ValueError, match="top_clusters=4 is not possible: there are 2 clusters"):
        hf_subbyte_moe.apply(model, {"routing": {"preset": "hierarchical", "clusters": 2}})


def test_bonus_is_in_units_of_the_logits() -> None:
    logits = torch.randn(50, EXPERTS, dtype=torch.float32)
    bonus = torch.rand(50, EXPERTS)
    raised = with_bonus(Scores(logits, None, LOGIT), logits, bonus)
    torch.testing.assert_close(raised, logits + bonus)
    odds = logits.softmax(-1)
    found = with_bonus(Scores(odds, odds, PROBABILITY), odds, bonus)
    torch.testing.assert_close(found / odds, bonus.exp())
    gates = logits.sigmoid()
    found = with_bonus(Scores(gates - 2, gates, SIGMOID), gates - 2, bonus)
    torch.testing.assert_close(found, (logits + bonus).sigmoid() - 2)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_soft_never_leaves_the_models_own_groups(family: str) -> None:
    model = tiny_moe(family)
    place = find_routers(model)[0]
    hidden = states(300)
    native = place.module(hidden)[2] // 2
    hf_subbyte_moe.apply(model, {"routing": {"mode": "soft", "clusters": 4, "strength": 40.0, "keep": 0}})
    chosen = place.module(hidden)[2] // 2
    # two of four groups stay; both experts may now come from one of them, and never from a third
    kept = torch.zeros(300, 4, dtype=torch.bool)
    scores = place.module(hidden)[0]
    scores = scores.softmax(-1) if family == "deepseek_v2" else scores.sigmoid() + place.module.e_score_correction_bias
    by_group = scores.view(300, 4, 2)
    best = (by_group.amax(-1) if family == "deepseek_v2" else by_group.sum(-1)).topk(2).indices
    kept.scatter_(1, best, True)
    assert kept.gather(1, native).all()
    assert kept.gather(1, chosen).all()


def make_state(mode: str, device: str, **options: Any) -> RouterState:
    clusters = contiguous(2)
    return RouterState(
        layer=1,
        experts=EXPERTS,
        top_k=TOP_K,
        config=RoutingConfig(mode=mode, **options),
        membership=clusters.membership(1).to(device),
        members=clusters.members(1).to(device),
        trail=Trail(0, torch.rand(8, GROUPS).to(device)),
    )


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_no_value_comes_back_to_the_host(mode: str) -> None:
    """Tensors on ``meta`` have no values: whatever asked for one would fail."""
    state = make_state(mode, "meta", **({"batch_aware": 1.0} if mode == "soft" else {}))
    logits = torch.empty(8, EXPERTS, device="meta")
    with ChooseExperts(EXPERTS, TOP_K, state.rank) as chooser:
        picked = logits.softmax(-1).topk(TOP_K, dim=-1)
    state.note(picked.values, picked.indices)
    assert chooser.picked is not None
    assert picked.indices.shape == (8, TOP_K)


def test_soft_follows_the_token() -> None:
    """With a bonus beyond all logits and ``follow`` 1, everything but the first expert goes where the token was."""
    place = torch.nn.functional.one_hot(torch.arange(8) % GROUPS, GROUPS).float()
    state = make_state("soft", "cpu", strength=40.0, follow=1.0)
    state.trail = Trail(0, place)
    logits = torch.randn(8, EXPERTS)
    with ChooseExperts(EXPERTS, TOP_K, state.rank):
        picked = logits.softmax(-1).topk(TOP_K, dim=-1)
    assert torch.equal(picked.indices[:, 0], logits.argmax(-1))
    assert torch.equal(picked.indices[:, 1:3] // 4, (torch.arange(8) % GROUPS)[:, None].expand(-1, 2))
    torch.testing.assert_close(picked.values, logits.softmax(-1).gather(1, picked.indices))
    state.trail = Trail(5, place)  # another layer's: not used
    with ChooseExperts(EXPERTS, TOP_K, state.rank):
        assert (logits.softmax(-1).topk(TOP_K, dim=-1).indices[:, 1:3] // 4 != picked.indices[:, 1:3] // 4).any()


def test_replicated_experts_are_in_every_cluster() -> None:
    labels = (torch.arange(8) // 4).expand(2, -1).contiguous()
    replicated = torch.zeros(2, 8, dtype=torch.bool)
    replicated[:, 7] = True
    clusters = Clusters(labels, replicated, 2)
    assert clusters.members(0).tolist() == [[0, 1, 2, 3, 7], [4, 5, 6, 7, 8]]
    model = tiny_moe("mixtral")
    steer(model, RoutingConfig(mode="hard", top_clusters=1), clusters)
    for place in find_routers(model):
        weight: Any = place.module
        weight.weight.data[7] *= 3
        indices = place.module(states(300))[2]
        sides = torch.where(indices == 7, torch.tensor(-1), indices // 4)
        both = (sides == 0).any(1) & (sides == 1).any(1)
        assert not both.any()
        assert ((sides == 0).any(1) & (sides == -1).any(1)).any()


def test_cluster_scores_of_short_clusters() -> None:
    choice = torch.tensor([[0.5, -2.0, float("-inf"), float("-inf")]])
    members = torch.tensor([[0, 1], [1, 4], [2, 3]])
    assert cluster_scores(choice, members, "top2").tolist() == [[-1.5, -2.0, float("-inf")]]
    assert cluster_scores(choice, members, "max").tolist() == [[0.5, -2.0, float("-inf")]]


@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 33])
def test_batch_aware_uses_fewer_experts(tokens: int) -> None:
    model = tiny_moe("qwen3_moe", num_experts=32, num_experts_per_tok=4)
    place = find_routers(model)[0]
    hidden = states(tokens)
    logits, _, native = place.module(hidden)
    hf_subbyte_moe.apply(model, {"routing": {"mode": "soft", "strength": 0, "batch_aware": 40.0, "keep": 2}})
    _, weights, indices = place.module(hidden)
    kept = native[:, :2]
    assert torch.equal(indices[:, :2].sort(1).values, kept.sort(1).values)
    assert weights.isfinite().all()
    needed = needed_experts(logits, 2)
    if tokens in (2, 8, 32):
        assert needed.gather(1, indices).all() or int(needed[0].sum()) < 4
        assert len(indices.unique()) <= len(native.unique())
    else:
        assert torch.equal(indices, native)  # nothing to share, or every expert is needed


def test_steps_of_a_batch_are_apart() -> None:
    """Known tokens read at once choose as they would one step after the other."""
    model = tiny_moe("qwen3_moe", num_experts=32, num_experts_per_tok=4)
    router: Any = find_routers(model)[0].module
    hf_subbyte_moe.apply(model, {"routing": {"mode": "soft", "strength": 0, "batch_aware": 2.0, "keep": 2}})
    hidden = states(24).view(4, 6, 64)  # four rows, six steps
    alone = torch.stack([router(hidden[:, step])[2] for step in range(6)], dim=1)
    router._hf_subbyte_moe_routing.steps = 6
    assert torch.equal(router(hidden)[2].view(4, 6, 4), alone)


def test_compiled_router_chooses_the_same() -> None:
    model = tiny_moe("mixtral")
    hf_subbyte_moe.apply(model, {"routing": {"mode": "hard", "clusters": 4, "top_clusters": 2}})
    router = find_routers(model)[0].module
    hidden = states(20)
    expected = router(hidden)
    compiled = torch.compile(router, backend="eager", fullgraph=True)
    assert all(torch.equal(left, right) for left, right in zip(expected, compiled(hidden), strict=True))
