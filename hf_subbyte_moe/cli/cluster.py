"""``hf-subbyte-moe cluster``: count which experts work together, and write clusters of them beside the model."""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from hf_subbyte_moe.cli.outputs import writable_plot, writable_sidecar
from hf_subbyte_moe.cli.running import load_model
from hf_subbyte_moe.cli.texts import DataFile, ModelName, beside_model, windows_of
from hf_subbyte_moe.routing import ROUTING_SIDECAR_NAME, Clusters, find_routers, release
from hf_subbyte_moe.routing.clustering import MOST_LOAD, Affinity
from hf_subbyte_moe.routing.measuring import INDEX, RANDOM, SIGNALS, TRACES, Measured, make_clusters, measure
from hf_subbyte_moe.routing.traces import count_affinity, locality


_SHOWN_LAYERS = 4


def cluster_experts(
    model: ModelName = None,
    clusters: Annotated[int, typer.Option(min=1, help="Clusters of every layer's experts.")] = 2,
    data: DataFile = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Cluster file to write.",
            show_default=f"{ROUTING_SIDECAR_NAME} in the model's folder",
            callback=writable_sidecar,
        ),
    ] = None,
    by: Annotated[
        str, typer.Option(help=f"What belongs together: {', '.join(SIGNALS)}.", autocompletion=lambda: list(SIGNALS))
    ] = TRACES,
    replicas: Annotated[int, typer.Option(min=0, help="Experts of a layer that every cluster holds.")] = 0,
    most_load: Annotated[float, typer.Option(min=1.0, help="What a cluster may serve, over the mean.")] = MOST_LOAD,
    windows: Annotated[int, typer.Option(min=4, help="Texts to count on; a quarter checks the result.")] = 32,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each.")] = 512,
    plot: Annotated[
        Path | None, typer.Option(help="Picture of the co-activation before and after.", callback=writable_plot)
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses texts and starts.")] = 0,
) -> None:
    """Cluster a model's experts by what they serve together, for routing modes "soft" and "hard".

    Example: hf-subbyte-moe cluster ./my-model --clusters 4 --data texts.jsonl --out clusters.safetensors
    """
    console = Console()
    if by not in SIGNALS:
        raise ValueError(f"--by {by!r} is not possible: one of {list(SIGNALS)}")
    loaded, tokenizer = load_model(model, cpu_dtype=torch.float32)
    release(loaded)  # its own options may steer it
    experts = find_routers(loaded)[0].experts  # a model without routers is refused before anything is counted
    if clusters > experts:
        raise ValueError(
            f"--clusters {clusters} is not possible: {type(loaded).__name__} has {experts} experts a layer"
        )
    out = out or beside_model(loaded, ROUTING_SIDECAR_NAME, "a cluster file")
    ids = windows_of(loaded, tokenizer, data, windows, context, seed)
    measured = measure(loaded, ids, progress="counting")
    counted, unseen = _divided(measured, windows, context)
    found = make_clusters(by, loaded, counted, clusters, replicas, most_load, seed=seed, progress="clustering")
    found.save(out)
    others = [make_clusters(name, loaded, counted, clusters, replicas, seed=seed) for name in (INDEX, RANDOM)]
    console.print(_locality_table(unseen, [found, *others]))
    if plot is not None:
        plot_coactivation(count_affinity(counted.indices, experts), found, plot)
        console.print(f"picture written to {plot}")
    console.print(f"clusters written to {out} ({out.stat().st_size:,} bytes)")


def _divided(measured: Measured, windows: int, context: int) -> tuple[Measured, Tensor]:
    """The last quarter of the texts only checks."""
    cut = (windows - windows // 4) * context
    return Measured(measured.indices[:cut], measured.states), measured.indices[cut:]


def _locality_table(indices: Tensor, placements: list[Clusters]) -> Table:
    table = Table(title="share that stays in one cluster, on texts that were not counted", title_justify="left")
    for name in ("clusters by", "transitions", "pairs", "most load of a cluster"):
        table.add_column(name, justify="left" if name == "clusters by" else "right")
    for clusters in placements:
        found = locality(indices, clusters)
        table.add_row(
            clusters.source, f"{found.transitions:.1%}", f"{found.pairs:.1%}", f"{found.domain_load:.2f} of the mean"
        )
    return table


def plot_coactivation(counted: Affinity, clusters: Clusters, path: Path) -> None:
    """Draw how often experts serve a token together, in the model's order and in the order of clusters.

    Args:
        counted: co-activation of every layer.
        clusters: their order.
        path: where to write; the ending chooses the format.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from missing
    layers = len(counted.within)
    shown = sorted({round(place) for place in np.linspace(0, layers - 1, min(_SHOWN_LAYERS, layers)).tolist()})
    figure = Figure(figsize=(3.2 * len(shown), 6.6), layout="constrained")
    panels = figure.subplots(2, len(shown), squeeze=False)
    for column, layer in enumerate(shown):
        matrix = counted.within[layer].float()
        order = clusters.labels[layer].argsort(stable=True)
        ends = torch.bincount(clusters.labels[layer], minlength=clusters.count).cumsum(0)[:-1] - 0.5
        top = float(matrix.max())
        for row, drawn in enumerate((matrix, matrix[order][:, order])):
            panel = panels[row][column]
            panel.imshow(drawn.numpy(), cmap="magma", vmin=0, vmax=top)
            panel.set(title=f"layer {layer}, {'by cluster' if row else 'by index'}", xticks=[], yticks=[])
        for end in ends.tolist():
            panels[1][column].axhline(end, color="white", linewidth=0.8)
            panels[1][column].axvline(end, color="white", linewidth=0.8)
    figure.suptitle(f"experts that serve a token together: {clusters.count} clusters by {clusters.source}")
    figure.savefig(path, dpi=120)
