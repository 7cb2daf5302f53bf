"""The section ``experts``: every wrong option is refused with its key, its value and what is allowed."""

import re
from typing import Any

import pytest

from hf_subbyte_moe import ExpertsConfig, SubByteConfig


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("placement", "cpu", "one of ['gpu', 'offload', 'disk']"),
        ("placement", None, "one of"),
        ("gpu_slots", 0, "a share of all experts above 0.0 and at most 1.0, or a number"),
        ("gpu_slots", 0.0, "a share"),
        ("gpu_slots", 1.5, "a share"),
        ("gpu_slots", -3, "a share"),
        ("gpu_slots", True, "a share"),
        ("gpu_slots", "half", "a share"),
        ("gpu_slots", float("nan"), "a share"),
        ("prefetch", "always", "one of ['auto', 'off', 'previous', 'gate', 'head']"),
        ("prefetch", True, "one of"),
        ("sidecar", "", "a path"),
        ("sidecar", 3, "a path"),
    ],
)
def test_wrong_values(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{key}={value!r} is not possible: {allowed}")):
        SubByteConfig.from_dict({"experts": {key: value}})


def test_sections_and_keys() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'slots' in experts; there are \['placement', 'gpu_slots'"):
        SubByteConfig.from_dict({"experts": {"slots": 3}})
    with pytest.raises(ValueError, match="experts must be a dictionary, not 'offload'"):
        SubByteConfig.from_dict({"experts": "offload"})
    options = {"experts": {"placement": "offload", "gpu_slots": 64, "prefetch": "off"}}
    config = SubByteConfig.from_dict(options)
    assert config.experts == ExpertsConfig(placement="offload", gpu_slots=64, prefetch="off")
    assert config.to_dict() == {"version": 1, **options}
    assert not ExpertsConfig().moves
