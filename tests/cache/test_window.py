"""Sinks and ring against a plain list of tokens for each row."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_subbyte_moe.cache.window import ExactWindow, StepsAhead


HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5


def token(row: int, index: int, dim: int) -> Tensor:
    """``[H, dim]`` that tells row, token, head and channel apart."""
    heads = torch.arange(HEADS).unsqueeze(1) * 0.25
    return row * 10_000 + index + heads + torch.arange(dim) / 64


def tokens(row: int, first: int, last: int, dim: int) -> Tensor:
    return torch.stack([token(row, index, dim) for index in range(first, last)], dim=1)


class Model:
    """Rows as lists: what was written last into each token, and how long a row is."""

    def __init__(self, rows: int, sinks: int, window: int) -> None:
        like = torch.zeros(rows, HEADS, 1, KEY_DIM), torch.zeros(rows, HEADS, 1, VALUE_DIM)
        self.window = ExactWindow(*like, sinks, window)
        self.names = list(range(rows))
        self.lengths = [0] * rows

    def prompt(self, row: int, count: int) -> None:
        """Write a prompt: its sinks, then as many of its last tokens as the ring holds."""
        name, sinks, ring = self.names[row], self.window.sinks, self.window.ring
        for first, last in ((0, min(sinks, count)), (max(sinks, count - ring), count)):
            if last > first:
                self.window.write(row, first, tokens(name, first, last, KEY_DIM), tokens(name, first, last, VALUE_DIM))
        self.lengths[row] = count

    def next_tokens(self) -> tuple[Tensor, Tensor]:
        """``[B, H, 1, dim]`` keys and values that come next."""
        places = list(zip(self.names, self.lengths, strict=True))
        keys, values = (torch.stack([token(*place, dim) for place in places]) for dim in (KEY_DIM, VALUE_DIM))
        return keys.unsqueeze(2), values.unsqueeze(2)

    def step(self) -> None:
        """Append one token to every row."""
        StepsAhead(self.window, np.array(self.lengths), self.first_recent(), 1, version=0).append(*self.next_tokens())
        self.lengths = [length + 1 for length in self.lengths]

    def first_recent(self) -> np.ndarray:
        """The oldest token that the ring still holds."""
        return np.maximum(np.array(self.lengths) - self.window.ring, 0)

    def check(self, first_recent: np.ndarray) -> None:
        """Exactly the sinks and the recent tokens are visible, each with its own content."""
        visible = self.window.visible(np.array(self.lengths), first_recent)
        assert visible.shape == (len(self.names), 1, self.window.sinks + self.window.ring)
        for row, (name, length) in enumerate(zip(self.names, self.lengths, strict=True)):
            recent = range(max(int(first_recent[row]), self.window.sinks), length)
            expected = [*range(min(self.window.sinks, length)), *recent]
            held = visible[row, 0].nonzero().squeeze(-1)
            assert len(held) == len(expected)
            for buffer, dim in ((self.window.keys, KEY_DIM), (self.window.values, VALUE_DIM)):
                found = buffer[row][:, held]
                order = found[0, :, 0].argsort()
                wanted = [token(name, index, dim) for index in expected]
                assert torch.equal(found[:, order], torch.stack(wanted, dim=1) if wanted else found)


@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("window", [1, 40, 128])
def test_rows_of_different_length_keep_their_sinks_and_recent_tokens(window: int, sinks: int) -> None:
    ring = window + 128
    model = Model(6, sinks, window)
    for row, count in enumerate([0, 1, sinks, sinks + 1, ring + sinks, 3 * ring + 7]):
        model.prompt(row, count)
    model.check(model.first_recent())
    for _ in range(ring + 3):
        model.step()
    model.check(model.first_recent())


def test_every_step_around_the_ring_is_right() -> None:
    model = Model(2, sinks=4, window=1)
    model.prompt(0, 2)
    model.prompt(1, 100)
    for _ in range(300):
        model.step()
        model.check(model.first_recent())


def test_rows_of_equal_length_take_the_same_slot() -> None:
    model = Model(3, sinks=2, window=3)
    for _ in range(150):
        model.step()
    model.check(model.first_recent())


def test_packed_tokens_are_not_visible_any_more() -> None:
    model = Model(2, sinks=4, window=128)
    model.prompt(0, 255)
    model.prompt(1, 200)
    model.check(np.array([132, 0]))  # row 0 packed its first tile behind the sinks
    model.check(np.array([255, 200]))


def test_a_row_shorter_than_the_sinks_shows_its_own_tokens_alone() -> None:
    model = Model(2, sinks=4, window=8)
    model.prompt(0, 3)
    visible = model.window.visible(np.array([3, 0]), np.array([0, 0]))
    assert visible[0, 0].nonzero().squeeze(-1).tolist() == [0, 1, 2]
    assert not visible[1].any()


def test_slots_are_sinks_first_and_then_a_ring() -> None:
    window = Model(1, sinks=4, window=2).window
    assert window.ring == 130
    index = np.array([0, 3, 4, 5, 133, 134, 263, 264])
    assert window.slots(index).tolist() == [0, 3, 4, 5, 133, 4, 133, 4]


def test_reading_gives_copies_in_token_order_across_the_end_of_the_ring() -> None:
    model = Model(2, sinks=4, window=2)
    model.prompt(1, 200)
    keys, values = model.window.read(1, 120, 150)
    assert torch.equal(keys, tokens(1, 120, 150, KEY_DIM))
    assert torch.equal(values, tokens(1, 120, 150, VALUE_DIM))
    keys.zero_()
    assert torch.equal(model.window.read(1, 120, 150)[0], tokens(1, 120, 150, KEY_DIM))
    assert torch.equal(model.window.read(1, 0, 4)[0], tokens(1, 0, 4, KEY_DIM))


def test_writing_one_row_leaves_the_others_alone() -> None:
    model = Model(3, sinks=2, window=2)
    for row in range(3):
        model.prompt(row, 50)
    before = model.window.keys.clone()
    model.window.write(1, 20, tokens(9, 20, 40, KEY_DIM), tokens(9, 20, 40, VALUE_DIM))
    assert torch.equal(model.window.keys[[0, 2]], before[[0, 2]])
    assert torch.equal(model.window.read(1, 20, 40)[0], tokens(9, 20, 40, KEY_DIM))


@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1, 0], [2], [0, 0, 1, 1, 2, 2]])
def test_rows_can_be_kept_reordered_and_repeated(rows: list[int]) -> None:
    model = Model(3, sinks=4, window=1)
    for row, count in enumerate([10, 150, 60]):
        model.prompt(row, count)
    model.window.select_rows(torch.tensor(rows))
    model.names = [model.names[row] for row in rows]
    model.lengths = [model.lengths[row] for row in rows]
    model.check(model.first_recent())
    for _ in range(5):
        model.step()
    model.check(model.first_recent())


def test_repeated_rows_do_not_share_memory() -> None:
    model = Model(1, sinks=0, window=1)
    model.prompt(0, 5)
    model.window.select_rows(torch.tensor([0, 0]))
    model.window.write(1, 0, tokens(7, 0, 5, KEY_DIM), tokens(7, 0, 5, VALUE_DIM))
    assert torch.equal(model.window.read(0, 0, 5)[0], tokens(0, 0, 5, KEY_DIM))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_buffers_have_the_dtype_of_the_model_and_nothing_else_is_held(dtype: torch.dtype) -> None:
    window = ExactWindow(torch.zeros(2, 3, 7, 8, dtype=dtype), torch.zeros(2, 3, 7, 16, dtype=dtype), 4, 10)
    keys, values = window.tensors()
    assert keys.shape == (2, 3, 4 + 10 + 128, 8)
    assert values.shape == (2, 3, 4 + 10 + 128, 16)
    assert keys.dtype == values.dtype == dtype


@pytest.mark.parametrize(("sinks", "window"), [(4, 1), (0, 40), (3, 200)])
@pytest.mark.parametrize("counts", [[0, 0], [1, 1], [2, 100], [3, 5], [150, 400]])
def test_masks_and_places_made_ahead_are_those_of_each_step(counts: list[int], sinks: int, window: int) -> None:
    model = Model(2, sinks, window)
    for row, count in enumerate(counts):
        model.prompt(row, count)
    first_recent = np.maximum(np.array(counts) - (model.window.ring - 20), 0)  # room for 20 tokens more
    ahead = StepsAhead(model.window, np.array(counts), first_recent, 20, version=0)
    assert ahead.left == 20
    while ahead.left:
        assert torch.equal(ahead.mask, model.window.visible(np.array(model.lengths), first_recent))
        keys, values = model.next_tokens()
        ahead.append(keys, values)
        model.lengths = [length + 1 for length in model.lengths]
    assert torch.equal(ahead.mask, model.window.visible(np.array(model.lengths), first_recent))
    model.check(first_recent)
