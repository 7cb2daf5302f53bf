"""Which implementation a call of ``decode_attention`` takes, and what it says about it."""

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from subbyte_kernels.decode_attention import AttentionResult, AttentionTiles, ExactTokens, select
from subbyte_kernels.decode_attention.select import decode_attention
from subbyte_kernels.formats import TILE_TOKENS
from subbyte_kernels.lanes import Order
from support.packing import gaussian, packed_side


CUDA = torch.cuda.is_available()

Call = tuple[Tensor, ExactTokens, AttentionTiles, float]


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    select._say_once.cache_clear()
    yield
    select._say_once.cache_clear()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The implementations that calls take, in their order."""
    names: list[str] = []
    reference = select.decode_attention_reference

    def recorded(*arguments: object) -> AttentionResult:
        names.append("torch")
        return reference(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(select, "decode_attention_reference", recorded)
    for name, (obstacle, kernel) in select._KERNELS.items():

        def launched(*arguments: object, name: str = name, kernel: object = kernel) -> AttentionResult:
            names.append(name)
            return kernel(*arguments)  # type: ignore[operator, no-any-return]

        monkeypatch.setitem(select._KERNELS, name, (obstacle, launched))
    return names


def call(queries: int = 1, tier: str = "vq3", dim: int = 64) -> Call:
    """One row, one KV head, one tile, on the CPU."""
    states = gaussian(1, 1, 1, TILE_TOKENS, dim, seed=1)
    mean = torch.zeros(1, 1, dim)
    exact = ExactTokens(
        gaussian(1, 1, 5, dim, seed=2), gaussian(1, 1, 5, dim, seed=3), torch.ones(1, 1, 5, dtype=torch.bool)
    )
    tiles = AttentionTiles(
        (packed_side(states, [[[tier]]], mean, order=Order.KEYS)[0],),
        packed_side(states, [[[tier]]], None, order=Order.VALUES)[0],
    )
    return gaussian(1, 2, queries, dim, seed=4), exact, tiles, dim**-0.5


def needs_interpreter() -> None:
    pytest.importorskip("triton", reason="needs triton")
    if CUDA:
        pytest.skip("the interpreter is for machines without a CUDA device")


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_cpu_computes_in_the_reference(backend: str, taken: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "subbyte_kernels")
    assert decode_attention(*call(), backend=backend).entropy is not None
    assert taken == ["torch"]
    assert not caplog.records


def test_a_named_kernel_is_taken_and_named_once(taken: list[str], caplog: pytest.LogCaptureFixture) -> None:
    needs_interpreter()
    caplog.set_level(logging.INFO, "subbyte_kernels")
    arguments = call()
    result = decode_attention(*arguments, backend="triton")
    decode_attention(*arguments, backend="triton")
    assert taken == ["triton", "triton"]
    assert [record.getMessage() for record in caplog.records] == ["decode attention runs in the fused triton kernel"]
    torch.testing.assert_close(result.output, decode_attention(*arguments).output, rtol=1e-4, atol=1e-4)


def test_a_named_kernel_that_cannot_do_a_call_says_why(taken: list[str]) -> None:
    needs_interpreter()
    with pytest.raises(ValueError, match=r"the triton kernel cannot compute this attention: .*9 new tokens"):
        decode_attention(*call(queries=9), backend="triton")
    query, exact, tiles, scaling = call()
    with_mean = AttentionTiles(tiles.keys, replace(tiles.values, mean=torch.zeros(1, 1, 64)))
    with pytest.raises(ValueError, match=r"the triton kernel cannot compute this attention: the values have a mean"):
        decode_attention(query, exact, with_mean, scaling, backend="triton")
    assert not taken


def test_the_cuda_kernel_is_refused_on_a_cpu(taken: list[str]) -> None:
    with pytest.raises(ValueError, match=r"the cuda kernel cannot compute this attention: .*cpu"):
        decode_attention(*call(), backend="cuda")
    assert not taken


def test_an_unknown_backend_is_refused_and_the_others_are_listed() -> None:
    with pytest.raises(ValueError, match=r"unknown attention backend 'flash'; there are .*'cuda', 'triton', 'torch'"):
        decode_attention(*call(), backend="flash")
