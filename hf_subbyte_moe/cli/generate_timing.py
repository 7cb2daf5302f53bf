"""What ``generate()`` takes: spans between tokens, steps on the device, bytes; with a prompt computed or made up."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.clock import DeviceClock
from hf_subbyte_moe.cli.shapes import Widths, cached_widths
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.decode import StepRunner
from hf_subbyte_moe.distributed.heads import head_ranks
from hf_subbyte_moe.distributed.launch import rank


WARM_UP = 6  # tokens that are not counted: kernels are built and steps captured


@dataclass(frozen=True)
class Measured:
    """One run of ``generate``; bytes are this process's.

    Attributes:
        tokens_ms: spans between tokens, behind the first few.
        steps_ms: of the model's forward on the device, likewise; empty where it cannot be timed alone.
        first_ms: until the first token is there; None where the prompt was not computed.
        peak_bytes: allocated at most; None on a CPU.
        cache_bytes: of keys and values at the end.
        read_bytes: of these, what a step reads: room for more is not read.
        fused: see :func:`fused_steps`.
    """

    tokens_ms: list[float]
    steps_ms: list[float]
    first_ms: float | None
    peak_bytes: int | None
    cache_bytes: int
    read_bytes: int
    fused: bool | None


class _Clock(BaseStreamer):
    """Notes when each token comes out; ``generate`` brings it to the host before."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """A token, or the prompt, is there."""
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""


@contextmanager
def _timed_steps(model: PreTrainedModel, device: DeviceClock) -> Iterator[Callable[[], list[float]]]:
    """Put marks around each single-token forward; what is between them, in ms."""
    marks: list[tuple[Any, Any]] = []
    inner, own = model.forward, vars(model).get("forward")

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids")
        if ids is None or ids.shape[-1] > 1:
            return inner(*args, **kwargs)
        first = device.mark()
        output = inner(*args, **kwargs)
        marks.append((first, device.mark()))
        return output

    vars(model)["forward"] = forward
    try:
        yield lambda: [device.ms_between(first, last) for first, last in marks[WARM_UP:]]
    finally:
        del vars(model)["forward"]
        if own is not None:
            vars(model)["forward"] = own


@contextmanager
def _untimed() -> Iterator[Callable[[], list[float]]]:
    yield list


def measure(
    model: PreTrainedModel, ids: Tensor, tokens: int, options: dict[str, Any], cache: Cache | None = None
) -> Measured:
    """Run ``generate`` once.

    Args:
        model: whole, or this rank's share of it.
        ids: ``[B, T]`` prompt.
        tokens: to generate.
        options: of ``generate``.
        cache: empty, to be filled with random keys and values of all tokens but the last; None computes the prompt.
    """
    device = DeviceClock(ids.device)
    device.clear()
    if cache is not None:
        fill(model, cache, ids[:, 1:])
        options = {**options, CACHE_KW: cache}
    clock = _Clock()
    lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    settings = {**lengths, "do_sample": False, "return_dict_in_generate": True, **options}
    compiled = options.get("cache_implementation") == "static"  # and so are functions of ours, which they are not for
    with torch.no_grad(), _untimed() if compiled else _timed_steps(model, device) as steps:
        generate: Any = model.generate
        made = generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **settings)
        device.wait()
        steps_ms = steps()
    spans = [1e3 * (after - before) for before, after in zip(clock.times, clock.times[1:], strict=False)]
    first_ms = spans[0] if cache is None else None
    used = cache_of(made)
    held = cache_bytes(used)
    return Measured(
        tokens_ms=spans[1 + WARM_UP :],
        steps_ms=steps_ms,
        first_ms=first_ms,
        peak_bytes=device.peak_bytes(),
        cache_bytes=held,
        read_bytes=held - spare_bytes(used),
        fused=fused_steps(model, used),
    )


def fused_steps(model: PreTrainedModel, cache: Any) -> bool | None:
    """Whether fused kernels computed a cache's steps; None where a model's own forward did."""
    runner = vars(model).get("forward")
    if not isinstance(runner, StepRunner) or not isinstance(cache, EntropySubbyteCache):
        return None
    steps = runner.graphed(cache)
    return None if steps is None else steps.is_fused


def fill(model: PreTrainedModel, cache: Cache, like: Tensor, widths: Widths | None = None) -> None:
    """Random numbers for all that this rank caches of ``like``'s tokens, packed without measuring.

    Args:
        model: the model.
        cache: empty.
        like: ``[B, T]``.
        widths: what the model caches, where it is known.
    """
    widths = widths or cached_widths(model)
    rows, tokens = like.shape
    shared = any(head_ranks(module) is not None for module in model.modules())  # latents are alike on all ranks
    generator = torch.Generator(like.device).manual_seed(rank() if shared else 0)
    for index, sides in enumerate(widths):
        keys, values = (
            torch.randn(rows, heads, tokens, width, dtype=model.dtype, device=like.device, generator=generator)
            for heads, width in sides
        )
        cache.update(keys, values, index)
        if isinstance(cache, EntropySubbyteCache):
            cache.packed_layers[index].settle(None)


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values, with room that our pools keep."""
    if hasattr(cache, "allocated_bytes"):
        return int(cache.allocated_bytes())
    return sum(int(layer.keys.nbytes + layer.values.nbytes) for layer in cache.layers)


def spare_bytes(cache: Any) -> int:
    """Of our cache, bytes of pools that hold nothing yet."""
    if not isinstance(cache, EntropySubbyteCache):
        return 0
    stores = [layer.rows.store for layer in cache.packed_layers.values()]
    return sum(
        store.nbytes() - sum(tensor.nbytes for name, tensor in store.state().items() if name != "counts")
        for store in stores
    )
