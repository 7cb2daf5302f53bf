"""The attention function that models call while they use our cache.

Registered with Transformers as ``entropy_subbyte``. Keys that do not come from our cache go to the function that the
model had before. A prompt without packed history is computed exactly by that function too; then its statistics are
taken and the layer packs. So is a later piece of a prompt, over the layer's history as its tiles give it back: for
many queries that costs less than reading codes for each of them. Everything else is attention over packed tiles.

Source: the interface, https://huggingface.co/docs/transformers/attention_interface.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_subbyte_moe.cache.cache import EntropySubbyteCache
from hf_subbyte_moe.cache.handle import LayerView, PackedKV
from hf_subbyte_moe.cache.masks import among_new, check_step, row_starts
from hf_subbyte_moe.cache.mla import ExpandedView, absorb_query, expand, expand_output
from hf_subbyte_moe.cache.prompts import PromptQueries
from hf_subbyte_moe.ops import MAX_TOKENS, ExactTokens, decode_attention
from hf_subbyte_moe.policy import AttentionForm, output_weight


ATTENTION_NAME = "entropy_subbyte"
PREVIOUS_ATTRIBUTE = "_hf_subbyte_attention"  # on each attention module: the implementation that it had before
_DEFAULT = "sdpa"

Attention = Callable[..., tuple[Tensor, Tensor | None]]


@dataclass
class PackedReads:
    """How much attention went through packed tiles.

    Attributes:
        tokens: packed tokens that queries met, summed over layers, rows and queries.
    """

    tokens: int = 0


_COUNTING: list[PackedReads] = []


@contextmanager
def count_packed_reads() -> Iterator[PackedReads]:
    """Count, while the context lasts, the packed tokens that attention calls read."""
    reads = PackedReads()
    _COUNTING.append(reads)
    try:
        yield reads
    finally:
        _COUNTING.remove(reads)


def count_step(cache: EntropySubbyteCache) -> None:
    """Count what one token a row has read of a cache in a replay, which calls no function here."""
    if _COUNTING:
        _count(sum(layer.packed_tokens for layer in cache.packed_layers.values()))


def _count(tokens: int) -> None:
    for reads in _COUNTING:
        reads.tokens += tokens


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention of a module of any Transformers model.

    Args:
        module: the attention module.
        query: ``[B, HQ, Sq, D]``.
        key: ``[B, H, T, D]``, from our cache or not.
        value: ``[B, H, T, Dv]``.
        attention_mask: bool or additive ``[B or 1, 1, Sq, T]``, or None for a causal one without padding; with keys
            of our cache it must agree with the padding that the cache knows, and is free among new tokens.
        scaling: factor of the scores; ``D ** -0.5`` by default.
        dropout: for keys that are not from our cache.
        **kwargs: for the function that the model had before.

    Returns:
        ``[B, Sq, HQ, Dv]``, and no attention weights for keys of our cache.

    Raises:
        ValueError: something about the attention that the packed cache cannot do.
    """
    if not isinstance(key, PackedKV):
        return _previous(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    view = key.view_of
    try:
        _refuse_unsupported(module, kwargs, dropout)
        view.layer.claim(module)
        if scaling is None:
            scaling = query.shape[-1] ** -0.5
        form = AttentionForm(scaling, kwargs.get("softcap"), kwargs.get("s_aux"))
        if view.layer.steps is not None:
            exact = view.layer.rows.seen(view.layer.steps.visible)
            return _packed(module, view, query, exact, form), None
        if view.pending:
            output = _prompt(module, view, query, attention_mask, form, kwargs)
        else:
            check_step(attention_mask, view.layer)
            output = _packed(module, view, query, view.layer.rows.exact(), form)
    except BaseException:  # whatever it is: no layer may keep half a step
        view.layer.take_back()
        raise
    view.layer.finish()
    return output, None


def _packed(
    module: torch.nn.Module, view: LayerView, query: Tensor, exact: ExactTokens, form: AttentionForm
) -> Tensor:
    """``[B, Sq, HQ, Dv]``: attention over exact tokens and packed tiles."""
    latent = isinstance(view, ExpandedView)
    stored_query = view.layer.rows.queries(absorb_query(module, query) if latent else query)
    tiles = view.layer.rows.packed() if view.layer.has_tiles else None
    steps = view.layer.steps
    attend = decode_attention if steps is None else steps.attention_of(view.layer)
    backend = view.layer.backend
    if query.shape[2] > 1 and backend != "torch":  # not what the user chose a kernel for; some take a few tokens
        backend = "auto"
    if steps is None:  # else `count_step` does
        _count(query.shape[2] * view.layer.packed_tokens)
    result = attend(stored_query, exact, tiles, *form, backend)
    output = expand_output(module, result.output) if latent else result.output
    return output.to(query.dtype).transpose(1, 2).contiguous()


def _prompt(
    module: torch.nn.Module,
    view: LayerView,
    query: Tensor,
    attention_mask: Tensor | None,
    form: AttentionForm,
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Several new tokens, or the first one: exact attention among them, then packing."""
    layer, latent = view.layer, isinstance(view, ExpandedView)
    layer.set_starts(row_starts(attention_mask, query.shape[0], layer))
    causal = among_new(attention_mask, layer) if layer.has_tiles else None
    seen: tuple[Tensor, Tensor] | None = None
    if causal is not None and query.shape[2] <= MAX_TOKENS:
        output = _packed(module, view, query, layer.rows.exact(layer.pending, causal), form)
    else:  # history is dequantized once for all queries, one layer's at a time
        states = layer.pending
        if layer.rows.lengths.any():
            states = seen = layer.dequantize()
            if attention_mask is None:  # to some functions that means queries as many as keys, or keys without a query
                attention_mask = _causal(query, states[0])
        if latent:
            states = expand(module, *states)
        output, _ = _previous(module, query, *states, attention_mask, scaling=form.scaling, dropout=0.0, **kwargs)
        _count(query.shape[2] * layer.packed_tokens)
    weight = None if latent else output_weight(module, output)
    layer.settle(PromptQueries(query, form, weight, partial(absorb_query, module) if latent else None, seen))
    return output


def _refuse_unsupported(module: torch.nn.Module, kwargs: Mapping[str, Any], dropout: float) -> None:
    if kwargs.get("output_attentions"):
        raise ValueError("the entropy_subbyte cache does not return attention weights")
    if kwargs.get("position_bias") is not None:
        raise ValueError(
            f"{type(module).__name__} adds a position bias, which the entropy_subbyte cache does not support"
        )
    if module.training and dropout:
        raise ValueError("the entropy_subbyte cache is for inference: call model.eval() first")


def _previous(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The function that the model had before, with the mask in the form that it expects."""
    plain = kwargs.get("s_aux") is None and kwargs.get("softcap") is None  # what sdpa can do
    name = getattr(module, PREVIOUS_ATTRIBUTE, _DEFAULT if plain else "eager")
    if name == "eager":
        function: Attention = sys.modules[type(module).__module__].eager_attention_forward
        attention_mask = _additive(attention_mask, query, key)
    elif "flash" in name:
        function = ALL_ATTENTION_FUNCTIONS[name]
        if attention_mask is not None:
            real = attention_mask[:, 0].any(1)  # [B, T]: some query sees the column, whatever its window
            attention_mask = None if bool(real.all()) else real
    else:  # flex and paged attention take masks of their own kinds
        function = ALL_ATTENTION_FUNCTIONS[_DEFAULT if "flex" in name or "paged" in name else name]
    return function(module, query, key, value, attention_mask, **kwargs)


def _causal(query: Tensor, key: Tensor) -> Tensor:
    """``[1, 1, q, T]`` which keys the queries, the last of the tokens, see."""
    queries, tokens = query.shape[2], key.shape[2]
    return torch.ones(queries, tokens, dtype=torch.bool, device=query.device).tril(tokens - queries)[None, None]


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """A bool mask as eager functions add it; no mask is a causal one."""
    if mask is None:
        if query.shape[2] == 1:
            return None
        mask = _causal(query, key)
    if mask.dtype != torch.bool:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, lowest)


def register_attention() -> None:
    """Make the name known to Transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, attention_forward)
