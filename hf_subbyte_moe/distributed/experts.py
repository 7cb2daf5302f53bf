"""Whole clusters of experts on ranks, inside Transformers' own expert parallelism.

All ranks see the same tokens (attention is sharded by heads), so what has to travel are results: the
weighted sum of a token's experts on one rank, to every other rank. Transformers sums over all ranks with one
all-reduce, whatever the router chose. Here a rank sends a token's sum only if it holds one of its experts: a token
whose experts lie on one rank crosses once instead of twice between two ranks. Which rank that is follows a cluster
file; weights move to their ranks once, after loading, and routers keep their numbering, so clusters, traces and
``output_router_logits`` mean what they meant. Sums are added in the order of the ranks: all ranks go on with the same
bits.

Gives up: replicated experts of a cluster file live on one rank; the sizes of what is sent are read by the host once a
layer, so that a step cannot be captured in a CUDA graph; a placed model must be put back before it is saved.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

from hf_subbyte_moe.compat import dispatch_config, register_dispatch
from hf_subbyte_moe.routing import Clusters


DISPATCH_NAME = "subbyte_clusters"
_ATTRIBUTE = "_hf_subbyte_moe_dispatch"


@dataclass
class Traffic:
    """What crossed ranks, all ranks together.

    Attributes:
        bytes: that were sent.
        calls: of expert layers.
        tokens: that these calls had.
    """

    bytes: int = 0
    calls: int = 0
    tokens: int = 0


def crossing_bytes(touched: Sequence[int], tokens: int, state_bytes: int) -> int:
    """Bytes that all ranks together send for one call of an expert layer.

    Args:
        touched: for each rank the tokens that it holds an expert of.
        tokens: of the call.
        state_bytes: of a token's hidden state.
    """
    others = len(touched) - 1
    return min(sum(touched), 2 * tokens) * others * state_bytes  # an all-reduce moves two states a token and rank


class ClusterDispatch:
    """Runs this rank's experts of one layer and brings every rank the sum.

    Attributes:
        position: ``[E]`` where each expert lies, counted over all ranks; None for the model's own order.
        traffic: what crossed.
        always_reduce: sum by all-reduce whatever the router chose, as Transformers does; to compare.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup) -> None:
        """``experts`` holds this rank's part of them."""
        self._experts = experts.forward
        self._local = int(experts.num_experts)  # type: ignore[arg-type]
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.position: Tensor | None = None
        self.traffic = Traffic()
        self.always_reduce = False
        object.__setattr__(experts, _ATTRIBUTE, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``[N, H]`` weighted sums, the same on every rank."""
        position = top_k_index if self.position is None else self.position[top_k_index]
        owner = position // self._local
        here = owner == self.rank
        index = torch.where(here, position % self._local, self._local)  # behind the last: not on this rank
        weights = top_k_weights.masked_fill(~here, 0)
        tokens, width = hidden_states.shape
        if self.always_reduce:
            self._count([tokens] * self.size, tokens, width * hidden_states.element_size())
            return self._reduced(self._experts(hidden_states, index, weights))
        rows = self._rows(owner)
        self._count([len(part) for part in rows], tokens, width * hidden_states.element_size())
        if sum(len(part) for part in rows) >= 2 * tokens and self.size > 2:
            return self._reduced(self._experts(hidden_states, index, weights))
        mine = rows[self.rank]
        own = hidden_states.new_zeros(0, width)
        if len(mine):
            own = self._experts(hidden_states[mine], index[mine], weights[mine]).to(hidden_states.dtype)
        made = torch.zeros_like(hidden_states)
        for part, sums in zip(rows, self._exchange(own, rows), strict=True):
            made.index_add_(0, part, sums)
        return made

    def _rows(self, owner: Tensor) -> list[Tensor]:
        """For each rank the tokens that it holds an expert of; one wait for the device."""
        chosen = owner.cpu()
        rows = [(chosen == rank).any(-1).nonzero()[:, 0] for rank in range(self.size)]
        return [part.to(owner.device, non_blocking=True) for part in rows]

    def _exchange(self, own: Tensor, rows: list[Tensor]) -> list[Tensor]:
        """Every rank's sums ``[n, H]``, in the order of the ranks."""
        counts = [len(part) for part in rows]
        received = [0 if rank == self.rank else count for rank, count in enumerate(counts)]
        sent = [0 if rank == self.rank else len(own) for rank in range(self.size)]
        out = own.new_empty(sum(received), own.shape[1])
        repeated = own.repeat(self.size - 1, 1) if self.size > 2 else own.contiguous()
        dist.all_to_all_single(out, repeated, received, sent, group=self.group)
        return [own if rank == self.rank else part for rank, part in enumerate(out.split(received))]

    def _reduced(self, partial: Tensor) -> Tensor:
        dist.all_reduce(partial, group=self.group)
        return partial

    def _count(self, touched: Sequence[int], tokens: int, state_bytes: int) -> None:
        self.traffic.bytes += crossing_bytes(touched, tokens, state_bytes)
        self.traffic.calls += 1
        self.traffic.tokens += tokens


register_dispatch(DISPATCH_NAME, ClusterDispatch)


def expert_parallel(config: PreTrainedConfig, ranks: int | None = None) -> DistributedConfig:
    """What ``from_pretrained(distributed_config=...)`` wants for experts, and attention heads, on ranks.

    Args:
        config: of the model.
        ranks: processes; None means those of ``torchrun``.

    Raises:
        ValueError: the model has no expert-parallel plan.
    """
    from_launcher = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    return dispatch_config(config, DISPATCH_NAME, ranks or from_launcher)


def dispatches(model: PreTrainedModel) -> Iterator[tuple[nn.Module, ClusterDispatch]]:
    """A model's experts modules and what brings tokens to them, in the order of the layers."""
    for module in model.modules():
        if (found := vars(module).get(_ATTRIBUTE)) is not None:
            yield module, found


def traffic_of(model: PreTrainedModel) -> Traffic:
    """What crossed ranks since the model was loaded or :func:`forget_traffic`; needs no communication."""
    parts = [dispatch.traffic for _, dispatch in dispatches(model)]
    return Traffic(
        sum(part.bytes for part in parts), sum(part.calls for part in parts), sum(part.tokens for part in parts)
    )


def forget_traffic(model: PreTrainedModel) -> None:
    """Count from zero."""
    for _, dispatch in dispatches(model):
        dispatch.traffic = Traffic()


def ranks_of_experts(clusters: Clusters | None, layers: int, experts: int, ranks: int) -> Tensor:
    """``[L, E]`` the rank of every expert: neighbouring clusters on one rank, none divided.

    Args:
        clusters: of the model; None for equal parts in the model's own order.
        layers: with routed experts.
        experts: of a layer.
        ranks: how many.

    Raises:
        ValueError: clusters of another model, fewer clusters than ranks, or such that ranks would hold different
            numbers of experts.
    """
    if clusters is None:
        return (torch.arange(experts) * ranks // experts).expand(layers, -1)
    if tuple(clusters.labels.shape) != (layers, experts):
        known = list(clusters.labels.shape)
        raise ValueError(f"these clusters are of a model with {known} layers and experts, not {[layers, experts]}")
    if clusters.count % ranks:
        raise ValueError(f"{clusters.count} clusters cannot be placed whole on {ranks} ranks: give a multiple of them")
    owner = clusters.labels.long() * ranks // clusters.count
    for layer, chosen in enumerate(owner):
        held = torch.bincount(chosen, minlength=ranks)
        if int(held.max()) != experts // ranks or experts % ranks:
            raise ValueError(
                f"layer {layer}: ranks would hold {held.tolist()} experts; expert parallelism needs {experts} in "
                f"{ranks} equal parts"
            )
    return owner


def place_experts(model: PreTrainedModel, clusters: Clusters | None) -> PreTrainedModel:
    """Bring every expert to the rank of its cluster; every rank must call.

    Args:
        model: loaded with :func:`expert_parallel`.
        clusters: None puts the model's own order back, as it must be for saving.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no experts on ranks, or the clusters do not fit.
    """
    found = list(dispatches(model))
    if not found:
        raise ValueError(
            "the model's experts are not on ranks: load it with distributed_config=expert_parallel(config)"
        )
    size = found[0][1].size
    experts = size * int(found[0][0].num_experts)  # type: ignore[arg-type]
    owners = ranks_of_experts(clusters, len(found), experts, size)
    for (module, dispatch), owner in zip(found, owners, strict=True):
        natural = torch.arange(experts)
        before = natural if dispatch.position is None else dispatch.position.cpu()
        after = torch.empty_like(natural)
        after[owner.argsort(stable=True)] = natural
        for parameter in module.parameters(recurse=False):
            _move(parameter, before, after, dispatch)
        device = next(module.parameters()).device
        dispatch.position = None if torch.equal(after, natural) else after.to(device)
    return model


def _move(parameter: nn.Parameter, before: Tensor, after: Tensor, dispatch: ClusterDispatch) -> None:
    """Exchange the slabs of a sharded parameter so that expert e lies at ``after[e]`` instead of ``before[e]``."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data
    each = len(local)
    source, target = before // each, after // each
    sent, received = [], []
    for rank in range(dispatch.size):
        leaving = ((source == dispatch.rank) & (target == rank)).nonzero()[:, 0]
        coming = ((target == dispatch.rank) & (source == rank)).nonzero()[:, 0]
        sent.append(leaving[after[leaving].argsort()])
        received.append(coming[after[coming].argsort()])
    out = torch.empty_like(local)
    arranged = local[(before[torch.cat(sent)] % each).to(local.device)].contiguous()
    counts = ([len(part) for part in received], [len(part) for part in sent])
    dist.all_to_all_single(out, arranged, *counts, group=dispatch.group)
    with torch.no_grad():
        local[(after[torch.cat(received)] % each).to(local.device)] = out


def predicted_bytes(steps: Sequence[Sequence[Tensor]], owners: Tensor, ranks: int, state_bytes: int) -> int:
    """Bytes that will cross ranks, from a trace alone.

    Args:
        steps: for each layer the experts ``[N, K]`` of every call, as ``routing.traces.Trace.steps``.
        owners: ``[L, E]`` from :func:`ranks_of_experts`.
        ranks: how many.
        state_bytes: of a token's hidden state.
    """
    total = 0
    for calls, owner in zip(steps, owners, strict=True):
        for chosen in calls:
            on = owner[chosen]
            touched = [int((on == rank).any(-1).sum()) for rank in range(ranks)]
            total += crossing_bytes(touched, len(chosen), state_bytes)
    return total
