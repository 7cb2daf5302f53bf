"""Tokenizers without a download."""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character of ASCII, its id the code; 0 begins a text where asked for, 1 pads, 2 ends."""
    vocabulary = {chr(code): code for code in range(128)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=chr(0), pad_token=chr(1), eos_token=chr(2), clean_up_tokenization_spaces=False
    )


class Letters:
    """As little of a tokenizer as the commands need: a letter is a token."""

    bos_token_id: int | None = 1
    eos_token_id = 2

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 29 for letter in text]}
