"""Safetensors files of ours: tensors, and under a key of the header notes in JSON with a version; where they lie."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class Sidecars:
    """Where files of one kind lie: in models' own folders, or where they were put when a model came from the Hub.

    Attributes:
        fetched: by a repository's name, the files that came with it.
    """

    def __init__(self, file_name: str) -> None:
        """``file_name``: in a model's folder or repository."""
        self._file_name = file_name
        self.fetched: dict[str, Path] = {}

    def remember(self, name: str, path: Path | None) -> None:
        """What came with a model from the Hub; None: nothing did, as in other revisions."""
        if path is None:
            self.fetched.pop(name, None)
        else:
            self.fetched[name] = path

    def find(self, name: str | None) -> Path | None:
        """The file of a model by its name or folder, if there is one."""
        if not name:
            return None
        beside = Path(name) / self._file_name
        return beside if beside.is_file() else self.fetched.get(name)


def read_tensor_file(
    path: Path, key: str, version: int, kind: str, content: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The notes and tensors of an existing file.

    Args:
        path: the file.
        key: of the header, under which the notes lie.
        version: the newest that can be read.
        kind: of file, for a message about one that cannot be opened.
        content: what it should hold, for a message about one that holds something else.
        device: where the tensors go.

    Raises:
        ValueError: it is no such file, or of a newer version.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            written = (file.metadata() or {}).get(key)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"{path} is no {kind}: {error}") from error
    if written is None:
        raise ValueError(f"{path} is a safetensors file, but holds no {content}")
    notes: dict[str, Any] = json.loads(written)
    if notes["version"] > version:
        raise ValueError(f"{path} is of version {notes['version']}; this release reads up to version {version}")
    return notes, tensors


def write_tensor_file(tensors: Mapping[str, Tensor], path: Path, header: Mapping[str, str]) -> None:
    """Write a safetensors file, and the folders that it needs.

    Raises:
        OSError: it cannot be written; the library's own error is neither that nor a ValueError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=dict(header))
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from None
