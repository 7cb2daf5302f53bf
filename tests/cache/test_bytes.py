"""Measured bytes equal the formula, and the promised sizes hold; case A12."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.accounting import LayerGeometry, layer_bytes, pool_capacity, tiles_of
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.codecs import codecs, get_codec
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.patching import use_packed_attention
from support.layers import make_layer, put, states
from support.models import prompt, tiny_model


pytestmark = pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")


def reachable_storages(thing: Any, seen: set[int], found: dict[int, int]) -> None:
    """Bytes of every distinct tensor storage that an object reaches."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, dict):
        for value in thing.values():
            reachable_storages(value, seen, found)
    elif isinstance(thing, (list, tuple, set)):
        for value in thing:
            reachable_storages(value, seen, found)
    elif hasattr(thing, "__dict__"):
        reachable_storages(vars(thing), seen, found)


@pytest.mark.parametrize("policy", ["uniform:vq175", "uniform:nuq2", "error"])
@pytest.mark.parametrize("codebook", ["universal", "online", "queries"])
def test_a12_no_hidden_copy_stays_alive(policy: str, codebook: str) -> None:
    layer = make_layer(policy=policy, codebook=codebook)
    put(layer, *states(2, 600))
    found: dict[int, int] = {}
    reachable_storages(layer, set(), found)
    rotations = layer.rows.codecs.rotations[0].nbytes  # a constant of the package, shared by all layers
    pages = 2 * 2 * 2 * pool_capacity(3) * 4  # kept on the host outside of tensors
    assert sum(found.values()) - rotations + pages == pytest.approx(layer.allocated_bytes(), rel=0.01)
    plain = 2 * 2 * 600 * 64 * 2 * 4
    assert layer.allocated_bytes() < 0.65 * plain


@pytest.mark.parametrize("tier", [codec.name for codec in codecs()])
@pytest.mark.parametrize(
    ("rows", "tokens", "dtype"), [(1, 132, torch.float32), (1, 5000, torch.bfloat16), (3, 700, torch.float16)]
)
def test_bytes_equal_the_formula(tier: str, rows: int, tokens: int, dtype: torch.dtype) -> None:
    layer = make_layer(policy=f"uniform:{tier}")
    key, value = (part.to(dtype) for part in states(rows, tokens + 200))
    put(layer, key[:, :, :tokens], value[:, :, :tokens])
    codec = get_codec(tier)
    for length in range(tokens, tokens + 201):
        if length > tokens:
            put(layer, key[:, :, length - 1 : length], value[:, :, length - 1 : length])
        tiles = tiles_of(length, 4, 128)
        geometry = LayerGeometry(rows, 2, 64, 64, dtype.itemsize, 128, 4)
        record = 4 * codec.format.record_words(64, dtype.itemsize)
        table = codec.format.entries * codec.format.vector_dim * 2
        if tier == "nuq2":
            table = 2 * rows * 2 * 4 * 4  # both sides, every row and head, four fp32 centroids
        expected = layer_bytes(geometry, tiles, [(record, 2 * rows * 2 * tiles)], table)
        assert layer.allocated_bytes() == expected, length


@pytest.mark.parametrize(
    ("heads", "head_dim", "tokens", "below_fp8", "below_bf16"),
    [(2, 64, 16384, 0.71, 0.85), (8, 128, 65536, 0.75, 0.87)],
)
def test_vq175_is_as_small_as_promised(
    heads: int, head_dim: int, tokens: int, below_fp8: float, below_bf16: float
) -> None:
    """By the formula that the test above holds to the measured bytes, everything counted."""
    geometry = LayerGeometry(1, heads, head_dim, head_dim, 2, 128, 4)
    tiles = tiles_of(tokens, 4, 128)
    record = 4 * get_codec("vq175").format.record_words(head_dim)
    total = layer_bytes(geometry, tiles, [(record, 2 * heads * tiles)], 128 * 4 * 2)
    values = tokens * geometry.values_per_token
    assert total <= (1 - below_fp8) * values
    assert total <= (1 - below_bf16) * 2 * values


def test_vq175_measured_at_16k() -> None:
    layer = make_layer(policy="uniform:vq175")
    key, value = (part.bfloat16() for part in states(1, 16384))
    put(layer, key, value)
    plain = key.nbytes + value.nbytes
    assert layer.allocated_bytes() <= 0.15 * plain
    assert layer.allocated_bytes() <= 0.29 * plain / 2


def test_a12_pools_that_grew_leave_nothing_behind() -> None:
    model = tiny_model("mixtral")
    use_packed_attention(model)
    cache = EntropySubbyteCache(model.config, policy="uniform:vq2", window=8, sinks=2)
    ids = prompt(1800)
    with torch.no_grad():
        model(ids[:, :600], **{CACHE_KW: cache})
        layer = cache.packed_layers[0]
        old = weakref.ref(layer.rows.packed().values.pools[7])
        model(ids[:, 600:1200], **{CACHE_KW: cache})  # attends to the tiles, then packs more
    gc.collect()
    assert old() is None
    assert layer.rows.packed().values.pools[7].shape[0] > 2
