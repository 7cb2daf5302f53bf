"""Options: every wrong one is refused with its key, its value and what is allowed."""

import json
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hf_subbyte_moe import ops
from hf_subbyte_moe.config import (
    BACKENDS,
    BUDGET_POLICIES,
    CODEBOOKS,
    CONFIG_VERSION,
    POLICIES,
    TIERS,
    KVCacheConfig,
    SubByteConfig,
)


WRONG = [
    ("default", 1, "true or false"),
    ("default", "yes", "true or false"),
    ("default", None, "true or false"),
    ("bits", 0, "a number of bits a value, above 0 and at most 16"),
    ("bits", -2.5, "at most 16"),
    ("bits", 16.1, "at most 16"),
    ("bits", float("nan"), "at most 16"),
    ("bits", float("inf"), "at most 16"),
    ("bits", True, "at most 16"),
    ("bits", "2.5", "a number of bits"),
    ("bits", [2.5], "a number of bits"),
    ("policy", "best", "one of ['auto', 'calibrated', 'error', 'entropy_rank', 'entropy_rank_inverse', "),
    ("policy", "uniform:", "with a tier of"),
    ("policy", "uniform:vq5", "with a tier of"),
    ("policy", "uniform: vq2", "with a tier of"),
    ("policy", None, "one of"),
    ("policy", 3, "one of"),
    ("policy", ["error"], "one of"),
    ("codebook", "best", "one of ['universal', 'online', 'queries', 'calibrated']"),
    ("sidecar", 3, "a path"),
    ("sidecar", "", "a path"),
    ("codebook", None, "one of"),
    ("codebook", ["online"], "one of"),
    ("window", 0, "a number of tokens, at least 1"),
    ("window", -1, "at least 1"),
    ("window", 128.0, "a number of tokens"),
    ("window", True, "a number of tokens"),
    ("window", "128", "a number of tokens"),
    ("window", None, "a number of tokens"),
    ("sinks", -1, "a number of tokens, at least 0"),
    ("sinks", 4.0, "a number of tokens"),
    ("sinks", False, "a number of tokens"),
    ("sinks", None, "a number of tokens"),
    ("chunk", 0, "'prompt' or a multiple of 128 tokens"),
    ("chunk", -128, "a multiple of 128"),
    ("chunk", 100, "a multiple of 128"),
    ("chunk", 128.0, "a multiple of 128"),
    ("chunk", True, "a multiple of 128"),
    ("chunk", "all", "'prompt'"),
    ("chunk", "256", "a multiple of 128"),
    ("chunk", None, "'prompt'"),
    ("backend", "flash", "one of ['auto', 'cuda', 'triton', 'torch']"),
    ("backend", None, "one of"),
]

RIGHT: list[dict[str, Any]] = [
    {},
    {"default": False},
    {"bits": 2.25},
    {"bits": 3},
    {"bits": 16},
    {"bits": 4.0, "policy": "entropy_rank"},
    {"policy": "entropy"},
    {"policy": "uniform:vq175", "codebook": "online"},
    {"window": 1, "sinks": 0},
    {"chunk": 128},
    {"chunk": 1024, "window": 256, "sinks": 8},
]


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG)
def test_a_wrong_value_is_refused_with_key_value_and_what_is_allowed(key: str, value: object, allowed: str) -> None:
    expected = f"^{re.escape(f'{key}={value!r} is not possible: ')}.*{re.escape(allowed)}"
    with pytest.raises(ValueError, match=expected):
        KVCacheConfig(**{key: value})
    with pytest.raises(ValueError, match=expected):
        SubByteConfig.from_dict({"kv_cache": {key: value}})


@pytest.mark.parametrize("key", ["bit", "Bits", "nbits", "", 3])
def test_an_unknown_key_is_refused_with_those_that_exist(key: object) -> None:
    known = "['default', 'bits', 'policy', 'codebook', 'window', 'sinks', 'chunk', 'sidecar', 'backend']"
    with pytest.raises(ValueError, match=re.escape(f"unknown key {key!r} in kv_cache; there are {known}")):
        KVCacheConfig.from_dict({key: 1})  # type: ignore[dict-item]


def test_the_name_of_the_section_is_in_the_message() -> None:
    with pytest.raises(ValueError, match="unknown key 'x' in cache_config"):
        KVCacheConfig.from_dict({"x": 1}, section="cache_config")
    with pytest.raises(ValueError, match="cache_config must be a dictionary, not 7"):
        KVCacheConfig.from_dict(7, section="cache_config")  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [None, 3, "kv_cache", ["kv_cache"], [("kv_cache", {})]])
def test_options_must_be_dictionaries(options: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(f"hf_subbyte_moe must be a dictionary, not {options!r}")):
        SubByteConfig.from_dict(options)
    if options is not None:  # None leaves the cache to Transformers
        with pytest.raises(ValueError, match=re.escape(f"kv_cache must be a dictionary, not {options!r}")):
            SubByteConfig.from_dict({"kv_cache": options})


def test_an_unknown_section_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'kvcache' in hf_subbyte_moe; there are \['kv_cache'"):
        SubByteConfig.from_dict({"kvcache": {}})


@pytest.mark.parametrize("version", [0, -1, CONFIG_VERSION + 1, 1.0, "1", True, None])
def test_versions_that_this_release_cannot_read_are_refused(version: object) -> None:
    expected = re.escape(f"version={version!r} is not possible: this release reads versions 1 to {CONFIG_VERSION}")
    with pytest.raises(ValueError, match=expected):
        SubByteConfig.from_dict({"version": version})


@pytest.mark.parametrize("policy", ["entropy", "uniform:vq2", "uniform:exact"])
def test_bits_are_refused_for_policies_that_fix_their_own(policy: str) -> None:
    message = f"bits=2.5 is not possible: policy {policy!r} fixes its own bits; a budget goes with "
    with pytest.raises(ValueError, match=re.escape(message + str(["auto", "calibrated", *BUDGET_POLICIES]))):
        KVCacheConfig(policy=policy, bits=2.5)


@pytest.mark.parametrize("options", RIGHT)
def test_what_is_given_comes_back(options: dict[str, Any]) -> None:
    config = KVCacheConfig.from_dict(options)
    assert config.to_dict() == options
    assert KVCacheConfig.from_dict(config.to_dict()) == config
    assert KVCacheConfig(**options) == config


@pytest.mark.parametrize("options", RIGHT)
def test_config_json_carries_everything(options: dict[str, Any]) -> None:
    config = SubByteConfig.from_dict({"kv_cache": options})
    written = json.loads(json.dumps(config.to_dict()))
    assert written == {"version": CONFIG_VERSION, "kv_cache": options}
    assert SubByteConfig.from_dict(written) == config


def test_an_empty_section_switches_the_cache_on_and_no_section_does_not() -> None:
    assert SubByteConfig.from_dict({"kv_cache": {}}).kv_cache == KVCacheConfig()
    for options in ({}, {"kv_cache": None}, {"version": CONFIG_VERSION}):
        config = SubByteConfig.from_dict(options)
        assert config.kv_cache is None
        assert config.to_dict() == {"version": CONFIG_VERSION}


def test_defaults_are_those_of_the_design() -> None:
    config = KVCacheConfig()
    assert config.default is True
    assert (config.policy, config.codebook, config.chunk) == ("auto", "universal", "prompt")
    assert (config.window, config.sinks) == (128, 4)
    assert config.to_dict() == {}


@pytest.mark.parametrize("policy", [*POLICIES, *(f"uniform:{tier}" for tier in TIERS)])
def test_every_named_policy_is_accepted(policy: str) -> None:
    assert KVCacheConfig(policy=policy).policy == policy


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_every_named_codebook_is_accepted(codebook: str) -> None:
    assert KVCacheConfig(codebook=codebook).codebook == codebook


def test_options_do_not_change_after_they_were_checked() -> None:
    config = KVCacheConfig()
    with pytest.raises(FrozenInstanceError):
        config.bits = -1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        SubByteConfig().kv_cache = config  # type: ignore[misc]


def test_reading_does_not_change_the_dictionary() -> None:
    options = {"version": 1, "kv_cache": {"bits": 3}}
    SubByteConfig.from_dict(options)
    assert options == {"version": 1, "kv_cache": {"bits": 3}}


def test_backends_are_those_of_the_kernels() -> None:
    assert BACKENDS == ops.BACKENDS


@pytest.mark.parametrize(("policy", "codebook"), [("error", "universal"), ("uniform:vq2", "queries")])
def test_a_sidecar_that_nothing_reads_is_refused(policy: str, codebook: str) -> None:
    with pytest.raises(ValueError, match="sidecar='file' is not possible: policy 'auto' or 'calibrated' or codebook"):
        KVCacheConfig(policy=policy, codebook=codebook, sidecar="file")
    KVCacheConfig(policy=policy, codebook="calibrated", sidecar="file")
    KVCacheConfig(codebook=codebook, sidecar="file")
