"""Decode steps that skip the checks: what they rely on must not outlive a change of rows or tiles."""

import copy
from collections.abc import Callable

import pytest
import torch

from hf_subbyte_moe.cache import EntropySubbyteLayer
from support.layers import make_layer, put, states


pytestmark = pytest.mark.filterwarnings("ignore:the model did not call:UserWarning")


def steps(layer: EntropySubbyteLayer, count: int, seed: int = 1) -> None:
    key, value = states(len(layer.starts), count, seed=seed)
    for at in range(count):
        layer.update(key[:, :, at : at + 1], value[:, :, at : at + 1])
        layer.rows.exact()


def assert_as_without_looking_ahead(layer: EntropySubbyteLayer) -> None:
    """What attention sees is what the rows say now."""
    exact, window = layer.rows.exact(), layer.rows.window
    assert torch.equal(exact.visible, window.visible(layer.rows.lengths, layer.rows.first_recent()))
    assert exact.keys is window.keys
    assert exact.values is window.values


def reload(layer: EntropySubbyteLayer) -> None:
    state = {name: tensor.clone() for name, tensor in layer.rows.state().items()}
    layer.rows.load_state(state)


def fail(layer: EntropySubbyteLayer) -> None:
    steps(layer, 1, seed=9)
    layer.take_back()


def fail_prompt(layer: EntropySubbyteLayer) -> None:
    layer.update(*states(len(layer.starts), 5, seed=9))
    layer.take_back()


CHANGES: dict[str, Callable[[EntropySubbyteLayer], None]] = {
    "nothing": lambda layer: None,
    "crop": lambda layer: layer.crop(-3),
    "crop into a tile": lambda layer: layer.crop(-200),
    "crop everything": lambda layer: layer.crop(-10_000),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "record": lambda layer: layer.activate_past_recording(),
    "reload": reload,
    "fail": fail,
    "fail a prompt": fail_prompt,
    "prompt": lambda layer: put(layer, *states(len(layer.starts), 7, seed=8)),
    "long prompt": lambda layer: put(layer, *states(len(layer.starts), 300, seed=8)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("before", [1, 33, 134])  # in the first masks; in the next ones; behind a flush
@pytest.mark.parametrize("ragged", [False, True])
def test_a_change_between_steps_is_seen_by_the_next_one(change: str, before: int, ragged: bool) -> None:
    layer = make_layer(policy="uniform:vq2", window=8)
    layer.update(*states(2, 300))
    if ragged:
        layer.set_starts(layer.starts + torch.tensor([0, 5]).numpy())
    layer.settle_without_statistics()
    twin = copy.deepcopy(layer)
    for one in (layer, twin):
        for count, seed in ((before, 1), (140, 2)):
            key, value = states(len(one.starts), count, seed=seed)
            for at in range(count):
                if one is twin:
                    one.rows._ahead = None
                one.update(key[:, :, at : at + 1], value[:, :, at : at + 1])
                if one is layer:
                    one.settle_without_statistics()
                    assert_as_without_looking_ahead(one)
            if seed == 1:
                CHANGES[change](one)
    twin.settle_without_statistics()
    assert layer.length == twin.length
    assert layer.rows.lengths.tolist() == twin.rows.lengths.tolist()
    assert layer.rows.store.counts.tolist() == twin.rows.store.counts.tolist()
    for left, right in zip(layer.dequantize(), twin.dequantize(), strict=True):
        assert torch.equal(left, right)


def test_most_steps_look_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer(policy="uniform:vq2")
    put(layer, *states(2, 300))
    checked: list[int] = []
    monkeypatch.setattr(layer, "_check_geometry", lambda *given: checked.append(layer.length))
    steps(layer, 100)
    assert 0 < len(checked) < 10


@pytest.mark.parametrize("before", [2, 86, 87])  # the 88th token behind 300 packs a tile
def test_a_failed_step_is_undone_whether_it_packed_or_not(before: int) -> None:
    layer = make_layer(policy="uniform:vq2")
    put(layer, *states(2, 300))
    steps(layer, before)
    tiles, held = layer.rows.store.counts.tolist(), layer.dequantize()
    steps(layer, 1, seed=2)
    assert (layer.rows.store.counts.tolist() != tiles) == (before == 87)
    layer.take_back()
    assert layer.length == 300 + before
    assert layer.rows.lengths.tolist() == [300 + before] * 2
    assert layer.rows.store.counts.tolist() == tiles
    assert_as_without_looking_ahead(layer)
    for left, right in zip(layer.dequantize(), held, strict=True):
        assert torch.equal(left, right)


def test_states_of_another_kind_are_refused_between_steps() -> None:
    layer = make_layer(policy="uniform:vq2")
    put(layer, *states(2, 300))
    steps(layer, 3)
    others = [states(1, 1), states(3, 1), states(2, 1, heads=1), tuple(part.half() for part in states(2, 1))]
    others.append((states(2, 1)[0], states(1, 1)[1]))
    for key, value in others:
        with pytest.raises(ValueError, match="do not fit this cache"):
            layer.update(key, value)
    with pytest.raises(ValueError, match="do not fit this cache, which lies on cpu"):
        layer.update(*(part.to("meta") for part in states(2, 1)))
    with pytest.raises(ValueError, match="NaN or Inf"):
        layer.update(states(2, 1)[0] / 0, states(2, 1)[1])
    layer.reorder_cache(torch.tensor([1, 0, 1]))
    with pytest.raises(ValueError, match="do not fit this cache"):
        layer.update(*states(2, 1))
    assert layer.length == 303
    steps(layer, 2)
    assert layer.rows.lengths.tolist() == [305] * 3
