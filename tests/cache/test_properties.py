"""Random sequences of operations against a plain-list model of the cache (hypothesis)."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from transformers import LlamaConfig

from hf_subbyte_moe.cache import EntropySubbyteCache, EntropySubbyteLayer
from hf_subbyte_moe.codecs import get_codec


pytestmark = pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")

WINDOW, SINKS, TILE, HEADS, DIM = 8, 2, 128, 2, 16


@dataclass
class ListRow:
    """A row as a list of tokens ``[H, D]``; ``tiles`` of them are packed."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    tiles: int = 0

    def settle(self) -> None:
        self.tiles = max(self.tiles, (len(self.keys) - SINKS - WINDOW) // TILE)

    def crop(self, count: int) -> None:
        length = max(0, len(self.keys) - count)
        del self.keys[length:], self.values[length:]
        self.tiles = min(self.tiles, max(0, (length - SINKS) // TILE))

    def copy(self) -> "ListRow":
        return ListRow(list(self.keys), list(self.values), self.tiles)


OPERATIONS = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 300)),
    st.tuples(st.just("steps"), st.integers(1, 150)),
    st.tuples(st.just("crop"), st.integers(0, 320)),
    st.tuples(st.just("reorder"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 3), min_size=1, max_size=2)),
)


def new_layer(tier: str) -> EntropySubbyteLayer:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=DIM, num_hidden_layers=1)
    return EntropySubbyteCache(config, policy=f"uniform:{tier}", window=WINDOW, sinks=SINKS).layers[0]


class Pair:
    """The layer under test and its model."""

    def __init__(self, tier: str, rows: int) -> None:
        self.layer, self.rows = new_layer(tier), [ListRow() for _ in range(rows)]
        self.generator = torch.Generator().manual_seed(0)
        self.cropped = False

    def update(self, tokens: int) -> None:
        key, value = (torch.randn(len(self.rows), HEADS, tokens, DIM, generator=self.generator) for _ in range(2))
        self.layer.update(key, value)
        self.layer.settle_without_statistics()
        for number, row in enumerate(self.rows):
            row.keys += key[number].unbind(1)
            row.values += value[number].unbind(1)
            row.settle()

    def choose(self, index: list[int], name: str) -> None:
        chosen = torch.tensor([number % len(self.rows) for number in index])
        if name == "reorder":
            self.layer.reorder_cache(chosen)
        else:
            self.layer.batch_select_indices(chosen)
        self.rows = [self.rows[number].copy() for number in chosen.tolist()]

    def run(self, name: str, amount: int | list[int]) -> None:
        if isinstance(amount, list):
            if self.layer.is_initialized:
                self.choose(amount, name)
        elif name == "update":
            self.update(amount)
        elif name == "steps":
            for _ in range(amount):
                self.update(1)
        elif name == "crop":
            self.layer.crop(-amount)
            for row in self.rows:
                row.crop(amount)
        elif self.layer.is_initialized and len(self.rows) * amount <= 4:
            self.layer.batch_repeat_interleave(amount)
            self.rows = [row.copy() for row in self.rows for _ in range(amount)]

    def check(self, error: float) -> None:
        length = len(self.rows[0].keys)
        assert self.layer.get_seq_length() == length
        if not self.layer.is_initialized:
            return
        assert self.layer.rows.store.counts.tolist() == [row.tiles for row in self.rows]
        assert self.layer.rows.lengths.tolist() == [length] * len(self.rows)
        if not length:
            return
        for side, states in enumerate(self.layer.dequantize()):
            given = torch.stack([torch.stack((row.keys, row.values)[side], dim=1) for row in self.rows])
            newest = slice(max(0, length - WINDOW), None)
            if error == 0:
                assert torch.equal(states, given)
                continue
            wrong = (states - given).norm(dim=-1) / given.norm(dim=-1)
            assert wrong.max() <= 1  # one token at its worst
            assert wrong.square().mean() <= 1.5 * error
            if not self.cropped:
                assert torch.equal(states[:, :, newest], given[:, :, newest])
            assert torch.equal(states[:, :, :SINKS], given[:, :, :SINKS])


@pytest.mark.parametrize("tier", ["exact", "vq4"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(rows=st.integers(1, 3), operations=st.lists(OPERATIONS, min_size=1, max_size=7))
def test_operations_in_any_order_equal_a_plain_list(
    tier: str, rows: int, operations: list[tuple[str, int | list[int]]]
) -> None:
    pair = Pair(tier, rows)
    for name, amount in operations:
        pair.run(name, amount)
        pair.cropped = pair.cropped or name == "crop"
        pair.check(get_codec(tier).relative_error)
    if pair.layer.is_initialized:
        store = pair.layer.rows.store
        named = set(store._pages[store._pages >= 0].tolist())
        pools = list(store._pools.values())
        # every slot is either named by a page or free
        assert len(named) + sum(len(pool._free) for pool in pools) == sum(pool.peak for pool in pools)
