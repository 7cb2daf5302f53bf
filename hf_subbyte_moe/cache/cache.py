"""The cache that ``generate`` uses: one :class:`EntropySubbyteLayer` for each full-attention layer of a model.

Layers of other kinds, such as sliding windows, stay as Transformers makes them.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_subbyte_moe.cache.journal import StepJournal
from hf_subbyte_moe.cache.layer import EntropySubbyteLayer, check_widths
from hf_subbyte_moe.cache.masks import check_padding
from hf_subbyte_moe.cache.prompts import LayerStatistics
from hf_subbyte_moe.cache.saving import cache_file, fill_cache, other_tensors, read_file, save_cache
from hf_subbyte_moe.compat import last_storing_layer
from hf_subbyte_moe.config import CALIBRATED, KVCacheConfig
from hf_subbyte_moe.policy import CalibratedPolicy, make_policy, resolve


CACHE_NAME = "entropy_subbyte"
# what tells a saved cache's model from another
_MODEL_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class EntropySubbyteCache(Cache):
    """Keys and values in sub-byte tiles whose bits follow what the attention heads need.

    ``model.generate(cache_implementation="entropy_subbyte")`` makes one. To make one by hand, call
    ``hf_subbyte_moe.apply(model)`` first, or nothing is measured.
    """

    def __init__(self, config: PreTrainedConfig, /, **options: Any) -> None:
        """Make an empty cache.

        Args:
            config: the model's config.
            **options: the keys of :class:`KVCacheConfig`.

        Raises:
            ValueError: an unknown or impossible option, or a model that this cache does not support.
        """
        self.kv_config = KVCacheConfig.from_dict(options, section="cache_config")
        whole, config = config, config.get_text_config(decoder=True)
        refuse_unsupported(config)
        policy_name, calibration = resolve(whole, self.kv_config)  # a part does not know its folder
        self.kv_config = replace(self.kv_config, policy=policy_name)
        self._model = {key: getattr(config, key, None) for key in _MODEL_KEYS}
        latent = _is_latent(config)
        check_widths(self.kv_config, _widths(config), latent)
        policies: dict[int, CalibratedPolicy] = {}
        if calibration is not None and policy_name == CALIBRATED:
            policies = calibration.layer_policies(self.kv_config)
        by_calibration = calibration if self.kv_config.codebook == CALIBRATED else None
        layers: list[Any] = []
        previous: EntropySubbyteLayer | None = None
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if type(layer) is DynamicLayer:
                known = policies.get(index)
                policy = make_policy(self.kv_config, index) if known is None else known
                metric = None if by_calibration is None else by_calibration.metrics[index]
                layer = previous = EntropySubbyteLayer(self.kv_config, policy, previous, latent, metric)
            layers.append(layer)
        super().__init__(layers=layers)
        self._journal = StepJournal(self.layers, last_storing_layer(config, self.layers))
        for layer in self.packed_layers.values():
            layer.journal = self._journal

    @property
    def packed_layers(self) -> dict[int, EntropySubbyteLayer]:
        """Layer index -> layer, of those that pack; the others are as Transformers makes them."""
        return {index: layer for index, layer in enumerate(self.layers) if isinstance(layer, EntropySubbyteLayer)}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`EntropySubbyteLayer.update`; a failure takes the step back from every layer.

        Raises:
            ValueError: there is no such layer, or the layer refuses the tokens.
            RuntimeError: gradients are wanted, or a step before ended early.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} does not exist: this cache was made for a model of {len(self.layers)} layers"
            )
        layer = self.layers[layer_idx]
        if isinstance(layer, EntropySubbyteLayer) and layer.steps is not None:
            self._journal.close()  # nothing to take back: the host counts a step when all of it is done
            return layer.update(key_states, value_states)
        call = partial(super().update, key_states, value_states, layer_idx, *args, **kwargs)
        made: tuple[Tensor, Tensor] = self._journal.store(layer_idx, "keys", (key_states, value_states), call)
        return made

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """What a layer of linear attention convolves; see :meth:`update` for failures."""
        call = partial(super().update_conv_state, conv_states, layer_idx, state_idx, **kwargs)
        made: Tensor = self._journal.store(layer_idx, ("conv", state_idx), (conv_states,), call)
        return made

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """What a layer of linear attention remembers; see :meth:`update` for failures."""
        call = partial(super().update_recurrent_state, recurrent_states, layer_idx, state_idx, **kwargs)
        made: Tensor = self._journal.store(layer_idx, ("recurrent", state_idx), (recurrent_states,), call)
        return made

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """What a layer of sparse attention chooses by; see :meth:`update` for failures."""
        call = partial(super().update_indexer, indexer_key_states, layer_idx)
        made: Tensor = self._journal.store(layer_idx, "indexer", (indexer_key_states,), call)
        return made

    def reset(self) -> None:
        """Forget everything."""
        self._journal.forget()
        super().reset()  # type: ignore[no-untyped-call]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns of every layer."""
        self._journal.check()
        super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows become ``beam_idx`` of the old rows."""
        self._journal.check()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self._journal.check()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._journal.check()
        super().batch_select_indices(indices)

    @property
    def statistics(self) -> dict[int, LayerStatistics]:
        """Layer index -> what it measured and chose; stays valid when the cache is gone."""
        return {index: layer.statistics for index, layer in self.packed_layers.items()}

    def save_pretrained(self, path: str | Path) -> None:
        """Write what all layers hold to a safetensors file, to go on from it later; pending tokens are packed first.

        Args:
            path: a file that ends in .safetensors, or a folder.

        Raises:
            ValueError: a layer is of a kind that cannot be saved.
            RuntimeError: a step before ended early.
        """
        self._journal.check()
        save_cache(self, self._model, cache_file(path))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, config: PreTrainedConfig, device: torch.device | str = "cpu"
    ) -> "EntropySubbyteCache":
        """A cache that :meth:`save_pretrained` wrote.

        Args:
            path: the same path.
            config: the model's config.
            device: where its tensors go.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds no cache, or one that does not fit the model.
        """
        notes, tensors = read_file(cache_file(path), device)
        cache = cls(config, **notes["kv_config"])
        fill_cache(cache, cache._model, notes, tensors)
        return cache

    def other_bytes(self) -> int:
        """Bytes of keys, values and states in the layers that do not pack."""
        others = [layer for layer in self.layers if not isinstance(layer, EntropySubbyteLayer)]
        return sum(tensor.nbytes for layer in others for tensor in other_tensors(layer).values())

    def check_padding(self, attention_mask: Tensor | None) -> None:
        """Refuse a ``generate`` whose mask ``[B, tokens]`` has other padding than the stored tokens.

        A captured step reads no mask, so this is where a changed one is seen.

        Raises:
            ValueError: it hides or shows other columns.
        """
        layer = next((layer for layer in self.packed_layers.values() if layer.is_initialized and layer.length), None)
        if attention_mask is not None and attention_mask.ndim == 2 and layer is not None:
            check_padding(attention_mask, layer)

    def allocated_bytes(self) -> int:
        """Bytes of everything that the layers hold, spare capacity included."""
        return self.other_bytes() + sum(layer.allocated_bytes() for layer in self.packed_layers.values())


def _is_latent(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "kv_lora_rank", None))


def _widths(config: PreTrainedConfig) -> tuple[int, int]:
    """What the two sides of a token should be wide, as far as the config tells; tensors have the last word."""
    if _is_latent(config):
        return config.kv_lora_rank, config.qk_rope_head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim, head_dim


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Refuse models whose layers this cache cannot hold.

    Raises:
        ValueError: names the model type and what is not supported.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"model type {name!r} is an encoder-decoder, which the entropy_subbyte cache does not support"
        )
    if getattr(config, "num_kv_shared_layers", 0) or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise ValueError(
            f"model type {name!r} shares keys and values between layers (num_kv_shared_layers), which the "
            "entropy_subbyte cache does not support"
        )
    layers = DynamicCache(config=config).layers
    if not any(type(layer) is DynamicLayer for layer in layers):
        kinds = sorted({type(layer).__name__ for layer in layers})
        raise ValueError(
            f"model type {name!r} has no full-attention layer to pack ({', '.join(kinds)}); the entropy_subbyte cache "
            "would save nothing"
        )
