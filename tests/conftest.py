"""Order of the tests: slow ones first, so that parallel workers end together.

Without a CUDA device Triton's kernels run in its interpreter, which must be chosen before they are defined.
"""

import os

import pytest
import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
