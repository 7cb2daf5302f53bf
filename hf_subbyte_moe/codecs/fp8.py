"""``fp8``: E4M3 with a scale per token: the format that people know, as a point of comparison.

Rotated and centred like the other tiers, though it gains nothing by it: tiles of all tiers then live in one space, and
one kernel reads them all.
"""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


FP8 = Codec(
    format=TileFormat(name="fp8", tier_id=1, encoding=Encoding.FLOAT8, code_bits=8),
    table=Table.NONE,
    relative_error=6.7e-4,
    summary="FP8 E4M3, scale per token",
)
