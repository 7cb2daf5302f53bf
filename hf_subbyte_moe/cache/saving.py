"""A cache in a safetensors file, for prompts that are read more often than they change.

Tensors are stored as they lie in memory, packed ones packed; bookkeeping that is no tensor is JSON in the file's
metadata. Universal tables are not stored: a tier's table never changes.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.policy import ChunkStatistics
from hf_subbyte_moe.tensor_files import read_tensor_file


if TYPE_CHECKING:
    from hf_subbyte_moe.cache.cache import EntropySubbyteCache

FILE_NAME = "entropy_subbyte_cache.safetensors"
_METADATA_KEY = "entropy_subbyte_cache"
_VERSION = 1
_PLAIN_TENSORS = ("keys", "values")
_PLAIN_ATTRIBUTES = ("cumulative_length", "record_past")
_INDEXER_TENSORS = ("indexer_keys", "indexer_position_ids")  # of sparse attention, which is not saved
_STATES = ("conv", "recurrent")  # of linear attention
_STATE_ATTRIBUTES = ("has_previous_state", "conv_kernel_size")
_SAVED = (  # kinds of layers of which nothing is lost
    "EntropySubbyteLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


def cache_file(path: str | Path) -> Path:
    """The file that a path means: itself if it ends in .safetensors, else ``FILE_NAME`` in that folder."""
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / FILE_NAME


def save_cache(cache: "EntropySubbyteCache", model: Mapping[str, Any], path: Path) -> None:
    """Write a cache and what tells its model apart; its pending tokens, if any, are packed first.

    Raises:
        ValueError: a layer is of a kind that cannot be saved.
    """
    unknown = sorted({type(layer).__name__ for layer in cache.layers} - set(_SAVED))
    if unknown:
        raise ValueError(f"a cache with layers of kind {', '.join(unknown)} cannot be saved")
    tensors: dict[str, Tensor] = {}
    layers = []
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, EntropySubbyteLayer):
            state, notes = _layer_state(layer)
        else:
            state, notes = _plain_state(layer)
        tensors.update({f"{index}.{name}": tensor.contiguous().clone() for name, tensor in state.items()})
        layers.append(notes)
    notes = {"version": _VERSION, "model": model, "kv_config": cache.kv_config.to_dict(), "layers": layers}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, metadata={_METADATA_KEY: json.dumps(notes)})


def read_file(path: Path, device: torch.device | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The notes and tensors of a cache file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no cache, or one of a newer version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no cache at {path}")
    return read_tensor_file(path, _METADATA_KEY, _VERSION, "cache file", "entropy_subbyte cache", device)


def fill_cache(
    cache: "EntropySubbyteCache", model: Mapping[str, Any], notes: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Put what :func:`read_file` found into a new cache.

    Raises:
        ValueError: it was written for another model.
    """
    for key, value in notes["model"].items():
        if model.get(key) != value:
            raise ValueError(f"the file was written for a model with {key} {value!r}, not {model.get(key)!r}")
    kinds = [entry["kind"] for entry in notes["layers"]]
    if kinds != [type(layer).__name__ for layer in cache.layers]:
        raise ValueError(
            f"the file was written for a model of {len(kinds)} layers {sorted(set(kinds))}, not for this one"
        )
    for index, (layer, entry) in enumerate(zip(cache.layers, notes["layers"], strict=True)):
        prefix = f"{index}."
        # copies: tensors begin anywhere in a file, and what a product of matrices rounds depends on where they begin
        state = {
            name.removeprefix(prefix): value.clone() for name, value in tensors.items() if name.startswith(prefix)
        }
        if not isinstance(layer, EntropySubbyteLayer):
            _load_plain(layer, entry, state)
        elif state:
            _load_layer(layer, entry, state)


def _layer_state(layer: EntropySubbyteLayer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    notes: dict[str, Any] = {"kind": type(layer).__name__, "length": layer.length, "record_past": layer.record_past}
    if not layer.is_initialized:
        return {}, notes
    layer.settle_without_statistics()
    notes["settled"] = [[[tiers.tolist(), length] for tiers, length in row] for row in layer.rows.settled]
    notes["chunks"] = [[_chunk_notes(chunk) for chunk in row] for row in layer.statistics.chunks]
    return {"starts": torch.from_numpy(layer.starts), **layer.rows.state()}, notes


def _chunk_notes(chunk: ChunkStatistics) -> dict[str, Any]:
    notes = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(chunk).items()}
    return {**notes, "candidates": [codec.name for codec in chunk.candidates]}


def _chunk(notes: Mapping[str, Any]) -> ChunkStatistics:
    fields: dict[str, Any] = dict(notes)
    fields.update({key: np.array(value) for key, value in notes.items() if isinstance(value, list)})
    fields["candidates"] = tuple(get_codec(name) for name in notes["candidates"])
    return ChunkStatistics(**fields)


def _load_layer(layer: EntropySubbyteLayer, notes: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    if notes["record_past"]:
        layer.activate_past_recording()
    layer.lazy_initialization(state["window.keys"], state["window.values"])
    layer.length, layer.starts = notes["length"], state["starts"].cpu().numpy()
    layer.rows.load_state(state)
    layer.rows.choices.settled = [[(np.array(tiers), length) for tiers, length in row] for row in notes["settled"]]
    layer.statistics.chunks = [[_chunk(chunk) for chunk in row] for row in notes["chunks"]]


def other_tensors(layer: Any) -> dict[str, Tensor]:
    """What a layer that does not pack holds, by the names in a file."""
    held = {name: getattr(layer, name, None) for name in (*_PLAIN_TENSORS, *_INDEXER_TENSORS)}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind in _STATES:
            held.update({f"{kind}.{index}": state for index, state in getattr(layer, f"{kind}_states").items()})
    return {name: tensor for name, tensor in held.items() if isinstance(tensor, Tensor)}


def _plain_state(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    attributes = {name: getattr(layer, name) for name in _PLAIN_ATTRIBUTES if hasattr(layer, name)}
    notes: dict[str, Any] = {"kind": type(layer).__name__, "attributes": attributes}
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        notes["states"] = {name: list(getattr(layer, name).items()) for name in _STATE_ATTRIBUTES}
    return other_tensors(layer), notes


def _load_plain(layer: Any, notes: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    if "keys" in state:
        layer.lazy_initialization(state["keys"], state["values"])
    for name in _PLAIN_TENSORS:
        if name in state:
            setattr(layer, name, state[name])
    vars(layer).update(notes["attributes"])
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        _load_states(layer, notes, state)


def _load_states(layer: Any, notes: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    if "states" not in notes:
        raise ValueError("the file was written by a release that did not store states of linear attention")
    for name, tensor in state.items():
        kind, _, index = name.partition(".")
        if kind in _STATES:
            layer.lazy_initialization(**{f"{kind}_states": tensor}, state_idx=int(index))
            getattr(layer, f"{kind}_states")[int(index)] = tensor
    for name, items in notes["states"].items():
        getattr(layer, name).update(dict(items))
