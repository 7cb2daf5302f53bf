"""CUDA C++ without a compiler on the machine: NVRTC compiles a kernel for what a call needs, the driver launches it.

Both come with a CUDA build of PyTorch; ``cuda-bindings`` makes them callable. Machine code is kept in a folder of the
user's, ``$SUBBYTE_KERNELS_CACHE`` or ``~/.cache/subbyte_kernels``: the next process does not compile again.
"""

import contextlib
import ctypes
import hashlib
import os
import re
import tempfile
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch


try:
    from cuda.bindings import driver, nvrtc
except ImportError:
    driver = nvrtc = None

_COMMON = Path(__file__).with_name("warp.cuh")
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
RESERVED_SHARED_BYTES = 1024  # of each block, from compute capability 8.0 on: dynamic shared memory begins behind them
_OVERLAPPING = (9, 0)  # capability from which a kernel may start while the one before it ends
_MAX_CONFIGS = 256
_broken: dict[int, str] = {}  # device -> why a kernel could not be built


class BuildError(RuntimeError):
    """A kernel cannot be compiled or loaded."""


def obstacle(device: int) -> str | None:
    """Why no kernel can be built for a device, or None."""
    return _broken.get(device) or _missing(device)


@cache
def _missing(device: int) -> str | None:
    if driver is None:
        return "cuda-bindings is not installed (pip install hf-subbyte-moe[cuda])"
    major, minor = capability(device)
    try:
        known = checked(nvrtc.nvrtcGetSupportedArchs())
    except RuntimeError as problem:  # the library is not there, or not the one that cuda-bindings wants
        return f"NVRTC cannot be used: {problem}"
    return None if 10 * major + minor in known else f"NVRTC does not know compute capability {major}.{minor}"


def checked(result: tuple[Any, ...]) -> Any:
    """The values of a driver or NVRTC call.

    Raises:
        RuntimeError: the call failed.
    """
    code, *values = result
    if int(code):
        raise RuntimeError(f"CUDA call failed: {code.name}")
    return values[0] if len(values) == 1 else values


def full_text(source: Path, defined: Mapping[str, object]) -> str:
    """A kernel's text with what it includes from its folder, behind what it wants defined and what all share."""
    given = "".join(f"#define {name} {value}\n" for name, value in defined.items())
    text = _INCLUDE.sub(lambda line: source.with_name(line[1]).read_text(), source.read_text())
    return given + _COMMON.read_text() + text


def compile_source(source: str, name: str, architecture: str) -> bytes:
    """Machine code of a kernel's text.

    Args:
        source: CUDA C++.
        name: what the compiler calls it in messages.
        architecture: for example "sm_90".

    Raises:
        BuildError: it does not compile; with the compiler's log.
    """
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"-default-device", b"-lineinfo"]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(code):
            log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise BuildError(f"{name} does not compile:\n{log.decode(errors='replace')}")
        binary = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, binary))
        return binary
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def cache_folder() -> Path:
    """Where machine code is kept."""
    named = os.environ.get("SUBBYTE_KERNELS_CACHE")
    return (
        Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "subbyte_kernels"
    )


def built(source: str, name: str, architecture: str) -> bytes:
    """:func:`compile_source`, or what an earlier call of the same compiler made of the same text.

    A folder that cannot be read or written is one that holds nothing.
    """
    compiler = checked(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((source, architecture, compiler)).encode()).hexdigest()
    kept = cache_folder() / f"{Path(name).stem}-{key[:32]}.cubin"
    with contextlib.suppress(OSError):
        binary = kept.read_bytes()
        if binary[-32:] == hashlib.sha256(binary[:-32]).digest():  # whole
            return binary[:-32]
    binary = compile_source(source, name, architecture)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
            file.write(binary + hashlib.sha256(binary).digest())
        os.replace(file.name, kept)  # noqa: PTH105 - other processes see all of it or nothing
    return binary


@lru_cache(maxsize=8)
def capability(device: int) -> tuple[int, int]:
    """Compute capability of a device."""
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=8)
def device_limits(device: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block can have."""
    limit = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    shared = int(checked(driver.cuDeviceGetAttribute(limit, device)))
    return torch.cuda.get_device_properties(device).multi_processor_count, shared


def capture_id(stream: int) -> int:
    """A number for the graph that a stream is capturing, 0 if it captures none."""
    status, number, *_ = checked(driver.cuStreamGetCaptureInfo(stream))
    return int(number) if int(status) else 0


class Kernel:
    """A compiled kernel on one device, ready to launch."""

    def __init__(
        self,
        source: Path,
        function: str,
        defined: Mapping[str, object],
        device: int,
        threads: int,
        shared: int,
        waits: bool = False,
    ) -> None:
        """Compile it.

        Args:
            source: its text.
            function: its name.
            defined: what is defined in front of ``warp.cuh`` and the text.
            device: CUDA device.
            threads: threads of a block.
            shared: bytes of dynamic shared memory of a block.
            waits: it waits itself, by ``griddepcontrol.wait``, for the kernel before it in the stream; where the
                device can, its blocks then start while those of the other end.

        Raises:
            BuildError: it cannot be compiled or loaded; from then on :func:`obstacle` says so for the device.
        """
        text = full_text(source, defined)
        self._device, self._threads, self._shared = device, threads, shared
        self._overlaps = waits and capability(device) >= _OVERLAPPING
        self._configs: dict[tuple[tuple[int, int, int], int], Any] = {}
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()  # the driver's context of this device exists and is current from here on
            try:
                binary = built(text, source.name, "sm_{}{}".format(*capability(device)))
                self._module = checked(driver.cuModuleLoadData(binary))
                self._function = checked(driver.cuModuleGetFunction(self._module, function.encode()))
                limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                checked(driver.cuFuncSetAttribute(self._function, limit, shared))
            except RuntimeError as problem:
                _broken[device] = f"{source.name} could not be built ({problem})"
                raise BuildError(_broken[device]) from problem

    def launch(self, grid: tuple[int, int, int], params: bytes, stream: int) -> None:
        """Launch on a stream of the kernel's device; ``params`` are copied before the call returns."""
        pointer = ctypes.c_char_p(params)
        config = self._configs.get((grid, stream)) or self._config(grid, stream)
        if torch.cuda.current_device() == self._device:
            checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointer), 0))
            return
        with torch.cuda.device(self._device):
            checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(pointer), 0))

    def _config(self, grid: tuple[int, int, int], stream: int) -> Any:
        """How the driver is told of a launch."""
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes, config.hStream = self._shared, stream
        if self._overlaps:
            overlap = driver.CUlaunchAttribute()
            overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [overlap], 1
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        self._configs[grid, stream] = config
        return config
