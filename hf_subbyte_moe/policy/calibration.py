"""What was learned about a model once, offline, in a sidecar file beside its weights; how the tiers follow from it.

The file says for every layer, KV head and side what each tier costs the model's predictions (``calibrate.py`` measures
it), and for the keys in which directions errors cost most. Policy ``calibrated`` spends one budget over all layers at
once, which a policy that sees one layer's prompt at a time cannot. Codebook ``calibrated`` chooses the codes of keys
by the stored directions instead of those of the prompt's own queries.

Gives up: what is particular to a prompt. Heads that calibration texts leave idle get few bits.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_subbyte_moe.codecs import Codec
from hf_subbyte_moe.config import AUTO, CALIBRATED, KVCacheConfig
from hf_subbyte_moe.policy.allocation import Floats, allocate
from hf_subbyte_moe.policy.policies import CANDIDATES, Measured, Needs, budget_bits, side_bits
from hf_subbyte_moe.tensor_files import Sidecars, read_tensor_file, write_tensor_file


SIDECAR_NAME = "subbyte_calibration.safetensors"
_METADATA_KEY = "subbyte_calibration"
_VERSION = 1
_HOW_TO = "make one with: hf-subbyte-moe calibrate MODEL"
_sidecars = Sidecars(SIDECAR_NAME)


def model_identity(config: PreTrainedConfig) -> dict[str, Any]:
    """What a sidecar must share with its model."""
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": config.vocab_size,
    }


@dataclass(frozen=True)
class Calibration:
    """What a sidecar holds.

    Attributes:
        model: see :func:`model_identity`.
        tiers: names of the tiers that were measured.
        errors: layer -> ``[H, 2, C]`` nats that a tier costs each prediction, by itself.
        metrics: layer -> ``[H, D, D]`` second moments of the gradients at the keys, unrotated; mean diagonal of 1.
        notes: how it was made; for people.
    """

    model: Mapping[str, Any]
    tiers: tuple[str, ...]
    errors: Mapping[int, Floats]
    metrics: Mapping[int, Tensor]
    notes: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write a safetensors file."""
        tensors = {f"errors.{layer}": torch.from_numpy(errors).float() for layer, errors in self.errors.items()}
        tensors.update({f"metric.{layer}": metric.half() for layer, metric in self.metrics.items()})
        said = {"version": _VERSION, "model": self.model, "tiers": self.tiers, "notes": self.notes}
        write_tensor_file(tensors, path, {_METADATA_KEY: json.dumps(said)})

    def check(self, config: PreTrainedConfig, path: Path) -> None:
        """Refuse another model, other tiers, or missing layers.

        Raises:
            ValueError: says what differs.
        """
        for key, wanted in model_identity(config).items():
            if self.model.get(key) != wanted:
                raise ValueError(
                    f"{path} was calibrated for a model with {key} {self.model.get(key)!r}, not {wanted!r}; {_HOW_TO}"
                )
        known = tuple(codec.name for codec in CANDIDATES)
        if self.tiers != known:
            raise ValueError(f"{path} measured the tiers {list(self.tiers)}, not {list(known)}; {_HOW_TO}")
        heads, dim = self.model["num_key_value_heads"], self.model["head_dim"]
        for layer, errors in self.errors.items():
            if errors.shape != (heads, 2, len(self.tiers)) or not np.isfinite(errors).all():
                shape = [heads, 2, len(self.tiers)]
                raise ValueError(f"{path}: layer {layer} holds no finite errors of shape {shape}; {_HOW_TO}")
            if layer not in self.metrics or self.metrics[layer].shape != (heads, dim, dim):
                raise ValueError(f"{path}: layer {layer} holds no metric of shape {[heads, dim, dim]}; {_HOW_TO}")
        layers = [
            index
            for index, layer in enumerate(DynamicCache(config=config.get_text_config(decoder=True)).layers)
            if type(layer) is DynamicLayer
        ]
        if sorted(self.errors) != layers:
            raise ValueError(f"{path} knows the layers {sorted(self.errors)}, not {layers}; {_HOW_TO}")

    def layer_policies(self, config: KVCacheConfig) -> "dict[int, CalibratedPolicy]":
        """Tiers for every layer under one budget."""
        dims = (int(self.model["head_dim"]),) * 2
        bits = side_bits(CANDIDATES, dims, latent=False)
        wanted = budget_bits(config, dims)
        assert wanted is not None
        layers = sorted(self.errors)
        errors = np.stack([self.errors[layer] for layer in layers])  # [L, H, 2, C]
        cost = np.broadcast_to(bits, errors.shape).reshape(-1, errors.shape[-1])
        sizes = np.ones(len(cost))
        chosen = allocate(errors.reshape(cost.shape), cost, sizes, wanted * len(cost)).reshape(errors.shape[:-1])
        return {
            layer: CalibratedPolicy(choice, known) for layer, choice, known in zip(layers, chosen, errors, strict=True)
        }


class CalibratedPolicy:
    """The tiers that a calibration gives one layer, for every prompt.

    Attributes:
        choice: ``[H, 2]`` numbers of tiers.
    """

    tiers: Sequence[Codec] = CANDIDATES

    def __init__(self, choice: NDArray[np.int64], errors: Floats) -> None:
        """``[H, 2]`` numbers of tiers, and the ``[H, 2, C]`` errors that they follow from."""
        self.choice, self.needs = choice, Needs(errors=False, known=errors)

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        return np.repeat(self.choice[None], len(chunks), axis=0)


def remember_sidecar(name: str, path: Path | None) -> None:
    """Let :func:`find_sidecar` know what came with a model from the Hub; None: nothing did, as in other revisions."""
    _sidecars.remember(name, path)


def find_sidecar(config: PreTrainedConfig) -> Path | None:
    """The sidecar in a model's own folder, or the one that came with it from the Hub."""
    return _sidecars.find(getattr(config, "name_or_path", None))


def resolve(config: PreTrainedConfig, options: KVCacheConfig) -> tuple[str, Calibration | None]:
    """The policy that ``options`` mean for this model, and the calibration if anything reads it.

    Raises:
        ValueError: something wants a calibration and there is none, or it is another model's.
        FileNotFoundError: the named sidecar does not exist.
    """
    needed = options.policy == CALIBRATED or options.codebook == CALIBRATED
    if options.policy != AUTO and not needed:
        return options.policy, None
    path = find_sidecar(config) if options.sidecar is None else Path(options.sidecar)
    if path is None:
        if needed:
            name = "policy" if options.policy == CALIBRATED else "codebook"
            raise ValueError(f"{name}='calibrated' needs the sidecar {SIDECAR_NAME} in the model's folder; {_HOW_TO}")
        return "error", None
    if not path.is_file():
        raise FileNotFoundError(f"there is no sidecar at {path}; {_HOW_TO} --out {path}")
    found = _read(path, path.stat().st_mtime_ns)
    found.check(config, path)
    return CALIBRATED if options.policy == AUTO else options.policy, found


@lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Calibration:
    """Read a sidecar; ``changed`` tells a new file of the same name."""
    del changed
    content = f"calibration; {_HOW_TO}"
    said, tensors = read_tensor_file(path, _METADATA_KEY, _VERSION, "safetensors file", content)
    layers: dict[str, dict[int, Tensor]] = {"errors": {}, "metric": {}}
    for name, tensor in tensors.items():
        kind, _, layer = name.partition(".")
        layers[kind][int(layer)] = tensor
    errors = {layer: tensor.double().numpy() for layer, tensor in layers["errors"].items()}
    return Calibration(said["model"], tuple(said["tiers"]), errors, layers["metric"], said["notes"])


def load_calibration(path: Path) -> Calibration:
    """Read a sidecar.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file holds no calibration, or one of a newer version.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no sidecar at {path}; {_HOW_TO}")
    return _read(path, path.stat().st_mtime_ns)
