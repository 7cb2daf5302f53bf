"""``vq3``: pairs of values share one of 64 vectors, 3 bits a value, rotated; ``vq3o`` adds outlier registers.

The key's channel mean is removed first, which is the asymmetry of the seed documents' "asymmetric 3-bit vector
quantization". Their "outlier preservation registers" are ``vq3o``: the two values of a token that the code misses most
are kept in FP8. Rotation leaves few outliers, so the registers buy little for their bits, and no policy picks them.
"""

from dataclasses import replace

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


VQ3 = Codec(
    format=TileFormat(name="vq3", tier_id=4, encoding=Encoding.VECTOR, code_bits=6, vector_dim=2, entries=64),
    table=Table.CODEBOOK,
    relative_error=3.0e-2,
    summary="2-D vectors, 64 entries",
)

VQ3O = Codec(
    format=replace(VQ3.format, name="vq3o", tier_id=5, token_outliers=2),
    table=Table.CODEBOOK,
    relative_error=2.45e-2,
    summary="2-D vectors, 64 entries, two FP8 registers a token",
)
