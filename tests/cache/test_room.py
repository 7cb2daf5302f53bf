"""Pools that grow are moved, and captured steps are captured again: so pools grow together, and seldom."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.cache.tiles import TileStore
from hf_subbyte_moe.codecs import codec_of, codecs
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.decode import runner
from hf_subbyte_moe.ops import tiles_ahead
from support.models import prompt, tiny_model


def places(stores: list[TileStore]) -> dict[Any, int]:
    """Where every pool lies."""
    held = {(number, *key): pool for number, store in enumerate(stores) for key, pool in store._pools.items()}
    return {key: pool.records.data_ptr() for key, pool in held.items()}


def moved(before: dict[Any, int], after: dict[Any, int]) -> bool:
    """Whether a pool that was there is somewhere else."""
    return any(before.get(key, place) != place for key, place in after.items())


@pytest.mark.slow
def test_pools_of_all_tiers_and_layers_grow_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))
    sizes = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    options = {"kv_cache": {"bits": 3.0}, "decode": {"cuda_graph": True}}
    model = hf_subbyte_moe.apply(tiny_model("qwen3_moe", **sizes), options)
    cache, ids = EntropySubbyteCache(model.config, bits=3.0), prompt(700, 9)
    moves, before = 0, {}
    with torch.no_grad():
        model(ids, **{CACHE_KW: cache})
        for step in range(340):
            model(ids[:, step, None], **{CACHE_KW: cache})
            now = places([layer.rows.store for layer in cache.packed_layers.values()])
            moves, before = moves + moved(before, now), now
    assert len(before) >= 6  # layers and tiers
    assert cache.layers[0].rows.store.counts.tolist() == [7] * 9  # after three flushes
    assert moves == 1


@pytest.mark.parametrize(("rows", "heads", "held"), [(1, 8, 40), (8, 4, 64), (16, 8, 20)])
def test_pools_move_once_in_eight_flushes(rows: int, heads: int, held: int) -> None:
    """Several layers, sides of one width, tiers that differ from row to row."""
    random, widths = np.random.default_rng(0), (64, 64)
    tiers = [codec.format.tier_id for codec in codecs()][1:5]
    stores = [TileStore(rows, heads, widths, torch.device("cpu")) for _ in range(4)]
    chosen = [random.choice(tiers, (2, rows, heads)) for _ in stores]

    def pack(tiles: int) -> None:
        for store, ids in zip(stores, chosen, strict=True):
            first = int(store.counts[0])
            store.extend(range(rows), tiles)
            for side in range(2):
                taken = np.broadcast_to(ids[side][:, None], (rows, tiles, heads))
                for tier in np.unique(taken):
                    where = np.argwhere(taken == tier)
                    words = codec_of(int(tier)).format.record_words(64)
                    records = torch.zeros(len(where), words, dtype=torch.int32)
                    store.write(
                        side, int(tier), np.stack([where[:, 0], where[:, 2], where[:, 1] + first], 1), [records]
                    )

    pack(held)
    moves, flushes = 0, 64
    for _ in range(flushes):
        needed = [
            sum((store.pool_keys(side, ids[side]) for side in range(2)), start=store.pool_keys(0, ids[0][:0]))
            for store, ids in zip(stores, chosen, strict=True)
        ]
        before, had_room = places(stores), all(map(TileStore.has_room, stores, needed))
        if not had_room:
            for store, tiles in zip(stores, needed, strict=True):
                store.make_room(tiles, rows, tiles_ahead(int(store.counts[0])))
        pack(1)
        assert not (had_room and moved(before, places(stores)))
        moves += moved(before, places(stores))
    assert moves <= math.ceil(flushes / 8) + 1
