"""Tiers by name and by the id that pages carry."""

from collections.abc import Iterator

from hf_subbyte_moe.codecs.base import Codec
from hf_subbyte_moe.codecs.exact import EXACT
from hf_subbyte_moe.codecs.fp6 import FP6
from hf_subbyte_moe.codecs.fp8 import FP8
from hf_subbyte_moe.codecs.nuq2 import NUQ2
from hf_subbyte_moe.codecs.vq2 import VQ2
from hf_subbyte_moe.codecs.vq3 import VQ3, VQ3O
from hf_subbyte_moe.codecs.vq4 import VQ4
from hf_subbyte_moe.codecs.vq175 import VQ175


_BY_NAME: dict[str, Codec] = {}
_BY_ID: dict[int, Codec] = {}


def register_codec(codec: Codec) -> None:
    """Add a tier.

    Raises:
        ValueError: its name or id is taken.
    """
    if codec.name in _BY_NAME:
        raise ValueError(f"tier {codec.name!r} is registered already")
    if codec.tier_id in _BY_ID:
        raise ValueError(f"tier {codec.name!r}: id {codec.tier_id} belongs to {_BY_ID[codec.tier_id].name!r}")
    _BY_NAME[codec.name] = codec
    _BY_ID[codec.tier_id] = codec


def get_codec(name: str) -> Codec:
    """The tier of that name.

    Raises:
        ValueError: unknown; the message lists what exists.
    """
    if name not in _BY_NAME:
        raise ValueError(f"unknown tier {name!r}; there are {sorted(_BY_NAME)}")
    return _BY_NAME[name]


def codec_of(tier_id: int) -> Codec:
    """The tier that a page names by its id."""
    return _BY_ID[tier_id]


def codecs() -> Iterator[Codec]:
    """All tiers, most bits first."""
    return iter(sorted(_BY_NAME.values(), key=lambda codec: -codec.format.bits_per_value(128)))


for _codec in (EXACT, FP8, FP6, VQ4, VQ3, VQ3O, NUQ2, VQ2, VQ175):
    register_codec(_codec)
