"""The command line: ``hf-subbyte-moe demo | explain | calibrate | cluster | bench | eval | publish``.

Exit codes: 0; 1 where a run failed a check or a server refused it; 2 where something was asked that is not possible.
"""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hf_subbyte_moe import __version__
from hf_subbyte_moe.cli.bench import bench
from hf_subbyte_moe.cli.calibrate import calibrate_model
from hf_subbyte_moe.cli.cluster import cluster_experts
from hf_subbyte_moe.cli.demo import demo
from hf_subbyte_moe.cli.evaluate import PASS_ON, evaluate
from hf_subbyte_moe.cli.inspect_prompt import explain_prompt
from hf_subbyte_moe.cli.publish import publish
from hf_subbyte_moe.distributed.launch import one_voice
from hf_subbyte_moe.scoring import RunFailedError


app = typer.Typer(
    name="hf-subbyte-moe",
    help="Sub-byte KV caches for Mixture-of-Experts models at long context.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"hf-subbyte-moe {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Sub-byte KV caches for Mixture-of-Experts models at long context."""


app.command()(demo)
app.command("explain")(explain_prompt)
app.command("calibrate")(calibrate_model)
app.command("cluster")(cluster_experts)
app.add_typer(bench, name="bench")
app.command("eval", context_settings=PASS_ON)(evaluate)
app.command()(publish)


def main() -> None:
    """Run a command; what went wrong is said on standard error."""
    try:
        with one_voice():
            app(prog_name="hf-subbyte-moe")
    except (ValueError, OSError) as error:  # as text: a message's brackets are no markup
        Console(stderr=True).print(Text.assemble(("error: ", "red"), str(error)), soft_wrap=True, highlight=False)
        sys.exit(1 if isinstance(error, RunFailedError) else 2)
