"""``vq4``: pairs of values share one of 256 vectors, 4 bits a value, rotated. The seed documents' 4-bit tier."""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


VQ4 = Codec(
    format=TileFormat(name="vq4", tier_id=3, encoding=Encoding.VECTOR, code_bits=8, vector_dim=2, entries=256),
    table=Table.CODEBOOK,
    relative_error=7.7e-3,
    summary="2-D vectors, 256 entries",
)
