"""Documents of the tasks in this folder, in RULER's words, and what their answers score.

What a task takes comes with ``--metadata``: ``max_seq_lengths`` (tokens of the whole prompt, counted with the model's
own tokenizer), ``num_samples`` of each length, ``haystack_file`` (a text; RULER's noise sentences without it),
``depths`` (rows of a heat map), ``data_seed`` and ``bos`` (begin with the tokenizer's token for that, for models that
want it and whose tokenizer does not say so). Documents depend on these alone, never on the global generators, so every
cache and every list of tasks gets the same ones.

Source: the formats and the metric, RULER (arXiv 2404.06654).
"""

import functools
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_subbyte_moe.tasks.words import ADJECTIVES, HEAD, NEEDLE, NOISE, NOUNS


_QUESTION = "\nWhat is the special magic number for {key} mentioned in the provided text?"
_PREFIX = "The special magic number for {key} mentioned in the provided text is"
_LEAST_LENGTH = 128
_TRIES = 12  # to meet a length; each one mends what the one before measured
_GLYPH = "�"

Document = dict[str, Any]


@dataclass(frozen=True)
class _Source:
    """What documents are made of.

    Attributes:
        tokenizer: the model's.
        lengths: tokens of a prompt.
        samples: of each length.
        text: of the haystack.
        depths: places of what is asked for, evenly spread.
        seed: of the documents.
        start: what every prompt begins with.
    """

    tokenizer: PreTrainedTokenizerBase
    lengths: Sequence[int]
    samples: int
    text: str
    depths: int
    seed: int
    start: str

    def count(self, text: str) -> int:
        """Tokens of a prompt, as the harness encodes it."""
        special = not (self.start and text.startswith(self.start))
        return len(self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def hay(self, rng: random.Random, tokens: int) -> str:
        """About so many tokens of the text, from some place on; repeated where it is short."""
        ids = _encoded(self.tokenizer, self.text)
        place = rng.randrange(max(1, len(ids) - tokens + 1))
        piece = (ids * (tokens // len(ids) + 1))[place : place + tokens] if tokens > len(ids) else ids[place:][:tokens]
        return str(self.tokenizer.decode(piece)).replace(_GLYPH, "")


@functools.lru_cache(maxsize=4)
def _tokenizer(name: str, gguf_file: str | None) -> PreTrainedTokenizerBase:
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    return made


@functools.lru_cache(maxsize=4)
def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _whole(options: dict[str, Any], key: str, default: int, least: int) -> int:
    value = options.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"metadata {key}={value!r} is not possible: a whole number, at least {least}")
    return value


def _read(options: dict[str, Any]) -> _Source:
    """Check what ``--metadata`` and ``--model_args`` say.

    Raises:
        ValueError: a wrong option, or a text that is not there.
    """
    named = next((options[key] for key in ("tokenizer", "pretrained") if options.get(key)), None)
    if isinstance(named, str):
        tokenizer = _tokenizer(named, options.get("gguf_file"))
    elif isinstance(named, PreTrainedTokenizerBase):
        tokenizer = named
    else:
        raise ValueError("lengths are counted in the model's tokens: give metadata tokenizer=ID_OR_PATH")
    lengths = options.get("max_seq_lengths", [4096])
    lengths = [lengths] if isinstance(lengths, int) else list(lengths)
    for length in lengths:
        _whole({"max_seq_lengths": length}, "max_seq_lengths", 0, _LEAST_LENGTH)
    file = options.get("haystack_file")
    if file is not None and not Path(file).is_file():
        raise ValueError(f"metadata haystack_file={file!r}: there is no such file")
    text = NOISE if file is None else Path(file).read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"metadata haystack_file={file!r}: it holds no text")
    start = str(tokenizer.bos_token or "") if options.get("bos") else ""
    return _Source(
        tokenizer,
        lengths,
        _whole(options, "num_samples", 100, 1),
        text,
        _whole(options, "depths", 10, 1),
        _whole(options, "data_seed", 0, 0),
        start,
    )


def _names(rng: random.Random, count: int) -> list[str]:
    return rng.sample([f"{adjective}-{noun}" for adjective in ADJECTIVES for noun in NOUNS], count)


def _fit(source: _Source, length: int, seed: str, build: Callable[[str], tuple[str, str]]) -> tuple[str, str, int]:
    """Input, prefix and tokens of a prompt whose haystack fills it up to ``length``.

    Raises:
        ValueError: it is longer without a haystack.
    """
    best: tuple[str, str, int] | None = None
    room = length
    for _ in range(_TRIES):
        text, prefix = build(source.hay(random.Random(seed), max(1, room)))
        tokens = source.count(f"{text} {prefix}" if prefix[0] != "\n" else text + prefix)
        if tokens <= length and (best is None or tokens > best[2]):
            best = (text, prefix, tokens)
        if tokens == length or (tokens > length and room <= 1):
            break
        room += length - tokens
    if best is None:
        raise ValueError(f"length {length} is too short for a prompt of this task")
    return best


def _insert(hay: str, places: list[float], pieces: list[str]) -> str:
    """Pieces at these parts of a text, moved to the next white space."""
    parts, last = [], 0
    for place, piece in sorted(zip(places, pieces, strict=True)):
        found = re.compile(r"\s").search(hay, max(last, round(place * len(hay))))
        cut = len(hay) if found is None else found.start()
        parts += [hay[last:cut], piece]
        last = cut
    return "".join([*parts, hay[last:]])


def _documents(options: dict[str, Any], name: str, make: Callable[[_Source, int, int, str], Document]) -> Any:
    source = _read(options)
    documents = [
        make(source, length, number, f"{source.seed}/{name}/{length}/{number}")
        for length in source.lengths
        for number in range(source.samples)
    ]
    return {"test": Dataset.from_list(documents)}


def _asked(
    source: _Source, length: int, number: int, seed: str, count: int, piece: str, ask: Callable[[str], tuple[str, str]]
) -> Document:
    """A document with ``count`` pairs hidden in its text; the one at a depth that ``number`` says is asked for."""
    rng = random.Random(seed)
    names, numbers = _names(rng, count), [str(value) for value in rng.sample(range(1_000_000, 10_000_000), count)]
    depth = (number % source.depths + 0.5) / source.depths
    places = [depth, *(rng.random() for _ in range(count - 1))]
    pieces = [piece.format(key=key, number=value) for key, value in zip(names, numbers, strict=True)]
    question, prefix = ask(names[0])
    head = source.start + (HEAD if piece == NEEDLE else "")
    text, prefix, tokens = _fit(
        source, length, seed, lambda hay: (head + _insert(hay, places, pieces) + question, prefix)
    )
    return {
        "input": text,
        "gen_prefix": prefix,
        "outputs": [numbers[0]],
        "max_length": length,
        "depth": depth,
        "prompt_tokens": tokens,
    }


def _ask_needle(key: str) -> tuple[str, str]:
    return _QUESTION.format(key=key), _PREFIX.format(key=key)


def needle(**options: Any) -> Any:
    """One needle."""
    return _documents(options, "needle", functools.partial(_asked, count=1, piece=NEEDLE, ask=_ask_needle))


def multikey(**options: Any) -> Any:
    """Eight needles, one question."""
    return _documents(options, "multikey", functools.partial(_asked, count=8, piece=NEEDLE, ask=_ask_needle))


def recall(**options: Any) -> Any:
    """Lines of keys and values in a text, one of which is asked for."""
    pairs = _whole(options, "num_pairs", 32, 1)
    if pairs > len(ADJECTIVES) * len(NOUNS):
        raise ValueError(f"metadata num_pairs={pairs} is not possible: at most {len(ADJECTIVES) * len(NOUNS)}")

    def ask(key: str) -> tuple[str, str]:
        return "\n\nRecall:", f"\n{key}:"

    return _documents(options, "recall", functools.partial(_asked, count=pairs, piece="\n{key}: {number}", ask=ask))


def text(**options: Any) -> Any:
    """Pieces of a text: a context of the length asked for, and ``scored_tokens`` more to predict."""
    scored = _whole(options, "scored_tokens", 256, 1)
    if options.get("haystack_file") is None:
        raise ValueError("perplexity is measured on a text: give metadata haystack_file=FILE")

    def make(source: _Source, length: int, number: int, seed: str) -> Document:
        ids = _encoded(source.tokenizer, source.text)
        places = _places(len(ids), length, scored, source.samples)
        place = places[number]
        decode = source.tokenizer.decode
        context = source.start + str(decode(ids[place : place + length])).replace(_GLYPH, "")
        after = str(decode(ids[place + length : place + length + scored])).replace(_GLYPH, "")
        kept = context.rstrip()
        after = context[len(kept) :] + after
        before = source.count(kept)
        return {
            "input": kept,
            "outputs": [after],
            "max_length": length,
            "prompt_tokens": before,
            "scored_tokens": source.count(kept + after) - before,
        }

    source = _read(options)
    held = len(_encoded(source.tokenizer, source.text))
    fewest = min(len(_places(held, length, scored, source.samples)) for length in source.lengths)
    return _documents({**options, "num_samples": fewest}, "text", make)


def _places(tokens: int, length: int, scored: int, samples: int) -> list[int]:
    """Where pieces of a text begin: evenly spread, no token scored twice; contexts may overlap.

    Raises:
        ValueError: the text is shorter than one piece.
    """
    room = tokens - length - scored
    if room < 0:
        raise ValueError(f"haystack_file holds {tokens} tokens, too few for {length} and {scored} more to predict")
    count = min(samples, room // scored + 1)
    return [number * room // max(1, count - 1) for number in range(count)]


# ------------------------------------------------------------------ scores


def score_answer(document: Document, results: list[str]) -> dict[str, float]:
    """RULER's metric for needles: the share of the right strings that the answer holds; also by length."""
    said = re.sub(r"[\x00-\x1f]", "\n", results[0].strip()).strip().lower()
    wanted = document["outputs"]
    score = sum(text.lower() in said for text in wanted) / len(wanted)
    return {"string_match": score, str(document["max_length"]): score}


def score_text(document: Document, results: list[tuple[float, bool]]) -> dict[str, float]:
    """Nats a token; also by length."""
    loss = -results[0][0] / document["scored_tokens"]
    return {"nll": loss, "perplexity": loss, str(document["max_length"]): loss}


def perplexity(losses: Sequence[float]) -> float:
    """Of the mean loss."""
    return math.exp(sum(losses) / len(losses))
