"""Tiers: how keys and values become codes. One file a tier; ``registry.py`` knows them all."""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.codecs.registry import codec_of, codecs, get_codec, register_codec


__all__ = ["Codec", "Table", "codec_of", "codecs", "get_codec", "register_codec"]
