"""All packed tiles of a side in the model's own space: what many new tokens attend to, who read them once for all."""

import torch
from torch import Tensor

from subbyte_kernels.formats import TILE_TOKENS, PackedTiles, page_slots, page_tiers
from subbyte_kernels.pack_tiles import unpack_tiles


_AT_ONCE = 1 << 25  # values whose records and codes are held beside the result


def unpack_pages(side: PackedTiles, dtype: torch.dtype) -> Tensor:
    """Dequantize every tile that a row has.

    Args:
        side: packed keys or values.
        dtype: the model's dtype, which the tiles came in.

    Returns:
        ``[B, H, T * 128, D]``, zero where a row has no such tile.
    """
    batch, heads, tiles = side.pages.shape
    dim, device = side.head_dim, side.pages.device
    out = torch.zeros(batch * heads * tiles, TILE_TOKENS, dim, dtype=dtype, device=device)
    # which tier a page has decides what runs: on the host, where the pages are known, nobody waits for the device
    pages = (side.pages.cpu() if side.host_pages is None else torch.from_numpy(side.host_pages)).reshape(-1)
    tiers, slots = page_tiers(pages), page_slots(pages).long()
    for tier_id, fmt in side.formats.items():
        for places in (tiers == tier_id).nonzero().squeeze(-1).split(max(1, _AT_ONCE // (TILE_TOKENS * dim))):
            if not len(places):
                continue
            here = places.to(device)
            records = side.pools[tier_id].index_select(0, slots[places].to(device))
            unit = here // tiles  # row * heads + head
            mean = None if side.mean is None else side.mean.flatten(0, 1)[unit]
            table, rows = side.table_rows(tier_id, unit)
            made = unpack_tiles(records, fmt, table, rows, side.rotation, mean, dtype, side.order, side.signs)
            if len(places) == len(out):
                out = made  # one tier, every page there is
            else:
                out[here] = made
    return out.view(batch, heads, -1, dim)
