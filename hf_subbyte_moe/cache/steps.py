"""Single-token steps of a whole cache at fixed addresses, for a forward that is captured once and replayed.

During a step everything that differs from the last one is computed on the device: the slot of the new token and the
mask of the exact tokens come from two small tensors, how long each row is and where its ring begins, and the step
itself counts the first of them up. So the same launches serve every step. Between two steps the host packs tiles that
are due, and the attention's launches follow the new tiles at their old addresses (``SteadyAttention``).

Gives up: caches with layers that do not pack, and tokens that may be taken back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.cache.cache import EntropySubbyteCache
from hf_subbyte_moe.cache.handle import FixedAddressError
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.ops import Scratch, SteadyAttention, TokenPlace, tiles_ahead


def steps_obstacle(cache: EntropySubbyteCache) -> str | None:
    """Why a cache cannot take its next token at fixed addresses, or None."""
    for layer in cache.layers:
        if not isinstance(layer, EntropySubbyteLayer):
            return f"a layer is a {type(layer).__name__}, which moves its tensors at each step"
        if layer.record_past:
            return "new tokens may be taken back"
        if not layer.is_initialized or layer.is_pending or not layer.rows.lengths.all():
            return "a row has no token yet"
    return None


class CacheSteps:
    """What a step reads and writes beside the model.

    Attributes:
        epoch: launches that were captured in another epoch do not compute the next step.
        left: steps until a row must pack a tile.
        lengths: ``[B]`` int64 on the device, tokens of each row.
        visible: ``[B, 1, slots]`` bool, during a step.
    """

    def __init__(self, cache: EntropySubbyteCache) -> None:
        """Prepare steps of a cache.

        Raises:
            FixedAddressError: it cannot take any; see :func:`steps_obstacle`.
        """
        obstacle = steps_obstacle(cache)
        if obstacle is not None:
            raise FixedAddressError(f"this cache cannot take a token at fixed addresses: {obstacle}")
        self._layers: list[EntropySubbyteLayer] = list(cache.packed_layers.values())
        scratch = Scratch()
        self._attention = {id(layer): SteadyAttention(scratch) for layer in self._layers}
        first = self._layers[0].rows
        self._window, device = first.window, first.window.keys.device
        self.lengths = torch.zeros(len(first.lengths), dtype=torch.int64, device=device)
        self._behind = torch.zeros_like(self.lengths)  # place in the ring's order of the oldest token behind the tiles
        self._slot = torch.arange(self._window.sinks + self._window.ring, device=device)
        self._in_ring = self._slot - self._window.sinks
        self.epoch = self.left = 0
        self.visible = self.lengths.new_zeros(0)
        self._place = self.lengths
        self._places: dict[int, Tensor] = {}
        self._counted: Ints | None = None  # the rows' lengths as the last step left them
        self._versions: list[int] = []
        self._factors: list[Tensor | None] = []

    # ------------------------------------------------------------------ between two steps, on the host

    @property
    def outdated(self) -> bool:
        """The cache was emptied, or has other rows: make new steps for it."""
        first = self._layers[0]
        return not first.is_initialized or first.rows.window is not self._window or len(first.starts) != self.rows

    @property
    def rows(self) -> int:
        """Rows of the cache."""
        return len(self.lengths)

    def prepare(self) -> None:
        """Follow whatever else changed the cache, and pack what is due before the next token.

        Raises:
            FixedAddressError: the cache cannot take a token at fixed addresses any more.
            ValueError: a tile that is due holds NaN or Inf.
        """
        layers, counted = self._layers, self._counted
        if counted is None or not all(layer.rows.lengths is counted for layer in layers) or self._moved():
            self._follow()
        if not self.left:
            self._flush()

    def _moved(self) -> bool:
        """Somebody else has changed tiles."""
        return self._versions != [layer.rows.store.version for layer in self._layers]

    def _follow(self) -> None:
        """Take over rows that a prompt, a crop or a choice of rows has changed."""
        lengths = self._layers[0].rows.lengths
        for layer in self._layers:
            if not np.array_equal(layer.rows.lengths, lengths) or layer.is_pending:
                raise FixedAddressError("the layers of this cache hold different tokens")
            layer.rows.grown(lengths)
            layer.before = None
        self.lengths.copy_(torch.from_numpy(lengths), non_blocking=True)
        self._counted = lengths
        self.epoch += 1
        self._settle()

    def _flush(self) -> None:
        """Pack the tiles that are due before another token."""
        for layer in self._layers:
            layer.pack_due(tiles_ahead(int(layer.rows.store.counts.max(initial=0))))
        self._settle()

    def _settle(self) -> None:
        rows = self._layers[0].rows
        behind = np.maximum(rows.first_recent(), self._window.sinks) - self._window.sinks
        self._behind.copy_(torch.from_numpy(behind), non_blocking=True)
        self.left = rows.free()
        factors = [layer.rows.codecs.balance.factors for layer in self._layers]
        fits = [all(now is before for now, before in zip(factors, self._factors, strict=False))]
        self._factors = factors
        for layer in self._layers:
            tiles = layer.rows.packed() if layer.has_tiles else None
            fits.append(self._attention[id(layer)].refit(tiles))
        if not all(fits):
            self.epoch += 1
        self._versions = [layer.rows.store.version for layer in self._layers]

    def advance(self) -> None:
        """A step was computed, or is on its way: every row has a token more."""
        assert self._counted is not None
        self._counted = self._counted + 1
        for layer in self._layers:
            layer.rows.lengths = self._counted
            layer.length += 1
        self.left -= 1

    def forget(self) -> None:
        """A step was interrupted: the next one looks at the cache again."""
        self._counted = None

    # ------------------------------------------------------------------ during a step, on the device

    @contextmanager
    def step(self) -> Iterator[None]:
        """While this lasts, the cache's layers take one token each at fixed addresses; the host counts nothing."""
        self._begin()
        for layer in self._layers:
            layer.steps = self
        try:
            yield
        finally:
            for layer in self._layers:
                layer.steps = None
            self.visible = self._place = self._slot[:0]
            self._places.clear()

    def _begin(self) -> None:
        """The new token's slot, and which slots its query sees; then rows are a token longer."""
        newest = self.lengths - self._window.sinks  # in the ring's order; a sink's is negative
        ring = self._window.ring
        self._place = torch.where(newest < 0, self.lengths, newest % ring + self._window.sinks)
        # the latest token that fell into each slot of the ring
        latest = newest[:, None] - (newest[:, None] - self._in_ring) % ring
        recent = latest >= self._behind[:, None]
        held = torch.where(self._in_ring < 0, self._slot <= self.lengths[:, None], recent)
        self.visible = held[:, None]
        self.lengths += 1

    def write(self, layer: EntropySubbyteLayer, key_states: Tensor, value_states: Tensor) -> None:
        """Store a token ``[B, H, 1, D]`` of every row."""
        window = layer.rows.window
        rows, heads, size, _ = window.keys.shape
        places = self._places.get(heads)
        if places is None:
            pair = torch.arange(rows * heads, device=self._place.device).view(rows, heads)
            places = self._places[heads] = (pair * size + self._place[:, None]).view(-1)
        stored = layer.rows.codecs.balance.divided(key_states)
        for held, states in ((window.keys, stored), (window.values, value_states)):
            held.view(-1, held.shape[-1]).index_copy_(0, places, states.reshape(-1, held.shape[-1]))

    @property
    def keys_are_plain(self) -> bool:
        """Keys are stored as the model makes them, in all layers."""
        return all(factors is None for factors in self._factors)

    def place(self, layer: EntropySubbyteLayer) -> TokenPlace:
        """Where a layer's new token goes, for a kernel that writes it itself."""
        return TokenPlace(layer.rows.window.keys, layer.rows.window.values, self._place)

    def attend(self, layer: EntropySubbyteLayer, query: Tensor, scaling: float) -> Tensor:
        """``[B, HQ, 1, D]``: attention of queries ``[B, HQ, 1, D]`` to a layer whose keys are plain."""
        tiles = layer.rows.packed() if layer.has_tiles else None
        exact = layer.rows.seen(self.visible)
        return self._attention[id(layer)](query, exact, tiles, scaling, None, None, layer.backend).output

    def attention_of(self, layer: EntropySubbyteLayer) -> SteadyAttention:
        """What computes a layer's attention."""
        return self._attention[id(layer)]
