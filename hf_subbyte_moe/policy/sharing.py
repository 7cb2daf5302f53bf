"""What every rank measured on its own heads, put together for a choice over all of them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hf_subbyte_moe.distributed.heads import HeadRanks
from hf_subbyte_moe.policy.policies import Measured, Needs


def own_needs(needs: Needs, ranks: HeadRanks | None) -> Needs:
    """A policy's needs as far as they concern this rank's heads."""
    if ranks is None or needs.known is None:
        return needs
    return replace(needs, known=needs.known[ranks.part(len(needs.known))])


def gather_chunks(chunks: Sequence[Measured], ranks: HeadRanks) -> list[Measured]:
    """Chunks of all heads, the same on every rank; every rank must call with chunks of the same tiles."""
    tiers = len(chunks[0].candidates)
    own = np.stack(
        [
            np.concatenate([chunk.entropy[:, None], chunk.mass[:, None], chunk.errors.reshape(-1, 2 * tiers)], axis=1)
            for chunk in chunks
        ]
    )  # [chunks, H, 2 + 2 C]
    everyone = np.concatenate(ranks.gather(own), axis=1)
    return [
        replace(chunk, entropy=known[:, 0], mass=known[:, 1], errors=known[:, 2:].reshape(-1, 2, tiers))
        for chunk, known in zip(chunks, everyone, strict=True)
    ]
