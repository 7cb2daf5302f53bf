"""Needle prompts of an exact length, in the form that RULER uses and the reference model was trained on."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_subbyte_moe.tasks.words import ADJECTIVES, HEAD, NEEDLE, NOISE, NOUNS


_TAIL = (
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is"
)


@dataclass(frozen=True)
class NeedlePrompt:
    """A question about one sentence in a long text.

    Attributes:
        ids: ``[1, context]`` token ids.
        expected: the number that the model should answer.
        question: the end of the prompt, which asks for it.
    """

    ids: Tensor
    expected: str
    question: str


def needle_prompt(
    tokenizer: PreTrainedTokenizerBase, context: int, seed: int, depth: float, haystack: str | None = None
) -> NeedlePrompt:
    """Hide a number in a text and ask for it.

    Args:
        tokenizer: the model's.
        context: tokens of the whole prompt.
        seed: chooses key and number.
        depth: where the needle lies, from 0 (start) to 1 (end).
        haystack: text around the needle, repeated as needed; RULER's noise sentences by default.

    Raises:
        ValueError: ``context`` is too short for the question, or ``depth`` is outside 0 to 1.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must lie between 0 and 1")
    rng = random.Random(seed)
    key = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
    number = str(rng.randint(1_000_000, 9_999_999))

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    question = _TAIL.format(key=key)
    head, tail = start + encode(HEAD), encode(question)
    needle = encode(NEEDLE.format(key=key, number=number))
    room = context - len(head) - len(needle) - len(tail)
    if room < 1:
        raise ValueError(f"context={context} is too short: the question alone takes {context - room} tokens")
    body = encode(haystack or NOISE)
    body = (body * (room // len(body) + 1))[:room]
    cut = round(depth * room)
    return NeedlePrompt(torch.tensor([head + body[:cut] + needle + body[cut:] + tail]), number, question)
