"""``hf-subbyte-moe bench``: times models. Each kind of measurement is a command; without one it is ``cache``."""

import typer

from hf_subbyte_moe.cli.bench_cache import Contexts, Pairs, Prefills, Quick, bench_cache
from hf_subbyte_moe.cli.bench_experts import bench_experts
from hf_subbyte_moe.cli.bench_latency import bench_latency
from hf_subbyte_moe.cli.demo import Bits, Model, PolicyName
from hf_subbyte_moe.cli.outputs import JsonFile


bench = typer.Typer(invoke_without_command=True)
bench.command("cache")(bench_cache)
bench.command("experts")(bench_experts)
bench.command("latency")(bench_latency)


@bench.callback()
def bench_without_command(
    called: typer.Context,
    model: Model = None,
    context: Contexts = None,
    bits: Bits = None,
    policy: PolicyName = "error",
    prefills: Prefills = 3,
    pairs: Pairs = 40,
    quick: Quick = False,
    json_file: JsonFile = None,
) -> None:
    """Time a model: its cache (also without a command), its experts, its milliseconds a token.

    Example: hf-subbyte-moe bench --quick
    """
    if called.invoked_subcommand is None:
        bench_cache(model, context, bits, policy, prefills, pairs, quick, json_file)
