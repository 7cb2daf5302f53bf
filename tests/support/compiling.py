"""Triton's kernels compiled for a GPU that is not there, in a process of its own: ``python -m support.compiling JOB``.

The interpreter takes code that the compiler refuses, and shapes on which it aborts.
"""

import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


SHARED_BYTES = 227 * 1024  # that a program may have there
_TESTS = Path(__file__).parents[1]


def compiled(
    folder: Path, module: str, calls: Iterable[tuple[str, Sequence[Any]]], by_device: Sequence[str] = ()
) -> Counter[str]:
    """Compile what calls would launch, and launch nothing.

    Args:
        folder: an empty one.
        module: with the launchers and their kernels.
        calls: name of a launcher, and its arguments, which lie on the CPU.
        by_device: functions of the module whose last argument is a device: they are told of a GPU.

    Returns:
        How often each kernel would have been launched.
    """
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("compiled in all other tests")
    job = folder / "job.pt"
    torch.save((module, list(calls), list(by_device)), job)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "support.compiling", str(job)],
        cwd=_TESTS,
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Counter(line.split()[1] for line in done.stdout.splitlines() if line.startswith("compiled "))


class Compiled:
    """A kernel that is compiled where it would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            made = self.kernel.warmup(*arguments, grid=grid, **options).metadata
            assert made.shared <= SHARED_BYTES, f"{made.name} needs {made.shared} bytes of shared memory: {options}"
            print("compiled", made.name)

        return launch


class Hopper:
    """What Triton asks a driver for while it compiles."""

    @staticmethod
    def get_current_target() -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device(*_: Any) -> int:
        return 0

    get_current_stream = get_current_device

    @staticmethod
    def get_active_torch_device() -> torch.device:
        return torch.device("cpu")


def _on_cuda(choose: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: choose(*arguments[:-1], torch.device("cuda"))


def _prepared(name: str, by_device: Sequence[str]) -> ModuleType:
    """A module whose kernels are only compiled."""
    from triton.runtime import JITFunction

    module = importlib.import_module(name)
    for chooser in by_device:
        setattr(module, chooser, _on_cuda(getattr(module, chooser)))
    for kernel, value in list(vars(module).items()):
        if kernel.endswith("_kernel") and isinstance(value, JITFunction):
            setattr(module, kernel, Compiled(value))
    return module


def _main(job: str) -> None:
    from triton.runtime import driver

    driver.set_active(Hopper())
    name, calls, by_device = torch.load(job, weights_only=False)
    module = _prepared(name, by_device)
    for launcher, arguments in calls:
        getattr(module, launcher)(*arguments)


if __name__ == "__main__":
    _main(sys.argv[1])
