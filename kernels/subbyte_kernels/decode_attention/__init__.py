"""Attention over packed tiles, the exact window and the sinks in one call.

``reference.py`` defines it, ``decode_attention.cu`` with ``cuda_kernel.py`` is the fast kernel, ``triton_kernel.py``
the portable one; ``select.py`` takes the first that can do a call. ``unpacked.py`` gives
many tokens at once the tiles themselves.
"""

from subbyte_kernels.decode_attention.reference import (
    AttentionResult,
    AttentionTiles,
    ExactTokens,
    decode_attention_reference,
)
from subbyte_kernels.decode_attention.select import BACKENDS, decode_attention
from subbyte_kernels.decode_attention.triton_kernel import MAX_TOKENS
from subbyte_kernels.decode_attention.unpacked import unpack_pages


__all__ = [
    "BACKENDS",
    "MAX_TOKENS",
    "AttentionResult",
    "AttentionTiles",
    "ExactTokens",
    "decode_attention",
    "decode_attention_reference",
    "unpack_pages",
]
