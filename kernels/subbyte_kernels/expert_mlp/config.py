"""How the launches of the experts are cut: tuned configurations by device and shape (``configs.json``)."""

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from subbyte_kernels.expert_mlp.layout import ExpertFormat, ExpertLayout


_TUNED = Path(__file__).with_name("configs.json")
_NEAR = 3.0  # both sides together, as a factor


@dataclass(frozen=True)
class CudaConfig:
    """How a launch is cut.

    Attributes:
        warps: warps of a block that compute.
        split: of them, those that share a stage.
        producers: more warps, that stream weights.
        stages: stages of the ring.
        step: chunks of a stage; of 32 columns in the model's dtype, of 128 packed.
        blocks_per_sm: blocks of a multiprocessor in the grid.
        fixed: products of integers, for one token and int4; both launches alike.
    """

    warps: int
    split: int
    producers: int
    stages: int
    step: int
    blocks_per_sm: int = 1
    fixed: bool = False

    def __post_init__(self) -> None:
        teams, rest = divmod(self.warps, self.split)
        if rest or self.stages % teams or self.stages % self.producers:
            raise ValueError(f"{self}: teams and producers must divide the stages")


def default_config(layout: ExpertLayout, bucket: int, down: bool) -> CudaConfig:
    """What is right for every shape."""
    if layout.format is not ExpertFormat.MODEL:
        return CudaConfig(8, 4, 2, 4, 4, 1 if down else 2)
    width = layout.intermediate if down else layout.hidden
    return CudaConfig(8, 4 if bucket <= 8 else 8, 2, 4, min(24, width // 32))


@lru_cache(maxsize=1)
def _tuned() -> dict[str, list[dict[str, Any]]]:
    """Device name -> what was the fastest for some shapes."""
    found: dict[str, list[dict[str, Any]]] = json.loads(_TUNED.read_text()) if _TUNED.exists() else {}
    return found


@lru_cache(maxsize=256)
def choose_config(device: int, layout: ExpertLayout, bucket: int, down: bool) -> CudaConfig:
    """The configuration that was tuned for the nearest shape of the same format and bucket of tokens, if one is near.

    A stage of whole rows fits one width alone, so that such a configuration is taken for that width only.
    """
    rows = [
        row
        for row in _tuned().get(torch.cuda.get_device_name(device), [])
        if (row["format"], row["tokens"], row["down"]) == (layout.format.value, bucket, down) and _fits(row, layout)
    ]
    if not rows:
        return default_config(layout, bucket, down)
    nearest = min(rows, key=lambda row: _distance(row, layout))
    if _distance(nearest, layout) > math.log(_NEAR):
        return default_config(layout, bucket, down)
    return CudaConfig(**{field.name: nearest.get(field.name, field.default) for field in fields(CudaConfig)})


def _distance(row: dict[str, Any], layout: ExpertLayout) -> float:
    sides = (row["hidden"] / layout.hidden, row["intermediate"] / layout.intermediate)
    return sum(abs(math.log(side)) for side in sides)


def _fits(row: dict[str, Any], layout: ExpertLayout) -> bool:
    side = "intermediate" if row["down"] else "hidden"
    whole = layout.format is ExpertFormat.MODEL and 32 * row["step"] >= row[side]
    return not whole or row[side] == getattr(layout, side)
