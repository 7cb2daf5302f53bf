"""The rotation: orthonormal, fixed for good, and good at its job, which is to spread what is concentrated."""

import pytest
import torch

from hf_subbyte_moe.codecs.rotation import rotation_block, rotation_matrix


CPU = torch.device("cpu")
HEAD_DIMS = (8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 120, 128, 160, 192, 256, 320, 512)

# records would mean something else if a sign changed
SIGNS = {
    8: "+++-+++-",
    32: "+++++-+-++--+--++++++-+-++--+--+",
    64: "+++++++++-+-+-+-++--++--+--++--+++++----+-+--+-+++----+++--+-++-",
}


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_orthonormal(head_dim: int) -> None:
    matrix = rotation_matrix(head_dim, CPU)
    assert matrix.shape == (head_dim, head_dim)
    assert matrix.dtype == torch.float32
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(head_dim), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "block"), [(8, 8), (64, 64), (72, 8), (80, 16), (96, 32), (112, 16), (256, 256)])
def test_blocks_are_the_power_of_two_factor(head_dim: int, block: int) -> None:
    assert rotation_block(head_dim) == block
    matrix = rotation_matrix(head_dim, CPU)
    inside = torch.block_diag(*[torch.ones(block, block)] * (head_dim // block)).bool()
    assert not matrix[~inside].any()
    # one channel goes to all of its block in equal parts
    torch.testing.assert_close(matrix[inside].abs(), torch.full((head_dim * block,), block**-0.5))


@pytest.mark.parametrize(("head_dim", "factor"), [(20, 4), (12, 4), (4, 4), (100, 4), (66, 2), (7, 1)])
def test_head_dims_without_a_block_of_eight_are_refused(head_dim: int, factor: int) -> None:
    message = f"head_dim {head_dim} cannot be packed: it must be a multiple of 8, .* factor is {factor}$"
    with pytest.raises(ValueError, match=message):
        rotation_block(head_dim)
    with pytest.raises(ValueError, match=message):
        rotation_matrix(head_dim, CPU)


@pytest.mark.parametrize("block", SIGNS)
def test_the_rotation_never_changes(block: int) -> None:
    signs = rotation_matrix(block, CPU)[0].sign()  # the Hadamard matrix starts with a row of ones
    assert "".join("+" if value > 0 else "-" for value in signs) == SIGNS[block]
    natural = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    torch.testing.assert_close(rotation_matrix(block, CPU) * signs * block**0.5, natural)


@pytest.mark.parametrize("head_dim", [72, 80, 96, 112, 192])
def test_every_block_is_the_rotation_of_its_own_size(head_dim: int) -> None:
    block = rotation_block(head_dim)
    expected = torch.block_diag(*[rotation_matrix(block, CPU)] * (head_dim // block))
    assert torch.equal(rotation_matrix(head_dim, CPU), expected)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_constant_and_alternating_vectors_are_spread_evenly(head_dim: int) -> None:
    """A constant, square waves of 2, 4, 8, ... channels and their products: the rows of a Hadamard matrix."""
    block = rotation_block(head_dim)
    walsh = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(block)] for i in range(block)])
    rotated = walsh.repeat(1, head_dim // block) @ rotation_matrix(head_dim, CPU).t()
    torch.testing.assert_close(rotated.square().mean(-1), torch.ones(block))
    odd_power = block.bit_length() % 2 == 0
    assert float(rotated.abs().max()) <= (2**0.5 if odd_power else 1) + 1e-5
