"""Time experts and routers of decode steps: ``python kernels/benchmarks/moe.py``.

It needs a CUDA device, takes about 2 minutes and writes ``results/expert_mlp.json`` and ``router.json``. Weights are
random, shapes are those of real models. Every call of a graph has other experts (a layer of Qwen3-30B-A3B has room
for 16 calls that share none) or another router's matrix, so that nothing comes from the L2 cache. Experts are checked
before they are timed: their error against fp32 may be twice that of PyTorch in the model's dtype; routers must choose
the family's experts wherever their logits are equal. A row that is not right shows no time. ``stock`` is what
Transformers' ``batched_mm`` and the families' routers compute, call by call, in the same kind of graph.

``--smoke`` goes through everything with tiny shapes, on a CPU too, where the references are timed.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import results
import torch
import typer
from baselines import brief, failures
from results import Record, error_ratio, not_right
from rich.console import Console
from run import conditions_of
from timing import Clock
from torch import Tensor

from subbyte_kernels.expert_mlp import (
    ExpertCall,
    ExpertFormat,
    ExpertLayout,
    expert_mlp,
    expert_mlp_reference,
    workspace_bytes,
)
from subbyte_kernels.router import RouterMatrix, RouterSpec, router, router_reference


DTYPE = torch.bfloat16
FORMATS = {"bf16": (ExpertFormat.MODEL, 32), "int4": (ExpertFormat.INT4, 32), "fp8": (ExpertFormat.FP8, 32)}
TOKENS = (1, 2, 4, 8, 16)
BACKENDS = ("cuda", "triton", "stock")
_CALLS = 16  # of a graph
_CHECKED_EXPERTS = 16  # the reference unpacks what it reads
_STOCK_TOKENS = 4  # more, and its copies of weights need more memory than there is
_LAYERS = 48  # routers of a graph
_ROW_KEY = ("model", "weights", "tokens", "backend")
_console = Console(highlight=False)


@dataclass(frozen=True)
class Experts:
    """One layer's experts.

    Attributes:
        name: of the model.
        hidden: H.
        intermediate: I.
        count: E.
        top_k: K.
        formats: that are timed.
    """

    name: str
    hidden: int
    intermediate: int
    count: int
    top_k: int
    formats: tuple[str, ...] = ("bf16", "int4", "fp8")


MODELS = (
    Experts("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Experts("DeepSeek-V2-Lite", 2048, 1408, 64, 6),
    Experts("Mixtral-8x7B", 4096, 14336, 8, 2),
    Experts("Mixtral-8x22B", 6144, 16384, 8, 2, ("int4",)),
)
SMALL = (Experts("small", 64, 96, 8, 2),)


@dataclass(frozen=True)
class Router:
    """One layer's router.

    Attributes:
        name: of the model.
        experts: E.
        hidden: H.
        spec: what it does.
    """

    name: str
    experts: int
    hidden: int
    spec: RouterSpec

    @property
    def dtype(self) -> torch.dtype:
        """Of its matrix."""
        return torch.float32 if self.spec.float_logits else DTYPE


_V2 = RouterSpec(6, float_logits=True, norm="none", sorted=False, float_weights=True)
_V3 = RouterSpec(
    8,
    score="sigmoid",
    float_logits=True,
    groups=8,
    groups_kept=4,
    group_score="top2",
    norm="sum_eps",
    eps=1e-20,
    scale=2.5,
    sorted=False,
    float_weights=True,
)
ROUTERS = (
    Router("Qwen3-30B-A3B", 128, 2048, RouterSpec(8)),
    Router("Mixtral-8x7B", 8, 4096, RouterSpec(2, float_weights=True)),
    Router("DeepSeek-V2-Lite", 64, 2048, _V2),
    Router("DeepSeek-V3", 256, 7168, _V3),
    Router("gpt-oss-20b", 32, 2880, RouterSpec(4, score="logits", norm="softmax")),
)
SMALL_ROUTERS = (Router("small", 16, 64, RouterSpec(2)),)


def random_slabs(layout: ExpertLayout, count: int, device: torch.device) -> Tensor:
    """Slabs of plausible weights, without packing any."""
    slabs = torch.empty(count, layout.slab_bytes, dtype=torch.uint8, device=device)
    if not layout.packed:
        slabs.view(layout.dtype).normal_(0, 0.02)
        return slabs
    slabs.random_(0, 256)
    size = 2.0**-4 if layout.format is ExpertFormat.FP8 else 2.0**-8
    scale = torch.tensor([size], dtype=torch.bfloat16, device=device).view(torch.uint8)
    for part in layout.views(slabs):
        blocks = part.unflatten(1, (-1, layout.block_bytes))
        codes = layout.block_bytes - 16 * 128 // layout.scale_columns
        blocks[..., codes:].unflatten(-1, (-1, 2)).copy_(scale)
        if layout.format is ExpertFormat.FP8:
            blocks[..., :codes] &= 0xB7  # neither NaN nor large
    return slabs


def stock(call: ExpertCall) -> Tensor:
    """The experts as ``batched_mm`` computes them: weights gathered, then batched products."""
    tokens, top_k = call.expert_ids.shape
    ids = call.expert_ids.reshape(-1)
    states = call.hidden.repeat_interleave(top_k, dim=0)
    gate, up = torch.bmm(call.gate_up[ids], states.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    made = torch.bmm(call.down[ids], (torch.nn.functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
    weighted = made * call.expert_weights.reshape(-1, 1).to(made.dtype)
    return weighted.view(tokens, top_k, -1).sum(1)


@dataclass(frozen=True)
class Layer:
    """A layer's experts and some steps of it.

    Attributes:
        layout: of its slabs.
        calls: steps; with one token neighbours share no expert.
        out: where they write.
        room: their workspace.
        distinct: experts of a step, on average.
    """

    layout: ExpertLayout
    calls: list[ExpertCall]
    out: Tensor
    room: Tensor
    distinct: float

    @property
    def bytes(self) -> int:
        """That a step reads at least."""
        layout = self.layout
        return int(self.distinct * (layout.gate_up_bytes + layout.matrix_bytes(layout.hidden, layout.intermediate)))


def random_layer(model: Experts, layout: ExpertLayout, slabs: tuple[Tensor, Tensor], tokens: int) -> Layer:
    """Steps of so many tokens through gate_up and down of ``slabs``."""
    gate_up, down = slabs
    device = gate_up.device
    generator = torch.Generator().manual_seed(tokens)
    order = torch.randperm(model.count, generator=generator)
    calls = []
    for number in range(_CALLS):
        if tokens == 1:  # one after the other, so that neighbours share none
            ids = order.roll(-number * model.top_k)[: model.top_k][None]
        else:
            ids = torch.rand(tokens, model.count, generator=generator).topk(model.top_k).indices
        hidden = torch.randn(tokens, model.hidden, generator=generator).to(device, DTYPE)
        weights = torch.rand(tokens, model.top_k, generator=generator).to(device)
        calls.append(ExpertCall(hidden, ids.to(device), weights, gate_up, down, layout))
    room = torch.empty(workspace_bytes(calls[0]), dtype=torch.uint8, device=device)
    distinct = sum(len(call.expert_ids.unique()) for call in calls) / len(calls)
    return Layer(layout, calls, torch.empty_like(calls[0].hidden), room, distinct)


class ExpertGate:
    """Whether outputs of a call are right, beside PyTorch in the model's dtype, on a few of the experts.

    Attributes:
        call: the call that is checked.
        plain_error: relative error of PyTorch.
    """

    def __init__(self, call: ExpertCall) -> None:
        """Compute what is right."""
        ids = call.expert_ids % min(_CHECKED_EXPERTS, call.gate_up.shape[0])
        self.call = replace(call, expert_ids=ids)
        self._right = expert_mlp_reference(replace(self.call, hidden=call.hidden.float()))
        count = int(ids.max()) + 1
        plain = call.layout.unpack(call.gate_up[:count], call.down[:count])
        self.plain_error = self.error(stock(replace(self.call, gate_up=plain[0].to(DTYPE), down=plain[1].to(DTYPE))))

    def error(self, made: Tensor) -> float:
        """Relative error of an output."""
        return float((made.float() - self._right).norm() / self._right.norm())


class Run:
    """Rows of both result files."""

    def __init__(self, device: torch.device, backends: Sequence[str] = BACKENDS) -> None:
        self.clock, self.device, self.wanted = Clock(device), device, backends
        self.copy_gbs = self.clock.copy_gbs() if device.type == "cuda" else self.clock.copy_gbs(1 << 24)
        self.conditions = conditions_of(device, self.copy_gbs)
        self.experts: list[Record] = []
        self.routers: list[Record] = []

    def row(
        self,
        rows: list[Record],
        named: Record,
        calls: Sequence[Callable[[], object]],
        size: int,
        checked: Callable[[], Record],
    ) -> None:
        """Check, time, remember and show one line; ``size``: bytes that a call reads at least."""
        found: Record = {}
        us = again = failed = None
        try:
            found = checked()
            failed = found.pop("wrong", None)
            if failed is None:
                timing = self.clock.time(calls)
                us, again = timing.us, timing.us_again
        except failures() as problem:
            failed = brief(problem)
        share = size / 1e3 / us / self.copy_gbs if us else None
        timed = {"us": us, "us_again": again, "bytes": size, "copy_share": share, "failed": failed}
        rows.append({**named, **timed, **found, "commit": self.conditions["commit"]})
        what = "  ".join(str(value) for value in named.values())
        _console.print(
            f"{what:44s} {results.shown(us, '9.2f')} us  {results.shown(share, '.1%')} of copy  {failed or ''}"
        )

    def model(self, model: Experts, name: str, tokens: Sequence[int]) -> None:
        """All numbers of tokens of one model's experts in one format."""
        kind, group = FORMATS[name]
        layout = ExpertLayout(kind, model.hidden, model.intermediate, DTYPE, group)
        slabs = layout.views(random_slabs(layout, model.count, self.device))
        for count in tokens:
            layer = random_layer(model, layout, slabs, count)
            for backend in self._backends(model, layout, count):
                named = {"model": model.name, "weights": name, "tokens": count, "backend": backend}
                run = (
                    stock
                    if backend == "stock"
                    else functools.partial(_ours, out=layer.out, room=layer.room, backend=backend)
                )
                timed = [functools.partial(run, call) for call in layer.calls]
                self.row(self.experts, named, timed, layer.bytes, functools.partial(_check_experts, run, layer))
                self.experts[-1]["distinct"] = layer.distinct

    def _backends(self, model: Experts, layout: ExpertLayout, tokens: int) -> list[str]:
        if self.device.type != "cuda":
            return ["torch"]
        portable = ["triton"] if model is MODELS[0] and tokens in (1, max(TOKENS)) else []
        known = ["cuda", *portable, *(["stock"] if not layout.packed and tokens <= _STOCK_TOKENS else [])]
        return [backend for backend in known if backend in self.wanted]

    def route(self, model: Router, tokens: Sequence[int]) -> None:
        """All numbers of tokens of one model's router."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        shape = (model.experts, model.hidden)
        matrices = [
            RouterMatrix(
                (torch.randn(shape, generator=generator, device=self.device) / model.hidden**0.5).to(model.dtype),
                correction=torch.zeros(model.experts, device=self.device) if model.spec.score == "sigmoid" else None,
            )
            for _ in range(_LAYERS)
        ]
        for count in tokens:
            states = torch.randn(count, model.hidden, generator=generator, device=self.device).to(DTYPE)
            for backend in self.wanted if self.device.type == "cuda" else ("torch",):
                if backend == "stock":
                    calls = [functools.partial(router_reference, states, matrix, model.spec) for matrix in matrices]
                else:
                    calls = [
                        functools.partial(router, states, matrix, model.spec, backend=backend) for matrix in matrices
                    ]
                named = {"model": model.name, "tokens": count, "backend": backend}
                size = matrices[0].weight.nbytes + states.nbytes
                check = functools.partial(_check_router, model, states, matrices, backend)
                self.row(self.routers, named, calls, size, check)


def _ours(call: ExpertCall, out: Tensor, room: Tensor, backend: str) -> Tensor:
    return expert_mlp(call, out, room, backend)


def _check_experts(run: Callable[[ExpertCall], Tensor], layer: Layer) -> Record:
    """Its error beside PyTorch's."""
    gate = ExpertGate(layer.calls[0])
    error = gate.error(run(gate.call))
    ratio = error_ratio(error, gate.plain_error)
    wrong = f"error {error:.1e} is {results.shown(ratio, '.1f')} times PyTorch's" if not_right(ratio) else None
    return {"error": error, "plain_error": gate.plain_error, "error_ratio": ratio, "wrong": wrong}


def _check_router(model: Router, states: Tensor, matrices: list[RouterMatrix], backend: str) -> Record:
    """Experts must be the family's where logits are equal; the share of tokens whose experts are."""
    same = total = 0
    for matrix in matrices:
        right = router_reference(states, matrix, model.spec)
        found = right if backend == "stock" else router(states, matrix, model.spec, backend=backend)
        chosen = (found.index.sort(-1).values == right.index.sort(-1).values).all(-1)
        if not bool(chosen[(found.logits == right.logits).all(-1)].all()):
            return {"wrong": "it chooses other experts from equal logits"}
        same, total = same + int(chosen.sum()), total + len(chosen)
    return {"same_experts": same / total}


def keep_rows(conditions: Record, rows: list[Record], path: Path) -> None:
    """Write rows beside those of the file that were not measured again."""
    old = results.load(path)["rows"] if path.exists() else []
    results.save({"conditions": conditions, "rows": results.newest(old, rows, _ROW_KEY)}, path)


def main(
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = results.RESULTS,
    only: Annotated[str, typer.Option(help="experts or router; both if it is not given.")] = "",
    backend: Annotated[list[str] | None, typer.Option(help="cuda, triton or stock; repeat for more.")] = None,
    model: Annotated[list[str] | None, typer.Option(help="Name of a model; repeat for more.")] = None,
    weights: Annotated[list[str] | None, typer.Option(help="bf16, int4 or fp8; repeat for more.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, max=16, help="Of a step; repeat for more.")] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Tiny shapes, seconds; writes to a temporary folder.")
    ] = False,
) -> None:
    """Time experts and routers. Exits with 1 if any output is not right or any kernel cannot run.

    Rows that a run does not measure again stay in the result files, with their own commit.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not smoke:
        raise typer.BadParameter("measuring needs a CUDA device; --smoke goes through everything on a CPU")
    torch.set_float32_matmul_precision("highest")
    folder = Path(tempfile.mkdtemp(prefix="moe_")) if smoke else out
    run = Run(device, tuple(backend or BACKENDS))
    steps = tokens or ((1, 3) if smoke else TOKENS)
    with torch.no_grad():
        if only != "experts":
            for place in SMALL_ROUTERS if smoke else ROUTERS:
                if not model or place.name in model:
                    run.route(place, steps)
                    keep_rows(run.conditions, run.routers, folder / "router.json")
        if only != "router":
            for experts in SMALL if smoke else MODELS:
                for name in experts.formats:
                    if (not model or experts.name in model) and (not weights or name in weights):
                        run.model(experts, name, steps)
                        keep_rows(run.conditions, run.experts, folder / "expert_mlp.json")
    _console.print(f"numbers written to {folder}", soft_wrap=True)
    raise typer.Exit(1 if any(line["failed"] for line in [*run.experts, *run.routers]) else 0)


if __name__ == "__main__":
    typer.run(main)
