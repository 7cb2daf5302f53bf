"""A tokenizer without a download: one token a character of ASCII."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def letter_tokenizer() -> PreTrainedTokenizerFast:
    """Token ids are ASCII codes; 0 begins a text where asked for, 1 pads, 2 ends."""
    vocabulary = {chr(code): code for code in range(128)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=chr(0), pad_token=chr(1), eos_token=chr(2), clean_up_tokenization_spaces=False
    )
