"""``fp6``: E2M3 with a scale per token, rotated.

E2M3 and not E3M2: with a scale per token the range is not needed, and the third mantissa bit is worth 5 dB. The seed
documents' tier for high entropy.
"""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


FP6 = Codec(
    format=TileFormat(name="fp6", tier_id=2, encoding=Encoding.FLOAT6, code_bits=6),
    table=Table.NONE,
    relative_error=8.3e-4,
    summary="FP6 E2M3, scale per token",
)
