"""Where commands write: looked at while the words are read, before a model is loaded and anything is measured.

Gives up: a disk that fills up later, and what somebody else changes meanwhile.
"""

import importlib.util
import os
from pathlib import Path
from typing import Annotated

import typer


def check_file(path: Path, name: str, makes_folders: bool = False) -> None:
    """Refuse a file that could not be written.

    Args:
        path: the file.
        name: what messages call it.
        makes_folders: folders that are missing will be made.

    Raises:
        ValueError: it is a folder, may not be written, or its folder is not there or may not be written.
    """
    if path.is_dir():
        raise ValueError(f"{name} {str(path)!r} is not possible: it is a folder, and a file is written")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ValueError(f"{name} {str(path)!r} is not possible: the file may not be written")
    elif makes_folders:
        check_folder(path.parent, name)
    elif not path.parent.is_dir():
        raise ValueError(f"{name} {str(path)!r} is not possible: there is no folder {str(path.parent)!r}")
    else:
        _refuse_closed(path.parent, name)


def check_folder(path: Path, name: str) -> None:
    """Refuse a folder that is not there and could not be made, or in which nothing may be written.

    Raises:
        ValueError: so it is.
    """
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ValueError(f"{name} {str(path)!r} is not possible: {str(there)!r} is no folder")
    _refuse_closed(there, name)


def _refuse_closed(folder: Path, name: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{name}: nothing may be written into the folder {str(folder)!r}")


def _name_of(parameter: typer.CallbackParam) -> str:
    return parameter.opts[0]


def writable_file(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Of an option: a file in a folder that is there."""
    if value is not None and not context.resilient_parsing:
        check_file(value, _name_of(parameter))
    return value


def writable_sidecar(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Of an option: a file whose folders are made."""
    if value is not None and not context.resilient_parsing:
        check_file(value, _name_of(parameter), makes_folders=True)
    return value


def writable_plot(context: typer.Context, parameter: typer.CallbackParam, value: Path | None) -> Path | None:
    """Of an option: a picture in a folder that is there, in a format that can be drawn."""
    if value is None or context.resilient_parsing:
        return value
    check_file(value, _name_of(parameter))
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'")
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if value.suffix and value.suffix[1:].lower() not in known:
        raise ValueError(f"{_name_of(parameter)} {str(value)!r} is not possible: the ending is one of {known}")
    return value


PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Draw entropy, error and tier by layer and head.", callback=writable_plot)
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the numbers to this file.", callback=writable_file)
]
