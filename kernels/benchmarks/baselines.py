"""What the packed kernels have to beat: attention over a bf16 cache by PyTorch, by Triton, and Transformers' own way.

Every back end of ``scaled_dot_product_attention`` is tried in two forms: query heads grouped by the operator
(``gqa``), and a KV head's group as the rows of one query (``folded``), which is the same attention without a mask. Our
Triton kernel (``split_k.py``) is tuned for each cell. The fastest whose output is right is the baseline.
"""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from gate import MAX_PLAIN_ERROR, Gate, plain_gate
from inputs import PlainInput, plain_input, sets_wanted
from shapes import OTHER_SHAPES, Cell
from timing import Clock
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


Attention = Callable[[PlainInput], Tensor]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "default": None,
}
_MATH_TOKENS = 300_000  # it repeats the cache in fp32 for every query head
_TUNING_MS = 8.0
_RESIDUAL = 64  # exact tokens of Transformers' cache, half of what it may hold


@dataclass(frozen=True)
class Baseline:
    """One implementation's time in one cell.

    Attributes:
        name: which one, with its tuned configuration.
        us: microseconds, None where it failed.
        us_again: the second pass.
        error: relative error against fp32 attention, None where it failed.
        candidate: whether it may become what we are compared with.
        failed: why there is no time, or None.
    """

    name: str
    us: float | None
    us_again: float | None
    error: float | None
    candidate: bool = True
    failed: str | None = None


def failures() -> tuple[type[Exception], ...]:
    """What may go wrong in somebody else's kernel; the run notes it and goes on."""
    expected: tuple[type[Exception], ...] = (RuntimeError, ValueError, ImportError, OSError)
    try:
        from triton.errors import TritonError
    except ImportError:
        return expected
    return (*expected, TritonError)


def brief(error: Exception) -> str:
    """An error in one line: its kind and how its message begins."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {'; '.join(lines[:3])[:300]}"


def _sdpa(given: PlainInput, backend: SDPBackend | None, folded: bool) -> Tensor:
    query = given.query
    if folded:
        query = query.reshape(given.keys.shape[0], given.keys.shape[1], -1, query.shape[-1])
    with nullcontext() if backend is None else sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(query, given.keys, given.values, enable_gqa=not folded)
    return output.reshape(*given.query.shape[:3], -1)


def _matmuls(given: PlainInput) -> Tensor:
    """Two products and a softmax, the group folded: the one way for keys wider than values that is no fp32."""
    query = given.query.reshape(given.keys.shape[0], given.keys.shape[1], -1, given.query.shape[-1])
    scores = (query @ given.keys.transpose(-1, -2)) * query.shape[-1] ** -0.5
    output = scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ given.values
    return output.reshape(*given.query.shape[:3], -1)


def sdpa_candidates(cell: Cell) -> Iterator[tuple[str, Attention]]:
    """PyTorch's implementations by name."""
    if cell.shape in OTHER_SHAPES:
        yield "matmuls folded", _matmuls
    for folded in (False, True):
        for name, backend in _BACKENDS.items():
            if name == "math" and cell.batch * cell.context > _MATH_TOKENS:
                continue
            form = "folded" if folded else "gqa"
            yield f"sdpa {name} {form}", functools.partial(_sdpa, backend=backend, folded=folded)


def time_baselines(cell: Cell, clock: Clock, tell: Callable[[str], None]) -> list[Baseline]:
    """Time everything in one cell, telling what comes next. The caches are gone when it returns."""
    tell("making bf16 caches")
    sets = [plain_input(cell, clock.device, seed) for seed in range(sets_wanted(cell.plain_bytes, clock.device))]
    gate = plain_gate(cell, sets[0])
    timed: list[Baseline] = []
    tell("timing PyTorch's attention, each back end in two forms")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of each back end that cannot do a call
        for name, attention in sdpa_candidates(cell):
            timed.append(_time(name, attention, sets, gate, clock, _best_us(timed)))
    tell("compiling and tuning Triton's attention")
    timed.append(_time_split_k(cell, sets, gate, clock))
    return timed


def _best_us(timed: list[Baseline]) -> float:
    """Microseconds of the fastest so far, 0 without one."""
    best = fastest(timed)
    return 0.0 if best is None or best.us is None else best.us


def fastest(timed: list[Baseline]) -> Baseline | None:
    """The baseline: the fastest whose output is right, or None."""
    right = [one for one in timed if one.candidate and one.us is not None and (one.error or 0.0) < MAX_PLAIN_ERROR]
    return min(right, key=lambda one: one.us or 0.0, default=None)


def _time(
    name: str, attention: Attention, sets: list[PlainInput], gate: Gate, clock: Clock, best_us: float
) -> Baseline:
    try:
        error = gate.error(attention(sets[0]))
        if not error < MAX_PLAIN_ERROR:
            return Baseline(name, None, None, error, failed=f"its error is {error:.1e}")
        timing = clock.time([functools.partial(attention, given) for given in sets], best_us=best_us)
    except failures() as problem:
        return Baseline(name, None, None, None, failed=brief(problem))
    return Baseline(name, timing.us, timing.us_again, error)


def _time_split_k(cell: Cell, sets: list[PlainInput], gate: Gate, clock: Clock) -> Baseline:
    """Our bf16 kernel in the configuration that suits the cell best."""
    name = "triton split-k"
    try:
        from split_k import CONFIGS, SplitKConfig, split_k_triton
    except ImportError as missing:
        return Baseline(name, None, None, None, failed=brief(missing))
    if clock.device.type != "cuda":
        return Baseline(name, None, None, None, failed="needs a CUDA device")
    shape = cell.shape
    if shape.rest or shape.tokens > 1 or shape.head_dim & (shape.head_dim - 1):
        return Baseline(name, None, None, None, failed="it takes one token, and keys and values of one power of two")
    multiprocessors = torch.cuda.get_device_properties(clock.device).multi_processor_count

    def attention(config: SplitKConfig) -> Attention:
        def call(given: PlainInput) -> Tensor:
            scaling = cell.shape.head_dim**-0.5
            return split_k_triton(given.query, given.keys, given.values, scaling, config, multiprocessors)

        return call

    best: tuple[float, SplitKConfig] | None = None
    problem: Exception | None = None
    for config in CONFIGS:
        if cell.context % config.block:
            continue
        calls = [functools.partial(attention(config), given) for given in sets]
        try:
            timing = clock.time(calls, budget_ms=_TUNING_MS, best_us=0.0 if best is None else best[0])
        except failures() as error:
            problem = error
            continue
        if best is None or timing.us < best[0]:
            best = timing.us, config
    if best is None:
        reason = f"no block divides {cell.context} tokens" if problem is None else brief(problem)
        return Baseline(name, None, None, None, failed=reason)
    return _time(f"{name} ({best[1].name})", attention(best[1]), sets, gate, clock, 0.0)


def time_quantized_cache(cell: Cell, clock: Clock) -> Baseline:
    """Transformers' ``QuantizedCache`` at 4 bit: a decode step dequantizes everything, then attends in bf16.

    It is no candidate: its values are quantized too, and the error is against the values before. Launches from Python
    count, as they do in its use.
    """
    name = "Transformers QuantizedCache, 4 bit"
    given = plain_input(cell, clock.device, seed=0)
    gate = plain_gate(cell, given)
    old = cell.context - _RESIDUAL - 1
    problems = []
    for backend, axis in (("quanto", 0), ("hqq", 1)):
        try:
            from transformers import cache_utils

            layer_class = {"quanto": cache_utils.QuantoQuantizedLayer, "hqq": cache_utils.HQQQuantizedLayer}[backend]
            layer = layer_class(nbits=4, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=128)
            layer.update(given.keys[:, :, :old], given.values[:, :, :old])
            layer.update(given.keys[:, :, old:-1], given.values[:, :, old:-1])

            def step(layer: cache_utils.QuantizedLayer = layer) -> Tensor:
                keys, values = layer.update(given.keys[:, :, -1:], given.values[:, :, -1:])
                return F.scaled_dot_product_attention(given.query, keys, values, enable_gqa=True)

            error = gate.error(step())
            timing = clock.time([step], budget_ms=0.0, graph=False, best_us=1e-3)
        except ImportError:
            problems.append(f"{backend} is not installed")
            continue
        except (*failures(), AttributeError, TypeError) as problem:  # of a package in another version
            problems.append(f"{backend}: {brief(problem)}")
            continue
        return Baseline(f"{name} ({backend})", timing.us, timing.us_again, error, candidate=False)
    return Baseline(name, None, None, None, candidate=False, failed="; ".join(problems))
