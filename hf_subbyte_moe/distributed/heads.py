"""KV heads spread over ranks by tensor parallelism, and how the ranks decide something about all of them.

Transformers shards the projections of an attention module; every rank then computes, caches and packs its own heads.
What no rank can know alone, the energy of the layer's whole output and what the other heads would gain from bits, goes
around as a few numbers once a prompt. Every rank then makes the same choice for all heads, that of one process.

Gives up: codebooks that are fitted to a prompt (``online``) are fitted to a rank's own heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor


Floats = NDArray[np.float64]

_KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "Wqkv")


@dataclass(frozen=True)
class HeadRanks:
    """The ranks that share a layer's heads; each holds as many neighbours as the others.

    Attributes:
        group: their process group.
        rank: this one.
        size: how many.
        device: where the group's tensors must lie.
    """

    group: Any
    rank: int
    size: int
    device: torch.device

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor."""
        total = tensor.to(self.device).clone()
        torch.distributed.all_reduce(total, group=self.group)
        return total.to(tensor.device)

    def gather(self, values: Floats) -> list[Floats]:
        """Every rank's values, of the same shape everywhere, in the order of the ranks."""
        own = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        torch.distributed.all_gather(parts, own, group=self.group)
        return [part.cpu().numpy() for part in parts]

    def part(self, heads: int) -> slice:
        """Which of all ``heads`` are this rank's."""
        each = heads // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def head_ranks(module: torch.nn.Module) -> HeadRanks | None:
    """The ranks that share an attention module's KV heads; None where it holds all of them."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    for name in _KEY_PROJECTIONS:
        weight = getattr(getattr(module, name, None), "weight", None)
        if weight is None:
            continue
        for dim, placement in enumerate(getattr(weight, "placements", ())):
            if placement.is_shard(0) and weight.device_mesh.size(dim) > 1:
                group = weight.device_mesh.get_group(dim)
                size = torch.distributed.get_world_size(group)
                return HeadRanks(group, torch.distributed.get_rank(group), size, weight.to_local().device)
    return None


def local_columns(weight: Tensor) -> Tensor | None:
    """This rank's part ``[out, in / ranks]`` of a weight that is sharded by its inputs; None for other weights."""
    placements = getattr(weight, "placements", None)
    if placements is None:
        return None
    sharded = [placement for placement in placements if not placement.is_replicate()]
    if len(sharded) != 1 or not sharded[0].is_shard(1):
        return None
    local: Tensor = weight.to_local()  # type: ignore[attr-defined]
    return local
