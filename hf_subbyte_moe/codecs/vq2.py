"""``vq2``: four values share one of 256 vectors, 2 bits a value, rotated."""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


VQ2 = Codec(
    format=TileFormat(name="vq2", tier_id=7, encoding=Encoding.VECTOR, code_bits=8, vector_dim=4, entries=256),
    table=Table.CODEBOOK,
    relative_error=9.8e-2,
    summary="4-D vectors, 256 entries",
)
