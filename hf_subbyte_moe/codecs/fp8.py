"""``fp8``: E4M3 with a scale per token, unrotated: the format that people know, as a point of comparison."""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


FP8 = Codec(
    format=TileFormat(name="fp8", tier_id=1, encoding=Encoding.FLOAT8, code_bits=8, rotated=False, centred=False),
    table=Table.NONE,
    relative_error=7.0e-4,
    summary="FP8 E4M3, scale per token",
)
