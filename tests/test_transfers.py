"""What is asked for together comes back as it was asked for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_subbyte_moe.transfers import Answers, upload, waits_cost


def test_answers_come_by_question_in_their_shapes() -> None:
    answers = Answers()
    first = answers.ask(torch.tensor(True), torch.arange(6.0).view(2, 3))
    nothing, last = answers.ask(), answers.ask(torch.tensor([0.1], dtype=torch.bfloat16), torch.zeros(0, 4))
    answers.send()
    truth, grid = first()
    assert (truth.shape, bool(truth)) == ((), True)
    assert grid.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert grid.dtype == np.float64
    assert nothing() == []
    assert [part.shape for part in last()] == [(1,), (0, 4)]
    assert last()[0] == float(torch.tensor(0.1, dtype=torch.bfloat16))


def test_a_cpu_is_asked_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even to ask for none looks for a device, which other accelerators do not have."""

    def stream(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "stream", stream)
    answers = Answers()
    with answers.beside(torch.zeros(1), keep=None):
        found = answers.ask(torch.ones(2))
    answers.send()
    assert found()[0].tolist() == [1, 1]


def test_nothing_asked_is_nothing_answered() -> None:
    answers = Answers()
    found = answers.ask()
    answers.send()
    assert found() == []


@pytest.mark.parametrize("values", [np.arange(5), torch.arange(5)])
def test_uploads_keep_values_and_dtype(values: np.ndarray | torch.Tensor) -> None:
    assert upload(values, torch.device("cpu")).tolist() == [0, 1, 2, 3, 4]
    assert upload(values, torch.device("cpu")).dtype is torch.int64
    assert not waits_cost(torch.zeros(1))


def test_what_is_pinned_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> SimpleNamespace:
        pinned.append(tensor)
        return SimpleNamespace(to=lambda device, non_blocking: tensor)

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    grid = np.arange(12).reshape(3, 4)
    assert upload(grid[:, 1:], torch.device("cuda")).tolist() == grid[:, 1:].tolist()
    assert [tensor.is_contiguous() for tensor in pinned] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_answers_and_is_given_arrays_without_waits() -> None:
    device, array = torch.device("cuda", 0), np.arange(1 << 17)
    grid = np.arange(1 << 18).reshape(-1, 4)
    expected = grid[:, 1:].tolist()
    states = torch.randn(4096, 4096, device=device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            states @ states  # work that a wait would have to see through
        answers, made = Answers(), upload(array, device)
        found = answers.ask(made[-3:], states[0, :2])
        array[:] = 0
        answers.send()
        strided = upload(grid[:, 1:], device)
        grid[:] = 0
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found()[0].tolist() == [(1 << 17) - 3, (1 << 17) - 2, (1 << 17) - 1]
    assert found()[1].tolist() == states[0, :2].tolist()
    assert made.tolist() == list(range(1 << 17))
    assert strided.tolist() == expected
