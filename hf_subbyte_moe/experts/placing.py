"""Place a model's experts, and take them back.

Gives up, by name: models that accelerate's hooks move, sharded experts, experts that Transformers' experts interface
does not run.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_subbyte_moe.config import AUTO, OFF, ExpertsConfig
from hf_subbyte_moe.experts.experts import Engine
from hf_subbyte_moe.experts.heads import Heads, find_sidecar
from hf_subbyte_moe.experts.loading import Loading
from hf_subbyte_moe.experts.memory import available_memory, refuse_too_large
from hf_subbyte_moe.experts.modules import Guard, PlacedExperts, Swap
from hf_subbyte_moe.experts.predictor import (
    GATE,
    HEAD,
    PREVIOUS,
    Predictor,
    PreviousToken,
    StaleGate,
    States,
    TrainedHead,
)
from hf_subbyte_moe.experts.weights import (
    Bank,
    DiskBank,
    HostBank,
    SlabLayout,
    TensorFile,
    refuse_full_disk,
    write_files,
)
from hf_subbyte_moe.routing.families import RouterPlace, experts_of_router, find_routers


_KEPT_SHARE = 0.5  # of free host memory, for slabs whose files are on disk
_LEAST_KEPT = 2


@dataclass(frozen=True)
class Plan:
    """What :func:`place` will do, checked.

    Attributes:
        config: the options.
        places: the model's routers.
        modules: the experts of each.
        slots: experts on the device at a time.
        layout: of an expert's slab.
        predictor: what foretells experts; "off" for nothing.
        heads: for predictor "head".
    """

    config: ExpertsConfig
    places: list[RouterPlace]
    modules: list[nn.Module]
    slots: int
    layout: SlabLayout
    predictor: str
    heads: Heads | None

    @property
    def slabs(self) -> int:
        """All experts."""
        return len(self.places) * self.places[0].experts

    @property
    def nbytes(self) -> int:
        """Bytes of all experts."""
        return self.slabs * self.layout.nbytes


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that runs a model's placed experts; None where they are where the model is."""
    for module in model.modules():
        if isinstance(module, PlacedExperts):
            return module._hf_subbyte_moe_experts[0]
    return None


def plan(model: PreTrainedModel, config: ExpertsConfig, loading: Loading | None = None) -> Plan | None:
    """Check whether a model's experts can be placed as the options say; changes nothing.

    Args:
        model: the model.
        config: the options.
        loading: how the model was loaded, where it was loaded for that.

    Returns:
        None where the options leave experts with the model.

    Raises:
        ValueError: they cannot; names what is in the way.
    """
    if not config.moves:
        return None
    places = find_routers(model)
    modules = [experts_of_router(model, place) for place in places]
    placed = engine_of(model)
    if placed is None:
        _refuse_moved(model)
        for place, module in zip(places, modules, strict=True):
            _refuse_experts(place, module, loading is not None and loading.experts_files is not None)
    layout = SlabLayout.of(modules[0], places[0].experts) if placed is None else placed.bank.layout
    if placed is None and any(SlabLayout.of(module, places[0].experts) != layout for module in modules):
        raise ValueError(f"experts: layers of {type(model).__name__} differ in their experts' shapes")
    slots = count_slots(config, len(places), places[0].experts, places[0].top_k)
    predictor, heads = _choose_predictor(model, config, places)
    return Plan(config, places, modules, slots, layout, predictor, heads)


def count_slots(config: ExpertsConfig, layers: int, experts: int, top_k: int) -> int:
    """How many slots the options ask for.

    Raises:
        ValueError: fewer than one token needs.
    """
    slots = config.gpu_slots if isinstance(config.gpu_slots, int) else int(config.gpu_slots * layers * experts)
    if slots < top_k * layers:
        raise ValueError(
            f"gpu_slots={config.gpu_slots!r} is not possible: {slots} slots, and a token needs {top_k} in each of "
            f"{layers} layers, {top_k * layers} in all"
        )
    return min(slots, layers * experts)


def place(model: PreTrainedModel, planned: Plan, loading: Loading | None = None) -> None:
    """Put experts where the plan says, and everything else on the GPU if there is one.

    An exception leaves the model as it was.

    Args:
        model: the model that was planned for.
        planned: the plan.
        loading: how the model was loaded, where it was loaded for that.
    """
    target = target_of(model) if loading is None or loading.device is None else loading.device
    before = engine_of(model)
    if before is None:
        engine = _move(model, planned, loading, target)
    else:
        engine = before if _same_bank(before.bank, planned.config) else _move_on(planned, before, target)
        before.forget()
        engine.slots = planned.slots
        if before.states is not None:
            before.states.remove()
    engine.states = None
    predictors, engine.states = _predictors(model, planned)
    engine.use_predictors(predictors)
    engine.calibrated = [] if planned.heads is None else list(planned.heads.notes.get("accuracy", []))
    engine.counters.reset()


def bring_back(model: PreTrainedModel, device: torch.device | None = None) -> None:
    """Give every module its experts back.

    Args:
        model: any model; one whose experts are with it stays as it is.
        device: where the experts go; None means where the rest of the model is.
    """
    engine = engine_of(model)
    if engine is None:
        return
    device = device or device_of(model)
    engine.forget()
    if engine.states is not None:
        engine.states.remove()
    for module in model.modules():
        if isinstance(module, PlacedExperts):
            Swap.take_back(module, device)
    del model.__dict__["_apply"]


def device_of(model: PreTrainedModel) -> torch.device:
    """Where a model's embeddings are."""
    embeddings: Any = model.get_input_embeddings()
    device: torch.device = embeddings.weight.device
    return device


def target_of(model: PreTrainedModel) -> torch.device:
    """Where a model's computations are to be: the GPU, if there is one."""
    device = device_of(model)
    if device.type == "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _same_bank(bank: Bank, config: ExpertsConfig) -> bool:
    return isinstance(bank, DiskBank) == (config.placement == "disk")


def _refuse_moved(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            f"experts: accelerate's hooks move the weights of {name} (device_map with offload or several devices); "
            "load it without device_map, or with one device"
        )
    if any(_is_sharded(weight) for weight in model.parameters()):
        raise ValueError(f"experts: {name} is sharded over several processes; load it whole")


def _is_sharded(weight: Any) -> bool:
    return hasattr(weight, "device_mesh") or hasattr(weight, "_is_fsdp_flattened") or hasattr(weight, "ds_id")


def _refuse_experts(place: RouterPlace, module: nn.Module, loaded_later: bool) -> None:
    kind = type(module).__name__
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(f"experts: {kind} is split over several processes (expert parallel); load it whole")
    if not hasattr(module, "has_gate") or not hasattr(module, "config"):
        raise ValueError(f"experts: {kind} beside {place.name} is not run by Transformers' experts interface")
    if not loaded_later and any(weight.device.type == "meta" for weight in module.parameters()):
        raise ValueError(f"experts: the weights of {kind} beside {place.name} are not loaded")


def _move(model: PreTrainedModel, planned: Plan, loading: Loading | None, target: torch.device) -> Engine:
    """Experts leave a model for a bank, layer by layer, and everything else goes to a device."""
    leaving = _Leaving(planned)
    home = device_of(model)
    try:
        bank = _bank(planned, loading, target.type == "cuda", leaving)
        engine = _engine(planned, bank)
        for layer, module in enumerate(planned.modules):
            Swap.put(module, engine, layer)
        object.__setattr__(model, "_apply", Guard(model, planned.layout))
        model.to(target)  # type: ignore[arg-type]
    except BaseException:
        vars(model).pop("_apply", None)
        leaving.undo()
        if home != target:
            model.to(home)  # type: ignore[arg-type]
        raise
    return engine


def _move_on(planned: Plan, before: Engine, target: torch.device) -> Engine:
    """Experts go from one bank to another; the modules turn to it when it is whole."""
    engine = _engine(planned, _bank(planned, None, target.type == "cuda", before.bank))
    for layer, module in enumerate(planned.modules):
        Swap.point(module, engine, layer)
    return engine


def _engine(planned: Plan, bank: Bank) -> Engine:
    return Engine(bank, planned.slots, planned.places[0].experts, planned.places[0].top_k, len(planned.places))


class _Leaving:
    """Modules whose weights go one after the other, never held twice, and come back after an error."""

    def __init__(self, planned: Plan) -> None:
        self._modules = planned.modules
        self._names = [part.name for part in planned.layout.parts]
        self._devices = [module.get_parameter("down_proj").device for module in planned.modules]
        self._gone: list[Callable[[], Mapping[str, torch.Tensor]]] = []

    def weights(self, layer: int) -> dict[str, torch.Tensor]:
        """``[E, *shape]`` of every weight of a layer that is still there."""
        return {name: getattr(self._modules[layer], name).detach() for name in self._names}

    def left(self, back: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        """The next layer's weights are somewhere else; ``back`` finds them."""
        module = self._modules[len(self._gone)]
        self._gone.append(back)
        for name, weight in self.weights(len(self._gone) - 1).items():
            trained = module._parameters[name].requires_grad  # type: ignore[union-attr]
            module._parameters[name] = nn.Parameter(weight[:0].clone(), requires_grad=trained)

    def undo(self) -> None:
        """Every module is as before."""
        for module in self._modules:
            if isinstance(module, PlacedExperts):
                Swap.leave(module)
        while self._gone:  # the last first: a bank gives its memory up from its end
            back = self._gone.pop()
            Swap.own(self._modules[len(self._gone)], back(), self._devices[len(self._gone)])


def _bank(planned: Plan, loading: Loading | None, pin: bool, source: _Leaving | Bank) -> Bank:
    experts, layout, layers = planned.places[0].experts, planned.layout, range(len(planned.modules))
    if planned.config.placement == "offload":
        weights = (weight for module in planned.modules for weight in module.parameters())
        leaves = isinstance(source, _Leaving) and all(weight.device.type == "cpu" for weight in weights)
        refuse_too_large(planned.nbytes // len(layers) if leaves else planned.nbytes, "the experts in host memory")
        bank = HostBank(layout, experts, pin)
        for layer in layers:
            bank.add(source.weights(layer))
            if isinstance(source, _Leaving):
                source.left(partial(bank.give_up, layer))
        return bank
    given = None if loading is None else loading.experts_files
    folder: Any = None if loading is None else loading.folder
    if given is None or any(file.map().dtype != layout.dtype for file in given[0].values()):
        given, folder = _written(planned, given, source)  # a checkpoint's files serve, but for another dtype
    kept = int(_KEPT_SHARE * available_memory() / layout.nbytes)
    kept = max(_LEAST_KEPT, min(planned.slabs, kept))
    return DiskBank(given, layout, experts, kept, pin, folder)


def _written(
    planned: Plan, given: Sequence[Mapping[str, TensorFile]] | None, source: _Leaving | Bank
) -> tuple[list[Mapping[str, TensorFile]], object]:
    """Files of every layer's experts, and the folder that keeps them."""
    folder = tempfile.TemporaryDirectory(prefix="hf-subbyte-moe-")
    refuse_full_disk(Path(folder.name), planned.nbytes, "the experts in files")
    files: list[Mapping[str, TensorFile]] = []
    for layer in range(len(planned.modules)):
        weights = source.weights(layer) if given is None else _mapped(given[layer])
        files.append(write_files(Path(folder.name), layer, weights, planned.layout.dtype))
        if given is None and isinstance(source, _Leaving):
            source.left(partial(_mapped, files[layer], folder))
    return files, folder


def _mapped(files: Mapping[str, TensorFile], folder: object = None) -> dict[str, torch.Tensor]:
    """The tensors of files; ``folder`` keeps these until then."""
    return {name: file.map() for name, file in files.items()}


def _choose_predictor(
    model: PreTrainedModel, config: ExpertsConfig, places: list[RouterPlace]
) -> tuple[str, Heads | None]:
    """What foretells a model's experts.

    Raises:
        ValueError: what the options name is not possible.
    """
    wanted = config.prefetch
    if wanted in (OFF, PREVIOUS) or len(places) == 1:
        return (OFF if len(places) == 1 else wanted), None
    path = find_sidecar(model, config)
    if wanted == HEAD and path is None:
        raise ValueError('prefetch="head" needs a sidecar: hf-subbyte-moe calibrate --predictor writes one')
    if path is not None and wanted in (HEAD, AUTO):
        heads = Heads.load(path)
        heads.check(model, places)
        return HEAD, heads
    try:
        states = States(model, places)
        states.remove()
        StaleGate(places, states)
    except ValueError:
        if wanted == GATE:
            raise
        return PREVIOUS, None
    return GATE, None


def _predictors(model: PreTrainedModel, planned: Plan) -> tuple[list[Predictor], States | None]:
    if planned.predictor == OFF:
        return [], None
    if planned.predictor == PREVIOUS:
        return [PreviousToken(len(planned.places))], None
    if planned.heads is not None:
        return [TrainedHead(planned.heads.weights, planned.heads.biases, planned.places[0].top_k)], None
    states = States(model, planned.places)
    return [StaleGate(planned.places, states)], states
