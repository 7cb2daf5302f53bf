"""Time packing, unpacking and prompt statistics: ``python kernels/benchmarks/packing.py``.

It needs a CUDA device, takes about 2 minutes and writes ``results/packing.json`` and ``results/statistics.json``. The
shape is Mixtral's: 8 KV heads of 128 channels, 32,768 tokens of one layer, bf16. Packing is compared bit by bit with
its reference before it is timed; a row that differs shows no time, but what differs first. ``--smoke`` goes through
everything with a few tokens, on a CPU too, where the references are timed.
"""

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import results
import torch
import typer
from baselines import brief
from results import Record
from rich.console import Console
from run import conditions_of
from timing import Clock
from torch import Tensor

from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.codecs.codebooks import universal_table
from hf_subbyte_moe.codecs.rotation import rotation_matrix, rotation_signs
from hf_subbyte_moe.codecs.shaping import Shaping, pack_shaped, second_moment, shapes
from subbyte_kernels.attention_statistics import (
    attention_statistics,
    attention_statistics_reference,
    probe_attention,
    probe_attention_reference,
)
from subbyte_kernels.formats import TILE_TOKENS, TileFormat, kernel_kind
from subbyte_kernels.lanes import Order, transpose_scales, unpack_tile_codes
from subbyte_kernels.pack_tiles import pack_tiles, pack_tiles_reference, unpack_tiles, unpack_tiles_reference
from subbyte_kernels.pack_tiles.reference import rotate_tokens


HEADS, QUERY_HEADS, DIM, TOKENS = 8, 32, 128, 32768
SAMPLES = 64
FLUSHED = 1  # tiles of each head that a decode step packs
_SETS = 4
_console = Console(highlight=False)


@dataclass(frozen=True)
class Tiles:
    """What one tier's calls take."""

    states: Tensor  # [M, 128, D]
    mean: Tensor | None  # [M, D]
    heads: Tensor  # [M]
    fmt: TileFormat
    table: Tensor | None
    order: Order

    @property
    def device(self) -> torch.device:
        return self.states.device

    def pack(self) -> Tensor:
        return pack_tiles(self.states, self.fmt, self.table, self._turn, self.mean, self.order, self._signs)

    def expected(self) -> Tensor:
        return pack_tiles_reference(self.states, self.fmt, self.table, self._turn, self.mean, self.order, self._signs)

    def unpack(self, records: Tensor, reference: bool = False) -> Tensor:
        table = None if self.table is None else self.table[None]
        function = unpack_tiles_reference if reference else unpack_tiles
        given = (records, self.fmt, table, None, self._turn, self.mean, self.states.dtype, self.order)
        return function(*given, self._signs)

    def shaped(self, shaping: Shaping, kernel: bool = True) -> Tensor:
        assert self.table is not None
        signs = self._signs if kernel else None
        codec = get_codec(self.fmt.name)
        return pack_shaped(
            self.states, self.heads, codec, self.table, self._turn, self.mean, self.order, shaping, signs
        )

    def unlike(self, found: Tensor, expected: Tensor) -> str | None:
        """How many words of records are not the reference's, and what the first of them stands for."""
        counted = _counted(found, expected)
        if counted is None:
            return None
        tile = int((found != expected).any(1).nonzero()[0])
        parts = [self._parts(records[tile : tile + 1]) for records in (found, expected)]
        (codes, scales), (right, right_scales) = parts
        token, group = ((codes != right) | (scales != right_scales)[:, None]).nonzero()[0].tolist()
        channel = group * self.fmt.vector_dim
        value = self._rotated(tile)[token, channel : channel + self.fmt.vector_dim]
        return (
            f"{counted}; first: {self.fmt.name} {self.order.value}, tile {tile} (head {int(self.heads[tile])}), "
            f"token {token}, channel {channel}: code {codes[token, group]}, the reference's {right[token, group]}; "
            f"scale {scales[token]:.9g}, the reference's {right_scales[token]:.9g}; "
            f"value {', '.join(f'{part:.9g}' for part in value.tolist())}"
        )

    def unlike_states(self, found: Tensor, expected: Tensor) -> str | None:
        """How many unpacked values are not the reference's, and where the first of them is."""
        counted = _counted(found, expected)
        if counted is None:
            return None
        tile = int((found != expected).flatten(1).any(1).nonzero()[0])
        token, channel = (found[tile] != expected[tile]).nonzero()[0].tolist()
        return (
            f"{counted}; first: {self.fmt.name} {self.order.value}, tile {tile} (head {int(self.heads[tile])}), "
            f"token {token}, channel {channel}: {found[tile, token, channel]:.9g}, "
            f"the reference's {expected[tile, token, channel]:.9g}"
        )

    def _parts(self, records: Tensor) -> tuple[Tensor, Tensor]:
        """``[128, C]`` codes and ``[128]`` scales of one record."""
        words, dim = self.fmt.code_words(self.states.shape[-1]), self.states.shape[-1]
        codes = unpack_tile_codes(records[:, :words], self.fmt.code_bits, self.order, dim)
        scales = transpose_scales(records[:, words:].contiguous().view(torch.bfloat16), dim)
        return codes[0], scales[0]

    def _rotated(self, tile: int) -> Tensor:
        """``[128, D]``: what is divided by the scale and coded."""
        states = self.states[tile].float()
        if self.mean is not None:
            states = states - self.mean[tile]
        values, factor = rotate_tokens(states, self._turn, self._signs)
        return values * factor

    @property
    def _turn(self) -> Tensor:
        return rotation_matrix(self.states.shape[-1], self.device)

    @property
    def _signs(self) -> Tensor:
        return rotation_signs(self.states.shape[-1], self.device)


def tiles_of(tier: str, order: Order, count: int, device: torch.device, seed: int) -> Tiles:
    """``count`` tiles of each head: Gaussian, with channels and tokens of different size."""
    generator = torch.Generator(device=device).manual_seed(seed)
    states = torch.randn(HEADS * count, TILE_TOKENS, DIM, generator=generator, device=device)
    states *= torch.logspace(-1, 1, DIM, device=device) * torch.logspace(-1, 1, TILE_TOKENS, device=device)[:, None]
    heads = torch.arange(HEADS, device=device).repeat_interleave(count)
    mean = torch.randn(HEADS, DIM, generator=generator, device=device)[heads] if order is Order.KEYS else None
    fmt = get_codec(tier).format
    table = universal_table(fmt, device)[0, 0].float() if fmt.entries else None
    return Tiles(states.to(torch.bfloat16), mean, heads, fmt, table, order)


class Run:
    """Rows of both result files."""

    def __init__(self, device: torch.device, tokens: int) -> None:
        self.clock, self.tokens = Clock(device), tokens
        copy_gbs = self.clock.copy_gbs() if device.type == "cuda" else self.clock.copy_gbs(1 << 24)
        self.conditions = conditions_of(device, copy_gbs)
        self.copy_gbs = copy_gbs
        self.packing: list[Record] = []
        self.statistics: list[Record] = []

    @property
    def device(self) -> torch.device:
        return self.clock.device

    def row(
        self,
        rows: list[Record],
        named: Record,
        calls: Sequence[Callable[[], object]],
        size: int,
        differs: Callable[[], str | None],
    ) -> None:
        """Check, time, remember and show one line; ``size``: bytes that a call reads and writes at least."""
        us = again = None
        try:
            failed = differs()
            if failed is None:
                timing = self.clock.time(calls)
                us, again = timing.us, timing.us_again
        except (RuntimeError, ValueError) as problem:
            failed = brief(problem)
        share = size / 1e3 / us / self.copy_gbs if us else None
        rows.append({**named, "us": us, "us_again": again, "bytes": size, "copy_share": share, "failed": failed})
        what = "  ".join(str(value) for value in named.values())
        _console.print(
            f"{what:44s} {results.shown(us, '9.1f')} us  {results.shown(share, '.0%')} of copy  {failed or ''}"
        )

    def pack(self, tier: str, order: Order, count: int) -> None:
        """One tier's packing: whole prompt or one flushed tile a head."""
        sets = [tiles_of(tier, order, count, self.device, seed) for seed in range(_SETS)]
        some = sets[0]
        records = some.pack()
        size = some.states.nbytes + records.nbytes
        named = {"op": "pack", "tier": tier, "order": order.value, "tiles": len(some.states)}
        self.row(
            self.packing,
            named,
            [given.pack for given in sets],
            size,
            lambda: some.unlike(some.pack(), some.expected()),
        )
        if count * TILE_TOKENS < self.tokens:
            return
        calls = [functools.partial(given.unpack, given.pack()) for given in sets]
        self.row(
            self.packing,
            {**named, "op": "unpack"},
            calls,
            size,
            lambda: some.unlike_states(some.unpack(records), some.unpack(records, reference=True)),
        )

    def shape(self, tier: str, count: int) -> None:
        """One tier's packing under a metric."""
        sets = [tiles_of(tier, Order.KEYS, count, self.device, seed) for seed in range(_SETS)]
        generator = torch.Generator(device=self.device).manual_seed(9)
        moments = second_moment(torch.randn(HEADS, 2 * DIM, DIM, generator=generator, device=self.device))
        shaping = Shaping(moments)
        few = tiles_of(tier, Order.KEYS, 1, self.device, 0)

        def differs() -> str | None:
            found, expected = few.shaped(shaping), few.shaped(shaping, kernel=False)
            share = float((found != expected).float().mean())
            return f"{share:.2%} of the words differ from the reference's" if share > _SHAPED_WORDS else None

        size = sets[0].states.nbytes + sets[0].pack().nbytes
        named = {"op": "pack under a metric", "tier": tier, "order": "keys", "tiles": len(sets[0].states)}
        self.row(self.packing, named, [functools.partial(given.shaped, shaping) for given in sets], size, differs)

    def measure(self) -> None:
        """Sampled queries over the prompt."""
        generator = torch.Generator(device=self.device).manual_seed(1)
        shape = (QUERY_HEADS, SAMPLES, DIM), (HEADS, self.tokens, DIM), (HEADS, self.tokens, DIM)
        query, keys, values = (
            torch.randn(*size, generator=generator, device=self.device).bfloat16() for size in shape
        )
        index = torch.linspace(self.tokens // 2, self.tokens - 1, SAMPLES, device=self.device).long()
        visible = torch.arange(self.tokens, device=self.device) <= index[:, None]
        given = (query, keys, values, visible, DIM**-0.5)
        lse = probe_attention_reference(*given).lse
        weighed = (query, index, lse, keys, 0, DIM**-0.5)
        for op, functions, arguments, read in (
            ("probe", (probe_attention, probe_attention_reference), given, keys.nbytes + values.nbytes),
            ("token weights", (attention_statistics, attention_statistics_reference), weighed, keys.nbytes),
        ):
            for name, function in zip(("selected", "reference"), functions, strict=True):
                named = {"op": op, "implementation": name, "tokens": self.tokens, "queries": SAMPLES}
                self.row(
                    self.statistics,
                    named,
                    [functools.partial(function, *arguments)],
                    read,
                    functools.partial(_far, function, functions[1], arguments),
                )


_SHAPED_WORDS = 0.02  # of records; near ties, and what follows them


def _counted(found: Tensor, expected: Tensor) -> str | None:
    different = int((found != expected).sum())
    return f"{different} of {found.numel()} elements differ from the reference's" if different else None


def _far(
    function: Callable[..., object], reference: Callable[..., object], arguments: tuple[object, ...]
) -> str | None:
    """What is further from the reference than rounding of probabilities to bf16 explains."""
    found, expected = function(*arguments), reference(*arguments)
    for name, value in vars(expected).items():
        error = float((getattr(found, name) - value).abs().max() / value.abs().max())
        if not error <= 4e-3:
            return f"{name}: error {error:.1e}"
    return None


def measure_all(run: Run) -> bool:
    """Everything; whether all of it is right."""
    whole = run.tokens // TILE_TOKENS
    for tier in (codec.name for codec in codecs() if kernel_kind(codec.format)):
        for order in Order:
            for count in dict.fromkeys((whole, FLUSHED)):
                run.pack(tier, order, count)
    for codec in codecs():
        if shapes(codec):
            run.shape(codec.name, whole)
    run.measure()
    return not any(line["failed"] for line in (*run.packing, *run.statistics))


def main(
    folder: Annotated[Path | None, typer.Option(help="Of the result files. [default: results]")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few tokens; writes to a temporary folder.")] = False,
) -> None:
    """Time packing, unpacking and prompt statistics; exits with 1 if any output is not right."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda" and not smoke:
        raise typer.BadParameter("measuring needs a CUDA device; --smoke goes through everything on a CPU")
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="packing_")) if smoke else results.RESULTS
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        run = Run(device, 2 * TILE_TOKENS if smoke else TOKENS)
        good = measure_all(run)
    for name, rows in (("packing", run.packing), ("statistics", run.statistics)):
        results.save({"conditions": run.conditions, "rows": rows}, folder / f"{name}.json")
    _console.print(f"numbers written to {folder}")
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    typer.run(main)
