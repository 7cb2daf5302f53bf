"""``vq175``: four values share one of 128 vectors, 7 bits: 1.75 bits a value, packed without a spare bit, rotated."""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


VQ175 = Codec(
    format=TileFormat(name="vq175", tier_id=8, encoding=Encoding.VECTOR, code_bits=7, vector_dim=4, entries=128),
    table=Table.CODEBOOK,
    relative_error=1.36e-1,
    summary="4-D vectors, 128 entries, 4 values in 7 bits",
)
