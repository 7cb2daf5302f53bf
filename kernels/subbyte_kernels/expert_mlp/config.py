"""How the launches of the experts are cut: tuned configurations by device and shape."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from subbyte_kernels.expert_mlp.layout import ExpertFormat, ExpertLayout


_TUNED = Path(__file__).with_name("configs.json")


@dataclass(frozen=True)
class CudaConfig:
    """How a launch is cut.

    Attributes:
        warps: warps of a block that compute; one more streams weights.
        stages: stages of the ring.
        step: chunks of a stage; of 32 columns in the model's dtype, of 128 packed.
        blocks_per_sm: blocks of a multiprocessor in the grid.
    """

    warps: int
    stages: int
    step: int
    blocks_per_sm: int = 1


@lru_cache(maxsize=256)
def choose_config(device: int, layout: ExpertLayout, bucket: int, down: bool) -> CudaConfig:
    """The default."""
    del device, down
    if layout.format is ExpertFormat.MODEL:
        return CudaConfig(7, 10, 8) if bucket <= 8 else CudaConfig(7, 20, 4)
    return CudaConfig(7, 20, 2) if layout.format is ExpertFormat.INT4 else CudaConfig(7, 10, 2)
