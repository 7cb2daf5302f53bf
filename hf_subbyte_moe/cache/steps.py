"""Single-token steps of a whole cache at fixed addresses, for a forward that is captured once and replayed.

During a step everything that differs from the last one is read on the device: a counter of steps, which each step
raises by one, and two tables that say which slot the token of a step takes and from which step on a slot is seen. So
the same launches serve every step. Between two steps the host packs tiles that are due and fills the tables anew, and
the attention's launches follow the new tiles at their old addresses (``SteadyAttention``).

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
from hf_subbyte_moe.ops import TILE_TOKENS, Scratch, SteadyAttention, TokenPlace, tiles_ahead
from hf_subbyte_moe.transfers import upload


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
        rows: of the cache.
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
        self.rows = len(first.lengths)
        slots = self._window.sinks + self._window.ring
        with torch.inference_mode(False):
            self._step = torch.zeros(1, dtype=torch.int32, device=device)  # since the tables were filled
            # the step from which a slot is seen, and the slots of each step's tokens
            self._since = torch.zeros(self.rows, slots, dtype=torch.int32, device=device)
            self._slots = torch.zeros(TILE_TOKENS, self.rows, dtype=torch.int64, device=device)
        self.epoch = self.left = 0
        self.visible = self._place = self._slots[0]
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
        self._counted = lengths
        self.epoch += 1
        self._settle()

    def _flush(self) -> None:
        """Pack the tiles that are due before another token.

        A pool that grows moves, and steps are captured again. So where one must grow, all do that would have to soon.
        """
        ahead = tiles_ahead(max(int(layer.rows.store.counts.max(initial=0)) for layer in self._layers))
        if not all(layer.rows.has_room() for layer in self._layers):
            for layer in self._layers:
                layer.rows.make_room(ahead)
        for layer in self._layers:
            layer.pack_due()
        self._settle()

    def _settle(self) -> None:
        rows = self._layers[0].rows
        self.left = rows.free()
        ahead = self._window.slots(rows.lengths + np.arange(self.left)[:, None])
        self._slots[: self.left].copy_(upload(ahead, self._slots.device))
        since = self._window.visible_since(rows.lengths, rows.first_recent())
        self._since.copy_(upload(since, self._since.device))
        self._step.zero_()
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
            self.visible = self._place = self._slots[0]
            self._places.clear()

    def _begin(self) -> None:
        """The new tokens' slots, and which slots their queries see."""
        self._place = self._slots.index_select(0, self._step)[0]
        self._step += 1
        self.visible = (self._since <= self._step)[:, None]

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
