"""One decoder layer's KV cache in sub-byte tiles, as Transformers sees it.

A row's tokens, oldest first: sinks (exact), packed tiles of 128 tokens, window (exact, the ring of ``window.py``).
A prompt's tokens stay exact until their attention call, which measures how the heads attend and then has them packed;
so packing costs one layer's exact keys and values at a time. On a GPU, which would have nothing to do while the host
waits for what was measured, a layer is packed after the next one's attention call, or when anybody asks for its rows;
so two layers' exact keys and values are held. A single new token enters the window, and where the
window holds a tile more than its recent tokens, the oldest tile is quantized once, whole, and appended.

Columns count as Transformers counts them, padding included; the rows of ``packing.py`` hold no padding.

Gives up: cropping into a tile brings what is left of it back with its quantization error.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.accounting import TILE_TOKENS
from hf_subbyte_moe.cache.handle import FixedAddressError, LayerView, ModuleReference, PackedKV
from hf_subbyte_moe.cache.packing import PackedRows
from hf_subbyte_moe.cache.prompts import BitLedger, LayerStatistics, Snapshot
from hf_subbyte_moe.cache.settling import SettlingLayer
from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.codecs.rotation import rotation_block
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.distributed.heads import head_ranks
from hf_subbyte_moe.policy import KEYS, SIDES, VALUES, Policy, budget_bits
from hf_subbyte_moe.transfers import waits_cost


if TYPE_CHECKING:
    from hf_subbyte_moe.cache.steps import CacheSteps

# a register of vq3o names its channel in one byte, an outlier of nuq2 its place in the tile in two
_WIDEST = {"uniform:vq3o": 256, "uniform:nuq2": 512}


def check_widths(config: KVCacheConfig, dims: tuple[int, int], latent: bool) -> None:
    """Refuse widths that cannot be packed, or that put a budget out of reach.

    Raises:
        ValueError: names the width and what is possible.
    """
    for dim in dims:
        rotation_block(dim)
        widest = _WIDEST.get(config.policy, dim)
        if dim > widest:
            raise ValueError(f"{config.policy!r} packs keys and values of at most {widest} channels, not {dim}")
    budget_bits(config, dims, latent)


class EntropySubbyteLayer(SettlingLayer):
    """Keys and values of one layer; see the module's text.

    Attributes:
        record_past: new tokens may be taken back by :meth:`crop`; their tiles are packed only then.
        steps: who takes the next token at fixed addresses, while a step lasts.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    steps: "CacheSteps | None" = None

    def __init__(
        self,
        config: KVCacheConfig,
        policy: Policy,
        previous: "EntropySubbyteLayer | None",
        latent: bool = False,
        metric: Tensor | None = None,
    ) -> None:
        """Make an empty layer.

        Args:
            config: options.
            policy: chooses tiers.
            previous: the packed layer before this one, whose unspent bits this one may use.
            latent: keys are latents, which are values too, and values are the rest of the keys.
            metric: ``[H, D, D]`` what errors of keys cost, calibrated; None without.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._config = config
        self._policy = policy
        self._latent = latent
        self._metric = metric
        self.record_past = False
        self._ledger: BitLedger = BitLedger(None if previous is None else previous._ledger)
        self.statistics = LayerStatistics(config.policy)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.is_initialized = False
        self._attention = ModuleReference()
        self.length = 0
        self.starts: Ints = np.zeros(0, dtype=np.int64)
        self._pending: tuple[Tensor, Tensor] | None = None
        self._take_measured()
        self.before: Snapshot | None = None
        self.statistics.chunks = []
        self.__dict__.pop("_rows", None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take shapes, dtype and device from the first states ``[B, H, any, D]``.

        Raises:
            ValueError: a head dimension that cannot be packed, or a budget out of its reach.
        """
        dims = (key_states.shape[-1], value_states.shape[-1])
        check_widths(self._config, dims, self._latent)
        self.dtype, self.device = key_states.dtype, key_states.device
        self._rows = PackedRows(
            self._config,
            self._policy,
            self._ledger,
            self.statistics,
            key_states,
            value_states,
            self._latent,
            self._metric,
        )
        if self.record_past:
            self.rows.keep_slack()
        self.starts = np.zeros(key_states.shape[0], dtype=np.int64)
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens.

        Args:
            key_states: ``[B, H, T, D]``, T at least 1, finite: a single token on an accelerator is checked when its
                tile is packed; a prompt on a GPU when its layer is packed.
            value_states: ``[B, H, T, Dv]``.
            *args: ignored, as every cache layer of Transformers does.
            **kwargs: likewise.

        Returns:
            :class:`PackedKV` keys and values of all tokens so far.

        Raises:
            ValueError: no token, other shapes than before, or a value that is not finite, here or in the tile that is
                due; the cache then takes the whole step back.
            RuntimeError: gradients are wanted.
        """
        self._check_states(key_states, value_states)
        if self.steps is not None:
            self.steps.write(self, key_states, value_states)
            return self._views(key_states, value_states, self.length + 1)
        self.settle_without_statistics()
        shapes, dtypes = (key_states.shape, value_states.shape), (key_states.dtype, value_states.dtype)
        layout = (shapes, dtypes, key_states.device, value_states.device)
        if self.is_initialized and self.rows.takes_another(layout):
            # most steps: a token like the last one, for which there is room
            self.before = Snapshot(self.length, self.starts, self.rows.lengths)
            self.rows.append(key_states, value_states, layout)
        else:
            self._store(key_states, value_states, layout)
        self.length += key_states.shape[2]
        return self._views(key_states, value_states, self.length)

    def _views(self, key_states: Tensor, value_states: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """What the model passes on as keys and values of so many columns."""
        view = LayerView(self, self._pending is not None)
        rows, heads, _, dim = key_states.shape
        return (
            PackedKV(view, KEYS, (rows, heads, length, dim), key_states),
            PackedKV(view, VALUES, (rows, heads, length, value_states.shape[-1]), value_states),
        )

    def _store(self, key_states: Tensor, value_states: Tensor, layout: object) -> None:
        """Check tokens, and append one or keep more of them for their attention call."""
        self.before = self._snapshot(key_states.shape[2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check_geometry(key_states, value_states)
        # a row without tokens may still be padding, which only the attention mask tells
        if key_states.shape[2] == 1 and self.length and self.rows.lengths.all():
            self._append(key_states, value_states, layout)
        else:
            self._pending = (key_states, value_states)

    def _append(self, key_states: Tensor, value_states: Tensor, layout: object) -> None:
        """One token a row; rows whose window is full pack their oldest tile first."""
        self.pack_due()
        self.rows.append(key_states, value_states, layout)

    def pack_due(self) -> None:
        """Pack the oldest tile of rows whose window has no room for another token, all or none.

        Raises:
            ValueError: a tile holds NaN or Inf.
        """
        due = [(rows, *self.rows.oldest_tile(rows)) for rows in self.rows.rows_due(1)]
        for _, key, value in due:
            if not key.is_meta and not bool(torch.isfinite(key).all() & torch.isfinite(value).all()):
                raise ValueError(
                    "tokens that were stored earlier hold NaN or Inf; crop them away or start with a new cache"
                )
        for rows, key, value in due:
            self.rows.pack_oldest(rows, key, value)

    def get_seq_length(self) -> int:
        """Columns so far, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns after an update of ``query_length`` tokens, and the first of them."""
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        """Unbounded."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The name of :meth:`get_max_length` in older releases of Transformers."""
        return self.get_max_length()

    def activate_past_recording(self) -> None:
        """Keep new tokens exact until :meth:`crop` says how many of them stay."""
        self.record_past = True
        if self.is_initialized:
            self.rows.keep_slack()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns; a number or a 0-dimensional tensor, at most 0.

        Raises:
            ValueError: a positive number.
        """
        count = -int(tokens_to_remove)
        if count < 0:
            raise ValueError(f"crop({-count}): give the number of tokens to remove as a negative number")
        if not self.is_initialized:
            return
        self.settle_without_statistics()
        if count:
            self._drop(count)
        if self.record_past:
            self.rows.trim()

    def _drop(self, count: int) -> None:
        self.length = max(0, self.length - count)
        self.starts = np.minimum(self.starts, self.length)
        for row, start in enumerate(self.starts.tolist()):
            self.rows.crop(row, self.length - start)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become ``beam_idx`` of the old rows; everything that belongs to a row moves with it."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.batch_select_indices(torch.arange(len(self.starts)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; also a mask of booleans."""
        if not self.is_initialized:
            return
        self.settle_without_statistics()
        chosen = np.arange(len(self.starts))[indices.detach().cpu().numpy()]
        if np.array_equal(chosen, np.arange(len(self.starts))):
            return
        self.rows.select_rows(chosen)
        self.starts = self.starts[chosen]

    def offload(self) -> None:
        """Not supported: a packed cache is small enough to stay.

        Raises:
            ValueError: always.
        """
        raise ValueError("cache offloading is not supported by the entropy_subbyte cache")

    # ------------------------------------------------------------------ what our attention function calls

    @property
    def backend(self) -> str:
        """What computes the attention of one new token."""
        return self._config.backend

    @property
    def has_tiles(self) -> bool:
        """Some row has packed tiles."""
        return not self.rows.store.empty

    @property
    def packed_tokens(self) -> int:
        """Tokens in tiles, all rows together."""
        return int(self.rows.store.counts.sum()) * TILE_TOKENS

    def claim(self, module: torch.nn.Module) -> None:
        """Remember whose layer this is.

        Raises:
            ValueError: another model filled this cache.
        """
        owner = self._attention.module
        if owner is None:
            self._attention = ModuleReference(module)
            self.rows.share_heads(head_ranks(module))
        elif owner is not module:
            raise ValueError("this cache was filled by another model; make a new one for this model")

    def set_starts(self, starts: Ints) -> None:
        """Say how many columns of each row are padding, while tokens are pending.

        Raises:
            ValueError: later tokens come with other padding.
        """
        # a row without tokens may turn out to be padded further, as in the first chunks of a chunked prefill
        if not ((starts == self.starts) | ((self.rows.lengths == 0) & (starts >= self.starts))).all():
            raise ValueError(
                "the attention mask pads other columns than the first prompt's did; only left padding of the first "
                "prompt is supported"
            )
        self.starts = starts

    def _snapshot(self, new_tokens: int) -> Snapshot:
        rows = self.rows.snapshot(new_tokens) if self.is_initialized else None
        return Snapshot(self.length, self.starts, rows)

    def dequantize(self) -> tuple[Tensor, Tensor]:
        """All keys and values ``[B, H, T, D]`` in the model's dtype; zero where a column is padding.

        Raises:
            FixedAddressError: during a step at fixed addresses, which only our attention function can read.
        """
        if self.steps is not None:
            raise FixedAddressError("the model reads keys and values outside the entropy_subbyte attention function")
        held = (self.rows.window.keys, self.rows.window.values)
        keys, values = (states.new_zeros(*states.shape[:2], self.length, states.shape[-1]) for states in held)
        self.rows.read(self.starts, (keys, values))
        if self._pending is not None:
            for states, new in zip((keys, values), self._pending, strict=True):
                states[:, :, self.length - new.shape[2] :] = new
        return keys, values

    def allocated_bytes(self) -> int:
        """Everything that the layer holds, spare capacity included."""
        if not self.is_initialized:
            return 0
        pending = () if self._pending is None else self._pending
        return self.rows.nbytes() + sum(states.nbytes for states in pending)

    # ------------------------------------------------------------------ checks

    def _check_states(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[2] == 0:
            raise ValueError("the prompt is empty: update() needs at least one token")
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise RuntimeError("the entropy_subbyte cache is for inference: run the model under torch.no_grad()")
        # looking now would wait: an accelerator's single token is checked when its tile is packed, a GPU's prompt then
        if not waits_cost(key_states) and (key_states.shape[2] > 1 or key_states.device.type == "cpu"):
            for name, states in zip(SIDES, (key_states, value_states), strict=True):
                if not states.is_meta and not bool(torch.isfinite(states).all()):
                    raise ValueError(f"the {name} hold NaN or Inf; nothing was stored")

    def _check_geometry(self, key_states: Tensor, value_states: Tensor) -> None:
        window = self.rows.window
        for name, states, held in (("keys", key_states, window.keys), ("values", value_states, window.values)):
            given, kept = [*states.shape[:2], states.shape[3]], [*held.shape[:2], held.shape[3]]
            if states.device != held.device:
                raise ValueError(
                    f"{name} on {states.device} do not fit this cache, which lies on {held.device}; a saved cache is "
                    "loaded onto the model's device by from_pretrained(..., device=model.device)"
                )
            if given != kept or states.dtype != held.dtype:
                raise ValueError(
                    f"{name} of [rows, heads, head_dim] {given} {states.dtype} do not fit this cache, which holds "
                    f"{kept} {held.dtype}; was it made for another model or batch?"
                )
