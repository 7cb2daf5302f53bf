"""Attention masks over packed history: what can be honoured is, the rest is refused and changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

import hf_subbyte_moe
from hf_subbyte_moe.cache import EntropySubbyteCache, masks
from hf_subbyte_moe.compat import CACHE_KW, cache_of
from hf_subbyte_moe.decode import runner
from support.models import left_padded, prompt, tiny_model


EXACT: dict[str, Any] = {"policy": "uniform:exact", "window": 8, "sinks": 2}
LOWEST = torch.finfo(torch.float32).min
FAMILIES = ["llama", "gemma3", "deepseek_v3"]


def run(model: Any, cache: Cache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, **{CACHE_KW: cache}).logits
    return logits


def ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def causal(tokens: int, held: int) -> Tensor:
    return ones(1, 1, tokens, held + tokens).tril(held)


def columns(tokens: int, hidden: slice) -> Tensor:
    mask = torch.ones(1, 300 + tokens, dtype=torch.long)
    mask[:, hidden] = 0
    return mask


def of_a_head(tokens: int) -> Tensor:
    mask = causal(tokens, 300).repeat(1, 4, 1, 1)
    mask[:, 1, :, 50:200] = False
    return mask


def of_a_query(tokens: int) -> Tensor:
    mask = causal(tokens, 300)
    mask[:, :, 0, 50:200] = False
    return mask


def biased(tokens: int) -> Tensor:
    return torch.where(causal(tokens, 300), torch.linspace(-1, 0, 300 + tokens), LOWEST)


MASKS = {
    "more on the left": lambda tokens: columns(tokens, slice(200)),
    "a hole": lambda tokens: columns(tokens, slice(50, 200)),
    "on the right": lambda tokens: columns(tokens, slice(290, 300)),
    "of a head": of_a_head,
    "of a query": of_a_query,
    "additive": biased,
    "too short": lambda tokens: causal(tokens, 250),
}


@pytest.mark.parametrize("tokens", [1, 4, 150])
@pytest.mark.parametrize("kind", MASKS)
def test_what_cannot_be_honoured_is_refused(kind: str, tokens: int) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    cache, ids = EntropySubbyteCache(model.config, **EXACT), prompt(tokens, seed=5)
    run(model, cache, prompt(300))
    with pytest.raises(ValueError, match=r"attention mask"):
        run(model, cache, ids, MASKS[kind](tokens))
    plain = DynamicCache(config=model.config)
    run(model, plain, prompt(300))
    torch.testing.assert_close(run(model, cache, ids), run(model, plain, ids), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tokens", [1, 4, 150])
@pytest.mark.parametrize("held", [6, 300])
@pytest.mark.parametrize("additive", [False, True])
def test_new_tokens_see_each_other_as_the_mask_says(family: str, tokens: int, held: int, additive: bool) -> None:
    model = hf_subbyte_moe.apply(tiny_model(family, **({} if family != "gemma3" else {"sliding_window": 4096})))
    mask = causal(tokens, held)
    mask[..., held : held + max(1, tokens // 2)] = True  # an image, which is read in both directions
    given: Any = mask
    if additive:
        given = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, LOWEST)
    if family == "gemma3":
        given = dict.fromkeys(("full_attention", "sliding_attention"), given)
    ids = prompt(tokens, seed=5)
    logits = []
    for cache in (EntropySubbyteCache(model.config, **EXACT), DynamicCache(config=model.config)):
        run(model, cache, prompt(held))
        logits += [run(model, cache, ids, given), run(model, cache, prompt(1))]
    for ours, plain in zip(logits[:2], logits[2:], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("captured", [False, True])
def test_a_returned_cache_does_not_go_on_with_other_padding(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where steps are captured, which read no mask."""
    model = tiny_model("llama")
    if captured:
        monkeypatch.setattr(runner, "_UNGRAPHED", ("cpu",))
        hf_subbyte_moe.apply(model, {"decode": {"cuda_graph": True}})
    options: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
    made = model.generate(prompt(300), cache_implementation="entropy_subbyte", cache_config=EXACT, **options)
    mask = torch.ones_like(made.sequences)
    mask[:, :200] = 0
    with pytest.raises(ValueError, match="left padding only, and the same in every call"):
        model.generate(made.sequences, attention_mask=mask, **{CACHE_KW: cache_of(made)}, **options)
    mask[:, :200] = 1
    again = model.generate(made.sequences, attention_mask=mask, **{CACHE_KW: cache_of(made)}, **options)
    assert again.sequences.shape[1] == 304


@pytest.mark.parametrize("tokens", [1, 4])
def test_padding_that_a_later_call_does_not_mention_is_refused(tokens: int) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama"))
    cache = EntropySubbyteCache(model.config, **EXACT)
    ids, mask = left_padded([prompt(200, seed=1), prompt(300, seed=2)])
    run(model, cache, ids, mask)
    new = prompt(tokens, rows=2)
    for wrong in (None, torch.ones(2, 300 + tokens, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"padding|pads"):
            run(model, cache, new, wrong)
    run(model, cache, new, torch.cat([mask, torch.ones(2, tokens, dtype=mask.dtype)], 1))
    assert cache.get_seq_length() == 300 + tokens


def test_a_mask_is_compared_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_subbyte_moe.apply(tiny_model("llama", num_hidden_layers=4))
    cache = EntropySubbyteCache(model.config, **EXACT)
    ids, mask = left_padded([prompt(200, seed=1), prompt(300, seed=2)])
    run(model, cache, ids, mask)
    compared, agrees = [], masks._agrees
    monkeypatch.setattr(masks, "_agrees", lambda *given: (compared.append(1), agrees(*given))[1])
    for _ in range(3):
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        run(model, cache, prompt(1, rows=2), mask)
    assert len(compared) == 3
