"""A table of what decode steps must cost, for models and numbers of GPUs that were not measured.

Everything is computed from the configs in ``eval/configs/models``; nothing runs. How far the computation agrees with
what was measured is tested (tests/test_roofline.py).

Example: python eval/roofline.py eval/configs/roofline.json
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from hf_subbyte_moe.roofline import H200, read_config, shape_of, steps


ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "eval" / "configs" / "models"


def computed(config: dict[str, Any]) -> dict[str, Any]:
    """The result file's content."""
    rows = []
    for name in tqdm(config["models"], desc="roofline", unit="model", leave=False):
        shape = shape_of(read_config(str(MODELS / f"{name}.json")), name)
        for batch in config["batch"]:
            for gpus in config["gpus"]:
                made = steps(shape, config["context"], batch, gpus, config["bits"])
                rows += [{"model": name, **asdict(step), "ms": step.ms} for step in made]
    return {"computed": True, "machine": asdict(H200), "rows": rows}


def main(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="What to compute.", exists=True)],
    out: Annotated[Path | None, typer.Option(help="Result file.", show_default="the config's")] = None,
) -> None:
    """Compute the table and write it."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    target = ROOT / config["out"] if out is None else out
    target.write_text(json.dumps(computed(config), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
