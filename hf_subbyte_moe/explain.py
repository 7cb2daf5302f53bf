"""What a cache measured, which tiers it chose, and what it weighs: numbers first, tables for people."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from hf_subbyte_moe.accounting import TILE_TOKENS
from hf_subbyte_moe.cache import EntropySubbyteCache, LayerStatistics
from hf_subbyte_moe.codecs import codec_of
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.experts.report import ExpertsState, experts_state, experts_tables
from hf_subbyte_moe.patching import STATISTICS_ATTRIBUTE
from hf_subbyte_moe.policy import SIDES


@dataclass(frozen=True)
class Choice:
    """One (layer, row, KV head, side, chunk).

    Attributes:
        layer: layer.
        row: batch row.
        head: KV head.
        side: "keys" or "values".
        first_tile: the chunk's first tile.
        tiles: its tiles; 0 if the prompt was too short to pack and only measured.
        tier: the tier chosen.
        entropy: attention entropy in bits; None where nothing was measured.
        mass: share of the attention on the chunk; None likewise.
        error: relative error of the layer's attention output that the tier causes; None likewise.
    """

    layer: int
    row: int
    head: int
    side: str
    first_tile: int
    tiles: int
    tier: str
    entropy: float | None
    mass: float | None
    error: float | None


@dataclass(frozen=True)
class CacheSize:
    """Bytes and bits of a cache.

    Attributes:
        tokens: real tokens, all rows together.
        bytes: everything allocated, layers that do not pack included.
        plain_bytes: a plain cache of the same tokens in the model's dtype.
        code_bits: codes alone, bits a packed value; None without tiles.
        bits: codes, scales and outliers, bits a packed value; None without tiles.
        bits_total: everything that the packing layers hold, bits a cached value; None for an empty cache.
    """

    tokens: int
    bytes: int
    plain_bytes: int
    code_bits: float | None
    bits: float | None
    bits_total: float | None


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` found; printing it shows tables.

    Attributes:
        choices: every choice of the policy.
        size: bytes and bits; None when the cache is gone.
        policy: the policy that chose; None where nothing was cached yet.
        experts: what experts outside the model do; None where they are with it, or a cache was asked about.
        packs_from: tokens of a row from which on some are packed; None where only the cache knows.
    """

    choices: Sequence[Choice]
    size: CacheSize | None
    policy: str | None
    experts: ExpertsState | None = None
    packs_from: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "policy": self.policy,
            "size": None if self.size is None else asdict(self.size),
            "choices": [asdict(choice) for choice in self.choices],
            **({} if self.experts is None else {"experts": self.experts.to_dict()}),
        }

    def render(self, console: Console) -> None:
        """Print tables: the size, then per layer and head the statistics and tiers of each row's last chunk."""
        if self.size is not None:
            console.print(_size_table(self.size))
        if self.experts is not None:
            console.print(experts_tables(self.experts))
        if self.choices:
            console.print(_choice_table(self.choices, self.policy))
        elif self.experts is None:
            console.print(self._why_nothing())

    def _why_nothing(self) -> str:
        if self.policy is None or (self.size is not None and not self.size.tokens):
            return "nothing was measured yet: run a prompt through the entropy_subbyte cache"
        first = f"{_packs_from(KVCacheConfig()):,} by default" if self.packs_from is None else f"{self.packs_from:,}"
        return (
            "the prompt was too short to be measured: tokens are packed where a row has as many as sinks, window and "
            f"a tile of {TILE_TOKENS} together ({first})"
        )

    def __repr__(self) -> str:
        console = Console(width=110, file=io.StringIO())
        with console.capture() as captured:
            self.render(console)
        return captured.get().rstrip()

    __str__ = __repr__


def explain(model_or_cache: PreTrainedModel | EntropySubbyteCache) -> Explanation:
    """What was measured and chosen.

    Args:
        model_or_cache: a cache, or a model that generated with one.

    Returns:
        Statistics and tiers by layer, row, head and side; bytes and bits where the cache is given; of a model with
        experts outside the GPU what these do. Print it.

    Raises:
        TypeError: neither a model nor one of our caches.
    """
    if isinstance(model_or_cache, EntropySubbyteCache):
        cache = model_or_cache
        options = cache.kv_config
        return Explanation(
            _choices(cache.statistics), cache_size(cache), options.policy, packs_from=_packs_from(options)
        )
    if not isinstance(model_or_cache, PreTrainedModel):
        raise TypeError(f"explain() takes a model or an EntropySubbyteCache, not {type(model_or_cache).__name__}")
    statistics: dict[int, LayerStatistics] = getattr(model_or_cache, STATISTICS_ATTRIBUTE, {})
    policy = next((record.policy for record in statistics.values()), None)
    return Explanation(_choices(statistics), None, policy, experts_state(model_or_cache))


def _packs_from(options: KVCacheConfig) -> int:
    return options.sinks + options.window + TILE_TOKENS


def cache_size(cache: EntropySubbyteCache) -> CacheSize:
    """Bytes and the three counts of bits of a cache. Under tensor parallelism of all ranks, which all must call."""
    code, record, packed, values, plain, tokens = 0.0, 0.0, 0, 0, 0, 0
    ranks = None
    for layer in cache.packed_layers.values():
        if not layer.is_initialized:
            continue
        ranks = layer.rows.ranks or ranks
        geometry = layer.rows.geometry()
        held = int(layer.rows.lengths.sum())
        tokens = max(tokens, held)
        values += held * geometry.values_per_token
        plain += held * geometry.values_per_token * geometry.itemsize
        for (tier_id, width), tiles in layer.rows.store.tile_counts().items():
            fmt = codec_of(tier_id).format
            count = tiles * TILE_TOKENS * width
            packed += count
            code += fmt.code_bits_per_value(geometry.itemsize) * count
            record += fmt.bits_per_value(width, geometry.itemsize) * count
    total, others = cache.allocated_bytes(), cache.other_bytes()
    if ranks is not None:
        counts = np.array([code, record, packed, values, plain, total, others], dtype=np.float64)
        code, record, *whole = np.sum(ranks.gather(counts), axis=0).tolist()
        packed, values, plain, total, others = (int(count) for count in whole)
    return CacheSize(
        tokens=tokens,
        bytes=total,
        plain_bytes=plain + others,
        code_bits=code / packed if packed else None,
        bits=record / packed if packed else None,
        bits_total=8 * (total - others) / values if values else None,
    )


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _choices(statistics: Mapping[int, LayerStatistics]) -> list[Choice]:
    choices = []
    for layer, record in statistics.items():
        for row, chunks in enumerate(record.chunks):
            for chunk in chunks:
                for (head, side), tier in np.ndenumerate(chunk.tiers):
                    measured = not np.isnan(chunk.entropy[head])
                    error = float(chunk.chosen_errors[head, side]) if measured else None
                    choices.append(
                        Choice(
                            layer=layer,
                            row=row,
                            head=head,
                            side=SIDES[side],
                            first_tile=chunk.first_tile,
                            tiles=chunk.tiles,
                            tier=codec_of(int(tier)).name,
                            entropy=_number(chunk.entropy[head]),
                            mass=_number(chunk.mass[head]),
                            error=error,
                        )
                    )
    return choices


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _size_table(size: CacheSize) -> Table:
    table = Table(title="cache", title_justify="left")
    for name in ("tokens", "bytes", "plain bytes", "of plain", "code_bits", "bits", "bits_total"):
        table.add_column(name, justify="right")
    share = size.bytes / size.plain_bytes if size.plain_bytes else None
    table.add_row(
        f"{size.tokens:,}",
        f"{size.bytes:,}",
        f"{size.plain_bytes:,}",
        _shown(share, ".1%"),
        *(_shown(value, ".3f") for value in (size.code_bits, size.bits, size.bits_total)),
    )
    return table


def _choice_table(choices: Sequence[Choice], policy: str | None) -> Table:
    """A line per layer and KV head; of several rows and chunks the first row's last chunk, and how many there are."""
    rows = {choice.row for choice in choices}
    last: dict[tuple[int, int], dict[str, Choice]] = {}
    for choice in choices:
        if choice.row == min(rows):
            last.setdefault((choice.layer, choice.head), {})[choice.side] = choice
    more = f", row {min(rows)} of {len(rows)}" if len(rows) > 1 else ""
    table = Table(title=f"tiers chosen by policy {policy!r}{more}", title_justify="left")
    for name in ("layer", "KV head", "entropy", "mass", "keys", "error", "values", "error"):
        table.add_column(name, justify="right")
    for (layer, head), sides in sorted(last.items()):
        keys, values = sides["keys"], sides["values"]
        table.add_row(
            str(layer),
            str(head),
            _shown(keys.entropy, ".2f"),
            _shown(keys.mass, ".1%"),
            keys.tier,
            _shown(keys.error, ".1e"),
            values.tier,
            _shown(values.error, ".1e"),
        )
    return table
