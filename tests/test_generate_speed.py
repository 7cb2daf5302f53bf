"""``eval/generate_speed.py``, as far as it needs no GPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hf_subbyte_moe.cli.shapes import random_model
from hf_subbyte_moe.decode import runner
from support.scripts import EVAL, scripts_of


CAPTURED = "uniform:vq2, captured"


@pytest.fixture(scope="module")
def speed() -> Iterator[Any]:
    with scripts_of(EVAL, "generate_speed") as found:
        yield found.generate_speed


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return random_model("toy", 2, torch.device("cpu"))


def test_every_cache_generates_and_leaves_the_model_as_it_was(
    speed: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))
    ids = torch.ones(1, 300, dtype=torch.int64)
    attention = model.config._attn_implementation
    assert [*speed._CACHES] == ["dynamic", "uniform:vq2", CAPTURED, "error, 2.5 bits"]
    for name in speed._CACHES:
        with torch.no_grad(), speed.prepared(model, name) as options:
            assert ("forward" in vars(model)) == (name == CAPTURED)
            made = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)
        assert made.shape == (1, 304)
        assert "forward" not in vars(model)
        assert model.config._attn_implementation == attention


def test_steps_that_were_not_captured_are_no_row(speed: Any, model: Any) -> None:
    ids = torch.ones(1, 300, dtype=torch.int64)
    with (
        pytest.raises(ValueError, match="steps of 'uniform:vq2, captured' were not captured: the model is on cpu"),
        torch.no_grad(),
        speed.prepared(model, CAPTURED) as options,
    ):
        model.generate(ids, max_new_tokens=2, do_sample=False, **options)
    assert "forward" not in vars(model)
