"""Which cluster every expert of every layer belongs to, checked, and the sidecar file that holds it.

A sidecar is one safetensors file: ``labels`` (``[L, E]`` int16) and ``replicated`` (``[L, E]`` bool: the expert is
held by every cluster), with what they belong to in the header.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_subbyte_moe.tensor_files import write_tensor_file


ROUTING_SIDECAR_NAME = "routing.safetensors"
_KIND = "hf_subbyte_moe routing"
_VERSION = "1"


@dataclass(frozen=True)
class Clusters:
    """Experts in clusters.

    Attributes:
        labels: ``[L, E]`` cluster of every expert.
        replicated: ``[L, E]`` bool; these experts are in every cluster.
        count: clusters.
        source: what they were made from, for people.
        model: model type, layers, experts and experts a token that they belong to.
    """

    labels: Tensor
    replicated: Tensor
    count: int
    source: str = ""
    model: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.labels.ndim != 2 or self.labels.is_floating_point() or self.labels.shape != self.replicated.shape:
            raise ValueError(
                f"clusters need a label of every layer and expert, not {list(self.labels.shape)} {self.labels.dtype}"
            )
        layers, experts = self.labels.shape
        if not 1 <= self.count <= experts:
            raise ValueError(f"{self.count} clusters are not possible with {experts} experts")
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= self.count:
            raise ValueError(
                f"clusters are no partition: labels lie between {int(self.labels.min())} and "
                f"{int(self.labels.max())}, not 0 and {self.count - 1}"
            )
        for layer in range(layers):
            sizes = torch.bincount(self.labels[layer].long(), minlength=self.count)
            if int(sizes.min()) == 0:
                raise ValueError(
                    f"clusters are no partition: cluster {int(sizes.argmin())} of layer {layer} has no expert"
                )

    def membership(self, layer: int) -> Tensor:
        """``[C, E]`` bool of one layer."""
        own = self.labels[layer].long() == torch.arange(self.count)[:, None]
        return own | self.replicated[layer]

    def members(self, layer: int) -> Tensor:
        """``[C, M]`` experts of every cluster of one layer; short clusters are filled up with E."""
        inside = self.membership(layer)
        experts = inside.shape[1]
        width = int(inside.sum(1).max())
        order = torch.where(inside, torch.arange(experts), experts).sort(dim=1).values
        return order[:, :width].contiguous()

    def least_experts(self, clusters: int) -> int:
        """The fewest experts that any so many clusters hold together."""
        sizes = torch.stack([self.membership(layer).sum(1) for layer in range(len(self.labels))])
        shared = self.replicated.sum(1)
        smallest = (sizes - shared[:, None]).sort(dim=1).values[:, :clusters].sum(1) + shared
        return int(smallest.min())

    def save(self, path: Path) -> None:
        """Write the sidecar.

        Raises:
            OSError: it cannot be written.
        """
        header = {
            "kind": _KIND,
            "version": _VERSION,
            "count": str(self.count),
            "source": self.source,
            "model": json.dumps(self.model),
        }
        tensors = {"labels": self.labels.to(torch.int16), "replicated": self.replicated}
        write_tensor_file(tensors, path, header)

    @classmethod
    def load(cls, path: Path) -> "Clusters":
        """Read a sidecar.

        Raises:
            ValueError: no such file, not one of ours, from a newer release, or its clusters are no partition.
        """
        if not path.is_file():
            raise ValueError(f"there is no cluster file {str(path)!r}: hf-subbyte-moe cluster writes one")
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                if header.get("kind") != _KIND:
                    raise ValueError(f"{str(path)!r} is no cluster file")
                if header.get("version") != _VERSION:
                    raise ValueError(
                        f"{str(path)!r} has version {header.get('version')}; this release reads {_VERSION}"
                    )
                labels, replicated = file.get_tensor("labels"), file.get_tensor("replicated")
        except SafetensorError as error:
            raise ValueError(f"{str(path)!r} is no cluster file: {error}") from None
        return cls(
            labels.to(torch.int64),
            replicated.bool(),
            int(header["count"]),
            header.get("source", ""),
            json.loads(header["model"]),
        )
