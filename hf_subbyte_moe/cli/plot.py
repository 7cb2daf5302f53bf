"""Pictures of what a policy saw and chose."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hf_subbyte_moe.codecs import codecs
from hf_subbyte_moe.explain import Choice, Explanation
from hf_subbyte_moe.policy import SIDES


def plot_choices(explanation: Explanation, path: Path) -> None:
    """Draw entropy, error and tier by layer and KV head; of several rows and chunks the last one counts.

    Args:
        explanation: of a cache that holds a prompt.
        path: where to write; the ending chooses the format.

    Raises:
        ValueError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.colors import BoundaryNorm
        from matplotlib.figure import Figure
    except ImportError as missing:
        raise ValueError("plots need matplotlib: pip install 'hf-subbyte-moe[eval]'") from missing
    if not explanation.choices:
        raise ValueError("nothing was measured, so there is nothing to draw")
    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplots(1, 5, sharey=True)
    entropy = _grid(explanation, "keys", lambda choice: choice.entropy)
    image = panels[0].imshow(entropy, aspect="auto", cmap="viridis")
    figure.colorbar(image, ax=panels[0], label="bits")
    panels[0].set(title="attention entropy", ylabel="layer")
    names = [codec.name for codec in codecs()]
    used = [name for name in names if any(choice.tier == name for choice in explanation.choices)]
    for number, side in enumerate(SIDES):
        errors = _grid(explanation, side, lambda choice: choice.error)
        panel = panels[1 + 2 * number]
        image = panel.imshow(np.log10(np.maximum(errors, 1e-12)), aspect="auto", cmap="magma")
        figure.colorbar(image, ax=panel, label="log10")
        panel.set(title=f"{side}: relative error")
        panel = panels[2 + 2 * number]
        tier = _grid(explanation, side, lambda choice: float(used.index(choice.tier)))
        image = panel.imshow(
            tier, aspect="auto", cmap="cividis_r", norm=BoundaryNorm(np.arange(len(used) + 1) - 0.5, 256)
        )
        figure.colorbar(image, ax=panel, ticks=range(len(used))).ax.set_yticklabels(used)
        panel.set(title=f"{side}: tier")
    for panel in panels:
        panel.set(xlabel="KV head", xticks=range(entropy.shape[1]))
    figure.suptitle(f"policy {explanation.policy!r}")
    figure.savefig(path, dpi=150)


def _grid(explanation: Explanation, side: str, value: Callable[[Choice], float | None]) -> NDArray[np.float64]:
    """``[layers, heads]`` of one side; NaN where nothing was measured."""
    choices = [choice for choice in explanation.choices if choice.side == side and choice.row == 0]
    shape = (1 + max(choice.layer for choice in choices), 1 + max(choice.head for choice in choices))
    grid = np.full(shape, np.nan)
    for choice in choices:
        found = value(choice)
        grid[choice.layer, choice.head] = np.nan if found is None else found
    return grid
