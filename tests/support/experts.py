"""Placed experts in tests: steps of a model, and links that misbehave."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_subbyte_moe
from hf_subbyte_moe.experts import Engine, engine_of
from hf_subbyte_moe.experts.governor import Governor
from hf_subbyte_moe.experts.link import Ticket


def steps(model: PreTrainedModel, ids: Tensor, prefix: int = 6) -> list[Tensor]:
    """Logits of a prompt and of each token after it."""
    call: Any = model
    with torch.no_grad():
        found = call(ids[:, :prefix], use_cache=True)
        logits = [found.logits]
        name = "cache" if "cache" in found else "past_key_values"
        for at in range(prefix, ids.shape[1]):
            found = call(ids[:, at : at + 1], **{name: found[name]}, use_cache=True)
            logits.append(found.logits)
    return logits


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(left) == len(right) and all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def offloaded(model: PreTrainedModel, slots: float, **options: Any) -> Engine:
    """Place a model's experts; their engine."""
    hf_subbyte_moe.apply(model, {"experts": {"placement": "offload", "gpu_slots": slots, **options}})
    engine = engine_of(model)
    assert engine is not None
    return engine


def always(engine: Engine, way: str) -> None:
    """Let a governor have no choice."""
    engine.governor = Governor([way])


class LazyLink:
    """Copies are done at the last moment: when the computation waits for their ticket, or for a later one.

    A missing wait shows as a wrong result. Everything is noted with a running number.
    """

    speed = 1e9

    def __init__(self) -> None:
        self.asked: list[tuple[Tensor, Tensor]] = []
        self.notes: list[tuple[str, int, int]] = []  # what, which copy or ticket, when
        self._done = 0

    def _note(self, what: str, which: int) -> None:
        self.notes.append((what, which, len(self.notes)))

    def read(self, tensors: Sequence[Tensor]) -> list[list[int]]:
        self._note("choice", 0)
        return [tensor.flatten().tolist() for tensor in tensors]

    def copying(self) -> Any:
        return nullcontext()

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._note("request", len(self.asked))
        self.asked.append((target, source))
        target.fill_(float("nan"))  # what was there is gone from now on

    def mark(self) -> Ticket:
        return Ticket(len(self.asked), None)

    def use(self, ticket: Ticket, timed: bool = False) -> None:
        for number in range(self._done, ticket.number):
            target, source = self.asked[number]
            target.copy_(source)
            self._note("copy", number)
        self._done = max(self._done, ticket.number)
        self._note("use", ticket.number)

    def stalled(self) -> float:
        return 0.0

    def drain(self) -> None:
        self.use(self.mark())
