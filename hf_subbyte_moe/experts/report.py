"""What a model's placed experts are doing: numbers first, tables for people."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from torch import nn

from hf_subbyte_moe.experts.counters import LayerCounts
from hf_subbyte_moe.experts.placing import engine_of


_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class ExpertsState:
    """Placed experts of one model, since they were placed.

    Attributes:
        experts: how many there are.
        slots: how many the device holds.
        device_bytes: of the slots.
        host_bytes: of the bank in host memory.
        pinned: whether that memory is pinned.
        link_gb_s: measured speed to the device, 1e9 bytes a second; None where it is not known, or copies are direct.
        tokens: forward passes that ran out of slots.
        hit_rate: of the experts that were needed, those that were in a slot; None before the first.
        bytes_per_token: copied, all reasons together; None likewise.
        stall_ms_per_token: that the computation waited for copies; None likewise.
        predictors: that may be used.
        prefetch: what is used now.
        step_ms: of a step with each way, as the governor measured.
        useful_bytes: brought ahead and needed.
        wasted_bytes: brought ahead and not needed.
        layers: counts by layer.
        calibrated: for each layer what the predictor finds with k, k + 1, k + 2, and exact sets, from its sidecar.
    """

    experts: int
    slots: int
    device_bytes: int
    host_bytes: int
    pinned: bool
    link_gb_s: float | None
    tokens: int
    hit_rate: float | None
    bytes_per_token: float | None
    stall_ms_per_token: float | None
    predictors: tuple[str, ...]
    prefetch: str
    step_ms: dict[str, float]
    useful_bytes: int
    wasted_bytes: int
    layers: Sequence[LayerCounts]
    calibrated: Sequence[dict[str, Any]]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def experts_state(model: nn.Module) -> ExpertsState | None:
    """What a model's placed experts are doing; None where they are with the model."""
    engine = engine_of(model)
    if engine is None:
        return None
    counters, tokens = engine.counters, engine.counters.tokens
    speed = engine.link_speed
    return ExpertsState(
        experts=engine.layers * engine.experts,
        slots=engine.slots,
        device_bytes=engine.slots * engine.bank.layout.nbytes,
        host_bytes=engine.bank.host_bytes(),
        pinned=engine.bank.pinned,
        link_gb_s=None if speed is None or speed == float("inf") else speed / 1e9,
        tokens=tokens,
        hit_rate=counters.hit_rate,
        bytes_per_token=counters.bytes / tokens if tokens else None,
        stall_ms_per_token=1e3 * counters.stall_seconds / tokens if tokens else None,
        predictors=tuple(engine.predictors),
        prefetch=engine.governor.way,
        step_ms={way: 1e3 * seconds for way, seconds in engine.governor.medians().items()},
        useful_bytes=counters.total("useful_bytes"),
        wasted_bytes=counters.total("wasted_bytes"),
        layers=counters.by_layer(),
        calibrated=[found for found in engine.calibrated if found["predictor"] in engine.predictors],
    )


def experts_tables(state: ExpertsState) -> Group:
    """Two tables: the whole, and every layer."""
    return Group(_whole(state), _layers(state))


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _whole(state: ExpertsState) -> Table:
    table = Table(title="experts", title_justify="left", show_header=False)
    table.add_column("what")
    table.add_column("value")
    memory = "pinned" if state.pinned else "pageable"
    link = "" if state.link_gb_s is None else f", {state.link_gb_s:.1f} GB/s to the device"
    times = ", ".join(f"{way} {ms:.1f} ms" for way, ms in state.step_ms.items())
    per_token = None if state.bytes_per_token is None else state.bytes_per_token / _MIB
    brought = f"{state.useful_bytes / _MIB:,.1f} MiB needed, {state.wasted_bytes / _MIB:,.1f} MiB not"
    for name, value in (
        ("in slots", f"{state.slots} of {state.experts}, {state.device_bytes / _GIB:.2f} GiB"),
        ("in host memory", f"{state.host_bytes / _GIB:.2f} GiB {memory}{link}"),
        ("tokens", str(state.tokens)),
        ("hit rate", _shown(state.hit_rate, ".1%")),
        ("MiB a token", _shown(per_token, ",.1f")),
        ("stall, ms a token", _shown(state.stall_ms_per_token, ".2f")),
        ("prefetch", f"{state.prefetch} (of {', '.join(state.predictors) or 'none'}){': ' if times else ''}{times}"),
        ("brought ahead", brought),
    ):
        table.add_row(name, value)
    return table


def _layers(state: ExpertsState) -> Table:
    table = Table(title="by layer", title_justify="left")
    names = ["MoE layer", "hit rate", "MiB a call", "foretold right", "exact sets"]
    calibrated = {found["layer"]: found for found in state.calibrated}
    if calibrated:
        names += ["calibrated: found with k", "k + 1", "k + 2", "exact"]
    for name in names:
        table.add_column(name, justify="right")
    for layer in state.layers:
        copied = None if layer.bytes_per_call is None else layer.bytes_per_call / _MIB
        cells = [
            str(layer.layer),
            _shown(layer.hit_rate, ".1%"),
            _shown(copied, ",.1f"),
            _shown(layer.slots_right, ".1%"),
            _shown(layer.sets_right, ".1%"),
        ]
        if calibrated:
            found = calibrated.get(layer.layer)
            shares = [None] * 4 if found is None else [*found["found"], found["exact"]]
            cells += [_shown(share, ".1%") for share in shares]
        table.add_row(*cells)
    return table
