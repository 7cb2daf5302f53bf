"""A Hub repository that says how its model's cache is to be made.

config.json gets the key ``hf_subbyte_moe`` and nothing else of ours: without this package Transformers ignores it, and
names that only we register would make the repository unloadable. Sidecars, which are the .safetensors files that hold
no weights, travel along. The card's numbers come from result files of ``hf-subbyte-moe eval``; without any it says so.

A config-only repository has no weights: it goes with those of its base model.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData, snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_subbyte_moe.cache import ATTENTION_NAME, CACHE_NAME, refuse_unsupported
from hf_subbyte_moe.config import ExpertsConfig, RoutingConfig, SubByteConfig
from hf_subbyte_moe.experts import check_form
from hf_subbyte_moe.experts.placing import count_slots
from hf_subbyte_moe.patching import CONFIG_KEY
from hf_subbyte_moe.results import Row, markdown_table
from hf_subbyte_moe.roofline import why_not
from hf_subbyte_moe.routing import ROUTING_SIDECAR_NAME, choose_clusters, find_routers
from hf_subbyte_moe.routing.families import experts_of_router


TAGS = ("hf-subbyte-moe", "kv-cache", "long-context")
_CONFIG, _GENERATION, _CARD = "config.json", "generation_config.json", "README.md"
_TENSORS, _INDEX = "*.safetensors", "*.safetensors.index.json"
_WEIGHTS = ("model", "pytorch_model", "consolidated", "adapter_model")  # how names of files with weights begin
_SMALL = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "LICENSE*")
_ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
_TASK = "text-generation"
INSTALL = "pip install hf-subbyte-moe"


def fetch(model: str, weights: bool) -> Path:
    """A folder with a model's files; a Hub id is downloaded.

    Raises:
        ValueError: there is no such model, or no config.json.
    """
    folder = Path(model)
    if not folder.is_dir():
        without = None if weights else [f"{name}*.safetensors" for name in _WEIGHTS]
        wanted = [*_SMALL, _CARD, _TENSORS]
        try:
            folder = Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=without))
        except (OSError, ValueError) as error:  # ValueError: a path that could be no id
            raise ValueError(f"{model!r} is neither a folder nor on the Hub: {why_not(model, error)}") from None
    if not (folder / _CONFIG).is_file():
        raise ValueError(f"{model}: there is no {_CONFIG}")
    return folder


def copy_files(source: Path, out: Path, weights: bool) -> list[str]:
    """Copy what belongs to a model's repository, its card and config aside; gives the names of sidecars.

    Raises:
        ValueError: weights are wanted and there are none, or ``out`` is the source.
    """
    if out.resolve() == source.resolve():
        raise ValueError(f"{out} is the model's own folder: name another")
    tensors = set(source.glob(_TENSORS))
    sidecars = {path for path in tensors if not path.name.startswith(_WEIGHTS)}
    if weights and tensors == sidecars:
        raise ValueError(f"{source} holds no .safetensors weights: convert them first, or say --config-only")
    chosen = {path for pattern in _SMALL for path in source.glob(pattern)} | sidecars
    chosen = chosen | tensors if weights else chosen - set(source.glob(_INDEX))
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(chosen):
        if path.is_file() and path.name not in (_CONFIG, _CARD):
            shutil.copyfile(path, out / path.name)
    return sorted(path.name for path in sidecars)


def _read(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_options(source: Path, options: Mapping[str, Any] | None) -> SubByteConfig:
    """The options that a repository is to carry, once it is clear that its model loads with them.

    Args:
        source: the model's folder.
        options: None keeps what the model's config says, or means the default cache.

    Raises:
        ValueError: wrong options, or a model that a part of them does not support.
    """
    checked = SubByteConfig.from_dict(options or _read(source / _CONFIG).get(CONFIG_KEY) or {"kv_cache": {}})
    config = AutoConfig.from_pretrained(source)
    if checked.kv_cache is not None:
        refuse_unsupported(config.get_text_config(decoder=True))
    if checked.routing is not None or checked.experts is not None:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        if checked.routing is not None:
            _check_routing(model, checked.routing, source)
        if checked.experts is not None:
            _check_experts(model, checked.experts)
    return checked


def _check_routing(model: PreTrainedModel, routing: RoutingConfig, source: Path) -> None:
    """Routers and clusters; without a sidecar clusters come from weights, which are not here."""
    if routing.sidecar is None and not (source / ROUTING_SIDECAR_NAME).is_file():
        routing = replace(routing, mode="native")
    choose_clusters(model, routing)


def _check_experts(model: PreTrainedModel, experts: ExpertsConfig) -> None:
    """What can be told without weights: packed or moved experts need a model that has them in a known form."""
    check_form(model, experts)
    if experts.moves:
        places = find_routers(model)
        for place in places:
            experts_of_router(model, place)
        count_slots(experts, len(places), places[0].experts, places[0].top_k)


def write_config(source: Path, out: Path, options: SubByteConfig) -> None:
    """config.json with our key, and no registered name of ours anywhere.

    Args:
        source: the model's folder.
        out: the repository.
        options: what the key says.
    """
    content = _read(source / _CONFIG)
    content[CONFIG_KEY] = options.to_dict()
    for key in _ATTENTION_KEYS:
        if content.get(key) == ATTENTION_NAME:
            del content[key]
    _write(out / _CONFIG, content)
    if (source / _GENERATION).is_file():
        generation = _read(source / _GENERATION)
        if generation.get("cache_implementation") == CACHE_NAME:
            for key in ("cache_implementation", "cache_config"):
                generation.pop(key, None)
        _write(out / _GENERATION, generation)


def model_index(rows: Sequence[Row]) -> list[EvalResult]:
    """Results of our cache as the Hub lists them."""
    found = []
    for row in rows:
        if row["cache"] == CACHE_NAME:
            length = "" if row["length"] is None else f", {row['length']:,} tokens"
            found.append(
                EvalResult(
                    task_type=_TASK,
                    dataset_type=row["task"],
                    dataset_name=f"{row['task']}{length}",
                    metric_type=row["metric"],
                    metric_value=row["score"],
                    metric_name=f"{row['metric']}, {row['label']}, prefill {row['prefill']}, n={row['n']}",
                    metric_args={"stderr": row["stderr"], "bits": row.get("bits"), "bytes": row.get("cache_bytes")},
                )
            )
    return found


def front_matter(source: Path, name: str, base_model: str | None, rows: Sequence[Row]) -> ModelCardData:
    """The card's metadata; a license, a language and tags of the model's own card are kept."""
    held = ModelCard.load(source / _CARD).data.to_dict() if (source / _CARD).is_file() else {}
    kept: dict[str, Any] = {
        key: held[key] for key in ("license", "license_name", "license_link", "language") if key in held
    }
    tags = list(dict.fromkeys([*(held.get("tags") or []), *TAGS]))
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=_TASK,
        tags=tags,
        model_name=name,
        eval_results=model_index(rows) or None,
        ignore_metadata_errors=False,
        base_model=base_model,
        **kept,
    )


def _snippet(repo: str, base_model: str | None, weights: bool) -> str:
    lines = ["import hf_subbyte_moe  # optional: without it the model loads as ever and uses the plain cache"]
    if weights:
        lines += [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'model = AutoModelForCausalLM.from_pretrained("{repo}", dtype="auto")',
            f'tokenizer = AutoTokenizer.from_pretrained("{repo}")',
        ]
    else:
        lines += [
            "from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer",
            "",
            f'config = AutoConfig.from_pretrained("{repo}")',
            f'model = AutoModelForCausalLM.from_pretrained("{base_model}", config=config, dtype="auto")',
            f'tokenizer = AutoTokenizer.from_pretrained("{base_model}")',
        ]
    lines += [
        'inputs = tokenizer("A long text ...", return_tensors="pt").to(model.device)',
        "output = model.generate(**inputs, max_new_tokens=100)  # out of the packed cache",
        "print(hf_subbyte_moe.explain(model))",
    ]
    return "\n".join(lines)


def card(
    data: ModelCardData,
    repo: str,
    base_model: str | None,
    options: SubByteConfig,
    sidecars: Sequence[str],
    rows: Sequence[Row],
    weights: bool,
) -> str:
    """README.md: front matter, how to use it, what was measured and what was not."""
    parts = [f"---\n{data.to_yaml()}\n---", f"# {data.model_name}"]
    what = "This repository holds the model" if weights else "This repository holds a configuration and no weights"
    origin = "" if base_model is None else f" ([{base_model}](https://huggingface.co/{base_model}))"
    parts.append(
        f"{what}{origin}, with options of [hf-subbyte-moe]: its KV cache is packed in sub-byte tiles. With the "
        f"package (`{INSTALL}`) imported, `generate` uses that cache without being told. Without it the key is "
        "ignored."
    )
    parts.append(f"```python\n{_snippet(repo, base_model, weights)}\n```")
    key = json.dumps({CONFIG_KEY: options.to_dict()}, indent=2)
    parts.append(f"What config.json says:\n\n```json\n{key}\n```")
    if sidecars:
        parts.append("Sidecars, found by themselves: " + ", ".join(f"`{name}`" for name in sidecars) + ".")
    parts.append("## Measured")
    if rows:
        protocols = sorted({row["prefill"] for row in rows})
        parts.append(
            f"By `hf-subbyte-moe eval` (lm-eval), prompts read {' and '.join(protocols)}; every answer out of the "
            f"cache named; scores of 1 are best unless the metric is a loss.\n\n{markdown_table(rows)}"
        )
        missing = "Other tasks, lengths, languages and hardware than those in the table."
    else:
        parts.append("Nothing: no result file was given when this card was written.")
        missing = "Quality and speed of this model with the packed cache. Measure yours with `hf-subbyte-moe eval`."
    parts.append(f"## Not measured\n\n{missing}")
    parts.append("[hf-subbyte-moe]: https://pypi.org/project/hf-subbyte-moe/")
    return "\n\n".join(parts) + "\n"


def push(folder: Path, repo: str, private: bool, endpoint: str | None) -> str:
    """Upload a folder to the Hub, which makes the repository where there is none; gives its address."""
    api = HfApi(endpoint=endpoint)
    address = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
    api.upload_folder(
        repo_id=repo,
        folder_path=folder,
        repo_type="model",
        commit_message="Options, sidecars and card by hf-subbyte-moe publish",
    )
    return str(address)
