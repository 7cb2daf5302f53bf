"""``hf-subbyte-moe calibrate --predictor``: how well the next layer's experts are foretold, and heads for that."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_subbyte_moe.cli.texts import beside_model, windows_of
from hf_subbyte_moe.experts import PREDICTOR_SIDECAR_NAME, bring_back
from hf_subbyte_moe.experts.calibration import (
    CONTROL,
    Accuracy,
    gate_of,
    mean_accuracy,
    measure_accuracy,
    train_heads,
    watch,
)
from hf_subbyte_moe.experts.heads import Heads
from hf_subbyte_moe.experts.predictor import GATE, HEAD
from hf_subbyte_moe.experts.replay import statistics_of
from hf_subbyte_moe.routing import find_routers, release


_UNSEEN = 4  # one text in so many checks what was learned
_LEAST = 4


def calibrate_predictor(
    console: Console,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: Path | None,
    out: Path | None,
    windows: int,
    context: int,
    seed: int,
) -> None:
    """Train heads on a model's texts, show what every predictor finds, and write the sidecar.

    Raises:
        ValueError: too few texts, a model that is not supported, or a gate that does not repeat the model's choice.
    """
    if windows < _LEAST:
        raise ValueError(f"--windows {windows} is not possible: a quarter checks, so at least {_LEAST}")
    release(model)  # its own options may steer it or have moved its experts
    bring_back(model)
    places = find_routers(model)
    out = out or beside_model(model, PREDICTOR_SIDECAR_NAME, "a sidecar")
    ids = windows_of(model, tokenizer, data, windows, context, seed)
    gate = gate_of(model, places)
    try:
        seen = watch(model, ids, gate, progress="texts")
        checks = windows // _UNSEEN
        heads = train_heads(model, seen.part(slice(checks, None)), seed, progress="heads")
        accuracy = measure_accuracy(model, seen.part(slice(0, checks)), gate, heads)
    finally:
        if gate is not None:
            gate.states.remove()
    means = mean_accuracy(accuracy)
    _refuse_wrong_gate(accuracy)
    recall = {name: mean.found[0] for name, mean in means.items() if name in (GATE, HEAD)}
    source = Path(str(model.config.name_or_path)).name
    statistics = statistics_of(seen.chosen, places[0].experts, seen.tokens, recall, source)
    notes: dict[str, Any] = {
        **heads.notes,
        "statistics": {
            "popularity": statistics.popularity,
            "repeat": statistics.repeat,
            "recall": recall,
            "source": source,
        },
        "accuracy": [vars(found) for found in accuracy],
    }
    Heads(heads.weights, heads.biases, heads.model, notes).save(out)
    console.print(accuracy_table(means, accuracy))
    console.print(f"sidecar written to {out} ({out.stat().st_size:,} bytes)")


def _refuse_wrong_gate(accuracy: list[Accuracy]) -> None:
    for found in accuracy:
        if found.predictor == CONTROL and found.found[0] < 1:
            raise ValueError(
                f"the gate repeats {found.found[0]:.4%} of layer {found.layer}'s own choice, not all of it: what it "
                "asks is not what the model asks"
            )


def accuracy_table(means: dict[str, Accuracy], accuracy: list[Accuracy]) -> Table:
    """Means over layers, and the worst layer of each predictor."""
    table = Table(title="the next layer's experts, on texts that were not learned from", title_justify="left")
    for name in ("predictor", "found with k", "k + 1", "k + 2", "exact set", "worst layer"):
        table.add_column(name, justify="right")
    for name, mean in means.items():
        worst = min((found for found in accuracy if found.predictor == name), key=lambda found: found.found[0])
        shares = [f"{share:.3f}" for share in (*mean.found, mean.exact)]
        table.add_row(name, *shares, f"{worst.layer}: {worst.found[0]:.3f}")
    return table
