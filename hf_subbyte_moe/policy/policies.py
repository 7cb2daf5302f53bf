"""Which tier each (KV head, side, chunk) of one row of one layer gets.

A policy sees what was measured on the prompt and, if it keeps a budget, how many bits it may spend. Raw entropy is
measured and shown for every head, but it has no portable sign: on one model high-entropy heads need more bits, on
another fewer. The measured error of the head's own output ranks heads on both, and is the default.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hf_subbyte_moe.codecs import Codec, get_codec
from hf_subbyte_moe.config import AUTO, DEFAULT_BITS, UNIFORM, KVCacheConfig
from hf_subbyte_moe.policy.allocation import Floats, allocate


KEYS, VALUES = 0, 1
SIDES = ("keys", "values")
CANDIDATES = tuple(get_codec(name) for name in ("vq175", "vq2", "vq3", "vq4", "fp6"))
_POSITIONAL = get_codec("vq4")
HIGH_ENTROPY, LOW_ENTROPY = 4.5, 2.5  # bits; the seed documents' thresholds
_KEY_WEIGHT = 4.0  # how much more a key's error costs than a value's where nothing was measured
_GOLDEN = 0.6180339887  # multiples of it fill the unit interval evenly
_RANK_SPAN_BITS = 3.0  # how many bits apart the ends of a ranking are valued


@dataclass(frozen=True)
class Measured:
    """What sampled queries of a prompt say about one chunk of one row of one layer.

    Attributes:
        first_tile: the chunk's first tile in its row.
        tiles: how many tiles it has; 0 for a prompt too short to pack, whose measurements serve later tiles.
        entropy: ``[H]`` mean entropy in bits of the attention of the sampled queries, to everything or, where the
            policy asks for that, to the chunk alone; NaN where none was sampled.
        mass: ``[H]`` share of their attention that falls on the chunk; NaN likewise.
        errors: ``[H, 2, C]`` error of the layer's attention output if this head's keys or values alone had one of the
            policy's C tiers, relative to the output's energy; a prior where nothing was sampled.
        candidates: the policy's tiers.
    """

    first_tile: int
    tiles: int
    entropy: Floats
    mass: Floats
    errors: Floats
    candidates: Sequence[Codec]


@dataclass(frozen=True)
class ChunkStatistics(Measured):
    """A measured chunk and what its policy chose for it.

    Attributes:
        tiers: ``[H, 2]`` tier ids.
        chosen_errors: ``[H, 2]`` the errors of these.
    """

    tiers: NDArray[np.int64]
    chosen_errors: Floats


def prior_errors(candidates: Sequence[Codec], heads: int) -> Floats:
    """``[H, 2, C]``: Gaussian error of each tier, keys weighted as they usually matter."""
    errors = np.array([codec.relative_error for codec in candidates])
    return np.tile(np.stack([_KEY_WEIGHT * errors, errors]), (heads, 1, 1))


def unmeasured(candidates: Sequence[Codec], heads: int, first_tile: int, tiles: int) -> Measured:
    """A chunk about which nothing is known."""
    unknown = np.full(heads, np.nan)
    return Measured(first_tile, tiles, unknown, unknown, prior_errors(candidates, heads), candidates)


@dataclass(frozen=True)
class Needs:
    """What a policy wants to know about a chunk.

    Attributes:
        errors: what each of its tiers would cost; what is known, or priors, serve where it is False.
        known: ``[H, 2, C]`` errors that need no measuring, or None.
        residual: ``entropy`` is that of the attention to the chunk alone, without sinks and window.
        chunk: tiles that share a choice, whatever the config says, with nothing measured; None: as the config says.
    """

    errors: bool = True
    known: Floats | None = None
    residual: bool = False
    chunk: int | None = None


class Policy(Protocol):
    """Chooses tiers for the chunks of one row of one layer."""

    @property
    def tiers(self) -> Sequence[Codec]:
        """Every tier that it may choose."""

    @property
    def needs(self) -> Needs:
        """What it wants to know."""

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        """Numbers ``[chunks, H, 2]`` of tiers in ``tiers``.

        Args:
            chunks: what was measured.
            bits: ``[2, C]`` bits a value of each of the policy's tiers, for keys and for values.
            sizes: ``[chunks, 2]`` values of one head in a chunk.
            budget: bits for all of it; ignored by policies without a budget.
        """


def _allocate(errors: Floats, bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
    """``[chunks, H, 2, C]`` errors -> ``[chunks, H, 2]`` choices under a budget."""
    shape = errors.shape[:-1]
    units = errors.reshape(-1, errors.shape[-1])
    cost = np.broadcast_to(bits, (*shape, bits.shape[-1])).reshape(units.shape)
    spread = np.broadcast_to(sizes[:, None, :], shape).reshape(-1)
    return allocate(units, cost, spread, budget).reshape(shape)


class ErrorPolicy:
    """Greedy by the measured error of the attention output, keys and values apart."""

    tiers: Sequence[Codec] = CANDIDATES
    needs = Needs()

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        return _allocate(np.stack([chunk.errors for chunk in chunks]), bits, sizes, budget)


class EntropyRankPolicy:
    """The seed documents' direction under a budget, the higher a head's entropy, the more bits; or its reverse."""

    tiers: Sequence[Codec] = CANDIDATES

    def __init__(self, sign: float = 1.0, residual: bool = False) -> None:
        """``sign`` -1 reverses; ``residual`` looks at the entropy without sinks and window."""
        self._sign, self.needs = sign, Needs(residual=residual)

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        entropy = self._sign * np.nan_to_num(np.stack([chunk.entropy for chunk in chunks]))
        _, place, count = np.unique(entropy.reshape(-1), return_inverse=True, return_counts=True)
        middle = count.cumsum() - (count + 1) / 2  # the rank of equal ones is their middle one
        rank = middle[place] / max(1, entropy.size - 1)
        weight = 4.0 ** (_RANK_SPAN_BITS * rank.reshape(entropy.shape))
        return _allocate(prior_errors(self.tiers, entropy.shape[1]) * weight[:, :, None, None], bits, sizes, budget)


class RandomPolicy:
    """Heads and sides in a random order, the same for every prompt, valued as far apart as the rankings."""

    tiers: Sequence[Codec] = CANDIDATES
    needs = Needs(errors=False)

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        heads = len(chunks[0].entropy)
        rank = np.random.default_rng(self._layer).permutation(heads * 2).reshape(heads, 2) / max(1, heads * 2 - 1)
        errors = np.array([codec.relative_error for codec in self.tiers]) * 4.0 ** (_RANK_SPAN_BITS * rank[..., None])
        return _allocate(np.tile(errors, (len(chunks), 1, 1, 1)), bits, sizes, budget)


class MixPolicy:
    """The same bits for every head and side, also between two tiers: their tiles take turns along the tokens.

    Heads, sides and layers start their turns at different tiles, so that every token gets about the same bits, too.
    Tiles that come while decoding keep the tier of the prompt's last one.
    """

    tiers: Sequence[Codec] = CANDIDATES
    needs = Needs(errors=False, chunk=1)

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        heads = len(chunks[0].entropy)
        wanted = budget / (float(sizes.sum()) * heads)
        average = sizes.sum(0) @ bits / sizes.sum()  # [C] bits of a tier over both sides
        low = max(0, int(np.searchsorted(average, wanted + 1e-6, side="right")) - 1)
        high = min(low + 1, len(average) - 1)
        share = 0.0 if high == low else float((wanted - average[low]) / (average[high] - average[low]))
        unit = np.arange(heads * 2).reshape(heads, 2) + 2 * heads * self._layer
        start = unit * _GOLDEN % 1
        tile = np.array([chunk.first_tile for chunk in chunks])[:, None, None]
        turns = np.floor((tile + 1) * share + start) - np.floor(tile * share + start)
        return np.where(turns > 0, high, low).astype(np.int64)


class EntropyPolicy:
    """The seed documents' rule as written: above 4.5 bits FP6, above 2.5 bits 3-bit vectors, else 1.75 bits."""

    tiers: Sequence[Codec] = tuple(get_codec(name) for name in ("fp6", "vq3", "vq175"))
    needs = Needs()

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        high, middle, low = range(3)
        entropy = np.stack([chunk.entropy for chunk in chunks])
        # nothing measured counts as high: the safe side
        tier = np.where(entropy <= LOW_ENTROPY, low, np.where(entropy <= HIGH_ENTROPY, middle, high))
        return np.repeat(tier[:, :, None], 2, axis=2).astype(np.int64)


class UniformPolicy:
    """One tier for everything."""

    needs = Needs()

    def __init__(self, tier: str) -> None:
        self.tiers: Sequence[Codec] = (get_codec(tier),)

    def choose(self, chunks: Sequence[Measured], bits: Floats, sizes: Floats, budget: float) -> NDArray[np.int64]:
        return np.zeros((len(chunks), len(chunks[0].entropy), 2), dtype=np.int64)


def make_policy(config: KVCacheConfig, layer: int = 0) -> Policy:
    """The policy that a config names, for one layer; ``calibrated`` comes out of its sidecar instead."""
    if config.policy.startswith(UNIFORM):
        return UniformPolicy(config.policy.removeprefix(UNIFORM))
    named: dict[str, Callable[[], Policy]] = {
        AUTO: ErrorPolicy,
        "error": ErrorPolicy,
        "entropy_rank": EntropyRankPolicy,
        "entropy_rank_inverse": lambda: EntropyRankPolicy(-1.0),
        "residual_entropy": lambda: EntropyRankPolicy(-1.0, residual=True),
        "random": lambda: RandomPolicy(layer),
        "uniform": lambda: MixPolicy(layer),
        "entropy": EntropyPolicy,
    }
    return named[config.policy]()


def positional(codec: Codec) -> Codec:
    """The tier that the rotary part of a latent cache's key gets instead: at least 4 bits.

    It is a ninth of the bytes of DeepSeek's cache and as fragile as any key.
    """
    return codec if codec.format.code_bits_per_value() >= _POSITIONAL.format.code_bits_per_value() else _POSITIONAL


def side_codec(codec: Codec, side: int, latent: bool) -> Codec:
    """The tier that a side really gets when ``codec`` is chosen for it; ``latent``: the second side is positional."""
    return positional(codec) if latent and side == VALUES else codec


def side_bits(tiers: Sequence[Codec], dims: tuple[int, int], latent: bool) -> Floats:
    """``[2, C]`` bits a value of each side under each tier."""
    return np.array(
        [
            [side_codec(codec, side, latent).format.bits_per_value(dim) for codec in tiers]
            for side, dim in enumerate(dims)
        ]
    )


def budget_bits(config: KVCacheConfig, dims: tuple[int, int], latent: bool = False) -> float | None:
    """Bits a value to keep to at these widths of the two sides; None for a policy that fixes its own.

    Without a number from the user it is ``DEFAULT_BITS``, or the least that the tiers need where a small head
    dimension makes scales expensive.

    Raises:
        ValueError: the user's number is out of reach; names the range that is possible.
    """
    if not config.keeps_budget:
        return None
    bits = side_bits(CANDIDATES, dims, latent)
    least, most = (float(np.dot(ends, dims) / sum(dims)) for ends in (bits.min(1), bits.max(1)))
    if config.bits is None:
        return max(DEFAULT_BITS, least)
    if not least <= config.bits <= most:
        width = f"head_dim {dims[0]}" if len(set(dims)) == 1 else f"widths {dims[0]} and {dims[1]}"
        raise ValueError(
            f"bits={config.bits} is out of reach at {width}: the tiers {[codec.name for codec in CANDIDATES]} give "
            f"{least:.3f} to {most:.3f} bits a value"
        )
    return float(config.bits)
