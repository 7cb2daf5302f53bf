"""What a cache was before the step that its layers are taking, so that a step that fails was never there.

A step begins with the first layer that is given tokens and ends with the last layer's attention call, or with the
packing of its tokens where these wait for it. Whatever fails in between, in a layer or in our attention function,
takes the tokens back from every layer. A failure that neither sees, as in a feed-forward block, is noticed by whoever
uses the cache next: the last layer was never reached. The tokens are taken back then too, and the caller is told,
since masks and positions were made for a cache that held them.

Gives up: states of linear attention, which change in place. A failed step that began with some leaves a cache that
only ``reset()`` makes usable again, and that says so.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.cache.prompts import PromptMask
from hf_subbyte_moe.cache.settling import SettlingLayer


class StepJournal:
    """The current step of one cache's layers.

    Attributes:
        checked_mask: the step's attention mask, once a layer has compared it with what the cache knows.
        prompt_mask: what the mask of several new tokens says, once a layer has looked.
        waiting: the layer, if any, whose new tokens are measured and not packed yet.
    """

    def __init__(self, layers: Sequence[Any], last: int) -> None:
        """Watch a cache.

        Args:
            layers: of the cache, in its order.
            last: index of the last one that stores anything.
        """
        self._layers, self._last = layers, last
        self._lost = False
        self.waiting: SettlingLayer | None = None
        self.close()

    def close(self) -> None:
        """The step is over, and stays."""
        self._before: dict[int, Any] = {}  # layer index -> what it was; None where that cannot be told
        self._parts: set[Hashable] = set()  # layer index and name of what the step stores
        self._touched: set[int] = set()  # layer indices
        self._reached_last = False
        self._forget_masks()

    def _forget_masks(self) -> None:
        self.checked_mask: Tensor | None = None
        self.prompt_mask: PromptMask | None = None

    def forget(self) -> None:
        """The cache was emptied."""
        self._lost = False
        self.close()

    def check(self) -> None:
        """Somebody uses the cache between two steps.

        Raises:
            RuntimeError: the step before ended early.
            ValueError: it stored NaN or Inf.
        """
        ended_early = bool(self._parts) and not self._reached_last
        if ended_early:
            self.take_back()
        else:
            self.finish_packing()
        if self._lost:
            raise RuntimeError(
                "an earlier forward failed and left states of linear attention that cannot be taken back; call "
                "reset() or make a new cache"
            )
        if ended_early:
            raise RuntimeError(
                "an earlier forward ended before the model's last layer; what it had stored was taken back, so this "
                "cache is what it was before it: call the model again"
            )
        self.close()

    def store(self, layer_idx: int, part: Hashable, states: Sequence[Tensor], call: Callable[[], Any]) -> Any:
        """Let a layer store a part of a step.

        Args:
            layer_idx: the layer.
            part: a name of it; a layer stores each part once a step.
            states: what it stores.
            call: stores it.

        Returns:
            What ``call`` returns.

        Raises:
            RuntimeError: gradients are wanted, or the step before ended early.
            ValueError: the step before, or this one in a layer before, stored NaN or Inf.
        """
        if self._lost or self._reached_last or (layer_idx, part) in self._parts:
            self.check()  # a new step
        try:
            if torch.is_grad_enabled() and any(new.requires_grad for new in states):
                raise RuntimeError("the entropy_subbyte cache is for inference: run the model under torch.no_grad()")
            layer = self._layers[layer_idx]
            self._parts.add((layer_idx, part))
            if layer_idx not in self._touched:
                self._touched.add(layer_idx)
                if isinstance(layer, EntropySubbyteLayer):
                    layer.before = None
                else:
                    self._before[layer_idx] = _attributes(layer)
            made = call()
        except BaseException:  # whatever it is: no layer may keep half a step
            self.take_back()
            raise
        if isinstance(layer, EntropySubbyteLayer):
            self._before[layer_idx] = layer.before
            self._reached_last = layer_idx == self._last
        elif layer_idx == self._last:
            self.finish_packing()  # while the step can still be taken back
            self.close()
        return made

    def finish(self) -> None:
        """A packed layer's attention call is over, or its tokens do not wait any more."""
        if self._reached_last:
            self._forget_masks()
            if self._layers[self._last].is_settled:
                self.close()

    def finish_packing(self) -> None:
        """Let the layer that waits go on; see :meth:`SettlingLayer.finish_packing`."""
        layer, self.waiting = self.waiting, None
        if layer is not None:
            layer.finish_packing()

    def index(self, layer: SettlingLayer) -> int:
        """A layer's number."""
        return self._layers.index(layer)

    def take_back(self) -> bool:
        """The step failed: its tokens were never here. Returns whether there was a step."""
        if not self._parts:
            return False
        touched, before = self._touched, self._before
        self.close()
        for index, layer in enumerate(self._layers[: max(touched) + 1]):
            if isinstance(layer, EntropySubbyteLayer):
                known = before.get(index, layer.before) if index in touched else None
                if known is not None:
                    layer.undo(known)
            elif before.get(index) is not None:
                vars(layer).clear()
                vars(layer).update(before[index])
            elif _has_states(layer):  # kernels may change them without telling the cache
                self._lost = True
        return True


def _attributes(layer: Any) -> dict[str, Any] | None:
    """What brings a layer back that replaces its tensors at each update; None where it changes them in place."""
    if _has_states(layer):
        return None
    return {key: value.copy() if isinstance(value, (dict, list)) else value for key, value in vars(layer).items()}


def _has_states(layer: Any) -> bool:
    """States of linear attention, which are not empty."""
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return False
    return any(
        state is not None for states in (layer.conv_states, layer.recurrent_states) for state in states.values()
    )
