"""What attention masks may say about tokens of a packed cache.

A cache stores which columns of a row are padding, once. A mask must agree with that about every stored column; among
new tokens it may say what it likes, as in a model that reads an image in both directions. What cannot be honoured is
refused, never ignored.
"""

import numpy as np
import torch
from torch import Tensor

from hf_subbyte_moe.cache.layer import EntropySubbyteLayer
from hf_subbyte_moe.cache.prompts import PromptMask
from hf_subbyte_moe.cache.window import Ints
from hf_subbyte_moe.transfers import upload


_HIDDEN = -1e4  # an additive mask hides with at most this; fp16's lowest is lower
_WRONG = (
    "the entropy_subbyte cache supports left padding only, and the same in every call: the attention mask hides or "
    "shows other columns of the stored tokens than the first prompt's did"
)


def row_starts(attention_mask: Tensor | None, batch: int, layer: EntropySubbyteLayer) -> Ints:
    """Padding columns on the left of each row, from what the last query may see.

    Args:
        attention_mask: bool or additive ``[B or 1, 1, q, T]``, or None.
        batch: rows.
        layer: whose pending tokens the queries are.

    Raises:
        ValueError: the mask hides columns between visible ones or on the right, or differs between heads.
    """
    if attention_mask is None:
        return np.zeros(batch, dtype=np.int64)
    _check_shape(attention_mask, layer)
    journal = layer.journal
    if journal is not None and journal.prompt_mask is not None and journal.prompt_mask.mask is attention_mask:
        return journal.prompt_mask.starts
    last = attention_mask[:, 0, -1, :]
    visible = (last if last.dtype == torch.bool else last == 0).cpu().numpy()
    visible = np.broadcast_to(visible, (batch, visible.shape[1]))
    starts: Ints = np.where(visible.any(1), visible.argmax(1), visible.shape[1])
    if not np.array_equal(visible.sum(1), visible.shape[1] - starts):
        raise ValueError(
            "the entropy_subbyte cache supports left padding only: the attention mask hides columns on the right of "
            "or between visible ones"
        )
    if journal is not None:
        journal.prompt_mask = PromptMask(attention_mask, starts)
    return starts


def check_padding(attention_mask: Tensor, layer: EntropySubbyteLayer) -> None:
    """Refuse a call's mask that does not show each row's stored tokens and hide its padding.

    Args:
        attention_mask: ``[B, any]``, 0 hides. Of more or fewer rows than are stored: nothing is checked here.
        layer: which has stored tokens.

    Raises:
        ValueError: it hides or shows other columns.
    """
    shown = attention_mask[:, : layer.length] != 0
    real = _real(layer)[:, : shown.shape[1]]
    if len(shown) == len(real) and not torch.equal(shown.to(real.device), real):
        raise ValueError(_WRONG)


def check_step(attention_mask: Tensor | None, layer: EntropySubbyteLayer) -> None:
    """Refuse a mask of one stored query that does not show all of each row's tokens, and nothing else.

    On an accelerator the comparison stays there: a wrong mask is an assertion that fails on the device.

    Args:
        attention_mask: bool or additive ``[B or 1, 1, 1, T]``; None shows everything.
        layer: which has stored the query's token.

    Raises:
        ValueError: the mask differs between heads, or it shows other columns.
    """
    journal = layer.journal
    if attention_mask is None:
        if layer.starts.any():
            raise ValueError(f"{_WRONG}; pass the attention mask of all tokens so far")
        return
    if journal is not None and journal.checked_mask is attention_mask:
        return  # an earlier layer's, of the same step
    _check_shape(attention_mask, layer)
    fits = _agrees(attention_mask[:, 0, 0], _real(layer)).all()
    if fits.device.type == "cpu":
        if not fits:
            raise ValueError(_WRONG)
    elif not fits.is_meta:
        torch._assert_async(fits, _WRONG)
    if journal is not None:
        journal.checked_mask = attention_mask


def among_new(attention_mask: Tensor | None, layer: EntropySubbyteLayer) -> Tensor:
    """``[B, q, q]`` which of the pending tokens their queries see, behind packed history; none sees padding.

    Args:
        attention_mask: bool or additive ``[B or 1, 1, q, T]``; None is a causal one.
        layer: whose pending tokens the queries are; its padding is known.

    Raises:
        ValueError: the mask hides or shows other stored columns than the first prompt's did, or adds to scores.
    """
    queries = layer.pending[0].shape[2]
    old = layer.length - queries
    real = _real(layer)
    if attention_mask is None:
        column = torch.arange(queries, device=layer.device)
        return (column <= column[:, None]) & real[:, None, old:]
    known = None if layer.journal is None else layer.journal.prompt_mask
    if known is None or known.mask is not attention_mask or known.starts is not layer.starts:
        return _among_new(attention_mask, real, old)
    if known.among_new is None:
        known.among_new = _among_new(attention_mask, real, old)
    return known.among_new


def _among_new(attention_mask: Tensor, real: Tensor, old: int) -> Tensor:
    given = attention_mask[:, 0]
    # what a query that is padding sees is nobody's concern
    fits = _agrees(given[..., :old], real[:, None, :old]) | ~real[:, old:, None]
    new = given[..., old:]
    visible = new if new.dtype == torch.bool else new == 0
    if not bool(fits.all() & _agrees(new, visible).all()):
        raise ValueError(_WRONG)
    return visible & real[:, None, old:]


def _real(layer: EntropySubbyteLayer) -> Tensor:
    """``[B, T]`` columns that are no padding."""
    device = torch.device(layer.device)
    return torch.arange(layer.length, device=device) >= upload(layer.starts, device)[:, None]


def _agrees(mask: Tensor, visible: Tensor) -> Tensor:
    """Where a mask shows or hides what it should, and adds nothing else."""
    if mask.dtype == torch.bool:
        return mask == visible
    return torch.where(visible, mask == 0, mask <= _HIDDEN)


def _check_shape(attention_mask: Tensor, layer: EntropySubbyteLayer) -> None:
    if attention_mask.shape[1] != 1:
        raise ValueError("the entropy_subbyte cache does not support an attention mask with a head dimension")
    if attention_mask.shape[-1] != layer.length:
        raise ValueError(
            f"the attention mask has {attention_mask.shape[-1]} columns, but the entropy_subbyte cache holds "
            f"{layer.length} with the new tokens"
        )
