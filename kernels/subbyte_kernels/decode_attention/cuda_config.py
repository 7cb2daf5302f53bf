"""How a launch of the CUDA kernel is cut: tuned configurations by device and size, and splits of a row."""

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from subbyte_kernels.decode_attention.balance import MAX_SPLITS


_TUNED = Path(__file__).with_name("configs.json")


@dataclass(frozen=True)
class CudaConfig:
    """How a launch is cut.

    Attributes:
        warps: warps of a block, each of which works on units of its own.
        blocks_per_sm: blocks that registers are divided for.
    """

    warps: int
    blocks_per_sm: int


def candidate_configs() -> list[CudaConfig]:
    """What tuning tries."""
    return [CudaConfig(8, 1), CudaConfig(12, 1), CudaConfig(16, 1)]


_DEFAULT = CudaConfig(8, 1)


@lru_cache(maxsize=1)
def _tuned() -> dict[str, list[dict[str, float]]]:
    """Device name -> what was the fastest at some numbers of heads and tiles."""
    found: dict[str, list[dict[str, float]]] = json.loads(_TUNED.read_text()) if _TUNED.exists() else {}
    return found


@lru_cache(maxsize=1024)
def choose_config(device: int, heads: int, tiles: int, mixed: bool) -> CudaConfig:
    """The tuned configuration nearest in size.

    Args:
        device: CUDA device.
        heads: KV heads of all rows.
        tiles: tiles of the longest row.
        mixed: tiles differ in their tiers.
    """
    tuned = _tuned().get(torch.cuda.get_device_name(device), [])
    rows = [row for row in tuned if row["mixed"] == mixed]
    if not rows or not tiles:
        return _DEFAULT
    nearest = min(rows, key=lambda row: abs(math.log(row["heads"] / heads)) + abs(math.log(row["tiles"] / tiles)))
    return CudaConfig(int(nearest["warps"]), int(nearest["blocks_per_sm"]))


@lru_cache(maxsize=4096)
def choose_splits(heads: int, tiles: int, config: CudaConfig, multiprocessors: int) -> int:
    """Splits of a row that keep all multiprocessors busy for the shortest time.

    A block takes a fixed time, as long as two rounds of its warps, and one more for each round of units.
    """
    slots = multiprocessors * config.blocks_per_sm
    units = 2 * tiles

    def cost(splits: int) -> float:
        waves = math.ceil(heads * splits / slots)
        rounds = math.ceil(units / splits / config.warps)
        return waves * (2 + rounds) + 0.02 * splits

    return min(range(1, max(1, min(units, MAX_SPLITS)) + 1), key=cost)
