"""The cache that ``generate`` uses: one :class:`EntropySubbyteLayer` for each full-attention layer of a model."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.cache.packing import LayerStatistics
from hf_subbyte_moe.codecs.rotation import rotation_block
from hf_subbyte_moe.config import KVCacheConfig
from hf_subbyte_moe.policy import budget_bits, make_policy


CACHE_NAME = "entropy_subbyte"


class EntropySubbyteCache(Cache):
    """Keys and values in sub-byte tiles whose bits follow what the attention heads need.

    ``model.generate(cache_implementation="entropy_subbyte")`` makes one. To make one by hand, call
    ``hf_subbyte_moe.apply(model)`` first, or nothing is measured.
    """

    layers: list[EntropySubbyteLayer]  # type: ignore[assignment]

    def __init__(self, config: PreTrainedConfig, /, **options: Any) -> None:
        """Make an empty cache.

        Args:
            config: the model's (text) config.
            **options: the keys of :class:`KVCacheConfig`.

        Raises:
            ValueError: an unknown or impossible option, or a model that this cache does not support.
        """
        self.kv_config = KVCacheConfig.from_dict(options, section="cache_config")
        refuse_unsupported(config)
        self._check_head_dim(config)
        policy = make_policy(self.kv_config)
        layers: list[EntropySubbyteLayer] = []
        for _ in DynamicCache(config=config).layers:
            layers.append(EntropySubbyteLayer(self.kv_config, policy, layers[-1] if layers else None))
        super().__init__(layers=layers)  # type: ignore[arg-type]

    def _check_head_dim(self, config: PreTrainedConfig) -> None:
        """Find an impossible head dimension or budget before any token is computed, where the config tells it."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotation_block(head_dim)
        budget_bits(self.kv_config, head_dim)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`EntropySubbyteLayer.update`; a failure takes the step back from the layers before, too."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} does not exist: this cache was made for a model of {len(self.layers)} layers"
            )
        try:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except ValueError:
            self._roll_back(layer_idx)
            raise

    def _roll_back(self, failed: int) -> None:
        kept = self.layers[failed].get_seq_length()
        for layer in self.layers[:failed]:
            layer.crop(kept - layer.get_seq_length())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows become ``beam_idx`` of the old rows."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def activate_past_recording(self) -> None:
        """Assistants ask for it.

        Raises:
            ValueError: always; assisted decoding is not supported yet.
        """
        raise ValueError("assisted decoding is not supported by the entropy_subbyte cache yet")

    @property
    def statistics(self) -> list[LayerStatistics]:
        """What each layer measured and chose; stays valid when the cache is gone."""
        return [layer.statistics for layer in self.layers]

    def allocated_bytes(self) -> int:
        """Bytes of everything that the layers hold, spare capacity included."""
        return sum(layer.allocated_bytes() for layer in self.layers)


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
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(f"model type {name!r} caches latents, which the entropy_subbyte cache does not support yet")
    other = sorted(
        {type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) is not DynamicLayer}
    )
    if other:
        raise ValueError(
            f"model type {name!r} has layers that are no full attention ({', '.join(other)}), which the "
            "entropy_subbyte cache does not support yet"
        )
