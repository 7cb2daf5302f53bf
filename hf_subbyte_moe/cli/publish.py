"""``hf-subbyte-moe publish``: write a complete Hub repository, and push it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from huggingface_hub.errors import HfHubHTTPError
from rich.console import Console

from hf_subbyte_moe import publishing
from hf_subbyte_moe.cli.outputs import check_folder
from hf_subbyte_moe.results import Row, read_rows
from hf_subbyte_moe.scoring import RunFailedError


def _read_options(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        options: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--options {text!r} is no JSON: {error}") from None
    return options


def publish(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub id or folder.")],
    out_dir: Annotated[
        Path, typer.Argument(metavar="OUT_DIR", help="The repository is written here.", file_okay=False)
    ],
    options: Annotated[
        str | None, typer.Option(help="Options as JSON, such as '{\"kv_cache\": {}}'.", show_default="the model's own")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the model behind it.")] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="report.json of hf-subbyte-moe eval; repeat.", exists=True, dir_okay=False),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The card's title.", show_default="the folder's name")] = None,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="No weights: a configuration for those of --base-model.")
    ] = False,
    push: Annotated[str | None, typer.Option(metavar="REPO", help="Upload to this repository, OWNER/NAME.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    endpoint: Annotated[str | None, typer.Option(help="Another Hub.", show_default="huggingface.co")] = None,
) -> None:
    """Write a Hub repository: config.json with our key, sidecars, weights, tokenizer, and a card.

    Example: hf-subbyte-moe publish Qwen/Qwen3-30B-A3B out --config-only --options '{"kv_cache": {"bits": 2.5}}'
    """
    console = Console()
    given = _read_options(options)
    if push is not None and push.count("/") != 1:
        raise ValueError(f"--push {push!r} is not possible: OWNER/NAME")
    check_folder(out_dir, "OUT_DIR")
    source = publishing.fetch(model, not config_only)
    if base_model is None and not Path(model).is_dir():
        base_model = model
    if config_only and base_model is None:
        raise ValueError("--config-only needs --base-model: the weights that the configuration is for")
    rows: list[Row] = [row for path in results or [] for row in read_rows(path)]
    checked = publishing.read_options(source, given)
    sidecars = publishing.copy_files(source, out_dir, not config_only)
    publishing.write_config(source, out_dir, checked)
    title = name or (push.split("/")[-1] if push else out_dir.name)
    data = publishing.front_matter(source, title, base_model, rows)
    page = publishing.card(data, push or str(out_dir), base_model, checked, sidecars, rows, not config_only)
    (out_dir / "README.md").write_text(page, encoding="utf-8")
    console.print(f"written to {out_dir}: {', '.join(sorted(path.name for path in out_dir.iterdir()))}")
    if push is not None:
        try:
            address = publishing.push(out_dir, push, private, endpoint)
        except HfHubHTTPError as error:
            raise RunFailedError(f"the Hub refused {push}: {error}") from None
        console.print(f"pushed to {address}")
