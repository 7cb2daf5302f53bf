"""What hierarchical routing keeps inside domains, and what it costs.

Clusters are made on one set of texts (``--calibration``) and measured on another (``--texts``), with the real model:
loss on text, an exact answer about one needle, and every expert that every token used. A row is one placement, mode
and strength. Routing ``native`` costs nothing by construction, so its rows only count. Rows of one commit are kept.

A loss comes with its standard error over texts, whose tokens are not independent. Rows without ``n_texts`` were
measured before and have the smaller one over tokens; they are replaced where they are measured again.

Batch-aware rows read known tokens of B texts at once, and step t of all rows shares its experts, as decoding would.

Example: python eval/routing.py eval/configs/routing.json --calibration calibration.jsonl --texts heldout.jsonl
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package beside this file, wherever we are run

from commits import commit_of
from quality.tasks import encode, read_texts, task_prompt, text_sequences

from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.routing import Clusters, find_routers, release, steer
from hf_subbyte_moe.routing.clustering import MOST_LOAD
from hf_subbyte_moe.routing.measuring import Measured, make_clusters, measure
from hf_subbyte_moe.routing.traces import crossings, distinct_experts, locality, recorded


ROOT = Path(__file__).resolve().parents[1]
_BALANCED = "default"  # of a cell's "most_load"; without it clusters may serve any load
_LOAD_FREE = 1e6
_STATE_BYTES = 2  # a hidden state travels in 16 bits


@dataclass(frozen=True)
class Seen:
    """One pass over the measured texts.

    Attributes:
        nll: ``[texts, n]`` of every token.
        indices: ``[N, L, K]`` experts used on texts.
        needle: share of right answers.
    """

    nll: Tensor
    indices: Tensor
    needle: float


class Bench:
    """The model and the texts of one run."""

    def __init__(self, config: dict[str, Any], calibration: Path, texts: Path) -> None:
        folder = ROOT / "model_cards" / config["model"]
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        release(self.model)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        start = [self.tokenizer.bos_token_id]
        streams = {}
        for name, path in (("calibration", calibration), ("texts", texts)):
            streams[name] = [token for text in read_texts(path, ROOT) for token in encode(self.tokenizer, text)]
        tokens = config["tokens"]
        self.counted = text_sequences(
            streams["calibration"], start, 1, tokens - 1, config["calibration_windows"], 0
        ).ids[:, :tokens]
        self.windows = text_sequences(streams["texts"], start, 1, tokens - 1, config["windows"], 0).ids[:, :tokens]
        self.prompts = [
            task_prompt(self.tokenizer, streams["texts"], "needle", config["needle_context"], 0, number)
            for number in range(config["prompts"])
        ]

    def measured(self) -> Measured:
        """What clusters are made from."""
        return measure(self.model, self.counted, progress="calibration")

    @contextmanager
    def steered(self, options: RoutingConfig, clusters: Clusters | None) -> Iterator[None]:
        """The model with other routing."""
        steer(self.model, options, clusters)
        try:
            yield
        finally:
            release(self.model)

    def look(self) -> Seen:
        """Loss, experts and needles with the routing of the moment."""
        with torch.no_grad():
            with recorded(self.model) as trace:
                nll = torch.cat([self._nll(window[None]) for window in self.windows])
            right = [self._answers(prompt) for prompt in self.prompts]
        return Seen(nll, trace.indices(), sum(right) / len(right))

    def look_at_batch(self, rows: int) -> tuple[Tensor, float]:
        """Loss of texts read ``rows`` at a time, step by step, and the distinct experts of a layer and step."""
        count = len(self.windows) // rows * rows
        nll, distinct = [], []
        with torch.no_grad():
            for batch in self.windows[:count].split(rows):
                for place in find_routers(self.model):
                    if (state := getattr(place.module, "_hf_subbyte_moe_routing", None)) is not None:
                        state.steps = batch.shape[1]
                with recorded(self.model) as trace:
                    nll.append(self._nll(batch))
                steps = trace.indices().unflatten(0, (rows, -1)).transpose(0, 1).flatten(0, 1)
                distinct.append(distinct_experts(steps, rows))
        return torch.cat(nll), sum(distinct) / len(distinct)

    def _nll(self, ids: Tensor) -> Tensor:
        """``[B, T - 1]`` of every token but the first."""
        logits = self.model(ids, use_cache=False).logits[:, :-1].float()
        return -logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def _answers(self, prompt: Any) -> bool:
        ids = torch.tensor([[*prompt.ids, *prompt.answer]])
        logits = self.model(ids, use_cache=False, logits_to_keep=len(prompt.answer) + 1).logits[0, :-1]
        return logits.argmax(-1).tolist() == list(prompt.answer)


def cells(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The asked rows, complete: a list in a cell means one row for each of its entries."""
    for asked in config["rows"]:
        expanded: list[dict[str, Any]] = [{"clustering": "traces", "mode": "native", "replicas": 0, "seed": 0}]
        for key, value in asked.items():
            values = value if isinstance(value, list) else [value]
            expanded = [{**cell, key: one} for cell in expanded for one in values]
        yield from expanded


def _options(cell: dict[str, Any]) -> RoutingConfig:
    keys = ("mode", "strength", "follow", "keep", "top_clusters")
    return RoutingConfig(**{key: cell[key] for key in keys if key in cell})


def placement_rows(bench: Bench, config: dict[str, Any], commit: str, results: dict[str, Any], out: Path) -> None:
    """Measure what is not measured yet; the file is written after every row."""
    done = {json.dumps(row["cell"], sort_keys=True) for row in results["rows"] if row["commit"] == commit}
    todo = [cell for cell in cells(config) if json.dumps(cell, sort_keys=True) not in done]
    if not todo:
        return
    counted, native = bench.measured(), bench.look()
    for cell in tqdm(todo, desc="placements", unit="row"):
        clusters = make_clusters(
            cell["clustering"],
            bench.model,
            counted,
            cell["domains"],
            cell["replicas"],
            MOST_LOAD if cell.get("most_load") == _BALANCED else _LOAD_FREE,
            starts=config["starts"],
            seed=cell["seed"],
        )
        options = _options(cell)
        seen = native
        if options.mode != "native":
            with bench.steered(options, clusters):
                seen = bench.look()
        row = {**_row(cell, options, clusters, seen, native, bench.model.config.hidden_size), "commit": commit}
        results["rows"] = [kept for kept in results["rows"] if kept["cell"] != cell] + [row]
        save(results, out)


def loss_change(difference: Tensor) -> dict[str, Any]:
    """A row's change of loss and its standard error over texts, from ``[texts, n]`` differences of tokens."""
    of_text = difference.mean(1)
    return {
        "dnll": float(of_text.mean()),
        "dnll_se": float(of_text.std() / len(of_text) ** 0.5),
        "n_tokens": difference.numel(),
        "n_texts": len(of_text),
    }


def _row(
    cell: dict[str, Any], options: RoutingConfig, clusters: Clusters, seen: Seen, native: Seen, width: int
) -> dict[str, Any]:
    """What one cell showed."""
    soft, changed = options.mode == "soft", options.mode != "native"
    found = locality(seen.indices, clusters)
    return {
        "domains": cell["domains"],
        "clustering": cell["clustering"],
        "mode": cell["mode"],
        "strength": options.strength if soft else None,
        "follow": options.follow if soft else None,
        "keep": options.keep if soft else None,
        "top_clusters": options.clusters_kept(clusters.count) if changed else None,
        "replicas": cell["replicas"],
        "balanced_load": cell.get("most_load") == _BALANCED,
        "seed": cell["seed"],
        "transitions_local": found.transitions,
        "pairs_local": found.pairs,
        **loss_change(seen.nll - native.nll),
        "needle": seen.needle,
        "needle_native": native.needle,
        "load": found.load,
        "load_native": locality(native.indices, clusters).load,
        "domain_load": found.domain_load,
        "memory": 1 + cell["replicas"] * (cell["domains"] - 1) / clusters.labels.shape[1],
        "bytes_crossing": crossings(seen.indices, clusters, _STATE_BYTES * width),
        "cell": cell,
    }


def batch_rows(bench: Bench, config: dict[str, Any], commit: str, results: dict[str, Any], out: Path) -> None:
    """Distinct experts of a step and loss, with and without the batch-aware bonus."""
    asked = config["batch"]
    results.setdefault("batch", [])
    for rows in (rows for rows in asked["rows"] if rows <= len(bench.windows)):
        if any((row["batch"], row["commit"]) == (rows, commit) for row in results["batch"]):
            continue
        results["batch"] = [row for row in results["batch"] if row["batch"] != rows]
        before, distinct = bench.look_at_batch(rows)
        for bonus in asked["bonus"]:
            options = RoutingConfig(mode="soft", strength=0, batch_aware=bonus, keep=asked["keep"])
            with bench.steered(options, None):
                nll, fewer = bench.look_at_batch(rows)
            results["batch"].append(
                {
                    "batch": rows,
                    "batch_aware": bonus,
                    "keep": asked["keep"],
                    "distinct": fewer,
                    "distinct_native": distinct,
                    **loss_change(nll - before),
                    "commit": commit,
                }
            )
            save(results, out)


def save(results: dict[str, Any], out: Path) -> None:
    """Write the result file."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def main(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="What to run.", exists=True)],
    calibration: Annotated[Path, typer.Option(help="Texts that clusters are made on.", exists=True, dir_okay=False)],
    texts: Annotated[Path, typer.Option(help="Texts that are measured.", exists=True, dir_okay=False)],
    limit: Annotated[int | None, typer.Option(min=2, help="At most so many texts and prompts.")] = None,
    commit: Annotated[
        str | None, typer.Option(envvar="BENCH_COMMIT", help="What is measured.", show_default="what git says")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file.", show_default="the config's")] = None,
) -> None:
    """Measure locality, loss, needles and traffic of placements and routing modes."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    if limit is not None:
        config.update({key: min(limit, config[key]) for key in ("windows", "calibration_windows", "prompts")})
    target = ROOT / config["out"] if out is None else out
    results = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {"rows": []}
    label = commit_of(ROOT) if commit is None else commit
    bench = Bench(config, calibration, texts)
    placement_rows(bench, config, label, results, target)
    batch_rows(bench, config, label, results, target)


if __name__ == "__main__":
    typer.run(main)
