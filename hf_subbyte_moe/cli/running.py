"""Load a model, run a prompt through it, and measure what the commands report."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.generation.streamers import BaseStreamer

import hf_subbyte_moe
from hf_subbyte_moe.compat import cache_of
from hf_subbyte_moe.distributed.launch import ranks
from hf_subbyte_moe.roofline import why_not


_REFERENCE = Path(hf_subbyte_moe.__file__).parents[1] / "model_cards" / "subbyte-moe-31m"


@dataclass(frozen=True)
class Answer:
    """One generated answer.

    Attributes:
        text: the new tokens, decoded.
        cache: the cache that it came out of.
        tokens_per_s: from the second new token on.
    """

    text: str
    cache: Any
    tokens_per_s: float


def reference_folder() -> Path:
    """Where a clone of this project has the reference model; elsewhere there is nothing."""
    return _REFERENCE


def default_model() -> str:
    """The reference model of a clone of this project.

    Raises:
        ValueError: no clone around this package.
    """
    if not _REFERENCE.is_dir():
        raise ValueError("outside a clone of the project there is no default model: name one, by its Hub id or folder")
    return str(_REFERENCE)


def load_model(
    name: str | None, cpu_dtype: torch.dtype = torch.bfloat16
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model on the GPU if there is one, in bf16 there, and its tokenizer; under torchrun, tensor parallel.

    Args:
        name: Hub id, folder or .gguf file; None means the reference model of a clone of this project.
        cpu_dtype: of the weights without a GPU.

    Raises:
        ValueError: no name, and no clone around this package; or no model of that name.
    """
    if name is None:
        name = default_model()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        # PyTorch may pick cuDNN, which plans anew for every length: with a growing plain cache that is most of a step
        torch.backends.cuda.enable_cudnn_sdp(False)
    file: dict[str, Any] = {}
    if name.endswith(".gguf"):
        name, file = str(Path(name).parent), {"gguf_file": Path(name).name}
    dtype = torch.bfloat16 if device == "cuda" else cpu_dtype
    try:
        shared = {"distributed_config": DistributedConfig(tp_plan="auto")} if ranks() > 1 else {}
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **file, **shared)
        tokenizer = AutoTokenizer.from_pretrained(name, **file)
    except OSError as error:
        raise ValueError(
            f"{name!r} is neither a folder with a model nor one on the Hub: {why_not(name, error)}"
        ) from None
    return (model if shared else model.to(device)).eval(), tokenizer


def refuse_over_limit(model: PreTrainedModel, tokens: int, new_tokens: int = 0) -> None:
    """Refuse a prompt that the model was not made for.

    Raises:
        ValueError: with the tokens that are generated it is over the model's limit.
    """
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if isinstance(limit, int) and tokens + new_tokens > limit:
        more = f" and {new_tokens} to generate" if new_tokens else ""
        raise ValueError(f"a prompt of {tokens:,} tokens{more} is over the limit of {limit:,} (the model's)")


@contextmanager
def layer_progress(model: PreTrainedModel, description: str) -> Iterator[None]:
    """A progress bar over the decoder layers of the next forward pass; later passes do not move it."""
    decoder: Any = model.get_decoder()
    layers = decoder.layers
    with tqdm(total=len(layers), desc=description, unit="layer", leave=False) as bar:

        def advance(*_: Any) -> None:  # a hook's result would replace the layer's
            bar.update(int(bar.n < len(layers)))

        hooks = [layer.register_forward_hook(advance) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class _TokenTimes(BaseStreamer):
    """Notes when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing to flush."""


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: Tensor, new_tokens: int, name: str, **options: Any
) -> Answer:
    """Generate greedily from ``[1, T]`` ids; ``options`` choose the cache."""
    times = _TokenTimes()
    generate: Any = model.generate
    with layer_progress(model, f"prefill, {name}"):
        output = generate(
            ids.to(model.device),
            attention_mask=torch.ones_like(ids).to(model.device),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            streamer=times,
            return_dict_in_generate=True,
            **options,
        )
    steps = times.times[1:]  # the first call carries the prompt
    rate = (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else float("nan")
    text = str(tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True))
    return Answer(text, cache_of(output), rate)


def tensor_bytes(cache: Any) -> int:
    """Bytes of a plain cache's keys and values."""
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
