"""Caches that only look quantized: what leaves the exact window is replaced by what its code would give back.

A side (keys or values) of a layer says which tokens leave and what they become; the layer keeps everything in the
model's dtype. The schedule is that of the packed cache: a step's single token has its oldest neighbours quantized
before its attention, a prompt is attended to exactly and quantized afterwards.

Bits are counted by formula and in the baseline's favour: scales and zero points at 16 bits whatever the model's dtype,
exact tokens as many as there are, no page tables, no spare capacity.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer


class MissingPackageError(ValueError):
    """A baseline is somebody else's code, and that is not installed."""


@dataclass(frozen=True)
class Bits:
    """What a cache holds, bits a value.

    Attributes:
        code_bits: codes alone, of what is quantized; None where nothing is.
        bits: with scales, zero points and outliers; None likewise.
        bits_total: everything, exact tokens in the model's dtype, over all cached values.
        bits_total_16: the same with exact tokens at 16 bits, whatever the model's dtype.
    """

    code_bits: float | None
    bits: float | None
    bits_total: float | None
    bits_total_16: float | None


@dataclass(frozen=True)
class Baseline:
    """Options of a baseline as a config gives them; each subclass is one baseline."""

    @classmethod
    def from_dict(cls, key: str, given: Mapping[str, Any]) -> "Baseline":
        """Read options.

        Raises:
            ValueError: an unknown or missing option, or an impossible value; names ``key`` and the option.
        """
        allowed = [item.name for item in fields(cls)]
        for name in given:
            if name not in allowed:
                raise ValueError(f"unknown key {name!r} in {key}; there are {allowed}")
        for item in fields(cls):
            if item.default is MISSING and item.name not in given:
                raise ValueError(f"{key} lacks {item.name!r}")
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"{key}.{error}") from None

    def options(self) -> dict[str, Any]:
        """What differs from the defaults, and what has none, as JSON values."""
        return {
            item.name: getattr(self, item.name) for item in fields(self) if getattr(self, item.name) != item.default
        }

    def cache(self, config: PreTrainedConfig) -> Cache:
        """An empty cache for a model.

        Raises:
            ValueError: the model does not suit it.
            MissingPackageError: somebody else's package is not installed.
        """
        raise NotImplementedError

    def check(self, name: str, allowed: str, fine: bool) -> None:
        """Raise a ValueError that names an option unless it is fine."""
        if not fine:
            raise ValueError(f"{name}={getattr(self, name)!r} is not possible: {allowed}")

    def whole(self, name: str, least: int) -> None:
        """Check a whole number."""
        value = getattr(self, name)
        fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
        self.check(name, f"a whole number, at least {least}", fine)


class Side:
    """Keys or values of one layer.

    Attributes:
        sinks: first tokens that stay exact.
        window: last tokens that stay exact.
        tile: tokens that leave the window together.
        late: a step's token leaves for the next step, not for its own.
    """

    def __init__(self, sinks: int, window: int, tile: int, late: bool = False) -> None:
        self.sinks, self.window, self.tile, self.late = sinks, window, tile, late

    def due(self, length: int) -> int:
        """Tokens behind the sinks that are quantized once ``length`` tokens are held."""
        return max(0, (length - self.sinks - self.window) // self.tile) * self.tile

    def round_trip(self, states: Tensor) -> Tensor:
        """``[B, H, n, D]`` tokens, oldest first, as their codes give them back; rows are independent."""
        raise NotImplementedError

    def code_bits(self, head_dim: int) -> float:
        """Bits a value of the codes alone."""
        raise NotImplementedError

    def bits(self, head_dim: int) -> float:
        """Bits a value with everything that decoding needs for each token or group."""
        raise NotImplementedError

    def fixed_bits(self, heads: int, head_dim: int) -> float:
        """Bits that a row holds once, such as means."""
        return 0.0


class SimulatedLayer(DynamicLayer):
    """A layer of exact and of replaced tokens.

    Attributes:
        sides: keys and values.
        packed: replaced tokens of each side.
    """

    def __init__(self, sides: tuple[Side, Side]) -> None:
        super().__init__()
        self.sides = sides
        self.packed = [0, 0]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens ``[B, H, T, D]``; what attention sees of old ones is what their codes say."""
        step = key_states.shape[2] == 1 and self.get_seq_length() > 0
        super().update(key_states, value_states)
        exact = (self.keys, self.values)
        self.keys, self.values = held = (self._settled(0, self.keys), self._settled(1, self.values))
        first, second = (
            new if step and not side.late else old for side, old, new in zip(self.sides, exact, held, strict=True)
        )
        return first, second

    def _settled(self, number: int, states: Tensor) -> Tensor:
        side, done = self.sides[number], self.packed[number]
        due = side.due(states.shape[2])
        if due <= done:
            return states
        region = slice(side.sinks + done, side.sinks + due)
        self.packed[number] = due
        states = states.clone()
        states[:, :, region] = side.round_trip(states[:, :, region]).to(states.dtype)
        return states


class SimulatedCache(Cache):
    """A cache of :class:`SimulatedLayer`."""

    def __init__(self, config: PreTrainedConfig, make: Callable[[int, int], tuple[Side, Side]]) -> None:
        """Make an empty cache; ``make`` gets a layer's number and how many there are.

        Raises:
            ValueError: the model has other layers than full attention, or caches latents.
        """
        count = full_attention_layers(config)
        super().__init__(layers=[SimulatedLayer(make(number, count)) for number in range(count)])

    def size(self) -> Bits:
        """What it would hold now."""
        code = record = fixed = 0.0
        packed = values = itemsize = 0
        for layer in self.layers:
            for number, states in enumerate((layer.keys, layer.values)):
                side, (rows, heads, tokens, dim) = layer.sides[number], states.shape
                count = rows * heads * dim * layer.packed[number]
                packed += count
                values += rows * heads * dim * tokens
                itemsize = states.dtype.itemsize
                code += side.code_bits(dim) * count
                record += side.bits(dim) * count
                fixed += side.fixed_bits(heads, dim) * rows
        return count_bits(code, record, packed, values, fixed, itemsize)


def count_bits(code: float, record: float, packed: int, values: int, fixed: float, itemsize: int) -> Bits:
    """Sums of bits and numbers of values as bits a value."""
    totals = [(record + fixed + bits * (values - packed)) / values for bits in (8 * itemsize, 16)]
    return Bits(code / packed if packed else None, record / packed if packed else None, totals[0], totals[1])


def full_attention_layers(config: PreTrainedConfig) -> int:
    """Layers of a model whose layers all attend to everything.

    Raises:
        ValueError: they don't, or it caches latents.
    """
    layers = DynamicCache(config=config).layers
    if getattr(config, "kv_lora_rank", None) or any(type(layer) is not DynamicLayer for layer in layers):
        raise ValueError(
            f"model type {config.model_type!r}: baselines hold plain keys and values of full attention only"
        )
    return int(config.num_hidden_layers)
