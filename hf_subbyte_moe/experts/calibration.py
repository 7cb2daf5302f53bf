"""How well the next layer's experts can be foretold, and heads that are trained to do it.

Texts run through the model once; what every layer's experts read, the state before its norm and what it chose are
noted. Heads are trained layer by layer on all but a quarter of the texts, to give the chosen experts the most
probability; accuracy is measured on that quarter.

Gives up: routers are frozen, so a fine-tuned model needs heads of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_subbyte_moe.experts.heads import Heads
from hf_subbyte_moe.experts.predictor import GATE, HEAD, PREVIOUS, StaleGate, States
from hf_subbyte_moe.routing.choice import model_facts
from hf_subbyte_moe.routing.families import RouterPlace, experts_of_router, find_routers
from hf_subbyte_moe.routing.modes import allowed_scores
from hf_subbyte_moe.routing.router import isinstance_of_sparsemixer
from hf_subbyte_moe.routing.selection import ChooseExperts, Scores
from hf_subbyte_moe.routing.traces import recorded


CONTROL = "control"
_EXTRA = 2  # experts fetched beside the k that are needed
_STEPS, _BATCH, _RATE = 600, 512, 5e-3


@dataclass(frozen=True)
class Accuracy:
    """How well one predictor foretells one layer.

    Attributes:
        predictor: its name; "control" is the gate on the layer's own state.
        layer: number of the MoE layer that is foretold.
        found: share of the chosen experts among the k, k+1 and k+2 that it names first.
        exact: share of tokens whose k experts it names all with k.
    """

    predictor: str
    layer: int
    found: tuple[float, float, float]
    exact: float


@dataclass(frozen=True)
class Seen:
    """A model on some texts; tokens of a text lie side by side.

    Attributes:
        read: for every layer ``[N, H]`` what its experts read.
        states: for every layer ``[N, H]`` what enters its norm; None where that is not known.
        chosen: ``[N, L, K]``.
        tokens: of a text.
    """

    read: list[Tensor]
    states: list[Tensor] | None
    chosen: Tensor
    tokens: int

    def part(self, texts: slice) -> "Seen":
        """Some of the texts."""

        def cut(rows: Tensor) -> Tensor:
            kept: Tensor = rows.unflatten(0, (-1, self.tokens))[texts].flatten(0, 1)
            return kept

        states = None if self.states is None else [cut(rows) for rows in self.states]
        return Seen([cut(rows) for rows in self.read], states, cut(self.chosen), self.tokens)


def gate_of(model: PreTrainedModel, places: list[RouterPlace]) -> StaleGate | None:
    """The gate of a model; None where it has none that can be asked. Its states must be removed."""
    try:
        states = States(model, places, most=None)
    except ValueError:
        return None
    try:
        return StaleGate(places, states)
    except ValueError:
        states.remove()
        return None


def watch(model: PreTrainedModel, windows: Tensor, gate: StaleGate | None, progress: str | None = None) -> Seen:
    """Run texts through a model and note what predictors could know.

    Args:
        model: a MoE model.
        windows: ``[W, T]`` token ids.
        gate: whose states are noted.
        progress: what a progress bar says; None shows none.
    """
    places = find_routers(model)
    read: list[list[Tensor]] = [[] for _ in places]
    states: list[list[Tensor]] = [[] for _ in places]
    hooks = []
    for layer, place in enumerate(places):

        def note(_: nn.Module, inputs: tuple[Any, ...], layer: int = layer) -> None:
            read[layer].append(inputs[0].detach().reshape(-1, inputs[0].shape[-1]).cpu())
            latest = None if gate is None else gate.states.latest[layer]
            if latest is not None:
                states[layer].append(latest.detach().reshape(-1, latest.shape[-1]).cpu())

        hooks.append(experts_of_router(model, place).register_forward_pre_hook(note))
    if gate is not None:
        gate.states.wanted = True
    try:
        with recorded(model) as trace, torch.no_grad():
            for window in tqdm(windows, desc=progress, leave=False, disable=progress is None):
                model(window[None].to(model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    noted = [torch.cat(rows) for rows in states] if gate is not None else None
    return Seen([torch.cat(rows) for rows in read], noted, trace.indices(), windows.shape[1])


def train_heads(model: PreTrainedModel, seen: Seen, seed: int = 0, progress: str | None = None) -> Heads:
    """Heads for what was seen.

    Args:
        model: the model.
        seen: texts to learn from.
        seed: of the order of tokens.
        progress: what a progress bar says; None shows none.
    """
    places = find_routers(model)
    layers = len(places)
    generator = torch.Generator().manual_seed(seed)
    weights, biases = [], []
    for layer in tqdm(range(layers - 1), desc=progress, leave=False, disable=progress is None):
        weight, bias = _train(seen.read[layer], seen.chosen[:, layer + 1], places[0].experts, model.device, generator)
        weights.append(weight)
        biases.append(bias)
    notes = {"tokens": len(seen.chosen), "steps": _STEPS, "batch": _BATCH}
    dtype = model.dtype
    return Heads(torch.stack(weights).to(dtype), torch.stack(biases).to(dtype), model_facts(model, places), notes)


def _train(
    read: Tensor, chosen: Tensor, experts: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """``[E, H]`` and ``[E]`` of one layer; inputs are scaled to unit size while it learns."""
    size = float(read.float().pow(2).mean().sqrt().clamp(min=1e-12))
    head = nn.Linear(read.shape[1], experts, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.Adam(head.parameters(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
    with torch.enable_grad():
        for _ in range(_STEPS):
            rows = torch.randint(len(read), (_BATCH,), generator=generator)
            logits = head(read[rows].to(device).float() / size)
            loss = -logits.log_softmax(-1).gather(1, chosen[rows].to(device)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return (head.weight / size).detach().cpu(), head.bias.detach().cpu()


def measure_accuracy(
    model: PreTrainedModel, seen: Seen, gate: StaleGate | None = None, heads: Heads | None = None
) -> list[Accuracy]:
    """How well each predictor foretells each layer's choice; the first layer has no predecessor.

    Args:
        model: the model.
        seen: texts to check on.
        gate: the model's gate.
        heads: trained heads.
    """
    places = find_routers(model)
    top_k, experts = places[0].top_k, places[0].experts
    found = []
    for layer in range(1, len(places)):
        chosen = seen.chosen[:, layer]
        ways: dict[str, Callable[[], Tensor]] = {}
        if gate is not None and seen.states is not None:
            before, own = seen.states[layer - 1], seen.states[layer]
            ways[CONTROL] = partial(_gate_scores, gate, layer, own, model.device)
            ways[GATE] = partial(_gate_scores, gate, layer, before, model.device)
        if heads is not None:
            weight, bias = heads.weights[layer - 1].float(), heads.biases[layer - 1].float()
            rows = seen.read[layer - 1].float()
            ways[HEAD] = partial(nn.functional.linear, rows, weight, bias)
        ways[PREVIOUS] = partial(_previous_scores, chosen, experts, seen.tokens)
        for name, scores in ways.items():
            found.append(_accuracy(name, layer, scores(), chosen, top_k))
    return found


def mean_accuracy(accuracy: list[Accuracy]) -> dict[str, Accuracy]:
    """Means over layers, by predictor; the layer is how many there were."""
    found = {}
    for name in dict.fromkeys(layer.predictor for layer in accuracy):
        own = [layer for layer in accuracy if layer.predictor == name]
        shares = [sum(layer.found[extra] for layer in own) / len(own) for extra in range(_EXTRA + 1)]
        exact = sum(layer.exact for layer in own) / len(own)
        found[name] = Accuracy(name, len(own), (shares[0], shares[1], shares[2]), exact)
    return found


def _gate_scores(gate: StaleGate, layer: int, states: Tensor, device: torch.device) -> Tensor:
    """``[N, E]`` by which a layer's router ranks experts for states that did not pass the layer's norm."""
    place = gate.places[layer]
    if isinstance_of_sparsemixer(place.module):
        picked = gate.ask(layer, states[None].to(device))
        return _previous_scores(picked, place.experts, 1, shift=False).cpu()
    noted: list[Tensor] = []

    def rank(scores: Scores) -> Tensor:
        noted.append(allowed_scores(scores))
        return scores.choice

    with ChooseExperts(place.experts, place.top_k, rank):
        gate.ask(layer, states[None].to(device))
    return noted[0].float().cpu()


def _previous_scores(chosen: Tensor, experts: int, tokens: int, shift: bool = True) -> Tensor:
    """``[N, E]`` one for what the token before chose; a text's first token has none before it."""
    scores = torch.zeros(len(chosen), experts).scatter_(1, chosen.cpu().long(), 1.0)
    if not shift:
        return scores
    scores = scores.roll(1, dims=0)
    scores[::tokens] = 0
    return scores


def _accuracy(name: str, layer: int, scores: Tensor, chosen: Tensor, top_k: int) -> Accuracy:
    most = min(top_k + _EXTRA, scores.shape[1])
    named = scores.topk(most, dim=-1).indices
    hit = (named[:, :, None] == chosen[:, None, :]).any(-1)  # [N, most]
    counts = hit.float().cumsum(-1)
    at = [min(top_k + extra, most) - 1 for extra in range(_EXTRA + 1)]
    shares = [float(counts[:, column].mean()) / top_k for column in at]
    return Accuracy(name, layer, (shares[0], shares[1], shares[2]), float((counts[:, at[0]] == top_k).float().mean()))
