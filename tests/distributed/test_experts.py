"""Which rank holds which expert, and bytes from a trace, without processes."""

import pytest
import torch

from hf_subbyte_moe.distributed.experts import crossing_bytes, place_experts, predicted_bytes, ranks_of_experts
from hf_subbyte_moe.routing import Clusters
from support.models import tiny_model


def clusters(labels: list[list[int]], count: int) -> Clusters:
    made = torch.tensor(labels)
    return Clusters(made, torch.zeros_like(made, dtype=torch.bool), count)


def test_clusters_are_placed_whole() -> None:
    found = ranks_of_experts(clusters([[3, 2, 1, 0], [0, 2, 1, 3]], 4), 2, 4, 2)
    assert found.tolist() == [[1, 1, 0, 0], [0, 1, 0, 1]]
    assert ranks_of_experts(None, 1, 6, 3).tolist() == [[0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize(
    ("made", "ranks", "told"),
    [
        (clusters([[0, 0, 0, 1]], 2), 2, "layer 0: ranks would hold \\[3, 1\\] experts"),
        (clusters([[0, 1, 2, 2]], 3), 2, "3 clusters cannot be placed whole on 2 ranks"),
        (clusters([[0, 1]], 2), 2, "are of a model with \\[1, 2\\]"),
    ],
)
def test_what_does_not_fit_is_refused(made: Clusters, ranks: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ranks_of_experts(made, 1, 4, ranks)


def test_a_model_that_is_not_on_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="distributed_config=expert_parallel"):
        place_experts(tiny_model("mixtral"), None)


def test_bytes_by_hand() -> None:
    """Three tokens: experts on one rank, on both, on the other; never more than an all-reduce."""
    owners = torch.tensor([[0, 0, 1, 1]])
    steps = [[torch.tensor([[0, 1], [1, 2], [3, 2]])]]
    assert predicted_bytes(steps, owners, 2, 10) == (1 + 2 + 1) * 10
    assert crossing_bytes([4, 4, 4], 4, 10) == 2 * 4 * 2 * 10
