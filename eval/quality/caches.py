"""Caches that the harness alone knows. Each name makes one from a model's config and what computes attention.

``control`` must lose, or the harness does not see damage. It is the real packed cache in its 2-bit tier, whose
codebook is replaced by one of 16 distinct 4-D vectors (fitted to a Gaussian, each repeated to fill the table): so its
codes say one bit a value, on every backend and through every kernel that the measured policies use. Random codes would
lose in any harness; one bit must be told from 1.75.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from baselines import Bits
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.codecs import get_codec
from hf_subbyte_moe.codecs.codebooks import lloyd
from hf_subbyte_moe.explain import cache_size
from hf_subbyte_moe.policy import KEYS, VALUES


CONTROL = "control"
CONTROL_BITS = 1.0
_CARRIER = get_codec("vq2")
_VECTORS, _STEPS = 1 << 14, 20


@lru_cache(maxsize=4)
def one_bit_table(device: torch.device) -> Tensor:
    """``[1, 1, entries, vector_dim]`` fp16 as the 2-bit tier wants it, with one bit a value of distinct entries."""
    fmt = _CARRIER.format
    distinct = 2 ** int(CONTROL_BITS * fmt.vector_dim)
    vectors = torch.randn(_VECTORS, fmt.vector_dim, generator=torch.Generator().manual_seed(0))
    table = lloyd(vectors, vectors[:distinct].clone(), _STEPS)
    return table.repeat_interleave(fmt.entries // distinct, dim=0).to(device, torch.float16)[None, None]


class OneBitCache(EntropySubbyteCache):
    """The control; see the module's text."""

    def __init__(self, config: PreTrainedConfig, backend: str, /) -> None:
        super().__init__(config, policy=f"uniform:{_CARRIER.name}", codebook="universal", backend=backend)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; a layer's tables are replaced once it has them, before it packs."""
        made = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer = self.packed_layers.get(layer_idx)
        if layer is not None:
            for side in (KEYS, VALUES):
                layer.rows.codecs.tables(side)[_CARRIER.tier_id] = one_bit_table(key_states.device)
        return made


def size_of(cache: Cache) -> Bits | None:
    """What a packed cache or a baseline holds; None for any other."""
    if not isinstance(cache, EntropySubbyteCache):
        return cache.size() if hasattr(cache, "size") else None
    size = cache_size(cache)
    total_16 = size.bits_total
    if size.bits_total is not None:
        values = excess = 0
        for layer in cache.packed_layers.values():
            geometry, rows = layer.rows.geometry(), layer.rows
            values += int(rows.lengths.sum()) * geometry.values_per_token
            excess += sum(8 * tensor.nbytes - 16 * tensor.numel() for tensor in (rows.window.keys, rows.window.values))
        total_16 = size.bits_total - excess / values
    return Bits(size.code_bits, size.bits, size.bits_total, total_16)


CACHES: dict[str, Callable[[PreTrainedConfig, str], Cache]] = {CONTROL: OneBitCache}
