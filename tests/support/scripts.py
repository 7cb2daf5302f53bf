"""Modules of ``eval`` and ``kernels/benchmarks``, which are folders of scripts: the names of some are in both."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest


ROOT = Path(__file__).parents[2]
EVAL, BENCHMARKS = ROOT / "eval", ROOT / "kernels" / "benchmarks"


@contextmanager
def scripts_of(folder: Path, *names: str) -> Iterator[SimpleNamespace]:
    """Import modules of a folder under their last names, whatever other tests have imported; and forget them again.

    Args:
        folder: which comes first on the path.
        names: of modules, dotted inside a package.
    """
    own = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}

    def imported() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in own]

    others = {name: sys.modules.pop(name) for name in imported()}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(folder))
            yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in names})
    finally:
        for name in imported():
            sys.modules.pop(name)
        sys.modules.update(others)
