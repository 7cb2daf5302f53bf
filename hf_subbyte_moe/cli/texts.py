"""What the commands that learn about a model offline share: its name, texts to learn from, where the result goes."""

import json
import random
from pathlib import Path
from typing import Annotated

import torch
import typer
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_subbyte_moe.cli.outputs import check_file


ModelName = Annotated[
    str | None, typer.Argument(help="Hub id, folder or .gguf file.", show_default="the reference MoE of the clone")
]
DataFile = Annotated[
    Path | None,
    typer.Option(
        help='Plain text, or JSON lines with a "text" each; without it the model writes its own.',
        exists=True,
        dir_okay=False,
    ),
]


def beside_model(model: PreTrainedModel, name: str, what: str) -> Path:
    """Where a file lies in the model's own folder.

    Raises:
        ValueError: the model did not come from a folder, or nothing may be written there; says so of ``what``.
    """
    folder = Path(str(model.config.name_or_path))
    if not folder.is_dir():
        raise ValueError(f"{model.config.name_or_path!r} is no folder that {what} could lie in: give --out FILE")
    check_file(folder / name, what)
    return folder / name


def windows_of(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: Path | None, count: int, tokens: int, seed: int
) -> torch.Tensor:
    """``[count, tokens]`` pieces of the texts of a file, or without one what the model writes itself."""
    if data is None:
        return written_windows(model, tokenizer, count, tokens, seed)
    return text_windows(tokenizer, read_texts(data), count, tokens, seed)


def read_texts(path: Path) -> list[str]:
    """Texts of a file: JSON lines with a key "text" each, or one plain text.

    Raises:
        ValueError: a line of JSON without a text; names the file and the line.
    """
    return json_texts(path) if path.suffix in (".jsonl", ".json") else [path.read_text(encoding="utf-8")]


def json_texts(path: Path) -> list[str]:
    """Texts of JSON lines with a key "text" each.

    Raises:
        ValueError: a line without a text; names the file and the line.
    """
    texts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, TypeError, KeyError):
            raise ValueError(f'{path.name}, line {number}: not {{"text": ...}}') from None
    return texts


def text_windows(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int, tokens: int, seed: int
) -> torch.Tensor:
    """``[count, tokens]`` pieces of texts, each from another text as long as there are enough long ones.

    Raises:
        ValueError: the texts hold fewer pieces that do not overlap.
    """
    rng = random.Random(seed)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    body = tokens - len(start)
    order = list(texts)
    rng.shuffle(order)
    pieces: list[list[list[int]]] = []  # by text, shuffled
    for text in tqdm(order, desc="tokens", unit="text", leave=False):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        own = [start + ids[low : low + body] for low in range(0, len(ids) - body + 1, body)]
        rng.shuffle(own)
        pieces.append(own)
    turns = max(map(len, pieces), default=0)
    taken = [own[turn] for turn in range(turns) for own in pieces if turn < len(own)][:count]
    if len(taken) < count:
        raise ValueError(f"the texts hold {len(taken)} pieces of {tokens} tokens, not {count}: give more of them")
    return torch.tensor(taken)


def written_windows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, seed: int
) -> torch.Tensor:
    """``[count, tokens]`` that the model writes itself, sampled at temperature 1."""
    first = next((token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None), 0)
    torch.manual_seed(seed)
    prompt = torch.full((count, 1), first, device=model.device)
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        min_new_tokens=tokens - 1,
        max_new_tokens=tokens - 1,
        cache_implementation="dynamic",
        pad_token_id=first,
        eos_token_id=tokenizer.eos_token_id,
    )
    with tqdm(total=tokens - 1, desc="the model writes; --data FILE is faster", unit="token", leave=False) as bar:

        def advance(*_: object) -> None:
            bar.update()

        hook = model.register_forward_hook(advance)
        try:
            written: torch.Tensor = model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), generation_config=config
            )
        finally:
            hook.remove()
    return written.cpu()
