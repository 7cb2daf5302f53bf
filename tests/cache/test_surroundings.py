"""What a program may set around a cache: PyTorch's default dtype, inference mode, autocast."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from hf_subbyte_moe.compat import cache_of
from hf_subbyte_moe.policy import sample_positions
from support.models import prompt, tiny_model


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("codebook", ["universal", "queries"])
def test_the_default_dtype_changes_nothing(codebook: str) -> None:
    model = tiny_model()
    for made_once in (rotation_matrix, rotation_signs):
        made_once.cache_clear()

    def generated() -> Any:
        return model.generate(
            prompt(300, rows=2),
            max_new_tokens=8,
            do_sample=False,
            return_dict_in_generate=True,
            cache_implementation="entropy_subbyte",
            cache_config={"window": 8, "codebook": codebook},
        )

    with default_dtype(torch.bfloat16):
        found = generated()
    for made_once in (rotation_matrix, rotation_signs):
        assert made_once(16, torch.device("cpu")).dtype is torch.float32
    expected = generated()
    for layer, other in zip(cache_of(found).layers, cache_of(expected).layers, strict=True):
        for name, tensor in other.rows.state().items():
            assert layer.rows.state()[name].dtype is tensor.dtype, name
            assert torch.equal(layer.rows.state()[name], tensor), name
    assert torch.equal(found.sequences, expected.sequences)


def test_the_default_dtype_moves_no_sample() -> None:
    """bf16 counts to 256 in ones, and to 65536 in steps of 256."""
    expected = sample_positions(60_000)
    with default_dtype(torch.bfloat16):
        assert torch.equal(sample_positions(60_000), expected)
