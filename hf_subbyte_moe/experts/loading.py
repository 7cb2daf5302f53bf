"""Loading a model whose experts will not be on the GPU, without ever holding it twice.

For placement "offload" the model is loaded into host memory, and its experts move into the bank layer by layer. For
"disk" Transformers' own loader writes every layer's experts into files as it reads them, so they are never in memory
together; the bank maps these files. What does not fit is refused before anything is loaded.
"""

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_subbyte_moe.config import ExpertsConfig
from hf_subbyte_moe.experts.memory import refuse_too_large
from hf_subbyte_moe.experts.quantized import pack_files, packed_bytes
from hf_subbyte_moe.experts.weights import TensorFile, refuse_full_disk
from hf_subbyte_moe.routing.families import experts_of_router, find_routers


class Loading:
    """One call of ``from_pretrained`` for a model whose experts go elsewhere.

    Args:
        cls: the model's class.
        config: of the model.
        options: where its experts go.
        kwargs: of the call; changed to what the loader must be told.

    Raises:
        ValueError: ``device_map`` names several devices, the model is not supported, or host memory is too small.
    """

    def __init__(
        self, cls: type[PreTrainedModel], config: PreTrainedConfig, options: ExpertsConfig, kwargs: dict[str, Any]
    ) -> None:
        self.device = _one_device(kwargs.pop("device_map", None))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.experts_files: list[Mapping[str, TensorFile]] | None = None
        self._disk = options.placement == "disk"
        with torch.device("meta"):
            skeleton = cls(config)
        self._names = [
            name
            for place in find_routers(skeleton)
            for name, module in skeleton.named_modules()
            if module is experts_of_router(skeleton, place)
        ]
        itemsize = _dtype(kwargs, config).itemsize
        whole = sum(weight.numel() for weight in skeleton.parameters())
        layers = [sum(weight.numel() for weight in skeleton.get_submodule(name).parameters()) for name in self._names]
        if self._disk:
            refuse_too_large((whole - sum(layers) + max(layers)) * itemsize, "the weights beside the experts")
            if "offload_folder" not in kwargs:
                self._folder = tempfile.TemporaryDirectory(prefix="hf-subbyte-moe-")
                kwargs["offload_folder"] = self._folder.name
            kwargs["device_map"] = _map_around(skeleton, set(self._names))
        else:
            refuse_too_large((whole + max(layers)) * itemsize, "the model's weights")

    def finish(self, model: PreTrainedModel) -> None:
        """The loader is done: note where it put experts into files, and take accelerate's hooks off the model."""
        if not self._disk:
            return
        from accelerate.hooks import remove_hook_from_submodules

        self.experts_files = []
        for name in self._names:
            module = model.get_submodule(name)
            self.experts_files.append({own: _file_of(module, own) for own, _ in module.named_parameters()})
        remove_hook_from_submodules(model)
        for module in model.modules():
            vars(module).pop("forward", None)  # left behind: the class's own, bound
        del model.hf_device_map

    def pack(self, model: PreTrainedModel, weights: str, through: torch.device) -> None:
        """Pack experts that lie in files; their bytes lie in files then, and files that were made for this call go.

        Args:
            model: that was loaded.
            weights: "int4", "int4-g64" or "fp8".
            through: where the bytes are made.
        """
        if self.experts_files is None:
            return
        folder = tempfile.TemporaryDirectory(prefix="hf-subbyte-moe-")
        modules = [model.get_submodule(name) for name in self._names]
        refuse_full_disk(Path(folder.name), packed_bytes(modules, weights), "packed experts in files")
        self.experts_files = pack_files(modules, self.experts_files, weights, through, Path(folder.name))
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = folder

    @property
    def folder(self) -> object:
        """Keeps the files as long as it is kept; None where they are the caller's."""
        return self._folder


def _map_around(module: nn.Module, away: set[str], name: str = "") -> dict[str, str]:
    """A ``device_map`` with some modules on disk and every other weight on the CPU."""
    if name in away:
        return {name: "disk"}
    inside = f"{name}." if name else ""
    if not any(other.startswith(inside) for other in away):
        return {name: "cpu"}
    own = [key for key, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
    found = {inside + key: "cpu" for key in own}
    for key, child in module.named_children():
        found.update(_map_around(child, away, inside + key))
    return found


def _file_of(module: nn.Module, name: str) -> TensorFile:
    hook: Any = module._hf_hook
    prefix, index = hook.weights_map.prefix, hook.weights_map.dataset.index
    entry = index[prefix + name]
    return TensorFile(Path(entry["safetensors_file"]), entry["weight_name"])


def _dtype(kwargs: Mapping[str, Any], config: PreTrainedConfig) -> torch.dtype:
    asked = kwargs.get("dtype", kwargs.get("torch_dtype"))
    if asked in (None, "auto"):
        asked = config.dtype
    if isinstance(asked, str):
        asked = getattr(torch, asked)
    return asked if isinstance(asked, torch.dtype) else torch.get_default_dtype()


def _one_device(device_map: Any) -> torch.device | None:
    """The device that a ``device_map`` names.

    Raises:
        ValueError: it names several, or leaves the choice among several.
    """
    if device_map is None:
        return None
    if isinstance(device_map, dict):
        named = {str(device) for device in device_map.values()}
        if len(named) != 1:
            raise ValueError(f"experts: device_map={device_map!r} is not possible: give one device, or none")
        device_map = next(iter(device_map.values()))
    if isinstance(device_map, str) and re.fullmatch(r"auto|balanced|balanced_low_0|sequential", device_map):
        if torch.cuda.device_count() > 1:
            raise ValueError(f"experts: device_map={device_map!r} is not possible with several GPUs: give one device")
        return None
    return torch.device("cuda", device_map) if isinstance(device_map, int) else torch.device(device_map)
