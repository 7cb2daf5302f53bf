"""Attention over packed tiles, the exact window and the sinks in one call. ``reference.py`` defines it."""

from subbyte_kernels.decode_attention.reference import (
    AttentionResult,
    AttentionTiles,
    ExactTokens,
    decode_attention_reference,
)


__all__ = ["AttentionResult", "AttentionTiles", "ExactTokens", "decode_attention_reference"]
