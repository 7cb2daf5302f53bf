"""Published codes, and the second seed document's, as their authors describe them.

``kivi``: keys in groups of tokens of one channel, values in groups of channels of one token, minimum and step of each
group; its residual as published, no sinks (``sinks`` adds them).
``min-max``: groups of one token's channels, the whole prompt at once, later tokens 128 at a time: what stock
``quanto`` does by default, without its package.
``lloyd-max``: Hadamard, the token's norm, then the best scalar levels for a Gaussian: TurboQuant without its sketch.
``fp8``: E4M3 with a scale a layer and side that the prompt fixes; everything, no window, as serving engines do.
``literal``: evenly spaced levels between the extremes of a head's values; what is beyond 3.5 sigma of its token, FP8.

Gives up: KIVI's groups restart with every flush of its residual, which is a multiple of them; TurboQuant's random
rotation is our fixed one.

Source: KIVI (arXiv 2402.02750), TurboQuant (arXiv 2504.19874), levels: Max, Quantizing for Minimum Distortion (1960).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from baselines.simulated import Baseline, Side, SimulatedCache
from hf_subbyte_moe.codecs.rotation import rotation_matrix
from hf_subbyte_moe.ops import normalize_tokens


TILE = 128
SCALE_BITS = 16
OUTLIER_BITS = 8 + 16  # a value in FP8 and its place in a tile
FP8_MAX = 448.0
_LEVELS = {
    2: (0.4528, 1.5104),
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}


def to_fp8(states: Tensor) -> Tensor:
    """The nearest E4M3 values, saturating."""
    return states.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()


def min_max_groups(states: Tensor, nbits: int) -> Tensor:
    """``[..., g]`` groups as ``nbits`` codes between their extremes give them back; minimum and step in fp16."""
    low = states.amin(-1, keepdim=True)
    step = ((states.amax(-1, keepdim=True) - low) / (2**nbits - 1)).half().float()
    low = low.half().float()
    codes = ((states - low) / step.clamp(min=torch.finfo(torch.half).tiny)).round().clamp(0, 2**nbits - 1)
    return codes * step + low


class KiviSide(Side):
    """Groups of one channel's tokens (keys) or of one token's channels (values)."""

    def __init__(self, nbits: int, group_size: int, residual: int, sinks: int, keys: bool) -> None:
        # keys leave when the residual is full, all of it; values one by one
        super().__init__(sinks, 0 if keys else residual, residual if keys else 1, late=True)
        self._nbits, self._group, self._keys = nbits, group_size, keys

    def round_trip(self, states: Tensor) -> Tensor:
        values = states.float()
        if self._keys:
            return min_max_groups(values.mT.unflatten(-1, (-1, self._group)), self._nbits).flatten(-2).mT
        return min_max_groups(values.unflatten(-1, (-1, self._group)), self._nbits).flatten(-2)

    def code_bits(self, head_dim: int) -> float:
        return self._nbits

    def bits(self, head_dim: int) -> float:
        return self._nbits + 2 * SCALE_BITS / self._group


@dataclass(frozen=True)
class Kivi(Baseline):
    """KIVI; ``residual`` tokens stay exact."""

    nbits: int
    group_size: int = 32
    residual: int = 128
    sinks: int = 0

    def __post_init__(self) -> None:
        self.whole("nbits", 1)
        self.whole("group_size", 1)
        self.whole("sinks", 0)
        self.whole("residual", 1)
        self.check("residual", f"a multiple of group_size={self.group_size}", self.residual % self.group_size == 0)

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""
        given = (self.nbits, self.group_size, self.residual, self.sinks)
        return SimulatedCache(config, lambda layer, count: (KiviSide(*given, True), KiviSide(*given, False)))


class MinMaxSide(Side):
    """Groups of one token's channels; of a prompt nothing stays exact."""

    def __init__(self, nbits: int, group_size: int) -> None:
        super().__init__(0, 0, TILE, late=True)
        self._nbits, self._group = nbits, group_size
        self._prompt: int | None = None

    def due(self, length: int) -> int:
        if self._prompt is None:
            self._prompt = length
        return self._prompt + super().due(length - self._prompt)

    def round_trip(self, states: Tensor) -> Tensor:
        return min_max_groups(states.float().unflatten(-1, (-1, self._group)), self._nbits).flatten(-2)

    def code_bits(self, head_dim: int) -> float:
        return self._nbits

    def bits(self, head_dim: int) -> float:
        return self._nbits + 2 * SCALE_BITS / self._group


@dataclass(frozen=True)
class MinMax(Baseline):
    """Codes between the extremes of a token's groups."""

    nbits: int
    group_size: int = 64

    def __post_init__(self) -> None:
        self.whole("nbits", 1)
        self.whole("group_size", 1)

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""
        given = (self.nbits, self.group_size)
        return SimulatedCache(config, lambda layer, count: (MinMaxSide(*given), MinMaxSide(*given)))


class LloydMaxSide(Side):
    """Rotated, the token's norm, scalar levels."""

    def __init__(self, nbits: int, sinks: int, window: int) -> None:
        super().__init__(sinks, window, TILE)
        self._nbits = nbits

    def round_trip(self, states: Tensor) -> Tensor:
        rotation = rotation_matrix(states.shape[-1], states.device)
        unit, rms = normalize_tokens(states.float() @ rotation.t())
        positive = torch.tensor(_LEVELS[self._nbits], device=states.device)
        levels = torch.cat([-positive.flip(0), positive])
        decoded = levels[torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)]
        # the norm in 16 bits: bf16, which has no overflow
        return decoded * rms.bfloat16().float() @ rotation

    def code_bits(self, head_dim: int) -> float:
        return self._nbits

    def bits(self, head_dim: int) -> float:
        return self._nbits + SCALE_BITS / head_dim


@dataclass(frozen=True)
class LloydMax(Baseline):
    """Rotated Lloyd-Max codes with our sinks and window."""

    nbits: int
    sinks: int = 4
    window: int = 128

    def __post_init__(self) -> None:
        self.check("nbits", f"one of {sorted(_LEVELS)}", self.nbits in _LEVELS)
        self.whole("sinks", 0)
        self.whole("window", 1)

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""
        given = (self.nbits, self.sinks, self.window)
        return SimulatedCache(config, lambda layer, count: (LloydMaxSide(*given), LloydMaxSide(*given)))


class Fp8Side(Side):
    """E4M3 with a scale that the first tokens of a row fix."""

    def __init__(self) -> None:
        super().__init__(0, 0, 1)
        self._scale: Tensor | None = None

    def round_trip(self, states: Tensor) -> Tensor:
        if self._scale is None:
            largest = states.float().abs().amax((1, 2, 3), keepdim=True)
            self._scale = (largest / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        return to_fp8(states.float() / self._scale) * self._scale

    def code_bits(self, head_dim: int) -> float:
        return 8.0

    def bits(self, head_dim: int) -> float:
        return 8.0

    def fixed_bits(self, heads: int, head_dim: int) -> float:
        return 32.0


@dataclass(frozen=True)
class Fp8(Baseline):
    """FP8 for everything."""

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""
        return SimulatedCache(config, lambda layer, count: (Fp8Side(), Fp8Side()))


class LiteralSide(Side):
    """``compress_kv_head`` of the document, head by head, over what leaves the window at once."""

    def __init__(self, nbits: int, sigma: float, sinks: int, window: int) -> None:
        super().__init__(sinks, window, TILE)
        self._nbits, self._sigma = nbits, sigma
        self._values = self._outliers = self._blocks = 0

    def round_trip(self, states: Tensor) -> Tensor:
        values = states.float()
        mean, std = values.mean(-1, keepdim=True), values.std(-1, keepdim=True)
        outlier = (values - mean).abs() > self._sigma * std
        rest = values.masked_fill(outlier, 0.0)
        low, high = (edge((2, 3), keepdim=True) for edge in (rest.amin, rest.amax))
        step = (high - low) / (2**self._nbits - 1)  # between the levels of torch.linspace
        code = ((rest - low) / step.clamp(min=torch.finfo(torch.float32).tiny)).round()
        self._values += values.numel()
        self._outliers += int(outlier.sum())
        self._blocks += values.shape[0] * values.shape[1]
        return torch.where(outlier, to_fp8(values), low + code * step)

    def code_bits(self, head_dim: int) -> float:
        return self._nbits

    def bits(self, head_dim: int) -> float:
        # the document's dense mask would cost a whole bit; a list of places is what it must mean
        kept = OUTLIER_BITS * self._outliers + SCALE_BITS * 2**self._nbits * self._blocks
        return self._nbits + kept / max(1, self._values)


@dataclass(frozen=True)
class Literal(Baseline):
    """The second seed document's code as written, with our sinks and window."""

    nbits: int = 2
    sigma: float = 3.5
    sinks: int = 4
    window: int = 128

    def __post_init__(self) -> None:
        self.whole("nbits", 1)
        self.check("sigma", "a positive number", isinstance(self.sigma, (int, float)) and self.sigma > 0)
        self.whole("sinks", 0)
        self.whole("window", 1)

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""
        given = (self.nbits, self.sigma, self.sinks, self.window)
        return SimulatedCache(config, lambda layer, count: (LiteralSide(*given), LiteralSide(*given)))
