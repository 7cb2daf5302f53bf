"""``hf-subbyte-moe eval``: EleutherAI's lm-eval with answers out of the packed cache, beside other caches."""

import hashlib
import importlib.util
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME
from hf_subbyte_moe.cli.outputs import check_file, check_folder
from hf_subbyte_moe.cli.running import default_model
from hf_subbyte_moe.results import ResultFile, cache_label, markdown_table, plot_needles, result_table, rows_of
from hf_subbyte_moe.scoring import ONE_PIECE, PROTOCOLS
from hf_subbyte_moe.tasks import FOLDER


REPORT, TABLE, HEAT_MAP = "report.json", "report.md", "needles.png"
_TABLE_WIDTH = 130
_WEIGHTS_SEEN = 16  # numbers of each weight
_PATHS = ("pretrained", "tokenizer", "haystack_file")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def parse_cache(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a cache: ``dynamic``, or JSON, whose key ``cache`` names another than ours.

    Raises:
        ValueError: neither.
    """
    if not text.lstrip().startswith("{"):
        return text, {}
    try:
        options: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--cache-config {text!r} is no JSON: {error}") from None
    return str(options.pop("cache", CACHE_NAME)), options


def _need_lm_eval() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("the command 'eval' needs lm-eval: pip install 'hf-subbyte-moe[eval]'")


def _read_arguments(arguments: Sequence[str]) -> Any:
    """The harness's own configuration; its parser and its checks."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig

    return EvaluatorConfig.from_cli(HarnessCLI()._parser.parse_args(["run", *arguments]))


def _load_tasks(config: Any) -> Any:
    """A task manager that makes its tasks once, so that every cache gets the same documents."""
    random.seed(config.seed[0])
    np.random.seed(config.seed[1])  # noqa: NPY002 -- RULER draws from it
    own = {path.stem for path in FOLDER.glob("*.yaml")}
    if config.include_path == [str(FOLDER)] and set(config.tasks) <= own:
        from lm_eval.tasks import TaskManager  # the harness's own tasks take seconds to list

        manager = TaskManager(include_path=str(FOLDER), include_defaults=False, metadata=config.metadata)
    else:
        manager = config.process_tasks(config.metadata)
    loaded = manager.load(config.tasks)
    manager.load = lambda tasks: loaded
    return manager


def _load_model(config: Any, model_args: dict[str, Any], caches: Sequence[tuple[str, dict[str, Any]]]) -> Any:
    """The model, once it is clear that it takes every cache and every length; that costs less than tasks."""
    from hf_subbyte_moe.lm_eval_model import SubByteLM

    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length of a plain cache
    given = {"batch_size": config.batch_size, "max_batch_size": config.max_batch_size, "device": config.device}
    lm: Any = SubByteLM.create_from_arg_obj(model_args, given)
    for name, options in caches:
        lm.choose_cache(name, options)
    asked = config.metadata.get("max_seq_lengths", [])
    longest = max([asked] if isinstance(asked, int) else asked, default=0)
    if isinstance(longest, int) and longest > lm.max_length:
        raise ValueError(f"prompts of {longest:,} tokens are over the limit of {lm.max_length:,} (the model's)")
    return lm


def _evaluate(lm: Any, config: Any, manager: Any, tracker: Any) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    found: dict[str, Any] = simple_evaluate(
        model=lm,
        model_args=config.model_args,
        tasks=config.tasks,
        task_manager=manager,
        num_fewshot=config.num_fewshot,
        batch_size=config.batch_size,
        max_batch_size=config.max_batch_size,
        device=config.device,
        use_cache=config.use_cache,
        rewrite_requests_cache=bool(config.cache_requests.get("rewrite_requests_cache")),
        delete_requests_cache=bool(config.cache_requests.get("delete_requests_cache")),
        cache_requests=bool(config.cache_requests.get("cache_requests")),
        limit=config.limit,
        samples=config.samples,
        check_integrity=config.check_integrity,
        write_out=config.write_out,
        log_samples=True,
        evaluation_tracker=tracker,
        system_instruction=config.system_instruction,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=config.fewshot_as_multiturn,
        gen_kwargs=config.gen_kwargs,
        predict_only=config.predict_only,
        random_seed=config.seed[0],
        numpy_random_seed=config.seed[1],
        torch_random_seed=config.seed[2],
        fewshot_random_seed=config.seed[3],
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        metadata=config.metadata,
    )
    return found


def _refuse(config: Any) -> None:
    """What would give wrong results without saying so."""
    requests = config.cache_requests
    if requests.get("cache_requests") and not requests.get("rewrite_requests_cache"):
        raise ValueError(
            "--cache_requests files prompts by task and tokenizer, not by their lengths, and would reuse those of "
            "another run: leave it out, or say --cache_requests refresh"
        )
    if config.wandb_args or config.trackio_args:
        raise ValueError("--wandb_args and --trackio_args are not passed on: their loggers take one run, not several")


def _weights_digest(model: torch.nn.Module) -> str:
    """Tells models of one name apart, wherever they lie: of some numbers of every weight."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if not weight.is_meta:
            digest.update(weight.detach().flatten()[:_WEIGHTS_SEEN].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _fingerprint(config: Any, model: torch.nn.Module) -> str:
    """What a run's documents and answers depend on, its caches aside."""
    named = ("metadata", "limit", "samples", "seed", "num_fewshot", "gen_kwargs", "system_instruction")
    said = {name: getattr(config, name) for name in (*named, "apply_chat_template", "model_args")}
    file = config.metadata.get("haystack_file")
    if isinstance(file, str) and Path(file).is_file():
        said["text"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    for name in ("metadata", "model_args"):  # files go by name: they may lie elsewhere on another machine
        said[name] = {key: Path(value).name if key in _PATHS else value for key, value in said[name].items()}
    whole = json.dumps([said, _weights_digest(model), hf_subbyte_moe.__version__], sort_keys=True, default=str)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]


def _known(
    results: ResultFile,
    label: str,
    model: str,
    prefill: str,
    fingerprint: str,
    lengths: Sequence[int] | None,
) -> list[dict[str, Any]]:
    """Rows that an earlier run left for a cache, at these lengths if there are some.

    Raises:
        ValueError: they are of another configuration.
    """
    rows = [row for row in results.rows if (row["label"], row["model"], row["prefill"]) == (label, model, prefill)]
    rows = [row for row in rows if lengths is None or row["length"] in lengths]
    for row in rows:
        if row.get("run") != fingerprint:
            raise ValueError(
                f"the report holds results of {label!r} with other options, documents, weights or another version, "
                "which are not reused: name another folder, or leave --resume out"
            )
    return rows


def run_caches(
    arguments: Sequence[str],
    caches: Sequence[tuple[str, dict[str, Any]]],
    results: ResultFile,
    resume: bool = False,
    lengths: Sequence[int] | None = None,
) -> list[dict[str, Any]]:
    """Evaluate every cache on the same tasks.

    Args:
        arguments: those of ``lm_eval run``, with ``--model_args`` of the model ``subbyte``.
        caches: names and options.
        results: gets the rows, cache by cache.
        resume: leave out caches that have rows of all tasks there already.
        lengths: what the tasks' lengths are, so that rows of others do not count as such.

    Returns:
        The rows of this run.

    Raises:
        ValueError: an unknown task, a wrong option, a length over the model's limit.
    """
    from lm_eval.loggers import EvaluationTracker

    config = _read_arguments(arguments)
    _refuse(config)
    config.include_path = [str(FOLDER), *([] if config.include_path is None else [config.include_path])]
    model_args = dict(config.model_args)
    prefill = model_args.get("prefill", ONE_PIECE)
    lm = _load_model(config, model_args, caches)
    manager = _load_tasks(config)
    tasks = set(manager.load(config.tasks)["tasks"])
    tracker = None
    if config.output_path:
        tracker = EvaluationTracker(**{**config.hf_hub_log_args, "output_path": config.output_path})
    fingerprint = _fingerprint(config, lm.model)
    rows: list[dict[str, Any]] = []
    for name, options in caches:
        model = Path(str(model_args["pretrained"])).name
        known: list[dict[str, Any]] = []
        if resume:
            held = _known(results, cache_label(name, options), model, prefill, fingerprint, lengths)
            known = [row for row in held if row["task"] in tasks]
        places: Sequence[int | None] = [None] if lengths is None else lengths
        wanted = {(task, length) for task in tasks for length in places}
        if resume and wanted <= {(row["task"], None if lengths is None else row["length"]) for row in known}:
            rows += known
            continue
        lm.choose_cache(name, options)
        found = _evaluate(lm, config, manager, tracker)
        if tracker is not None:
            samples = found.pop("samples")
            tracker.save_results_aggregated(results=found, samples=samples)
            if config.log_samples:
                for task in found["configs"]:
                    tracker.save_results_samples(task_name=task, samples=samples[task])
            found["samples"] = samples
        made = [{**row, "run": fingerprint} for row in rows_of(found)]
        results.add(made)
        rows += made
    return rows


def evaluate(
    context: typer.Context,
    tasks: Annotated[str, typer.Option(help="Names of lm-eval tasks, with commas between them; or YAML files.")],
    model: Annotated[str | None, typer.Option(help="Hub id or path; default: the reference MoE of the clone.")] = None,
    cache_config: Annotated[
        list[str] | None,
        typer.Option(
            help='Options of our cache as JSON; "dynamic" is the plain one, {"cache": "quantized", ...} that of '
            "Transformers. Repeat to compare.",
            show_default="the model's own options",
        ),
    ] = None,
    prefill: Annotated[
        str,
        typer.Option(help="one-piece or chunked: how prompts are read.", autocompletion=lambda: list(PROTOCOLS)),
    ] = ONE_PIECE,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of the prompts, with commas, for tasks that make them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the report.", file_okay=False)] = Path("subbyte_eval"),
    resume: Annotated[bool, typer.Option("--resume", help="Leave out caches that the report has already.")] = False,
) -> None:
    """Run lm-eval tasks out of the packed cache. Every other option goes to lm_eval as it is.

    Example: hf-subbyte-moe eval --tasks subbyte_needle,niah_single_1 --lengths 4096 --cache-config '{"bits": 2.5}'
    """
    _need_lm_eval()
    check_folder(out, "--out")
    for name in (REPORT, TABLE, HEAT_MAP):
        check_file(out / name, "--out", makes_folders=True)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    model_args: dict[str, Any] = {"pretrained": default_model() if model is None else model, "prefill": prefill}
    arguments = ["--model", "subbyte", "--tasks", tasks, "--model_args", json.dumps(model_args)]
    asked = None
    if lengths is not None:
        try:
            asked = [int(length) for length in lengths.split(",")]
        except ValueError:
            raise ValueError(f"--lengths {lengths!r} is not possible: numbers with commas between them") from None
        arguments += ["--metadata", json.dumps({"max_seq_lengths": asked})]
    caches = [parse_cache(text) for text in cache_config or ["{}"]]
    rows = run_caches([*arguments, *context.args], caches, ResultFile(out / REPORT), resume, asked)
    console.print(result_table(rows))
    (out / TABLE).write_text(markdown_table(rows) + "\n", encoding="utf-8")
    drawn = plot_needles(rows, out / HEAT_MAP)
    console.print(f"written to {out}: {REPORT}, {TABLE}" + (f", {HEAT_MAP}" if drawn else ""))
