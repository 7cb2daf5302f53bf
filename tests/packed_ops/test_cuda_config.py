"""Which tuned configuration a launch takes, and how many splits."""

from typing import Any

import pytest
import torch

from subbyte_kernels.decode_attention import cuda_config
from subbyte_kernels.decode_attention.cuda_config import CudaConfig, choose_config, choose_splits


ROWS = [
    {"heads": 8, "tiles": 62, "mixed": False, "warps": 8, "blocks_per_sm": 1},
    {"heads": 8, "tiles": 1022, "mixed": False, "warps": 16, "blocks_per_sm": 1},
    {"heads": 8, "tiles": 1022, "mixed": True, "warps": 12, "blocks_per_sm": 1},
]


@pytest.fixture(autouse=True)
def tuned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One device that was tuned, and device 1, which was not."""
    monkeypatch.setattr(cuda_config, "_tuned", lambda: {"GPU": ROWS})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "other" if device else "GPU")
    choose_config.cache_clear()
    yield
    choose_config.cache_clear()


@pytest.mark.parametrize(
    ("device", "tiles", "mixed", "warps"),
    [(0, 70, False, 8), (0, 800, False, 16), (0, 70, True, 12), (0, 5000, True, 12), (1, 800, False, 8)],
)
def test_the_nearest_size_of_the_same_kind_on_the_same_device(
    device: int, tiles: int, mixed: bool, warps: int
) -> None:
    assert choose_config(device, 8, tiles, mixed).warps == warps


def test_no_tiles_need_no_tuning() -> None:
    assert choose_config(0, 8, 0, mixed=False) == CudaConfig(8, 1)


@pytest.mark.parametrize(("heads", "tiles"), [(8, 62), (4, 1022), (64, 254), (256, 4)])
def test_splits_fill_the_device_and_leave_a_unit_for_each_warp(heads: int, tiles: int) -> None:
    splits = choose_splits(heads, tiles, CudaConfig(8, 1), multiprocessors=132)
    assert 1 <= splits <= 128
    assert heads * splits <= max(heads, 3 * 132)
    assert 2 * tiles / splits > 1
