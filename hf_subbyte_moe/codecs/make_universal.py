"""Make ``universal.safetensors``: ``python -m hf_subbyte_moe.codecs.make_universal`` (a few minutes on a CPU).

Lloyd's algorithm on samples of a Gaussian whose tokens were divided by their root mean square, as the encoder sees
them. A result is kept under its shape (``4d256``); a test holds its error to the codecs' ``relative_error``.
"""

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from hf_subbyte_moe.codecs.base import Table
from hf_subbyte_moe.codecs.codebooks import UNIVERSAL_FILE, lloyd, table_key
from hf_subbyte_moe.codecs.registry import codecs


_VECTORS = 1 << 20
_STEPS = 100


def gaussian_table(entries: int, vector_dim: int) -> Tensor:
    """``[entries, vector_dim]`` fp16 for standard normal vectors; seeded."""
    generator = torch.Generator().manual_seed(entries * 8 + vector_dim)
    vectors = torch.randn(_VECTORS, vector_dim, dtype=torch.float32, generator=generator)
    table = vectors[:entries].clone()
    for _ in tqdm(range(_STEPS), desc=table_key(entries, vector_dim)):
        table = lloyd(vectors, table, 1)
    order = table.square().sum(-1).argsort() if vector_dim > 1 else table[:, 0].argsort()
    return table[order].to(torch.float16)


def main() -> None:
    """Write the file beside this module."""
    shapes = {(codec.format.entries, codec.format.vector_dim) for codec in codecs() if codec.table is not Table.NONE}
    save_file({table_key(*shape): gaussian_table(*shape) for shape in sorted(shapes)}, UNIVERSAL_FILE)


if __name__ == "__main__":
    main()
