"""What is decoded: pieces of text, and prompts with one right answer, in the words the reference model was trained on.

A task's prompt has exactly the asked number of tokens, its question last. Haystacks are slices of the texts; one in
four is RULER's noise sentences, as in training. Prompts depend on the seed, the task, the context and their number
alone, so every cache gets the same ones. Where a task ends in "-later", its question is read token by token, once the
prompt before it is packed, so no choice of bits could look at it.

Source: the tasks, RULER (arXiv 2404.06654).
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_subbyte_moe.cli.texts import json_texts


TEXT = "text"
OWN_TEXTS = "own sources"
_NOISE_SHARE = 0.25
_NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_ADJECTIVES = ("red", "quick", "lazy", "silent", "golden", "ancient", "hollow", "frozen", "gentle", "hidden", "vivid")
_NOUNS = ("fox", "river", "stone", "table", "garden", "window", "lantern", "bridge", "castle", "temple", "orchard")
_HEAD = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n"
)
_NEEDLE = " One of the special magic numbers for {key} is: {number}."
_QUESTION = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is"
)
_CHAIN_HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
_CHAIN_QUESTION = (
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, 4 variables are assigned the value {value}, they are:"
)
_KEYS = 8
_LATER = "-later"
_CHAINS, _LINKS = 2, 4


@dataclass(frozen=True)
class Puzzle:
    """A task's prompt before its haystack.

    Attributes:
        head: its beginning.
        needles: pieces to hide, in this order.
        question: its end.
        answer: what must follow, space in front included.
        once: what the whole prompt holds exactly once; the answer is read off there.
    """

    head: str
    needles: list[str]
    question: str
    answer: str
    once: list[str]


@dataclass(frozen=True)
class Sequences:
    """Tokens to decode through a cache, and what is looked at.

    Attributes:
        ids: ``[n, prefill + S]`` tokens; the first ``prefill`` are read as a prompt, the others one at a time.
        prefill: tokens of the prompt.
        targets: ``[n, S]`` what should follow each token that is read alone.
        counted: ``[n, S]`` bool; False behind the end of a shorter answer.
    """

    ids: Tensor
    prefill: int
    targets: Tensor
    counted: Tensor

    def __len__(self) -> int:
        return self.ids.shape[0]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids without special tokens."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def read_texts(path: Path | None, root: Path) -> list[str]:
    """Texts of a file of JSON lines, or the README and the sources below ``root``.

    Raises:
        ValueError: a line without a text; names the file and the line.
    """
    if path is None:
        files = [root / "README.md", *sorted((root / "hf_subbyte_moe").rglob("*.py"))]
        files += sorted((root / "kernels" / "subbyte_kernels").rglob("*.py"))
        return [file.read_text(encoding="utf-8") for file in files]
    return json_texts(path)


def text_sequences(stream: list[int], start: list[int], context: int, scored: int, count: int, seed: int) -> Sequences:
    """Pieces of text that do not overlap.

    Args:
        stream: tokens of all texts.
        start: tokens in front of each piece.
        context: tokens before the first scored one.
        scored: scored tokens.
        count: pieces at most; fewer where the texts are short.
        seed: chooses among the pieces.

    Raises:
        ValueError: the texts are shorter than one piece.
    """
    body = context + scored + 1 - len(start)
    places = range(0, len(stream) - body + 1, body)
    if not places:
        raise ValueError(
            f"texts of {len(stream)} tokens hold no piece of {body}: give longer ones or a shorter context"
        )
    rng = random.Random(f"{seed}/{TEXT}/{context}")
    chosen = sorted(rng.sample(places, min(count, len(places))))
    pieces = torch.tensor([start + stream[place : place + body] for place in chosen])
    targets = pieces[:, context + 1 :]
    return Sequences(pieces[:, :-1], context, targets, torch.ones_like(targets, dtype=torch.bool))


def _keys(rng: random.Random, count: int) -> list[str]:
    pairs = [f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    return rng.sample(pairs, count)


def _needle(rng: random.Random, keys: int) -> Puzzle:
    names, numbers = _keys(rng, keys), rng.sample(range(1_000_000, 10_000_000), keys)
    needles = [_NEEDLE.format(key=key, number=number) for key, number in zip(names, numbers, strict=True)]
    asked = rng.randrange(keys)
    number = str(numbers[asked])
    return Puzzle(_HEAD, needles, _QUESTION.format(key=names[asked]), f" {number}", [number])


def _variables(rng: random.Random) -> Puzzle:
    names: list[str] = []
    while len(names) < _CHAINS * _LINKS:
        name = "".join(rng.choice(string.ascii_uppercase) for _ in range(5))
        if name not in names:
            names.append(name)
    values = rng.sample(range(10_000, 100_000), _CHAINS)
    chains = [names[number * _LINKS : (number + 1) * _LINKS] for number in range(_CHAINS)]
    lines: list[tuple[float, str]] = []
    for value, chain in zip(values, chains, strict=True):
        places = sorted(rng.random() for _ in chain)
        said = [str(value), *(f"VAR {name}" for name in chain)]
        lines += [
            (place, f" VAR {name} = {what}\n") for place, name, what in zip(places, chain, said[:-1], strict=True)
        ]
    asked = rng.randrange(_CHAINS)
    return Puzzle(
        _CHAIN_HEAD,
        [line for _, line in sorted(lines)],
        _CHAIN_QUESTION.format(value=values[asked]),
        " " + " ".join(chains[asked]),
        [f"VAR {name} = " for name in names],
    )


TASKS: dict[str, Callable[[random.Random], Puzzle]] = {
    "needle": lambda rng: _needle(rng, 1),
    "multikey": lambda rng: _needle(rng, _KEYS),
    f"multikey{_LATER}": lambda rng: _needle(rng, _KEYS),
    "variables": _variables,
}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a task.

    Attributes:
        ids: as many tokens as the context.
        answer: tokens that should follow.
        puzzle: what it was made of.
        alone: so many of its last tokens are read one at a time.
    """

    ids: list[int]
    answer: list[int]
    puzzle: Puzzle
    alone: int = 1


def task_prompt(
    tokenizer: PreTrainedTokenizerBase, stream: list[int], task: str, context: int, seed: int, number: int
) -> Prompt:
    """Hide a puzzle in a haystack.

    Args:
        tokenizer: the model's.
        stream: tokens of all texts.
        task: a key of ``TASKS``.
        context: tokens of the whole prompt.
        seed: of the run.
        number: of the prompt.

    Raises:
        ValueError: ``context`` is too short for the puzzle alone.
    """
    rng = random.Random(f"{seed}/{task}/{context}/{number}")
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    noise = encode(tokenizer, _NOISE)
    while True:  # a haystack may hold the answer by chance
        puzzle = TASKS[task](rng)
        head, question = start + encode(tokenizer, puzzle.head), encode(tokenizer, puzzle.question)
        needles = [encode(tokenizer, needle) for needle in puzzle.needles]
        room = context - len(head) - len(question) - sum(map(len, needles))
        if room < len(needles):
            raise ValueError(f"context={context} is too short: task {task!r} takes {context - room} tokens alone")
        if rng.random() < _NOISE_SHARE or len(stream) <= room:
            source = noise if len(stream) > room or not stream else stream
            hay = (source * (room // len(source) + 1))[:room]
        else:
            place = rng.randrange(len(stream) - room)
            hay = stream[place : place + room]
        ids, last = list(head), 0
        for cut, needle in zip(sorted(rng.sample(range(room), len(needles))), needles, strict=True):
            ids += hay[last:cut] + needle
            last = cut
        ids += hay[last:] + question
        whole = str(tokenizer.decode(ids))
        if all(whole.count(piece) == 1 for piece in puzzle.once):
            alone = len(question) if task.endswith(_LATER) else 1
            return Prompt(ids, encode(tokenizer, puzzle.answer), puzzle, alone)


def task_sequences(prompts: list[Prompt]) -> Sequences:
    """Prompts of one length with their right answers; the last token of a prompt is read alone, as the first step.

    So the first token of the answer comes out of the packed cache, not out of the exact attention of the prompt. Where
    more tokens of a prompt are read alone, none of them counts but the last.
    """
    longest = max(len(prompt.answer) for prompt in prompts)
    context, alone = len(prompts[0].ids), max(prompt.alone for prompt in prompts)
    whole = torch.zeros(len(prompts), context + longest, dtype=torch.long)
    counted = torch.zeros(len(prompts), alone - 1 + longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        tokens = [*prompt.ids, *prompt.answer]
        whole[row, : len(tokens)] = torch.tensor(tokens)
        counted[row, alone - 1 : alone - 1 + len(prompt.answer)] = True
    return Sequences(whole[:, :-1], context - alone, whole[:, context - alone + 1 :], counted)
