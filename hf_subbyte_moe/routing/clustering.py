"""Balanced clusters of experts, aligned from layer to layer.

Experts of all layers form one graph: edges inside a layer say that two experts serve the same tokens (or are alike),
edges between neighbouring layers that a token passed from one to the other. Every layer is cut into clusters of equal
size so that as much weight as possible stays inside; since layers are cut together, cluster 2 of layer 5 is the one
that tokens of cluster 2 of layer 4 go to. A spectral start and random ones are refined by exchanging pairs of experts
until no exchange helps; the best result stays. Where loads are given, no cluster of a layer may serve much more than
its share: else all popular experts end in one cluster, and everything is local there.

Gives up: optimality. Exchanges find local optima, so there are several starts.

Source: exchanges, Kernighan and Lin (1970); affinity between layers, ExFlow (arXiv 2401.08383).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


MOST_LOAD = 1.15
_EPSILON = 1e-9
_OVERLOAD_PRICE = 10.0  # of a load beyond the most, in weight of edges: more than any exchange gains
_POWER_STEPS = 60


@dataclass(frozen=True)
class Affinity:
    """How much belongs together.

    Attributes:
        within: ``[L, E, E]`` symmetric, diagonal ignored.
        between: ``[L - 1, E, E]`` from experts of a layer (rows) to those of the next.
        load: ``[L, E]`` how much every expert serves; None if that is not known or not to be balanced.
    """

    within: Tensor
    between: Tensor
    load: Tensor | None = None

    def without(self, experts: Tensor) -> "Affinity":
        """The same without some experts' weights; ``[L, E]`` bool."""
        alone = (~experts).to(self.within.dtype)
        return Affinity(
            self.within * alone[:, :, None] * alone[:, None, :],
            self.between * alone[:-1, :, None] * alone[1:, None, :],
            None if self.load is None else self.load * alone,
        )

    def pull(self, layer: int, sides: Tensor) -> Tensor:
        """``[E, C]`` how strongly each cluster pulls each expert of a layer; ``sides`` is ``[L, E, C]``."""
        found = self.within[layer] @ sides[layer]
        if layer > 0:
            found = found + self.between[layer - 1].T @ sides[layer - 1]
        if layer < len(sides) - 1:
            found = found + self.between[layer] @ sides[layer + 1]
        return found

    def inside(self, labels: Tensor) -> float:
        """Weight inside clusters, every edge once."""
        same = labels[:, :, None] == labels[:, None, :]
        across = labels[:-1, :, None] == labels[1:, None, :]
        return float((self.within * same).sum() / 2 + (self.between * across).sum())


def partition(
    affinity: Affinity,
    count: int,
    groups: int = 1,
    starts: int = 8,
    seed: int = 0,
    most_load: float = MOST_LOAD,
    progress: Callable[[], None] | None = None,
) -> Tensor:
    """Cut every layer into ``count`` clusters of equal size (to within one expert).

    Args:
        affinity: what belongs together.
        count: clusters.
        groups: the model's own groups of consecutive experts; clusters are unions of them or lie inside them.
        starts: the first is spectral, the others random.
        seed: of the random ones.
        most_load: what a cluster may serve, in shares of the mean; matters where the affinity has loads.
        progress: called after every start.

    Returns:
        ``[L, E]`` labels.

    Raises:
        ValueError: more clusters than experts, or clusters that cannot be aligned with the groups.
    """
    layers, experts, _ = affinity.within.shape
    if not 1 <= count <= experts:
        raise ValueError(f"{count} clusters are not possible with {experts} experts")
    if groups > 1 and count % groups and groups % count:
        raise ValueError(f"{count} clusters cannot be aligned with the model's own {groups} groups of experts")
    if groups > 1 and count < groups:
        size = experts // groups
        load = None if affinity.load is None else affinity.load.reshape(layers, groups, size).sum(-1)
        merged = Affinity(_merged(affinity.within, size), _merged(affinity.between, size), load)
        return partition(merged, count, 1, starts, seed, most_load, progress).repeat_interleave(size, dim=1)
    within = affinity.within.double().clone()
    within.diagonal(dim1=1, dim2=2).zero_()
    load = torch.zeros(layers, experts) if affinity.load is None else affinity.load
    graph = Affinity(within, affinity.between.double(), load.double())
    own = torch.arange(experts) * groups // experts  # group of every expert
    generator = torch.Generator().manual_seed(seed)
    best, best_inside = None, 0.0
    for start in range(starts):
        rank = (
            _spectral_order(graph, generator)
            if start == 0
            else torch.rand(layers, experts, generator=generator, dtype=torch.float64)
        )
        labels = _refined(graph, _cut(rank, own, count), own, count, most_load)
        inside = graph.inside(labels) - _overload(graph, labels, count, most_load)
        if best is None or inside > best_inside:
            best, best_inside = labels, inside
        if progress is not None:
            progress()
    assert best is not None
    return best


def replicas(affinity: Affinity, labels: Tensor, number: int) -> Tensor:
    """``[L, E]`` bool: in every layer the ``number`` experts with the most weight that leaves their cluster."""
    same = labels[:, :, None] == labels[:, None, :]
    across = labels[:-1, :, None] != labels[1:, None, :]
    outside = (affinity.within * ~same).sum(-1)
    leaving = affinity.between * across
    outside[:-1] += leaving.sum(-1)
    outside[1:] += leaving.sum(1)
    chosen = torch.zeros_like(labels, dtype=torch.bool)
    return chosen.scatter_(1, outside.topk(number, dim=1).indices, True) if number else chosen


def partition_with_replicas(
    affinity: Affinity,
    count: int,
    number: int,
    groups: int = 1,
    starts: int = 8,
    seed: int = 0,
    most_load: float = MOST_LOAD,
    rounds: int = 3,
    progress: Callable[[], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Labels and replicas, each chosen anew for the other; replicas pull no expert anywhere.

    Returns:
        ``[L, E]`` labels and ``[L, E]`` bool.
    """
    labels = partition(affinity, count, groups, starts, seed, most_load, progress)
    if not number:
        return labels, torch.zeros_like(labels, dtype=torch.bool)
    best: tuple[Tensor, Tensor] | None = None
    least = float("inf")
    for _ in range(rounds):
        held = replicas(affinity, labels, number)
        rest = affinity.without(held)
        labels = partition(rest, count, groups, starts, seed, most_load, progress)
        outside = float(rest.within.sum() / 2 + rest.between.sum()) - rest.inside(labels)
        if outside < least:
            best, least = (labels, held), outside
    assert best is not None
    return best


def _merged(matrices: Tensor, size: int) -> Tensor:
    """``[L, E, E]`` to ``[L, E / size, E / size]``, sums of blocks."""
    layers, experts, _ = matrices.shape
    blocks = matrices.reshape(layers, experts // size, size, experts // size, size)
    return blocks.sum((2, 4))


def _spectral_order(graph: Affinity, generator: torch.Generator) -> Tensor:
    """``[L, E]`` second eigenvector of the normalised graph, by power iteration on all layers at once."""
    layers, experts, _ = graph.within.shape
    ones = torch.ones(layers, experts, 1, dtype=torch.float64)
    root = torch.stack([graph.pull(layer, ones) for layer in range(layers)]).clamp(min=_EPSILON).sqrt()
    first = root / root.norm()
    vector = torch.rand(layers, experts, 1, generator=generator, dtype=torch.float64) - 0.5
    for _ in range(_POWER_STEPS):
        scaled = vector / root
        moved = torch.stack([graph.pull(layer, scaled) for layer in range(layers)]) / root
        vector = moved + vector  # shifted, so that no negative eigenvalue leads
        vector = vector - first * (first * vector).sum()
        vector = vector / vector.norm().clamp(min=_EPSILON)
    return (vector / root)[..., 0]


def _cut(rank: Tensor, own: Tensor, count: int) -> Tensor:
    """``[L, E]`` labels: each group's experts in the order of ``rank``, cut into equal pieces."""
    groups = int(own.max()) + 1
    labels = torch.empty(rank.shape, dtype=torch.int64)
    for group in range(groups):
        inside = (own == group).nonzero()[:, 0]
        pieces = count // groups
        order = rank[:, inside].argsort(dim=1)
        label = group * pieces + torch.arange(len(inside)) * pieces // len(inside)
        labels.scatter_(1, inside[order], label.expand(len(rank), -1))
    return labels


def _overload(graph: Affinity, labels: Tensor, count: int, most_load: float) -> float:
    """The price of all loads beyond the most."""
    assert graph.load is not None
    served = torch.zeros(len(labels), count, dtype=torch.float64).scatter_add_(1, labels, graph.load)
    most = most_load * graph.load.sum(1, keepdim=True) / count
    return _OVERLOAD_PRICE * float((served - most).clamp(min=0).sum())


def _relief(load: Tensor, label: Tensor, count: int, most_load: float) -> Tensor:
    """``[E, E]`` how much an exchange of two experts of a layer lowers the price of overload."""
    served = torch.zeros(count, dtype=torch.float64).scatter_add_(0, label, load)
    most = most_load * load.sum() / count
    moved = load[None, :] - load[:, None]  # what i's cluster gains when i goes and j comes
    now = (served - most).clamp(min=0)[label]
    then = (served[label][:, None] + moved - most).clamp(min=0)
    return _OVERLOAD_PRICE * (now[:, None] + now[None, :] - then - then.T)


def _refined(graph: Affinity, labels: Tensor, own: Tensor, count: int, most_load: float) -> Tensor:
    """Exchange the pair that helps most, layer by layer, until none helps in any layer."""
    sides = torch.nn.functional.one_hot(labels, count).to(graph.within.dtype)
    apart = own[:, None] != own[None, :]
    assert graph.load is not None
    changed = True
    while changed:
        changed = False
        for layer in range(len(labels)):
            while True:
                label = labels[layer]
                pull = graph.pull(layer, sides)
                there = pull[:, label]  # [i, j]: what pulls i to where j is
                here = pull.gather(1, label[:, None])
                gain = there + there.T - here - here.T - 2 * graph.within[layer]
                gain = gain + _relief(graph.load[layer], label, count, most_load)
                gain = gain.masked_fill(apart | (label[:, None] == label[None, :]), 0)
                best = int(gain.argmax())
                first, second = divmod(best, len(label))
                if gain[first, second] <= _EPSILON:
                    break
                changed = True
                labels[layer, [first, second]] = label[[second, first]]
                sides[layer, [first, second]] = sides[layer, [second, first]]
    return labels
