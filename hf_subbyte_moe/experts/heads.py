"""Trained heads: for every layer but the last a linear map from what its experts read to the next layer's choice.

They are kept in a sidecar file beside the model; ``calibration.py`` trains them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_subbyte_moe.config import ExpertsConfig
from hf_subbyte_moe.routing.choice import model_facts
from hf_subbyte_moe.routing.families import RouterPlace
from hf_subbyte_moe.tensor_files import Sidecars, read_tensor_file, write_tensor_file


PREDICTOR_SIDECAR_NAME = "experts.safetensors"
_KEY, _VERSION = "hf_subbyte_moe_experts", 1
_SIDECARS = Sidecars(PREDICTOR_SIDECAR_NAME)


def remember_predictor_sidecar(name: str, path: Path | None) -> None:
    """Where the sidecar of a Hub repository was put; None: the revision that was loaded has none."""
    _SIDECARS.remember(name, path)


def find_sidecar(model: PreTrainedModel, config: ExpertsConfig) -> Path | None:
    """The sidecar that the options name, or that lies beside the model.

    Raises:
        ValueError: they name one that is not there.
    """
    if config.sidecar is not None:
        path = Path(config.sidecar)
        if not path.is_file():
            raise ValueError(f"there is no sidecar {str(path)!r}: hf-subbyte-moe calibrate --predictor writes one")
        return path
    return _SIDECARS.find(model.config.name_or_path)


@dataclass(frozen=True)
class Heads:
    """Heads of one model.

    Attributes:
        weights: ``[L - 1, E, H]``.
        biases: ``[L - 1, E]``.
        model: facts of the model that they belong to.
        notes: how they were trained, and what they find.
    """

    weights: Tensor
    biases: Tensor
    model: dict[str, Any]
    notes: dict[str, Any]

    def save(self, path: Path) -> None:
        """Write the sidecar."""
        header = {"version": _VERSION, "model": self.model, "notes": self.notes}
        write_tensor_file({"weights": self.weights, "biases": self.biases}, path, {_KEY: json.dumps(header)})

    @classmethod
    def load(cls, path: Path) -> "Heads":
        """Read a sidecar.

        Raises:
            ValueError: it is no such file, or of a newer version.
        """
        header, tensors = read_tensor_file(path, _KEY, _VERSION, "predictor sidecar", "heads that foretell experts")
        return cls(tensors["weights"], tensors["biases"], header["model"], header["notes"])

    def check(self, model: PreTrainedModel, places: list[RouterPlace]) -> None:
        """Refuse another model's.

        Raises:
            ValueError: these are; names both.
        """
        facts = model_facts(model, places)
        width = model.config.get_text_config(decoder=True).hidden_size
        if self.model != facts or self.weights.shape != (len(places) - 1, places[0].experts, width):
            raise ValueError(f"the heads belong to another model: {self.model}; this one has {facts}")
