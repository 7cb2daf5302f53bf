"""A model's experts run out of slots.

For every call the engine finds which experts it needs, has them brought, and calls the model's own forward with a
stand-in for the module whose weights are slots. So whatever experts function the model's configuration names
(``eager``, ``batched_mm``, ``grouped_mm``, one that was registered) computes, at decode the one that ``generate``
switches to, and the result is the resident model's bit for bit. A registered function that reads slots by number on
the device joins ``SLOT_READERS``; others get the experts that they need side by side. Steps that do without the
modules (``decode/fused.py``) have the experts brought, and read the slots themselves.

Gives up: gradients. The modules are in ``modules.py``.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_subbyte_moe.config import OFF
from hf_subbyte_moe.experts.counters import Counters
from hf_subbyte_moe.experts.governor import Governor, Pace
from hf_subbyte_moe.experts.link import CudaLink, DirectLink, Link
from hf_subbyte_moe.experts.predictor import FEW_TOKENS, GATE, Predictor, StaleGate, States
from hf_subbyte_moe.experts.prefetcher import Prefetcher
from hf_subbyte_moe.experts.residency import SlotPool
from hf_subbyte_moe.experts.streaming import LayerStream
from hf_subbyte_moe.experts.weights import Bank


SLOT_READERS: set[str] = set()  # experts functions that find weights by the numbers they are given
_EAGER, _BATCHED = "eager", "batched_mm"


class RunsExperts(Protocol):
    """An experts module that the engine computes for."""

    config: Any

    @property
    def own_forward(self) -> Callable[..., Tensor]:
        """The forward of the model's class, to be called with a stand-in for the module."""


class StandIn:
    """An experts module whose weights are somewhere else.

    Args:
        module: the module; everything but its weights is its own.
        weights: by name.
        count: experts that the weights hold.
    """

    def __init__(self, module: object, weights: dict[str, Any], count: int) -> None:
        self.__dict__.update(weights)
        self._module = module
        self.num_experts = count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


class ByExpert:
    """A weight in slots that is asked for by expert, one at a time.

    Args:
        slots: ``[S, *shape]``.
        where: slot of every expert.
    """

    def __init__(self, slots: Tensor, where: list[int]) -> None:
        self._slots, self._where = slots, where

    def __getitem__(self, expert: Any) -> Tensor:
        return self._slots[self._where[int(expert)]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_slots"], name)


class ByChoice:
    """A weight in slots that ``batched_mm`` asks for by all choices of a call at once.

    The host knows the slots, so rows are put side by side from where each begins: the device needs no map, and nothing
    indexes a tensor of more than 2^31 elements.

    Args:
        slots: ``[S, *shape]``.
    """

    def __init__(self, slots: Tensor) -> None:
        self._rows = slots.unbind(0)
        self.chosen: list[int] = []

    def __getitem__(self, choices: Tensor) -> Tensor:
        return torch.stack([self._rows[slot] for slot in self.chosen])


class Device:
    """What lives on one device: slots, their map, and the ways to fill them.

    Args:
        device: the device.
        bank: where slabs come from.
        slots: how many.
        experts: of every layer.
        layers: how many.
        counters: what is counted.
        link: to the device; None makes the usual one.
    """

    def __init__(
        self,
        device: torch.device,
        bank: Bank,
        slots: int,
        experts: int,
        layers: int,
        counters: Counters,
        link: Link | None = None,
    ) -> None:
        self.device = device
        layout = bank.layout
        self.slots = torch.empty(slots, layout.elements, dtype=layout.dtype, device=device)
        self.views = layout.views(self.slots)
        on_gpu = device.type == "cuda"
        self._host_map = torch.full((layers, experts), -1, dtype=torch.int32, pin_memory=on_gpu)
        self.map = self._host_map.to(device, copy=True)  # [L, E] slot of every expert
        self._host_rows, self._rows = self._host_map.unbind(0), self.map.unbind(0)
        self._host_views = [row.numpy() for row in self._host_rows]
        self._sent = [row.tobytes() for row in self._host_views]  # what the device's rows hold
        self._stand_ins: dict[int, StandIn] = {}
        self._by_choice = {name: ByChoice(view) for name, view in self.views.items()}
        self.pool = SlotPool(slots, self._host_map.view(-1).numpy())
        if link is None:
            link = DirectLink()
            if on_gpu:
                link = CudaLink(device)
                link.measure(bank.slab(0, 0), self.slots[0])
        self.link = link
        self.prefetcher = Prefetcher(bank, self.pool, self.slots, link, experts, counters)
        self.stream = LayerStream(bank, self.pool, self.slots, link, experts, layers, counters)
        self.pace = Pace(layers, link.speed)

    def slots_of(self, layer: int) -> Tensor:
        """``[E]`` int32 slot of every expert of a layer, on the device; copied there where it changed."""
        row, now = self._rows[layer], self._host_views[layer].tobytes()
        if self._sent[layer] != now:  # the host changes a row only after it waited for the device, see link.py
            row.copy_(self._host_rows[layer], non_blocking=True)
            self._sent[layer] = now
        return row

    def row(self, layer: int) -> Tensor:
        """Slot of every expert of a layer, on the host."""
        return self._host_rows[layer]

    def chosen(self, layer: int, choices: list[int]) -> dict[str, "ByChoice"]:
        """Weights of a layer's experts in the order of choices."""
        where = self._host_rows[layer].tolist()
        slots = [where[expert] for expert in choices]
        for weight in self._by_choice.values():
            weight.chosen = slots
        return self._by_choice

    def stand_in(self, layer: int, module: object) -> "StandIn":
        """For a layer's module, with all slots as its weights."""
        found = self._stand_ins.get(layer)
        if found is None:
            found = self._stand_ins[layer] = StandIn(module, self.views, len(self.slots))
        return found


class Engine:
    """All experts of one model.

    Args:
        bank: where slabs come from.
        slots: how many experts the device holds.
        experts: of every layer.
        top_k: experts that a token uses.
        layers: MoE layers.
    """

    def __init__(self, bank: Bank, slots: int, experts: int, top_k: int, layers: int) -> None:
        self.bank, self.slots, self.experts, self.top_k, self.layers = bank, slots, experts, top_k, layers
        self.counters = Counters(layers)
        self.states: States | None = None  # what enters the layers' norms, where a predictor reads it
        self.calibrated: list[dict[str, Any]] = []  # what a sidecar says of predictors
        self.make_link: Callable[[], Link] | None = None  # tests put slow ones here
        self._on: Device | None = None
        bank.drain = self._drain
        self.use_predictors(())

    def use_predictors(self, predictors: Sequence[Predictor]) -> None:
        """Let the governor choose among these and none."""
        self.predictors = {predictor.name: predictor for predictor in predictors}
        self.governor = Governor([OFF, *self.predictors])
        self._predictor: Predictor | None = None
        self._foretold: list[int] | None = None
        self._step: tuple[float, int] | None = None
        if self.states is not None:
            self.states.wanted = GATE in self.predictors

    @property
    def link_speed(self) -> float | None:
        """Bytes a second to the device; None before it is known."""
        return self._on.link.speed if self._on is not None else None

    def on(self, device: torch.device) -> Device:
        """What lives on a device; a model that moved leaves its slots behind."""
        if self._on is None or self._on.device != device:
            self.forget()
            with torch.inference_mode(False):  # later calls may be outside it
                link = None if self.make_link is None else self.make_link()
                self._on = Device(device, self.bank, self.slots, self.experts, self.layers, self.counters, link)
        return self._on

    def forget(self) -> None:
        """Nothing is in slots any more."""
        self._drain()
        self._on = None

    def _drain(self) -> None:
        if self._on is not None:
            self._on.link.drain()

    def run(self, layer: int, module: RunsExperts, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Compute one layer's experts.

        Args:
            layer: number of the MoE layer.
            module: its experts.
            hidden: ``[N, H]``.
            index: ``[N, K]`` experts of every token.
            weights: ``[N, K]`` of their outputs.

        Returns:
            ``[N, H]``.
        """
        if index.numel() == 0:
            return torch.zeros_like(hidden)
        device = self.on(hidden.device)
        choices, needed, rows = self._bring(layer, hidden, index, device)
        if rows is None:
            return self._from_slots(layer, module, hidden, index, weights, choices, needed, device)
        stand_in = StandIn(module, self.bank.layout.views(rows), self.experts)
        return module.own_forward(stand_in, hidden, index, weights)

    def bring(self, layer: int, hidden: Tensor, index: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
        """Have one layer's experts on the device, for kernels that read them where they lie.

        Args:
            layer: number of the MoE layer.
            hidden: ``[N, H]`` what they will read.
            index: ``[N, K]`` experts of every token, N at least 1.

        Returns:
            ``[S, *shape]`` of every weight by name, and ``[E]`` int32 slot of every expert that was chosen; None where
            expert e lies in slot e.
        """
        device = self.on(hidden.device)
        rows = self._bring(layer, hidden, index, device)[2]
        if rows is None:
            return device.views, device.slots_of(layer)
        return self.bank.layout.views(rows), None

    def _bring(
        self, layer: int, hidden: Tensor, index: Tensor, device: Device
    ) -> tuple[list[int], list[int], Tensor | None]:
        """Choices as the device made them, each expert once, and ``[E, elements]`` of those that are not in slots."""
        few = hidden.shape[0] <= FEW_TOKENS
        predicted = self._enqueue_prediction(layer, hidden, index, device) if few else None
        try:
            chosen = device.link.read([index] if predicted is None else [index, predicted])
            now = time.perf_counter()
            needed = sorted(set(chosen[0]))
            if few or layer:  # before a prompt somebody thought: that says nothing of the next token
                device.pace.chose(layer, now)
            if layer == 0:
                self._begin_step(now, hidden.shape[0] if few else 0, device)
            self._score_prediction(layer, needed if few else [])
            if len(needed) <= min(self.slots, max(self.top_k, self.experts // 2)):
                if device.stream.active:
                    device.stream.close()
                copied = device.prefetcher.demand(layer, needed)
                if few:
                    self._foretell(layer, needed, chosen[1:], copied, device)
                device.pace.asked(layer, now, copied)
                return chosen[0], needed, None
            device.prefetcher.give_all_up()
            return chosen[0], needed, device.stream.bring(layer, needed)
        except BaseException:
            self.abandon(device)
            raise

    def abandon(self, device: Device) -> None:
        """A call failed half way: what is not whole is not known."""
        self._foretold, self._step = None, None
        device.stream.abandon()
        device.prefetcher.give_all_up()

    def _from_slots(
        self,
        layer: int,
        module: RunsExperts,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        choices: list[int],
        needed: list[int],
        device: Device,
    ) -> Tensor:
        name = module.config._experts_implementation
        if name in SLOT_READERS and hidden.shape[0] <= FEW_TOKENS:  # readers may hand more on to others
            where = device.slots_of(layer)[index]
            return module.own_forward(device.stand_in(layer, module), hidden, where, weights)
        if name == _BATCHED:
            return module.own_forward(
                StandIn(module, device.chosen(layer, choices), self.experts), hidden, index, weights
            )
        row = device.row(layer)
        if name == _EAGER or name is None:
            where_each: list[int] = row.tolist()
            held = {part: ByExpert(view, where_each) for part, view in device.views.items()}
            return module.own_forward(StandIn(module, held, self.experts), hidden, index, weights)
        # side by side, in the order of their numbers, as in a layer that has no others
        place = torch.zeros(self.experts, dtype=torch.int64)
        place[needed] = torch.arange(len(needed))
        beside = self.bank.layout.views(torch.stack([device.slots[slot] for slot in row[needed].tolist()]))
        renamed = place.to(hidden.device)[index]
        return module.own_forward(StandIn(module, beside, len(needed)), hidden, renamed, weights)

    def _enqueue_prediction(self, layer: int, hidden: Tensor, index: Tensor, device: Device) -> Tensor | None:
        predictor = self._predictor
        if predictor is None or device.pace.budget(layer) <= 0:
            return None
        if isinstance(predictor, StaleGate):
            predictor.check(layer, index)
        return predictor.enqueue(layer, hidden)

    def _foretell(self, layer: int, needed: list[int], read: list[list[int]], copied: int, device: Device) -> None:
        for predictor in self.predictors.values():
            predictor.saw(layer, needed)
        chooser = self._predictor
        if chooser is None:
            return
        likely = list(dict.fromkeys(read[0])) if read else chooser.known(layer)
        if not likely:
            return
        following = (layer + 1) % self.layers
        self._foretold = likely
        budget = device.pace.budget(layer)
        keep = {layer * self.experts + expert for expert in needed}
        device.prefetcher.foretell(following, likely, budget, keep)

    def _score_prediction(self, layer: int, needed: list[int]) -> None:
        if self._foretold is None or not needed:
            self._foretold = None
            return
        named = set(self._foretold)
        right = len(named & set(needed))
        self.counters.predicted(layer, len(named), right, named >= set(needed))
        self._foretold = None

    def _begin_step(self, now: float, tokens: int, device: Device) -> None:
        """A token begins: the one before it says how long its way took."""
        self.counters.stall_seconds += device.link.stalled()
        if self._step is not None and tokens and self._step[1] == tokens:
            self.governor.took(now - self._step[0])
        self._step = (now, tokens) if tokens else None
        self._predictor = self.predictors.get(self.governor.way) if tokens else None
