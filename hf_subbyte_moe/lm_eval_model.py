"""The lm-eval model ``subbyte``: the harness's own Hugging Face model, its answers read out of a chosen cache.

``generate_until`` runs ``generate`` with the cache. Log-likelihoods are scored by decoding: the context but its last
token is the prompt, and every scored token comes out of the cache. (The harness's own ``hf`` scores in one forward
pass without a cache, so a quantized one could not lose there.) Rolling log-likelihoods have no context; what fits
before the first tile is due is read at once, which is the same.

How the prompt is read stands in every result, with bytes, speed and ``packed_tokens_read`` by task and length. A task
during which no query met a packed token fails.

Gives up: batches of log-likelihoods whose contexts differ in length, since what is packed when would differ, too; and
data-parallel runs. What follows a shorter continuation of a batch is fed, and counts in its bytes and packed tokens. A
step holds the logits of up to 259 tokens a row, so batches of a large vocabulary take memory.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache, QuantizedCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import CACHE_NAME, EntropySubbyteCache, count_packed_reads
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.explain import cache_size
from hf_subbyte_moe.patching import use_packed_attention
from hf_subbyte_moe.registration import make_cache
from hf_subbyte_moe.results import document_length
from hf_subbyte_moe.scoring import (
    BLOCK,
    CHUNK,
    CHUNKED,
    ONE_PIECE,
    PROTOCOLS,
    RunFailedError,
    decode,
    feed,
    forward,
    unpacked_tokens,
)


try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"the model 'subbyte' needs lm-eval: pip install 'hf-subbyte-moe[eval]' ({error})") from None


CACHES = (CACHE_NAME, "dynamic", "quantized")
_FINGERPRINT = "hf-subbyte-moe configuration"
_OWN_CACHE = ("cache_implementation", "cache_config", "prefill_chunk_size", "cache", "past_key_values", "use_cache")
_WEIGHED = ("cache_bytes", "plain_bytes", "code_bits", "bits", "bits_total")
_SCALE_BITS = 16  # of a stock cache's scales and zero points


@dataclass
class Usage:
    """What one task took at one length.

    Attributes:
        prompt_tokens: of every request, padding not counted.
        cache_bytes: a row's share of the cache after its last token.
        plain_bytes: the same of a plain cache.
        code_bits: codes alone, bits a packed value; only of our cache.
        bits: with scales and outliers; likewise.
        bits_total: everything held, bits a cached value; only of our cache.
        packed_tokens_read: packed tokens that queries met, over all layers.
        prefill_s: until a batch's first new token.
        decode_s: from there to its last one.
        decoded: tokens in that time, all rows.
    """

    prompt_tokens: list[int] = field(default_factory=list)
    cache_bytes: list[float] = field(default_factory=list)
    plain_bytes: list[float] = field(default_factory=list)
    code_bits: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    bits_total: list[float] = field(default_factory=list)
    packed_tokens_read: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Means, as JSON values; None where nothing was measured."""
        tokens = self.prompt_tokens
        return {
            "requests": len(tokens),
            "prompt_tokens": {"least": min(tokens), "most": max(tokens)} if tokens else None,
            **{key: _mean(getattr(self, key)) for key in _WEIGHED},
            "packed_tokens_read": self.packed_tokens_read,
            "prefill_s": self.prefill_s,
            "tokens_per_s": self.decoded / self.decode_s if self.decode_s else None,
        }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class _Clock(LogitsProcessor):
    """Notes when each step's logits are there; changes nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def _stock_bytes(cache: Cache, width: int) -> float:
    """Bytes of a cache of Transformers, of a quantized one by formula; ``width``: values of one column, one side."""
    total = 0.0
    layers: list[Any] = cache.layers
    for layer in layers:
        exact = [states for states in (layer.keys, layer.values) if isinstance(states, Tensor)]
        total += sum(states.nbytes for states in exact)
        if hasattr(layer, "q_group_size"):
            columns = int(layer.get_seq_length()) - (exact[0].shape[-2] if exact[0].ndim == 4 else 0)
            total += 2 * columns * width * (layer.nbits + 2 * _SCALE_BITS / layer.q_group_size) / 8
    return total


def _alike(lengths: Sequence[tuple[int, ...]], rows: int | str) -> Iterator[list[int]]:
    """Numbers of requests that can be scored together: contexts as long as each other, continuations nearly so.

    Args:
        lengths: of every request's context and continuation.
        rows: of a batch, at most; anything but a number, as "auto", means 1.
    """
    most = rows if isinstance(rows, int) else 1
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        (context, continuation), first = lengths[number], lengths[batch[0]] if batch else lengths[number]
        if len(batch) == most or context != first[0] or continuation - first[1] > BLOCK:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@register_model("subbyte")
class SubByteLM(HFLM):  # type: ignore[misc]
    """``--model subbyte``; see the module's text."""

    def __init__(
        self,
        pretrained: Any,
        *,
        cache: str = CACHE_NAME,
        cache_config: Mapping[str, Any] | str | None = None,
        prefill: str = ONE_PIECE,
        block: int = BLOCK,
        **options: Any,
    ) -> None:
        """Load the model.

        Args:
            pretrained: Hub id, folder, or a model.
            cache: "entropy_subbyte", "dynamic" or "quantized" (Transformers' own).
            cache_config: what the cache is made with, a dictionary or JSON.
            prefill: "one-piece" or "chunked" (512 tokens at a time): how prompts are read.
            block: known tokens that are scored at once.
            **options: those of ``HFLM``; what it doesn't know goes to ``from_pretrained``.

        Raises:
            ValueError: an impossible option, or a length over the model's limit.
        """
        if prefill not in PROTOCOLS:
            raise ValueError(f"prefill={prefill!r} is not possible: one of {list(PROTOCOLS)}")
        if not isinstance(block, int) or not 1 <= block <= BLOCK:
            raise ValueError(f"block={block!r} is not possible: a number of tokens from 1 to {BLOCK}")
        super().__init__(pretrained, **options)
        self._prefill, self._block = prefill, block
        self._packed_attention = False
        text = self.model.config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None)
        if limit is not None and self.max_length > limit:
            raise ValueError(f"max_length={self.max_length} is over the model's limit of {limit} tokens")
        self.choose_cache(cache, cache_config)

    def choose_cache(self, cache: str, cache_config: Mapping[str, Any] | str | None = None) -> None:
        """Answer out of this cache from now on; forgets what was counted.

        Raises:
            ValueError: an unknown cache, or options that it does not take.
        """
        if cache not in CACHES:
            raise ValueError(f"cache={cache!r} is not possible: one of {list(CACHES)}")
        given = json.loads(cache_config) if isinstance(cache_config, str) else cache_config
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"cache_config={cache_config!r} is not possible: a dictionary")
        self._cache, self._cache_config = cache, dict(given or {})
        self._usages: dict[str, dict[str, Usage]] = {}
        self._usage = Usage()
        if cache == CACHE_NAME and not self._packed_attention:
            use_packed_attention(self.model)
            self._packed_attention = True
        self._new_cache()  # wrong options fail before the wait

    # ------------------------------------------------------------------ what the harness calls

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """See ``HFLM``; task by task."""
        return self._by_task(super().generate_until, requests, disable_tqdm)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """See ``HFLM``; through the cache, task by task."""
        return self._by_task(super().loglikelihood, requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """See ``HFLM``; through the cache, task by task."""
        return self._by_task(super().loglikelihood_rolling, requests, disable_tqdm)

    def get_model_info(self) -> dict[str, Any]:
        """What ``HFLM`` tells about the model, and all about the cache under the key ``subbyte``."""
        usage = {
            task: {length: usage.to_dict() for length, usage in lengths.items()}
            for task, lengths in self._usages.items()
        }
        return {**super().get_model_info(), "subbyte": {**self.configuration(), "usage": usage}}

    def configuration(self) -> dict[str, Any]:
        """What results depend on, beside the tasks."""
        config = self.model.config
        return {
            "model": str(getattr(config, "name_or_path", "") or type(self.model).__name__),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "cache": self._cache,
            "cache_config": self._cache_config,
            "model_options": getattr(config, "hf_subbyte_moe", None) if self._cache == CACHE_NAME else None,
            "prefill": self._prefill,
            "block": self._block,
            "max_length": self.max_length,
            "version": hf_subbyte_moe.__version__,
        }

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Refuse answers that another configuration left: ``--use_cache`` files them by their request alone.

        Raises:
            ValueError: the file holds such answers.
        """
        held = getattr(cache_hook, "dbdict", None)
        if held is not None:
            mine = json.dumps(self.configuration(), sort_keys=True, default=str)
            if len(held) and held.get(_FINGERPRINT) != mine:
                raise ValueError(
                    "use_cache: the file holds answers of another model, cache, configuration or protocol, which "
                    "would be reused; name another file"
                )
            held[_FINGERPRINT] = mine
        super().set_cache_hook(cache_hook)

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """See ``HFLM``; refuses empty prompts, and those it would cut, unless ``truncation`` asks for that."""
        if not all(strings):
            raise ValueError("the prompt of a task is empty: give at least one token")
        ids, mask = super().tok_batch_encode(
            strings, padding_side, left_truncate_len if truncation else None, truncation
        )
        if left_truncate_len and ids.shape[1] > left_truncate_len:
            raise self._too_long(ids.shape[1], left_truncate_len)
        return ids, mask

    # ------------------------------------------------------------------ through the cache

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        taken = [key for key in _OWN_CACHE if key in generation_kwargs]
        if taken:
            raise ValueError(f"gen_kwargs may not hold {taken}: say cache, cache_config and prefill in model_args")
        cache, clock = self._new_cache(), _Clock()
        if self._prefill == CHUNKED:
            generation_kwargs["prefill_chunk_size"] = CHUNK
        mask = generation_kwargs.get("attention_mask")
        real = [context.shape[1]] * len(context) if mask is None else mask.sum(1).tolist()
        start = time.perf_counter()
        output: Tensor = super()._model_generate(
            context,
            max_length,
            stop,
            logits_processor=LogitsProcessorList([clock]),
            **{CACHE_KW: cache},
            **generation_kwargs,
        )
        usage = self._usage
        usage.prompt_tokens += real
        usage.prefill_s += clock.times[0] - start
        usage.decode_s += clock.times[-1] - clock.times[0]
        usage.decoded += (len(clock.times) - 1) * len(context)
        self._weigh(cache, len(context))
        return output

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            if not context or not continuation:
                raise ValueError("a request for a log-likelihood has no context or nothing to score")
            if len(context) + len(continuation) > self.max_length + 1:
                raise self._too_long(len(context) + len(continuation) - 1, self.max_length)
        rows = override_bs or self.batch_size
        answers: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm, leave=False) as bar:
            for numbers in _alike([tuple(map(len, request[1:])) for request in requests], rows):
                made = self._score([requests[number][1:] for number in numbers])
                for number, answer in zip(numbers, made, strict=True):
                    answers[number] = answer
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                bar.update(len(numbers))
        return answers

    def _score(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would say it; equally long contexts."""
        prefill, longest = len(requests[0][0]) - 1, max(len(continuation) for _, continuation in requests)
        # what follows a shorter continuation is fed and not scored
        targets = torch.tensor(
            [continuation + continuation[-1:] * (longest - len(continuation)) for _, continuation in requests],
            device=self.device,
        )
        contexts = torch.tensor([context for context, _ in requests], device=self.device)
        ids = torch.cat([contexts, targets[:, :-1]], dim=1)
        cache = self._new_cache()
        found, right, done = [], [], 0
        for logits in self._steps(ids, prefill, cache):
            wanted = targets[:, done : done + logits.shape[1], None]
            done += logits.shape[1]
            found.append(logits.log_softmax(-1).gather(2, wanted)[:, :, 0])
            right.append(logits.argmax(-1, keepdim=True) == wanted)
        logs, greedy = torch.cat(found, dim=1).double().cpu(), torch.cat(right, dim=1)[:, :, 0].cpu()
        lengths = [len(continuation) for _, continuation in requests]
        self._usage.prompt_tokens += [prefill + length for length in lengths]
        self._weigh(cache, len(requests))
        return [
            (float(logs[row, :length].sum()), bool(greedy[row, :length].all())) for row, length in enumerate(lengths)
        ]

    def _steps(self, ids: Tensor, prefill: int, cache: Cache) -> Iterator[Tensor]:
        """Logits from ``prefill`` on."""
        block = 1 if isinstance(cache, QuantizedCache) else self._block
        head = min(ids.shape[1], max(1, unpacked_tokens(cache)))
        if prefill >= head:
            yield from decode(self.model, ids, prefill, cache, self._prefill, block)
            return
        with torch.no_grad():  # nothing is packed before these are over, so they may be read at once
            yield forward(self.model, ids[:, :head], cache, head - prefill).float()
        yield from feed(self.model, ids, head, cache, block)

    def _new_cache(self) -> Cache:
        if self._cache == CACHE_NAME:
            return make_cache(self.model, self._cache_config)
        config = self.model.config.get_text_config(decoder=True)
        if self._cache == "dynamic":
            if self._cache_config:
                raise ValueError(f"cache_config={self._cache_config!r}: cache 'dynamic' takes no options")
            return DynamicCache(config=config)
        options = dict(self._cache_config)
        try:
            return QuantizedCache(options.pop("backend", "quanto"), config, **options)
        except (TypeError, ImportError) as error:
            raise ValueError(f"cache 'quantized' with {self._cache_config!r}: {error}") from None

    # ------------------------------------------------------------------ counting

    def _by_task(self, run: Callable[..., list[Any]], requests: list[Any], disable_tqdm: bool) -> list[Any]:
        """Answers in the order of the requests, each task and length counted on its own.

        Raises:
            RunFailedError: a task never read a packed token.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault((str(request.task_name), document_length(request.doc)), []).append(number)
        answers: list[Any] = [None] * len(requests)
        for (task, length), numbers in groups.items():
            self._usage = self._usages.setdefault(task, {}).setdefault(length, Usage())
            with count_packed_reads() as reads:
                made = run([requests[number] for number in numbers], disable_tqdm=disable_tqdm)
            self._usage.packed_tokens_read += reads.tokens
            for number, answer in zip(numbers, made, strict=True):
                answers[number] = answer
        if self._cache == CACHE_NAME:
            for task in {task for task, _ in groups}:
                self._check_read(task)
        return answers

    def _check_read(self, task: str) -> None:
        lengths = self._usages[task].values()
        if not sum(usage.packed_tokens_read for usage in lengths):
            longest = max(max(usage.prompt_tokens, default=0) for usage in lengths)
            raise RunFailedError(
                f"task {task!r} never read a packed token: prompts of at most {longest:,} tokens stay exact in a "
                f"cache that packs from {unpacked_tokens(self._new_cache()) + 1:,} tokens on; give longer ones or a "
                "smaller window, or use cache 'dynamic'"
            )

    def _weigh(self, cache: Cache, rows: int) -> None:
        """Note what a cache holds."""
        usage = self._usage
        if isinstance(cache, EntropySubbyteCache):
            size = cache_size(cache)
            of_row = (size.bytes / rows, size.plain_bytes / rows, size.code_bits, size.bits, size.bits_total)
            for key, value in zip(_WEIGHED, of_row, strict=True):
                getattr(usage, key).extend([] if value is None else [value] * rows)
            return
        config = self.model.config.get_text_config(decoder=True)
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        usage.cache_bytes += [_stock_bytes(cache, rows * config.num_key_value_heads * dim) / rows] * rows

    def _too_long(self, tokens: int, limit: int) -> ValueError:
        return ValueError(
            f"a prompt of {tokens:,} tokens is over the limit of {limit:,} (the model's, or max_length, less the "
            "tokens to generate): it would lose its beginning, unasked; give shorter ones or raise max_length"
        )
