"""The single-token forward of one model and one cache: computed once, captured once, then replayed.

The token and its position are copied into fixed buffers; everything else that a step reads lies at fixed addresses
(``cache/steps.py``). The first step of an epoch runs without a graph and builds what its kernels need; the second is
captured and replayed; all later ones are replays, with packing between them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from hf_subbyte_moe.cache import CacheSteps, EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.decode.fused import FusedStep


Forward = Callable[..., ModelOutput]


class CaptureError(RuntimeError):
    """The forward does something that a CUDA graph cannot hold."""

    @property
    def out_of_memory(self) -> bool:
        """Whether there was no memory for it, which may be otherwise another time."""
        problem: BaseException | None = self
        while problem is not None:
            if isinstance(problem, torch.OutOfMemoryError):
                return True
            problem = problem.__cause__ or problem.__context__
        return False


class CaptureRoom:
    """What all graphs of a model share: a stream, and memory that the next graph takes over from the last."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None  # keeps the memory alive

    def capture(self, run: Callable[[], ModelOutput]) -> tuple[torch.cuda.CUDAGraph, ModelOutput]:
        """Record what a function launches, without running it.

        Raises:
            CaptureError: it cannot be recorded; says why.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    output = run()
                finally:
                    graph.capture_end()
            except (RuntimeError, ValueError) as problem:
                raise CaptureError(f"its step cannot be captured ({_first_line(problem)})") from problem
        self._last = graph
        return graph, output


def _first_line(problem: BaseException) -> str:
    """What went wrong first, in a line: ending a broken capture raises once more."""
    while isinstance(problem.__context__, (RuntimeError, ValueError)):
        problem = problem.__context__
    return str(problem).strip().partition("\n")[0]


class GraphedStep:
    """Single-token steps of one cache. It keeps the cache's layers alive, not the cache.

    Attributes:
        captures: graphs that were captured so far.
        replays: steps that were replays.
    """

    def __init__(
        self,
        cache: EntropySubbyteCache,
        ids: Tensor,
        positions: Tensor,
        room: CaptureRoom | None,
        fused: FusedStep | None = None,
    ) -> None:
        """Prepare for steps of these shapes.

        Args:
            cache: ours, with at least a token in every row.
            ids: ``[B, 1]`` a step's tokens.
            positions: their positions, as the model takes them.
            room: for graphs; None runs every step without one.
            fused: computes what it can in place of the model's forward.
        """
        self.steps = CacheSteps(cache)
        with torch.inference_mode(False):  # later steps may be outside it
            self._ids, self._positions = torch.empty_like(ids), torch.empty_like(positions)
        self._room, self._fused = room, fused
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: ModelOutput | None = None
        self._warm = self._captured = -1  # epochs
        self.captures = self.replays = 0

    @property
    def has_kernels(self) -> bool:
        """Whether there are fused kernels for the model."""
        return self._fused is not None

    @property
    def is_fused(self) -> bool:
        """Whether steps are computed by fused kernels."""
        return self._fused is not None and self.steps.keys_are_plain

    def fits(self, ids: Tensor, positions: Tensor) -> bool:
        """Whether a step's tensors have the shapes that this one was made for, and the cache its rows.

        Without a graph also whether the model still has the hooks that it had.
        """
        if self._room is None and self._fused is not None and self._fused.hooks_changed:
            return False
        same = ids.shape == self._ids.shape and positions.shape == self._positions.shape
        return same and ids.device == self._ids.device and not self.steps.outdated

    def __call__(
        self, forward: Forward, cache: EntropySubbyteCache, ids: Tensor, positions: Tensor, options: dict[str, Any]
    ) -> ModelOutput:
        """Compute one step.

        Args:
            forward: the model's forward without a graph.
            cache: the cache that this was made for.
            ids: ``[B, 1]``.
            positions: of them.
            options: other arguments of ``forward``, the same at each step.

        Returns:
            What ``forward`` returns, in memory of its own.

        Raises:
            CaptureError: the step cannot be captured; nothing was stored.
            ValueError: the step cannot be computed at fixed addresses; nothing was stored.
        """
        try:
            self.steps.prepare()
            self._ids.copy_(ids)
            self._positions.copy_(positions)
            inputs = {"input_ids": self._ids, "position_ids": self._positions, CACHE_KW: cache, **options}

            def run() -> ModelOutput:
                with self.steps.step():
                    if self.is_fused and self._fused is not None:
                        return self._fused(self.steps, cache, self._ids, self._positions)
                    return forward(**inputs)

            output = run() if self._room is None else self._on_device(run, self._room)
        except BaseException:
            self.steps.forget()
            raise
        self.steps.advance()
        if self._room is None:
            return output
        return type(output)(**{name: _own(value, cache) for name, value in output.items()})

    def _on_device(self, run: Callable[[], ModelOutput], room: CaptureRoom) -> ModelOutput:
        epoch = self.steps.epoch
        if self._captured != epoch:
            if self._warm != epoch:
                self._warm = epoch
                return self._aside(run, room)
            self._graph, made = room.capture(run)
            self._output = type(made)(**{name: _unowned(value) for name, value in made.items()})
            self._captured = epoch
            self.captures += 1
        assert self._graph is not None
        assert self._output is not None
        self._graph.replay()
        self.replays += 1
        return self._output

    @staticmethod
    def _aside(run: Callable[[], ModelOutput], room: CaptureRoom) -> ModelOutput:
        """Run on the stream that captures: libraries take memory for each stream, which should not be a graph's."""
        current = torch.cuda.current_stream(room.stream.device)
        room.stream.wait_stream(current)
        with torch.cuda.stream(room.stream):
            output = run()
        current.wait_stream(room.stream)
        return output


def _unowned(value: Any) -> Any:
    """An entry of an output, without the cache."""
    return _CACHE if isinstance(value, EntropySubbyteCache) else value


def _own(value: Any, cache: EntropySubbyteCache) -> Any:
    """An entry of an output that the next step does not overwrite."""
    if value is _CACHE:
        return cache
    return value.clone() if isinstance(value, Tensor) else value


_CACHE = object()
