"""``exact``: the model's own bytes. Loses nothing and saves nothing; it proves the plumbing around the codecs."""

from hf_subbyte_moe.codecs.base import Codec, Table
from hf_subbyte_moe.ops import Encoding, TileFormat


EXACT = Codec(
    format=TileFormat(name="exact", tier_id=0, encoding=Encoding.RAW, code_bits=16, rotated=False, centred=False),
    table=Table.NONE,
    relative_error=0.0,
    summary="the model's own bytes",
)
