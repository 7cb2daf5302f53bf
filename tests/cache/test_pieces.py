"""A prompt that comes in pieces is measured, piece by piece, against everything that its queries see."""

from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_subbyte_moe.cache import packing
from hf_subbyte_moe.cache.groups import RowGroup
from hf_subbyte_moe.compat import CACHE_KW
from hf_subbyte_moe.policy import RowProbe
from hf_subbyte_moe.policy.statistics import sample_positions
from support.ahead import LAYERS, make_cache, make_model, pieces
from support.models import left_padded, prompt


@pytest.mark.parametrize("balanced", [False, True], ids=["usual keys", "keys with factors"])
def test_queries_see_what_is_packed_what_is_exact_and_what_is_new(
    balanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, window, sinks = 400, 300, 8, 2
    lengths = (first + second, 600, first + second)
    model = make_model()
    if balanced:
        attend = model.model.layers[0].self_attn
        attend.k_proj.weight.data[[3, 11]] *= 64
        attend.q_proj.weight.data[[3, 11, 19, 27]] /= 64
    ids, mask = left_padded([prompt(length, seed=row) for row, length in enumerate(lengths)])
    probes: list[tuple[torch.Tensor, Any]] = []

    def probe(query: torch.Tensor, position: torch.Tensor, exact: Any, *rest: Any) -> RowProbe:
        probes.append((position, exact))
        return RowProbe(query, position, exact, *rest)

    cache = make_cache(model, policy="uniform:exact", codebook="universal", window=window, sinks=sinks)
    pieces(model, cache, ids[:, :first], mask[:, :first])
    assert cache.layers[0].rows.store.counts.min() > 0
    assert (cache.layers[0].rows.codecs.balance.factors is not None) == balanced
    monkeypatch.setattr(packing, "RowProbe", probe)
    whole = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE_KW: whole})
        model(ids[:, first:], attention_mask=mask, **{CACHE_KW: cache})
    groups = [[0, 2], [1]]
    assert len(probes) == LAYERS * len(groups)
    for number, (position, exact) in enumerate(probes):
        layer, rows = divmod(number, len(groups))
        length = lengths[groups[rows][0]]
        held = length - second
        assert position.tolist() == (held + sample_positions(second)).tolist()
        assert torch.equal(exact.visible[0], torch.arange(length) <= position[:, None])
        states = (whole.layers[layer].keys, whole.layers[layer].values)
        keys, values = (part[groups[rows]][:, :, -length:] for part in states)
        if balanced and not layer:
            group = RowGroup(groups[rows], keys.device)
            keys = cache.layers[0].rows.codecs.balance.divided(keys.flatten(0, 1), group).view_as(keys)
        torch.testing.assert_close(exact.keys, keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(exact.values, values, rtol=1e-4, atol=1e-4)
