"""The command line: ``hf-subbyte-moe demo | explain | calibrate | cluster | bench | eval | publish``."""

import sys

import typer
from rich.console import Console

from hf_subbyte_moe.cli.bench import bench
from hf_subbyte_moe.cli.calibrate import calibrate_model
from hf_subbyte_moe.cli.cluster import cluster_experts
from hf_subbyte_moe.cli.demo import demo
from hf_subbyte_moe.cli.evaluate import PASS_ON, evaluate
from hf_subbyte_moe.cli.inspect_prompt import explain_prompt
from hf_subbyte_moe.cli.publish import publish


app = typer.Typer(
    name="hf-subbyte-moe",
    help="Sub-byte KV caches for Mixture-of-Experts models at long context.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command("explain")(explain_prompt)
app.command("calibrate")(calibrate_model)
app.command("cluster")(cluster_experts)
app.add_typer(bench, name="bench")
app.command("eval", context_settings=PASS_ON)(evaluate)
app.command()(publish)


def main() -> None:
    """Run a command; what a user did wrong is one line on standard error and exit code 1."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
        sys.exit(1)
