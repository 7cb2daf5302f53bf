"""``hf-subbyte-moe explain``: what a model's heads look like on a prompt, and which tiers they would get.

With a MODEL_OR_CONFIG it needs no weights: what a decode step of that model must cost.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.demo import Bits, Context, Model, PolicyName, cache_options
from hf_subbyte_moe.cli.outputs import JsonFile, PlotFile
from hf_subbyte_moe.cli.plot import plot_choices
from hf_subbyte_moe.cli.prompts import needle_prompt
from hf_subbyte_moe.cli.roofline import explain_shape
from hf_subbyte_moe.cli.running import layer_progress, load_model, refuse_over_limit
from hf_subbyte_moe.cli.watch import watch_experts
from hf_subbyte_moe.config import AUTO, PREFETCHES
from hf_subbyte_moe.explain import explain
from hf_subbyte_moe.patching import use_packed_attention
from hf_subbyte_moe.scoring import forward


def explain_prompt(
    shape: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL_OR_CONFIG]", help="Hub id, folder or config.json: compute a step's cost."),
    ] = None,
    model: Model = None,
    text: Annotated[
        Path | None, typer.Option(help="Prompt; default: a needle prompt.", exists=True, dir_okay=False)
    ] = None,
    context: Context = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Rows, for MODEL_OR_CONFIG.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs, for MODEL_OR_CONFIG.")] = 1,
    bits: Bits = None,
    policy: PolicyName = "auto",
    plot: PlotFile = None,
    json_file: JsonFile = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Generate with experts outside the GPU, and show live what they do.")
    ] = False,
    gpu_slots: Annotated[float, typer.Option(min=0, max=1, help="Share of experts on the GPU, for --watch.")] = 0.5,
    prefetch: Annotated[str, typer.Option(help=f"One of {', '.join(PREFETCHES)}, for --watch.")] = AUTO,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate, for --watch.")] = 128,
) -> None:
    """Show entropy, attention mass, error and tier of every head on a prompt; or compute what a step must cost.

    Without MODEL_OR_CONFIG, --model is run on one prompt. With it nothing is run: no weights are needed.

    Example: hf-subbyte-moe explain --context 4096 --policy entropy

    Example: hf-subbyte-moe explain --watch --gpu-slots 0.25

    Example: hf-subbyte-moe explain mistralai/Mixtral-8x22B-v0.1 --context 131072 --batch 4 --gpus 8
    """
    console = Console()
    if shape is not None:
        if model is not None or text is not None or plot is not None or policy != AUTO or watch:
            raise ValueError(
                "explain MODEL_OR_CONFIG computes without weights: --text, --policy, --plot and --watch run a prompt, "
                f"on --model {shape}"
            )
        explain_shape(shape, context, batch, gpus, bits, json_file, console)
        return
    kv_cache = cache_options(policy, bits)
    loaded, tokenizer = load_model(model)
    if text is None:
        ids = needle_prompt(tokenizer, context, seed=0, depth=0.35).ids
    else:
        ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][:, :context]
    refuse_over_limit(loaded, ids.shape[1], new_tokens if watch else 0)
    if watch:
        options = {"placement": "offload", "gpu_slots": gpu_slots, "prefetch": prefetch}
        watch_experts(console, loaded, ids, options, new_tokens)
        if json_file is not None:
            json_file.write_text(json.dumps(explain(loaded).to_dict(), indent=2) + "\n", encoding="utf-8")
        return
    cache = EntropySubbyteCache(loaded.config.get_text_config(decoder=True), **kv_cache)
    use_packed_attention(loaded)
    with torch.no_grad(), layer_progress(loaded, "prefill"):
        forward(loaded, ids.to(loaded.device), cache)
    explanation = explain(cache)
    explanation.render(console)
    if plot is not None:
        plot_choices(explanation, plot)
        console.print(f"plot written to {plot}")
    if json_file is not None:
        json_file.write_text(json.dumps(explanation.to_dict(), indent=2) + "\n", encoding="utf-8")
        console.print(f"numbers written to {json_file}")
