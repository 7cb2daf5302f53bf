"""Fused decode attention kernels and cases for them, with dense attention in fp64 as what is right."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from subbyte_kernels.decode_attention import AttentionResult, AttentionTiles, ExactTokens
from subbyte_kernels.formats import TILE_TOKENS, PackedTiles
from subbyte_kernels.lanes import Order
from support.packing import gaussian, generator, packed_side


CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PAIRS = [
    ("vq175", "vq175"),
    ("vq2", "vq2"),
    ("vq3", "vq175"),
    ("vq3", "vq2"),
    ("vq4", "vq2"),
    ("vq4", "vq4"),
    ("fp6", "vq3"),
    ("fp8", "fp8"),
]
MIXED_KEYS, MIXED_VALUES = ["vq175", "fp6", "vq4"], ["vq2", "fp8", "vq3"]


@dataclass(frozen=True)
class Kernel:
    """A fused kernel.

    Attributes:
        name: its backend.
        obstacle: why it cannot compute a call, or None.
        launch: the kernel.
    """

    name: str
    obstacle: Callable[..., str | None]
    launch: Callable[..., AttentionResult]


def moved(side: PackedTiles) -> PackedTiles:
    """A side on the device under test."""
    return replace(
        side,
        pages=side.pages.to(DEVICE),
        pools={tier: pool.to(DEVICE) for tier, pool in side.pools.items()},
        tables={tier: table.to(DEVICE) for tier, table in side.tables.items()},
        rotation=side.rotation.to(DEVICE),
        mean=None if side.mean is None else side.mean.to(DEVICE),
        signs=None if side.signs is None else side.signs.to(DEVICE),
    )


def _spread(states: Tensor, tail: float) -> Tensor:
    """Larger values larger and smaller ones smaller."""
    return states.sign() * states.abs() ** tail


class Case:
    """Rows with different numbers of tiles; keys with a mean, exact tokens with a ragged mask.

    ``value_dim``: width of values where it differs. ``rest``: width of a second part of the keys, whose first part is
    then the values, too, as latent attention has it. ``tail``: power that spreads the sizes of packed values.
    """

    def __init__(
        self,
        key_tier: str | list[str] = "vq3",
        value_tier: str | list[str] = "vq2",
        *,
        heads: int = 2,
        group: int = 4,
        dim: int = 64,
        counts: tuple[int, ...] = (2, 1),
        exact: int = 9,
        dtype: torch.dtype = torch.bfloat16,
        spare_slots: int = 0,
        own_tables: dict[int, Tensor] | None = None,
        value_scale: Tensor | float = 1.0,
        tokens: int = 1,
        value_dim: int | None = None,
        rest: int = 0,
        tail: float = 1.0,
    ) -> None:
        rows, tiles, width, value_dim = len(counts), max(counts), dim + rest, value_dim or dim
        self.scaling, self.softcap, self.sink_logits = width**-0.5, None, None
        self.query = (2 * gaussian(rows, heads * group, tokens, width, seed=1)).to(dtype).to(DEVICE)
        mean = 2 * gaussian(rows, heads, width, seed=2)
        shape = (rows, heads, tiles, TILE_TOKENS)
        keys = _spread(gaussian(*shape, width, seed=3), tail) + mean[:, :, None, None]
        values = (_spread(gaussian(*shape, value_dim, seed=4), tail) + 0.5) * value_scale
        key_tiers, value_tiers = (self.tiers(tier, heads, counts) for tier in (key_tier, value_tier))
        packed, self.dense_keys = packed_side(
            keys[..., :dim], key_tiers, mean[..., :dim], spare_slots, own_tables, Order.KEYS, dtype
        )
        self.keys = moved(packed)
        self.parts = (self.keys,)
        if rest:
            packed, dense = packed_side(
                keys[..., dim:], value_tiers, mean[..., dim:], spare_slots, own_tables, Order.KEYS, dtype
            )
            self.values, self.dense_values = self.keys, self.dense_keys
            self.parts, self.dense_keys = (self.keys, moved(packed)), torch.cat([self.dense_keys, dense], dim=-1)
        else:
            packed, self.dense_values = packed_side(
                values, value_tiers, None, spare_slots, own_tables, Order.VALUES, dtype
            )
            self.values = moved(packed)
        visible = torch.rand(rows, tokens, exact, generator=generator(5)) < 0.7
        visible[..., :1] = True
        self.exact = ExactTokens(
            (gaussian(rows, heads, exact, width, seed=6) + mean.unsqueeze(2)).to(dtype).to(DEVICE),
            gaussian(rows, heads, exact, value_dim, seed=7).to(dtype).to(DEVICE),
            visible.to(DEVICE),
        )

    @staticmethod
    def tiers(tier: str | list[str], heads: int, counts: tuple[int, ...]) -> list[list[list[str]]]:
        """One tier everywhere, or a list that row, head and tile walk through."""
        cycle = [tier] if isinstance(tier, str) else tier
        return [
            [[cycle[(row + 2 * head + tile) % len(cycle)] for tile in range(count)] for head in range(heads)]
            for row, count in enumerate(counts)
        ]

    @property
    def tiles(self) -> AttentionTiles:
        return AttentionTiles((self.keys, *self.parts[1:]), self.values)

    def obstacle(self, kernel: Kernel) -> str | None:
        return kernel.obstacle(self.query, self.exact, self.tiles, self.softcap, self.sink_logits)

    def run(self, kernel: Kernel, splits: int | None = None, *, tiles: bool = True) -> AttentionResult:
        assert self.obstacle(kernel) is None
        packed = self.tiles if tiles else None
        return kernel.launch(
            self.query, self.exact, packed, self.scaling, self.softcap, self.sink_logits, splits=splits
        )

    def dense(self, dtype: torch.dtype, tiles: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, keys, values and mask ``[B, 1, Sq, n]`` of everything; what nobody sees is zero."""
        group = self.query.shape[1] // self.exact.keys.shape[1]
        seen = self.exact.visible.unsqueeze(1)
        by_any = seen.any(2, keepdim=True).transpose(-1, -2)
        exact = [part.masked_fill(~by_any, 0) for part in (self.exact.keys, self.exact.values)]
        if tiles:
            packed = [part.flatten(2, 3).to(DEVICE) for part in (self.dense_keys, self.dense_values)]
            exact = [torch.cat([part.float(), more], dim=2) for part, more in zip(exact, packed, strict=True)]
            present = (self.values.pages[:, 0] >= 0).repeat_interleave(TILE_TOKENS, -1)[:, None, None]
            seen = torch.cat([seen, present.expand(-1, 1, seen.shape[2], -1)], dim=-1)
        keys, values = (part.to(dtype).repeat_interleave(group, 1) for part in exact)
        return self.query.to(dtype), keys, values, seen

    def softmax(self, dtype: torch.dtype, tiles: bool) -> AttentionResult:
        """Scores of states in ``dtype`` in fp64, with soft cap and sinks."""
        query, keys, values, seen = self.dense(dtype, tiles)
        scores = query.double() @ keys.double().transpose(-1, -2) * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sink_logits is not None:
            sinks = self.sink_logits.double().view(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks], dim=-1)
            values = torch.nn.functional.pad(values, (0, 0, 0, 1))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
        return AttentionResult(weights @ values.double(), lse, None)

    def plain_error(self, expected: AttentionResult, tiles: bool) -> tuple[float, float, float]:
        """What bf16 costs PyTorch: largest and root mean square error of outputs, largest of the lse."""
        if self.softcap is None and self.sink_logits is None:
            query, keys, values, seen = self.dense(torch.bfloat16, tiles)
            output = torch.nn.functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=seen, scale=self.scaling
            ).double()
        else:
            output = self.softmax(torch.bfloat16, tiles).output.bfloat16().double()
        error = (output - expected.output)[expected.lse > -torch.inf]
        lse = (self.softmax(torch.bfloat16, tiles).lse - expected.lse)[expected.lse > -torch.inf]
        return float(error.abs().max()), float(error.square().mean().sqrt()), float(lse.abs().max())

    def check(self, result: AttentionResult, *, tiles: bool = True) -> None:
        """The accuracy that the module promises; in fp32 a few roundings."""
        expected = self.softmax(torch.float64, tiles)
        sees = expected.lse > -torch.inf
        assert result.output.shape == (*self.query.shape[:3], self.exact.values.shape[-1])
        assert result.output.dtype in (torch.float32, self.query.dtype)
        assert result.lse.dtype == torch.float32
        assert result.entropy is None
        assert torch.equal(result.lse > -torch.inf, sees)
        assert not result.output[~sees].any()
        error = (result.output.double() - expected.output)[sees]
        lse = (result.lse.double() - expected.lse)[sees]
        assert torch.isfinite(error).all()
        if self.query.dtype is torch.float32:
            size = float(expected.output.abs().max())
            assert float(error.abs().max()) <= 1e-5 * max(1.0, size)
            assert float(lse.abs().max()) <= 1e-5 * max(1.0, float(expected.lse[sees].abs().max()))
            return
        largest, typical, lse_largest = self.plain_error(expected, tiles)
        fp32 = 1e-6 * float(expected.output.abs().max())  # what bf16 may have lost nothing to by luck
        assert float(error.abs().max()) <= 2 * largest + fp32
        assert float(error.square().mean().sqrt()) <= 2 * typical + fp32
        assert float(lse.abs().max()) <= 2 * lse_largest + 1e-5


def assert_identical(result: AttentionResult, expected: AttentionResult) -> None:
    assert torch.equal(result.output, expected.output)
    assert torch.equal(result.lse, expected.lse)


def supports(case: Case, kernel: Kernel, *, cuda: bool) -> bool:
    """Whether a kernel takes a case, which must be what is stated: Triton's takes all, ``cuda`` tells of the other."""
    stated = kernel.name == "triton" or cuda
    reason = case.obstacle(kernel)
    assert (reason is None) == stated, reason
    return stated
