"""``nuq2``: four centroids a head by k-means, unrotated, values beyond 3.5 sigma of their token in FP8.

The seed documents' "2-bit non-uniform with outliers". Unrotated, because rotation would dissolve the outliers that it
keeps. A tile keeps at most 1 % of its values, the largest first: a record has one size.
"""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


NUQ2 = Codec(
    format=TileFormat(
        name="nuq2",
        tier_id=6,
        encoding=Encoding.SCALAR,
        code_bits=2,
        entries=4,
        rotated=False,
        tile_outlier_share=0.01,
    ),
    table=Table.CENTROIDS,
    relative_error=1.2e-1,
    summary="4 centroids a head, FP8 outliers",
)
