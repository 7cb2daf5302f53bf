"""Our own vector codes with parts exchanged, for questions that the package has no option for.

With nothing changed this is ``uniform:<tier>`` (a test holds the two together); then the rotation, the key's mean or
the norm-keeping scale can be left out, keys and values can have different tiers, the first and last layers a better
one, and outliers can be kept in FP8.

Gives up: the policies, which need the packed cache.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from baselines.peers import OUTLIER_BITS, TILE, to_fp8
from baselines.simulated import Baseline, Side, SimulatedCache
from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.codecs.codebooks import universal_table
from hf_subbyte_moe.codecs.rotation import rotation_matrix
from hf_subbyte_moe.ops import lattice_entries, normalize_tokens


SCALES = ("norm", "least-squares", "rms")
_TIERS = tuple(codec.name for codec in codecs() if codec.format.vector_dim > 1 and not codec.format.token_outliers)
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Simulated(Baseline):
    """What to leave out or to exchange.

    Attributes:
        tier: of keys and values.
        value_tier: of values instead; None means the same.
        rotation: rotate before quantizing.
        scale: "norm" (the decoded vector is as long as the original), "least-squares" (as close as can be) or "rms"
            (the original's own, as the levels assume).
        mean: remove the key's channel mean.
        channel_power: divide the key's channels by this power of their root mean square (frozen, like the mean).
        protect: so many first and so many last layers get ``protect_tier``.
        protect_tier: see ``protect``.
        outlier_sigma: values beyond so many root mean squares of their token stay in FP8; None keeps none.
        sinks: first tokens that stay exact.
        window: last tokens that stay exact.
    """

    tier: str
    value_tier: str | None = None
    rotation: bool = True
    scale: str = "norm"
    mean: bool = True
    channel_power: float = 0.0
    protect: int = 0
    protect_tier: str = "vq4"
    outlier_sigma: float | None = None
    sinks: int = 4
    window: int = 128

    def __post_init__(self) -> None:
        for name in ("tier", "value_tier", "protect_tier"):
            unset = name == "value_tier" and self.value_tier is None
            self.check(name, f"one of {list(_TIERS)}", unset or getattr(self, name) in _TIERS)
        for name in ("rotation", "mean"):
            self.check(name, "true or false", isinstance(getattr(self, name), bool))
        power = self.channel_power
        self.check("channel_power", "0 to 1", isinstance(power, (int, float)) and 0 <= power <= 1)
        self.check("scale", f"one of {list(SCALES)}", self.scale in SCALES)
        sigma = self.outlier_sigma
        self.check(
            "outlier_sigma", "a positive number", sigma is None or (isinstance(sigma, (int, float)) and sigma > 0)
        )
        self.whole("protect", 0)
        self.whole("sinks", 0)
        self.whole("window", 1)

    def cache(self, config: PreTrainedConfig) -> SimulatedCache:
        """See the module's text."""

        def sides(layer: int, count: int) -> tuple[Side, Side]:
            protected = layer < self.protect or layer >= count - self.protect
            tiers = (self.tier, self.value_tier or self.tier)
            key_tier, value_tier = (self.protect_tier, self.protect_tier) if protected else tiers
            return VectorSide(self, key_tier, keys=True), VectorSide(self, value_tier, keys=False)

        return SimulatedCache(config, sides)


class VectorSide(Side):
    """One side in one vector tier."""

    def __init__(self, given: Simulated, tier: str, keys: bool) -> None:
        super().__init__(given.sinks, given.window, TILE)
        self._given, self._format = given, get_codec(tier).format
        self._centred, self._power = keys and given.mean, given.channel_power if keys else 0.0
        self._mean: Tensor | None = None
        self._channels: Tensor | None = None
        self._values = self._outliers = 0

    def round_trip(self, states: Tensor) -> Tensor:
        values = states.float()
        if self._centred:
            if self._mean is None:
                self._mean = values.mean(2, keepdim=True)
            values = values - self._mean
        if self._power:
            if self._channels is None:
                rms = values.square().mean(2, keepdim=True).sqrt()
                self._channels = rms.clamp(min=_TINY) ** self._power
            values = values / self._channels
        rotation = rotation_matrix(values.shape[-1], values.device)
        if self._given.rotation:
            values = values @ rotation.t()
        decoded = self._coded(values)
        if self._given.rotation:
            decoded = decoded @ rotation
        if self._channels is not None:
            decoded = decoded * self._channels
        return decoded if self._mean is None else decoded + self._mean

    def _coded(self, values: Tensor) -> Tensor:
        sigma = self._given.outlier_sigma
        limit = torch.inf if sigma is None else sigma
        outlier = normalize_tokens(values)[0].abs() > limit
        self._values += values.numel()
        self._outliers += int(outlier.sum())
        inlier = values.masked_fill(outlier, 0.0)
        kept = (~outlier).float().mean(-1, keepdim=True)  # the root mean square is that of the values that are coded
        unit, rms = normalize_tokens(inlier)
        unit, rms = unit * kept.sqrt(), rms / kept.sqrt()
        table = universal_table(self._format, values.device)[0, 0].float()
        decoded = table[lattice_entries(unit.reshape(-1, self._format.vector_dim), table)].view_as(unit)
        decoded = decoded.masked_fill(outlier, 0.0)
        scale = (rms * self._factor(unit, decoded)).bfloat16().float()
        far = to_fp8(values / scale.clamp(min=_TINY)) * scale
        return torch.where(outlier, far, decoded * scale)

    def _factor(self, unit: Tensor, decoded: Tensor) -> Tensor:
        if self._given.scale == "rms":
            return torch.ones_like(unit[..., :1])
        length = decoded.norm(dim=-1, keepdim=True).clamp(min=_TINY)
        if self._given.scale == "norm":
            return unit.norm(dim=-1, keepdim=True) / length
        return (unit * decoded).sum(-1, keepdim=True) / length.square()

    def code_bits(self, head_dim: int) -> float:
        return self._format.code_bits_per_value()

    def bits(self, head_dim: int) -> float:
        return self._format.bits_per_value(head_dim) + OUTLIER_BITS * self._outliers / max(1, self._values)

    def fixed_bits(self, heads: int, head_dim: int) -> float:
        return 32.0 * heads * head_dim * sum(held is not None for held in (self._mean, self._channels))
