"""What importing does and what ``unregister`` takes back; case A03's "importing twice is harmless"."""

import functools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, Gemma3Config, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicCache
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

import hf_subbyte_moe
from hf_subbyte_moe import policy
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache
from hf_subbyte_moe.compat import cache_of
from hf_subbyte_moe.config import ExpertsConfig, RoutingConfig, SubByteConfig
from hf_subbyte_moe.experts import heads as experts_heads
from hf_subbyte_moe.registration import _bring_sidecars, make_cache
from hf_subbyte_moe.routing import choice as routing_choice
from support.models import prompt, tiny_model


def run_python(code: str, cwd: Path | None = None) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=cwd)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_importing_starts_no_cuda_and_loads_no_triton_of_its_own() -> None:
    """Where triton is installed, Transformers' own modules load it; this package must not be another reason."""
    code = (
        "import sys, torch, transformers.modeling_utils, transformers.generation.utils; "
        "before = {name.split('.')[0] for name in sys.modules}; import hf_subbyte_moe; "
        "print({name.split('.')[0] for name in sys.modules} & {'triton', 'matplotlib', 'typer'} - before, "
        "torch.cuda.is_initialized())"
    )
    assert run_python(code).split() == ["set()", "False"]


def test_the_name_kernels_is_left_to_hugging_face(tmp_path: Path) -> None:
    code = (
        "import importlib.util, hf_subbyte_moe; spec = importlib.util.find_spec('kernels'); "
        "print(spec is None or 'site-packages' in str(spec.origin))"
    )
    assert run_python(code, tmp_path).strip() == "True"


def test_importing_changes_these_names_and_two_methods_and_unregister_undoes_it() -> None:
    code = """
import transformers, transformers.generation.configuration_utils as gcu
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.cache_utils import Cache
def state():
    return {
        "names": (gcu.ALL_CACHE_IMPLEMENTATIONS, gcu.DYNAMIC_CACHE_IMPLEMENTATIONS),
        "attention": sorted(AttentionInterface._global_mapping),
        "masks": sorted(AttentionMaskInterface._global_mapping),
        "methods": (GenerationMixin._prepare_cache_for_generation, PreTrainedModel.from_pretrained.__func__),
        "others": tuple(sorted((cls.__name__, name, id(value)) for cls in (GenerationMixin, PreTrainedModel,
            PreTrainedConfig, Cache) for name, value in vars(cls).items()
            if name not in ("_prepare_cache_for_generation", "from_pretrained"))),
    }
before = state()
import hf_subbyte_moe
during = state()
changed = sorted(key for key in before if before[key] != during[key])
hf_subbyte_moe.register()
import importlib; importlib.reload(hf_subbyte_moe)
again = state() == during
hf_subbyte_moe.unregister(); hf_subbyte_moe.unregister()
print(changed, again, state() == before)
"""
    assert run_python(code).strip() == "['attention', 'masks', 'methods', 'names'] True True"


def test_unregister_and_register_again() -> None:
    wrapped = (GenerationMixin._prepare_cache_for_generation, PreTrainedModel.from_pretrained.__func__)
    hf_subbyte_moe.unregister()
    try:
        assert CACHE_NAME not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        assert CACHE_NAME not in AttentionInterface._global_mapping
        with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
            tiny_model().generate(prompt(4), max_new_tokens=1, cache_implementation=CACHE_NAME)
    finally:
        hf_subbyte_moe.register()
    now = (GenerationMixin._prepare_cache_for_generation, PreTrainedModel.from_pretrained.__func__)
    assert all(left is not right for left, right in zip(now, wrapped, strict=True))
    assert CACHE_NAME in configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    tiny_model().generate(prompt(4), max_new_tokens=1, cache_implementation=CACHE_NAME)


def test_unregister_leaves_the_wraps_of_others_in_place() -> None:
    """``functools.wraps`` copies the attributes of a function, our mark among them."""
    owners: Any = (GenerationMixin, PreTrainedModel)
    ours = GenerationMixin._prepare_cache_for_generation, PreTrainedModel.from_pretrained.__func__
    calls: list[str] = []

    def wrapped(function: Any) -> Any:
        @functools.wraps(function)
        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return theirs

    theirs = tuple(wrapped(function) for function in ours)
    owners[0]._prepare_cache_for_generation, owners[1].from_pretrained = theirs[0], classmethod(theirs[1])
    try:
        hf_subbyte_moe.unregister()
        assert owners[0]._prepare_cache_for_generation is theirs[0]
        assert owners[1].from_pretrained.__func__ is theirs[1]
        model = tiny_model()
        model.config.hf_subbyte_moe = {"kv_cache": {"default": True}}
        plain = model.generate(prompt(4), max_new_tokens=1, return_dict_in_generate=True)
        assert calls == ["_prepare_cache_for_generation"]
        assert type(cache_of(plain)) is DynamicCache
        hf_subbyte_moe.register()
        assert owners[0]._prepare_cache_for_generation is theirs[0]
        found = model.generate(prompt(4), max_new_tokens=1, return_dict_in_generate=True)
        assert isinstance(cache_of(found), EntropySubbyteCache)
    finally:
        owners[0]._prepare_cache_for_generation, owners[1].from_pretrained = ours[0], classmethod(ours[1])
        hf_subbyte_moe.register()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_config": {"bit": 2}}, "unknown key 'bit' in cache_config; there are"),
        ({"cache_config": {"config": 2}}, "unknown key 'config' in cache_config"),
        ({"cache_config": {"bits": 1.0}}, "bits=1.0 is out of reach at head_dim 16"),
        ({"cache_config": {"bits": 9.0}}, "bits=9.0 is out of reach at head_dim 16"),
        ({"cache_config": {"policy": "magic"}}, "policy='magic' is not possible"),
        ({"cache_config": {"policy": "uniform:vq9"}}, "policy='uniform:vq9' is not possible"),
        ({"cache_config": {"policy": "entropy", "bits": 3}}, "bits=3 is not possible: policy 'entropy' fixes its own"),
    ],
)
def test_what_cannot_work_is_refused_before_any_token(options: dict[str, object], message: str) -> None:
    model = tiny_model()
    model.forward = lambda *args, **kwargs: pytest.fail("a token was computed")
    with pytest.raises(ValueError, match=message):
        model.generate(prompt(8), max_new_tokens=2, cache_implementation=CACHE_NAME, **options)


def test_a_cache_is_made_from_all_of_a_composite_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text part does not know the model's name, by which a sidecar is found."""
    config = Gemma3Config(name_or_path="somebody/some-model")
    seen: list[object] = []
    monkeypatch.setattr("hf_subbyte_moe.registration.EntropySubbyteCache", lambda config, **_: seen.append(config))
    monkeypatch.setattr("hf_subbyte_moe.registration.use_packed_attention", lambda model: None)
    monkeypatch.setattr("hf_subbyte_moe.registration.remember_cache", lambda model, cache: None)
    model: Any = SimpleNamespace(config=config, _supports_default_dynamic_cache=lambda: True)
    make_cache(model)
    assert seen == [config]


def test_a_sidecar_is_looked_for_beside_all_of_a_composite_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    known = policy.resolve
    monkeypatch.setattr(
        "hf_subbyte_moe.cache.cache.resolve", lambda config, options: (seen.append(config), known(config, options))[1]
    )
    config = Gemma3Config(name_or_path="somebody/some-model")
    EntropySubbyteCache(config)
    assert seen == [config]


@pytest.mark.parametrize(
    ("options", "file"),
    [
        (SubByteConfig(routing=RoutingConfig(mode="soft")), "routing.safetensors"),
        (SubByteConfig(experts=ExpertsConfig(placement="offload")), "experts.safetensors"),
    ],
)
def test_a_revision_without_a_sidecar_does_not_take_another_ones(
    options: SubByteConfig, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = {**routing_choice._SIDECARS.fetched}, {**experts_heads._SIDECARS.fetched}
    name = "somebody/some-model"
    model: Any = SimpleNamespace(config=SimpleNamespace(name_or_path=name))
    monkeypatch.setattr(
        "hf_subbyte_moe.registration.cached_file",
        lambda name, file, revision, **_: f"/{revision}/{file}" if revision == "a" else None,
    )
    held = routing_choice._SIDECARS.fetched if options.routing is not None else experts_heads._SIDECARS.fetched
    _bring_sidecars(model, options, {"revision": "a"})
    assert held[name] == Path("/a") / file
    _bring_sidecars(model, options, {"revision": "b"})
    assert name not in held
    assert remembered == (routing_choice._SIDECARS.fetched, experts_heads._SIDECARS.fetched)


@pytest.mark.parametrize("mask", [[[1, 1, 1, 0]], [[0, 1, 0, 1]]])
def test_padding_that_is_not_on_the_left_is_refused(mask: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="supports left padding only"):
        tiny_model().generate(
            prompt(4), attention_mask=torch.tensor(mask), max_new_tokens=2, cache_implementation=CACHE_NAME
        )


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        tiny_model().generate(prompt(4)[:, :0], max_new_tokens=2, cache_implementation=CACHE_NAME)


def test_unsupported_models_are_refused_by_name() -> None:
    sliding = tiny_model("mixtral", sliding_window=8)
    with pytest.raises(
        ValueError, match=r"'mixtral' has no full-attention layer to pack \(DynamicSlidingWindowLayer\)"
    ):
        sliding.generate(prompt(4), max_new_tokens=2, cache_implementation=CACHE_NAME)
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="encoder-decoder"):
        T5ForConditionalGeneration(config).generate(prompt(4) % 64, max_new_tokens=2, cache_implementation=CACHE_NAME)
