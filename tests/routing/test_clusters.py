"""Clusters: the partition, its file, what is refused; and what is counted on traces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hf_subbyte_moe
from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.routing import Clusters, find_routers
from hf_subbyte_moe.routing.clustering import Affinity, partition, partition_with_replicas
from hf_subbyte_moe.routing.measuring import PLACEMENTS, make_clusters, measure
from hf_subbyte_moe.routing.traces import count_affinity, crossings, distinct_experts, domains_of, locality, recorded
from support.models import prompt
from support.moe import tiny_moe


def planted(layers: int = 5, experts: int = 12, count: int = 3, seed: int = 0) -> tuple[Affinity, torch.Tensor]:
    """A graph with hidden clusters, and them."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.stack([torch.randperm(experts, generator=generator) % count for _ in range(layers)])
    within = (labels[:, :, None] == labels[:, None, :]).double() + 0.5 * torch.rand(
        layers, experts, experts, generator=generator, dtype=torch.float64
    )
    between = (labels[:-1, :, None] == labels[1:, None, :]).double()
    between = between + 0.5 * torch.rand(between.shape, generator=generator, dtype=torch.float64)
    return Affinity((within + within.mT) / 2, between), labels


def same_up_to_names(found: torch.Tensor, hidden: torch.Tensor) -> bool:
    """Names are shared by all layers, so one renaming must do."""
    pairs = torch.unique(torch.stack([found.flatten(), hidden.flatten()]), dim=1)
    return pairs.shape[1] == int(hidden.max()) + 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("count", [2, 3, 4])
def test_planted_clusters_are_found_in_all_layers(count: int, seed: int) -> None:
    affinity, hidden = planted(count=count, seed=seed)
    assert same_up_to_names(partition(affinity, count), hidden)


@pytest.mark.parametrize(("experts", "count"), [(12, 1), (12, 12), (7, 2), (10, 4)])
def test_sizes_are_balanced(experts: int, count: int) -> None:
    affinity, _ = planted(experts=experts)
    for row in partition(affinity, count):
        sizes = torch.bincount(row, minlength=count)
        assert int(sizes.max() - sizes.min()) <= 1
        assert int(sizes.min()) >= 1


def test_loads_are_balanced() -> None:
    affinity, _ = planted(layers=3, experts=8, count=2)
    load = torch.tensor([50.0, 50, 1, 1, 1, 1, 1, 1]).expand(3, -1).contiguous()
    pulled = affinity.within.clone()
    pulled[:, 0, 1] = pulled[:, 1, 0] = 50  # the popular two belong together
    together = partition(Affinity(pulled, affinity.between), 2)
    apart = partition(Affinity(pulled, affinity.between, load), 2, most_load=1.1)
    assert (together[:, 0] == together[:, 1]).all()
    assert (apart[:, 0] != apart[:, 1]).all()


@pytest.mark.parametrize(("count", "groups"), [(2, 4), (4, 4), (8, 4)])
def test_clusters_align_with_the_models_groups(count: int, groups: int) -> None:
    affinity, _ = planted(experts=16)
    own = torch.arange(16) * groups // 16
    for row in partition(affinity, count, groups):
        assert len(torch.unique(torch.stack([own, row]), dim=1)[0]) == max(count, groups)
    with pytest.raises(ValueError, match="3 clusters cannot be aligned with the model's own 4 groups"):
        partition(affinity, 3, groups)
    with pytest.raises(ValueError, match="17 clusters are not possible with 16 experts"):
        partition(affinity, 17)


def test_replicas_leave_less_outside() -> None:
    affinity, _ = planted()
    labels, held = partition_with_replicas(affinity, 3, 2)
    assert held.sum(1).tolist() == [2] * 5
    rest = affinity.without(held)
    outside = float(rest.within.sum() / 2 + rest.between.sum()) - rest.inside(labels)
    plain = partition(affinity, 3)
    assert outside < float(affinity.within.sum() / 2 + affinity.between.sum()) - affinity.inside(plain)


def facts(**changed: Any) -> dict[str, Any]:
    return {"model_type": "mixtral", "layers": 2, "experts": 8, "top_k": 2, **changed}


def halves(**changed: Any) -> Clusters:
    labels = (torch.arange(8) // 4).expand(2, -1).contiguous()
    return Clusters(labels, torch.zeros(2, 8, dtype=torch.bool), 2, "by hand", facts(**changed))


def apply_file(path: Path, **options: Any) -> None:
    hf_subbyte_moe.apply(tiny_moe("mixtral"), {"routing": {"mode": "hard", "sidecar": str(path), **options}})


def test_file_round_trip(tmp_path: Path) -> None:
    halves().save(tmp_path / "c.safetensors")
    found = Clusters.load(tmp_path / "c.safetensors")
    assert torch.equal(found.labels, halves().labels)
    assert (found.count, found.source, found.model) == (2, "by hand", facts())
    apply_file(tmp_path / "c.safetensors", clusters=2)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (
            {"model_type": "olmoe"},
            "the clusters belong to another model: model_type olmoe.*this one has model_type mix",
        ),
        ({"layers": 3}, "belong to another model: .*layers 3.*layers 2"),
        ({"top_k": 4}, "belong to another model"),
    ],
)
def test_files_of_other_models(tmp_path: Path, changed: dict[str, Any], match: str) -> None:
    halves(**changed).save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=match):
        apply_file(tmp_path / "c.safetensors")


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    with pytest.raises(ValueError, match="there is no cluster file"):
        apply_file(path)
    path.write_bytes(b"no tensors here")
    with pytest.raises(ValueError, match="is no cluster file"):
        apply_file(path)
    save_file({"labels": torch.zeros(2, 8)}, path)
    with pytest.raises(ValueError, match="is no cluster file"):
        apply_file(path)
    halves().save(path)
    with pytest.raises(ValueError, match="clusters=4 is not possible: the cluster file has 2"):
        apply_file(path, clusters=4)
    with pytest.raises(ValueError, match="top_clusters=3 is not possible: there are 2 clusters"):
        apply_file(path, top_clusters=3)


def test_no_partition() -> None:
    none = torch.zeros(2, 8, dtype=torch.bool)
    labels = (torch.arange(8) // 4).expand(2, -1).contiguous()
    for wrong, count, match in (
        (labels, 3, "no partition: cluster 2 of layer 0 has no expert"),
        (labels - 1, 2, "no partition: labels lie between -1 and 0, not 0 and 1"),
        (labels + 1, 2, "no partition: labels lie between 1 and 2"),
        (labels, 9, "9 clusters are not possible with 8 experts"),
        (labels.float(), 2, "need a label of every layer and expert"),
        (labels[:, :7], 2, "need a label of every layer and expert"),
    ):
        with pytest.raises(ValueError, match=match):
            Clusters(wrong, none, count)


def test_options_that_do_not_fit() -> None:
    def apply(**options: Any) -> None:
        hf_subbyte_moe.apply(model, {"routing": options})

    model = tiny_moe("mixtral")
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="clusters=9 is not possible: MixtralForCausalLM has 8 experts"):
        apply(mode="soft", clusters=9)
    with pytest.raises(ValueError, match="1 of 8 clusters may hold 1 experts, and the model picks 2"):
        apply(mode="hard", clusters=8, top_clusters=1)
    with pytest.raises(ValueError, match="keep=3 is not possible: the model picks 2"):
        apply(mode="soft", clusters=2, keep=3)
    assert [type(module) for module in model.modules()] == before
    model = tiny_moe("deepseek_v3")
    with pytest.raises(ValueError, match="3 clusters cannot be aligned with the model's own 4 groups"):
        apply(mode="hard", clusters=3)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "firm"}, r"mode='firm' is not possible: one of \['native', 'soft', 'hard'\]"),
        ({"clusters": 0}, "clusters=0 is not possible"),
        ({"clusters": True}, "clusters=True is not possible"),
        ({"clusters": 2, "top_clusters": 3}, "top_clusters=3 is not possible: there are 2 clusters"),
        ({"strength": -1}, "strength=-1 is not possible: a number from 0 to 40"),
        ({"strength": float("nan")}, "strength=nan is not possible"),
        ({"follow": 1.5}, "follow=1.5 is not possible: a number from 0 to 1"),
        ({"keep": -1}, "keep=-1 is not possible"),
        ({"sidecar": 3}, "sidecar=3 is not possible: a path"),
        ({"cluster_score": "sum"}, "cluster_score='sum' is not possible"),
        ({"preset": "flat"}, r"preset='flat' is not possible: one of \['hierarchical'\]"),
        ({"cluster": 2}, "unknown key 'cluster' in routing"),
    ],
)
def test_wrong_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        RoutingConfig.from_dict(options)


def test_locality_by_hand() -> None:
    """Two tokens, three layers, experts 0 to 3 in one domain and 4 to 7 in the other; 7 is in both."""
    labels = (torch.arange(8) // 4).expand(3, -1).contiguous()
    held = torch.zeros(3, 8, dtype=torch.bool)
    indices = torch.tensor([[[0, 1], [2, 4], [5, 6]], [[0, 4], [5, 7], [1, 2]]])
    plain = locality(indices, Clusters(labels, held, 2))
    assert plain.transitions == pytest.approx((2 + 2 + 2 + 0) / 16)
    assert plain.pairs == pytest.approx((1 + 0 + 1 + 0 + 1 + 1) / 6)
    held[:, 7] = True
    domains = domains_of(indices, Clusters(labels, held, 2))
    assert domains[1].tolist() == [[0, 1], [1, 1], [0, 0]]
    indices[1, 1] = torch.tensor([1, 7])
    assert domains_of(indices, Clusters(labels, held, 2))[1].tolist() == [[0, 1], [0, 0], [0, 0]]
    one = torch.tensor([[[0, 1], [0, 4], [4, 5]]])
    # at home in domain 0: layer 1 reaches over once, layer 2 (a tie: home stays) once; there and back
    assert crossings(one, Clusters(labels, held, 2), 10) == 2 * 2 * 10
    assert distinct_experts(torch.tensor([[[0, 1]], [[1, 2]], [[3, 4]], [[3, 4]]]), 2) == 2.5


def test_recording_sees_what_is_chosen() -> None:
    model = tiny_moe("olmoe")
    with recorded(model) as trace:
        model(prompt(20, rows=2))
    indices = trace.indices()
    assert indices.shape == (40, 2, 2)
    counted = count_affinity(indices, 8)
    assert float(counted.between.sum()) == pytest.approx(4)
    assert not find_routers(model)[0].module._forward_hooks


@pytest.mark.parametrize("by", PLACEMENTS)
def test_every_placement(by: str) -> None:
    model = tiny_moe("deepseek_v3")
    measured = measure(model, prompt(16, rows=2))
    clusters = make_clusters(by, model, measured, 2, replicas=1, starts=2)
    assert clusters.labels.shape == (2, 8)
    assert clusters.replicated.sum(1).tolist() == [1, 1]
    assert clusters.source == by
