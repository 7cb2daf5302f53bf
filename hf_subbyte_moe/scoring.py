"""Logits out of a cache: read a prompt, then feed known tokens through the cache and look at what comes out.

A model's logits about its prompt see exact keys and values, whatever the cache, so what a cache costs shows only in
tokens that are decoded. Several known tokens may be fed at once: the packed cache packs nothing between them, so they
see what single steps would have shown them. A step at which a tile is due is always a single one.

Gives up: sampling. What is fed back is what is right, not what the model would have said.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_subbyte_moe.accounting import TILE_TOKENS
from hf_subbyte_moe.cache import EntropySubbyteCache
from hf_subbyte_moe.compat import CACHE_KW


ONE_PIECE, CHUNKED = "one-piece", "chunked"
PROTOCOLS = (ONE_PIECE, CHUNKED)
CHUNK = 512  # tokens of a prompt that the protocol "chunked" reads at once
BLOCK = 64  # known tokens that are fed at once


class RunFailedError(ValueError):
    """The options were right, and the run did not give what it must: a check failed, or a server refused."""


def forward(model: PreTrainedModel, ids: Tensor, cache: Cache, keep: int = 1) -> Tensor:
    """``[B, keep, V]`` logits of the last tokens of ``[B, T]`` ids, which enter the cache."""
    options: dict[str, Any] = {CACHE_KW: cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = keep
    logits: Tensor = model(ids, **options).logits
    return logits[:, -keep:]


def unpacked_tokens(cache: Cache) -> int:
    """Tokens of a row that a packed cache holds before it packs the first of them."""
    if not isinstance(cache, EntropySubbyteCache):
        return 0
    return cache.kv_config.sinks + cache.kv_config.window + TILE_TOKENS - 1


def _block_end(cache: Cache, start: int, stop: int, block: int) -> int:
    """Where the block of tokens that begins at ``start`` ends; a token that makes a tile due stands alone."""
    if not isinstance(cache, EntropySubbyteCache):
        return min(stop, start + block)
    kept = unpacked_tokens(cache)
    due = kept + max(0, -((kept - start) // TILE_TOKENS)) * TILE_TOKENS  # next place whose token makes a tile due
    return start + 1 if due == start else min(stop, start + block, due)


def read_prompt(model: PreTrainedModel, ids: Tensor, cache: Cache, protocol: str) -> None:
    """Fill an empty cache with ``[B, T]`` ids, without padding.

    Raises:
        ValueError: no prompt, or an unknown protocol.
    """
    if protocol not in PROTOCOLS:
        raise ValueError(f"prefill={protocol!r} is not possible: one of {list(PROTOCOLS)}")
    if not ids.shape[1]:
        raise ValueError("the prompt is empty: give at least one token")
    with torch.no_grad():
        for piece in ids.split(CHUNK if protocol == CHUNKED else ids.shape[1], dim=1):
            forward(model, piece, cache)


def feed(
    model: PreTrainedModel,
    ids: Tensor,
    start: int,
    cache: Cache,
    block: int = 1,
    before: Callable[[int], None] = lambda step: None,
) -> Iterator[Tensor]:
    """Feed known tokens.

    Args:
        model: the model, with our attention function in place where the cache is ours.
        ids: ``[B, T]`` on the model's device, without padding.
        start: the cache holds so many of them, at least 1 (32, or a policy that measures chooses on the first block).
        cache: the cache.
        block: tokens that are fed at once, at most; 1 for caches that pack in the middle of what they are given.
        before: called with the number of each step's first token, counted from ``start``, right before it.

    Yields:
        ``[B, n, V]`` fp32 logits of the n tokens of each step.
    """
    first = start
    with torch.no_grad():
        while start < ids.shape[1]:
            end = _block_end(cache, start, ids.shape[1], block)
            before(start - first)
            yield forward(model, ids[:, start:end], cache, end - start).float()
            start = end


def decode(
    model: PreTrainedModel,
    ids: Tensor,
    prefill: int,
    cache: Cache,
    protocol: str,
    block: int = 1,
    before: Callable[[int], None] = lambda step: None,
) -> Iterator[Tensor]:
    """Read the first ``prefill`` tokens as a prompt and feed the others; see :func:`read_prompt` and :func:`feed`."""
    read_prompt(model, ids[:, :prefill], cache, protocol)
    yield from feed(model, ids, prefill, cache, block, before)
