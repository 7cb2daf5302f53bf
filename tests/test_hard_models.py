"""Models whose keys break low-bit caches: what the changes keep, and that ours hold where stock ones fall apart."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from support.models import prompt, tiny_model
from support.scripts import EVAL, scripts_of


CONTEXT, STEPS, TEXTS = 640, 20, 3
STOCK = {"cache": "min-max", "nbits": 4}


@pytest.fixture(scope="module")
def quality() -> Iterator[Any]:
    names = ("quality.harness", "quality.config", "quality.tasks", "baselines.hard_models")
    with scripts_of(EVAL, *names) as found:
        yield found


@pytest.mark.parametrize("kind", ["llama", "mixtral", "qwen2", "qwen2_moe"])
def test_heavy_tails_change_no_logit(quality: Any, kind: str) -> None:
    model, ids = tiny_model(kind), prompt(100)
    with torch.no_grad():
        before = model(ids).logits
        keys = model.model.layers[0].self_attn.k_proj.weight.norm()
        quality.hard_models.widen_key_tails(model, 64.0)
        torch.testing.assert_close(model(ids).logits, before, atol=1e-3, rtol=1e-3)
    assert model.model.layers[0].self_attn.k_proj.weight.norm() > 5 * keys


@pytest.mark.parametrize("kind", ["mixtral", "qwen2"])
def test_offsets_are_added_to_the_slowest_channels(quality: Any, kind: str) -> None:
    model = tiny_model(kind)
    projection = model.model.layers[1].self_attn.k_proj
    before = torch.zeros(projection.out_features) if projection.bias is None else projection.bias.detach().clone()
    quality.hard_models.add_key_offset(model, 50.0)
    added = (projection.bias - before).detach().view(2, 2, 8)
    assert added[..., :6].abs().max() == 0
    assert (added[..., 6:].abs() == 50).all()


def test_models_with_norms_behind_their_projections_are_refused(quality: Any) -> None:
    with pytest.raises(ValueError, match="Qwen3Attention has norms behind its projections"):
        quality.hard_models.add_key_offset(tiny_model("qwen3"), 1.0)


@pytest.mark.parametrize(
    ("change", "stock_growth"),
    [({"key_offset": 100.0}, 0.5), ({"heavy_tail": 16.0}, 0.08)],
    ids=["offsets of 100", "tails of 16"],
)
def test_two_and_a_half_bits_hold_where_four_do_not(
    quality: Any, change: dict[str, float], stock_growth: float
) -> None:
    model, tokenizer = quality.harness.load(quality.config.ModelEntry("reference", change=change), "cpu")
    stream = quality.tasks.encode(tokenizer, (EVAL.parent / "LICENSE").read_text(encoding="utf-8"))
    given = quality.tasks.text_sequences(stream, [tokenizer.bos_token_id], CONTEXT, STEPS, TEXTS, seed=0)
    exact = quality.harness.exact_logits(model, given, "one-piece", 4096)
    growth, kl = {}, {}
    for name, policy in {"ours": {"policy": "error", "code_bits": 2.25}, "stock": STOCK}.items():
        entry = quality.config.PolicyEntry.from_dict(name, policy)[0]
        found = quality.harness.measure(model, given, exact, entry, "one-piece", 4096)
        growth[name] = found.scores.dnll.mean() / found.scores.nll_exact.mean()
        kl[name] = found.scores.kl.mean()
    assert abs(growth["ours"]) < 0.02
    assert kl["stock"] > 3 * kl["ours"]
    assert growth["stock"] > stock_growth
