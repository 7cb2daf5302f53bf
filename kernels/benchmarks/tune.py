"""Choose the CUDA kernel's configurations: every candidate in every cell, the fastest that is right is kept.

A cell has two winners: the smallest sum over the tuned pairs of tiers, and the fastest for a mixture. The kernel looks
a size up by device, KV heads of all rows, tiles, and whether tiers are mixed.
"""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from baselines import brief, failures
from gate import Gate, packed_gate
from inputs import PackedInput, input_sets
from limits import Budget, Only, check_device
from results import Record, error_ratio, not_right
from rich.console import Console
from rich.markup import escape
from shapes import MIX, TUNED, Cell, Variant
from timing import Clock

from subbyte_kernels.decode_attention import AttentionResult


CONFIGS = results.FOLDER.parent / "subbyte_kernels" / "decode_attention" / "configs.json"
_BUDGET_MS = 10.0
_SECONDS = 0.15  # of one candidate
_console = Console(highlight=False)

Kernel = Callable[..., AttentionResult]


def tune(clock: Clock, cells: list[Cell], only: Only, budget: Budget, configs: Path, record: Path) -> bool:
    """Tune for the clock's device; whether every cell has a winner.

    Args:
        clock: of a CUDA device.
        cells: cache sizes.
        only: filters; pairs that it leaves out do not count.
        budget: seconds.
        configs: where winners go, by device; entries of other devices and sizes stay.
        record: where all times go.

    Raises:
        ValueError: the filters leave no pair.
    """
    from subbyte_kernels.decode_attention.cuda_config import candidate_configs
    from subbyte_kernels.decode_attention.cuda_kernel import decode_attention_cuda

    device, candidates = torch.cuda.get_device_name(clock.device), candidate_configs()
    tuned = [variant for variant in (*TUNED, MIX) if only.variant(variant)]
    if not tuned:
        raise ValueError(f"--only leaves nothing to tune for; there are {[variant.name for variant in (*TUNED, MIX)]}")
    times: list[Record] = []
    good = True
    for cell in cells:
        if not budget.allows(3 + _SECONDS * len(candidates) * len(tuned), cell.name):
            continue
        for mixed in (False, True):
            group = [variant for variant in tuned if (variant is MIX) is mixed]
            if not group:
                continue
            name = f"{cell.name}, {'mixed' if mixed else 'one pair'}"
            found = [_candidates(cell, variant, clock, candidates, decode_attention_cuda) for variant in group]
            lines = [line for of_variant in found for line in of_variant]
            times += lines
            results.save({"device": device, "times": times}, record)
            best = winner(lines, len(group))
            if best is None:
                good = False
                _console.print(f"{name}: [red]no configuration is right[/red]", soft_wrap=True)
                continue
            keep_config(configs, device, cell, mixed, best)
            _console.print(f"{name}: {escape(str(best))}", soft_wrap=True)
    for what in budget.skipped:
        _console.print(f"skipped for want of time: {what}", soft_wrap=True)
    return good


def _candidates(cell: Cell, variant: Variant, clock: Clock, candidates: list[Any], kernel: Kernel) -> list[Record]:
    """A line for each candidate; where it failed or is not right, ``us`` is None."""
    sets = input_sets(cell, variant, clock.device)
    gate = packed_gate(cell, sets[0])
    place = {"shape": cell.shape.name, "batch": cell.batch, "context": cell.context, "pair": variant.name}
    lines = []
    for config in candidates:
        us, failed = _candidate(functools.partial(_call, kernel, config), sets, gate, clock)
        lines.append({**place, **dataclasses.asdict(config), "us": us, "failed": failed})
        check_device(clock.device)
    return lines


def _call(kernel: Kernel, config: Any, given: PackedInput) -> AttentionResult:
    scaling = given.query.shape[-1] ** -0.5
    return kernel(given.query, given.exact, given.tiles, scaling, config=config)


def _candidate(
    call: Callable[[PackedInput], AttentionResult], sets: list[PackedInput], gate: Gate, clock: Clock
) -> tuple[float | None, str | None]:
    """Microseconds, or None and why."""
    try:
        error = gate.error(call(sets[0]).output)
        if not_right(error_ratio(error, gate.plain_error)):
            return None, f"its error is {error:.1e}"
        return clock.time([functools.partial(call, given) for given in sets], budget_ms=_BUDGET_MS).us, None
    except failures() as problem:
        return None, brief(problem)


def winner(lines: list[Record], pairs: int) -> Record | None:
    """The configuration that was right for all pairs and the fastest on average: its fields and mean ``us``."""
    times: dict[tuple[int, int], list[float]] = {}
    for line in lines:
        if line["us"] is not None:
            times.setdefault((line["warps"], line["blocks_per_sm"]), []).append(line["us"])
    means = {config: sum(found) / pairs for config, found in times.items() if len(found) == pairs}
    if not means:
        return None
    warps, blocks_per_sm = min(means, key=lambda config: means[config])
    return {"warps": warps, "blocks_per_sm": blocks_per_sm, "us": round(means[warps, blocks_per_sm], 2)}


def keep_config(path: Path, device: str, cell: Cell, mixed: bool, best: Record) -> None:
    """Put a winner into the file; it replaces the one of the same device and size."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    size = {"heads": cell.units, "tiles": cell.tiles, "mixed": mixed}
    others = [entry for entry in known.get(device, []) if {**entry, **size} != entry]
    known[device] = sorted(
        [*others, {**size, **best}], key=lambda entry: (entry["heads"], entry["tiles"], entry["mixed"])
    )
    results.save(known, path)
