"""Milliseconds a decode step, and bytes that cross GPUs, of models on several GPUs.

Random weights of published shapes are made on the GPUs, with as many layers as the config says: what a layer costs
does not depend on what it has learned. What routing keeps local does: random weights have no structure to cluster, so
"clustered" shows the cost of the machinery here, and eval/routing.py what clusters are worth. A cache of random keys
and values stands for a prompt of ``context`` tokens; ``prompt`` tokens are read without a cache for a second time.

Rows are written as they come. One process is one GPU; under torchrun the mode says how the ranks share the model.

Example: torchrun --nproc-per-node 2 eval/distributed.py eval/configs/distributed.json expert
"""

import json
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import transformers
import typer
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.distributed.configuration_utils import DistributedConfig


sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the package beside this file, wherever we are run

from commits import commit_of

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cli.clock import DeviceClock
from hf_subbyte_moe.cli.generate_timing import fill
from hf_subbyte_moe.cli.shapes import random_model_of
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.config import RoutingConfig
from hf_subbyte_moe.distributed.experts import (
    dispatches,
    expert_parallel,
    forget_traffic,
    place_experts,
    predicted_bytes,
    ranks_of_experts,
    traffic_of,
)
from hf_subbyte_moe.distributed.launch import rank_device
from hf_subbyte_moe.patching import use_packed_attention
from hf_subbyte_moe.roofline import read_config, shape_of, step
from hf_subbyte_moe.routing import Clusters, find_routers, release, steer
from hf_subbyte_moe.routing.measuring import make_clusters, measure
from hf_subbyte_moe.routing.traces import recorded


ROOT = Path(__file__).resolve().parents[1]
MODES = ("single", "tensor", "expert")
_STATE_BYTES = 2  # of an element of a hidden state


class Watch(DeviceClock):
    """A device's clock, and the time that everything has: when it is spent, nothing more begins."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        super().__init__(device)
        self._end = time.monotonic() + seconds

    def spent(self) -> bool:
        """Whether time is over, on any rank: all decide alike."""
        over = torch.tensor([float(time.monotonic() > self._end)], device=self.device)
        if dist.is_initialized():
            dist.all_reduce(over)
        return bool(over.item() > 0)


def filled_cache(model: Any, packed: bool, batch: int, context: int, bits: float) -> Any:
    """A cache of random keys and values, as much of them as this rank holds."""
    text = model.config.get_text_config(decoder=True)
    cache: Any = EntropySubbyteCache(text, policy="uniform", bits=bits) if packed else DynamicCache(config=text)
    fill(model, cache, torch.empty(batch, context, dtype=torch.int64, device=model.device))
    return cache


def decode_ms(model: Any, cache: Any, ids: Tensor, steps: int, watch: Watch) -> float:
    """Median milliseconds of greedy steps."""
    spans = []
    for _ in range(steps):
        position = torch.full((len(ids), 1), cache.get_seq_length(), device=ids.device)
        watch.wait()
        began = time.perf_counter()
        logits = model(ids, position_ids=position, use_cache=True, **{CACHE_KW: cache}).logits
        ids = logits[:, -1:].argmax(-1)
        watch.wait()
        spans.append(1e3 * (time.perf_counter() - began))
    return float(torch.tensor(spans).median())


@contextmanager
def placed(model: Any, clusters: Clusters | None, options: RoutingConfig | None, reduce: bool) -> Iterator[None]:
    """Experts on ranks by clusters, routers steered, sums by all-reduce; all taken back at the end."""
    place_experts(model, clusters)
    for _, dispatch in dispatches(model):
        dispatch.always_reduce = reduce
    if options is not None:
        steer(model, options, clusters)
    try:
        yield
    finally:
        release(model)


class Run:
    """One model on this process's share of the GPUs."""

    def __init__(self, asked: dict[str, Any], config: dict[str, Any], mode: str, watch: Watch, save: Any) -> None:
        self.asked, self.config, self.mode, self.watch, self._save = asked, config, mode, watch, save
        file = ROOT / "eval" / "configs" / "models" / f"{asked['name']}.json"
        self.model_config = read_config(str(file))
        self.model_config.num_hidden_layers = asked["layers"]
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        parallel = None
        if mode == "tensor":
            parallel = DistributedConfig(tp_plan="auto")
        elif mode == "expert":
            parallel = expert_parallel(self.model_config)
        self.model = random_model_of(self.model_config, watch.device, parallel)
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.shape = shape_of(self.model_config, asked["name"])
        self.states = self.model_config.hidden_size * _STATE_BYTES
        use_packed_attention(self.model)

    def ids(self, rows: int, tokens: int, seed: int) -> Tensor:
        """Random tokens, the same on every rank."""
        random = torch.Generator().manual_seed(seed)
        return torch.randint(5, self.model_config.vocab_size, (rows, tokens), generator=random).to(self.watch.device)

    def clusters(self) -> Clusters:
        """One cluster of experts for each rank, from what random tokens choose."""
        windows = self.ids(4, self.config["traced"] // 4, 1)
        return make_clusters("traces", self.model, measure(self.model, windows), self.ranks, starts=1)

    def all(self) -> None:
        """Every placement and batch."""
        placements: list[tuple[str, Clusters | None, RoutingConfig | None, bool]] = [("none", None, None, False)]
        if self.mode == "expert":
            began = time.perf_counter()
            clusters = self.clusters()
            self.say(f"clusters in {time.perf_counter() - began:.1f} s")
            soft = RoutingConfig(mode="soft", strength=self.config["strength"], top_clusters=1)
            placements = [
                ("native", None, None, True),
                ("by index", None, None, False),
                ("clustered", clusters, None, False),
                ("clustered, soft", clusters, soft, False),
            ]
        for batch in self.config["batch"]:
            caches = [True] if self.mode == "expert" else [True, False]
            for packed in caches:
                if self.watch.spent():
                    return
                try:
                    self._batch(batch, packed, placements)
                except torch.OutOfMemoryError as error:
                    self.say(f"batch {batch}, packed {packed}: does not fit ({str(error)[:80]})")
                torch.cuda.empty_cache() if self.watch.device.type == "cuda" else None

    def _batch(self, batch: int, packed: bool, placements: list[Any]) -> None:
        context, experts = self.config["context"], "batched_mm" if batch == 1 else "grouped_mm"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cache = filled_cache(self.model, packed, batch, context, self.config["bits"])
        self.model.set_experts_implementation(experts)
        for name, clusters, options, reduce in placements:
            if self.watch.spent():
                return
            with self._placed(clusters, options, reduce), torch.no_grad():
                decode_ms(self.model, cache, self.ids(batch, 1, 2), self.config["warm_up"], self.watch)
                forget_traffic(self.model)
                with recorded(self.model) as trace:
                    decode_ms(self.model, cache, self.ids(batch, 1, 3), self.config["steps"], self.watch)
                sent = traffic_of(self.model).bytes
                said = self._predicted(trace, clusters) if self.mode == "expert" and not reduce else None
                ms = decode_ms(self.model, cache, self.ids(batch, 1, 3), self.config["steps"], self.watch)
                self.model.set_experts_implementation("grouped_mm")
                prompt_ms = self._prompt_ms() if packed and batch == 1 else None
                self.model.set_experts_implementation(experts)
            tokens = self.config["steps"] * batch
            self._row(
                name, batch, packed, ms, prompt_ms, sent / tokens, None if said is None else said / tokens, experts
            )

    @contextmanager
    def _placed(self, clusters: Clusters | None, options: RoutingConfig | None, reduce: bool) -> Iterator[None]:
        if self.mode == "expert":
            with placed(self.model, clusters, options, reduce):
                yield
        else:
            yield

    def _predicted(self, trace: Any, clusters: Clusters | None) -> int:
        experts = find_routers(self.model)[0].experts
        owners = ranks_of_experts(clusters, len(trace.steps), experts, self.ranks)
        return predicted_bytes(trace.steps, owners, self.ranks, self.states)

    def _prompt_ms(self) -> float:
        """Reading a prompt without a cache: the second of two times."""
        ids, ms = self.ids(1, self.config["prompt"], 4), 0.0
        for _ in range(2):
            self.watch.wait()
            began = time.perf_counter()
            self.model.model(ids, use_cache=False)
            self.watch.wait()
            ms = 1e3 * (time.perf_counter() - began)
        return ms

    def _row(
        self,
        placement: str,
        batch: int,
        packed: bool,
        ms: float,
        prompt_ms: float | None,
        expert_bytes: float,
        predicted: float | None,
        experts: str,
    ) -> None:
        """Write one row; bytes a token, all ranks together. All-reduces move two states a token and rank but one."""
        layers, moe = self.model_config.num_hidden_layers, self.shape.moe_layers
        reduced = 2 * (self.ranks - 1) * self.states
        floor = step(self.shape, self.config["context"], batch, self.ranks, self.config["bits"] if packed else None)
        self._save(
            {
                "model": self.asked["name"],
                "layers": layers,
                "gpus": self.ranks,
                "mode": self.mode,
                "placement": placement,
                "cache": f"packed, {self.config['bits']} bits" if packed else "bf16",
                "experts": experts,
                "batch": batch,
                "context": self.config["context"],
                "ms": ms,
                "floor_ms": floor.ms,
                "roofline_share": floor.ms / ms,
                "prompt_tokens": self.config["prompt"] if prompt_ms is not None else None,
                "prompt_ms": prompt_ms,
                "attention_bytes": layers * reduced,
                "expert_bytes": expert_bytes if self.mode == "expert" else moe * reduced,
                "expert_bytes_predicted": predicted,
            }
        )

    def say(self, text: str) -> None:
        """On rank 0."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"{self.asked['name']}, {self.mode}: {text}", flush=True)


def writer(target: Path, conditions: dict[str, Any]) -> Any:
    """What writes one row beside those of other cells, on rank 0."""
    first = not dist.is_initialized() or dist.get_rank() == 0

    def save(row: dict[str, Any]) -> None:
        if not first:
            return
        known = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {"rows": []}
        cell = ("model", "layers", "gpus", "mode", "placement", "cache", "batch", "context")
        known["rows"] = [kept for kept in known["rows"] if any(kept[key] != row[key] for key in cell)]
        known["rows"].append({**row, **conditions})
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), flush=True)

    return save


def main(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG.json", help="What to run.", exists=True)],
    mode: Annotated[str, typer.Argument(help="single, tensor or expert: how the ranks share a model.")] = "single",
    commit: Annotated[
        str | None, typer.Option(envvar="BENCH_COMMIT", help="What is measured.", show_default="what git says")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file.", show_default="the config's")] = None,
) -> None:
    """Time decode steps and count what crosses GPUs."""
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not possible: one of {list(MODES)}")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length of a growing cache
    device = rank_device()
    if mode != "single":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    watch = Watch(device, config["seconds"])
    conditions = {
        "device": watch.name,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "package": hf_subbyte_moe.__version__,
        "commit": commit_of(ROOT) if commit is None else commit,
    }
    save = writer(ROOT / config["out"] if out is None else out, conditions)
    for asked in config["models"]:
        if watch.spent():
            break
        Run(asked, config, mode, watch, save).all()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
