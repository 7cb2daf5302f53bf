"""How the launches of the experts are cut: tuned configurations by device and shape."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from subbyte_kernels.expert_mlp.layout import ExpertFormat, ExpertLayout


_TUNED = Path(__file__).with_name("configs.json")


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
    """

    warps: int
    split: int
    producers: int
    stages: int
    step: int
    blocks_per_sm: int = 1


@lru_cache(maxsize=256)
def choose_config(device: int, layout: ExpertLayout, bucket: int, down: bool) -> CudaConfig:
    """The default."""
    del device
    if layout.format is not ExpertFormat.MODEL:
        return CudaConfig(8, 2, 2, 6, 4)
    width = layout.intermediate if down else layout.hidden
    return CudaConfig(8, 4 if bucket <= 8 else 8, 4, 3, min(32, width // 32))
