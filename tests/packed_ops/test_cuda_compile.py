"""The CUDA kernels compile, for every tier and shape that the launchers let through; no GPU is needed for that."""

import pytest
import torch

from hf_subbyte_moe.codecs import codecs
from subbyte_kernels import nvrtc
from subbyte_kernels.decode_attention import cuda_kernel as decode
from subbyte_kernels.formats import kernel_kind
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles import cuda_kernel as pack


FORMATS = [codec.format for codec in codecs() if kernel_kind(codec.format)]


def _missing() -> str | None:
    if nvrtc.driver is None:
        return "needs cuda-bindings"
    try:
        nvrtc.checked(nvrtc.nvrtc.nvrtcVersion())
    except RuntimeError as problem:
        return f"needs NVRTC: {problem}"
    return None


pytestmark = pytest.mark.skipif(_missing() is not None, reason=str(_missing()))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("head_dim", "group", "warps"), [(128, 4, 8), (64, 8, 12), (128, 16, 4)])
def test_decode_attention(head_dim: int, group: int, warps: int, architecture: str) -> None:
    tables = sorted({(fmt.entries, fmt.vector_dim) for fmt in FORMATS if fmt.entries}, reverse=True)
    tiers = tuple(
        (fmt.tier_id, str(kernel_kind(fmt)), tables.index((fmt.entries, fmt.vector_dim)) if fmt.entries else -1)
        for fmt in FORMATS
    )
    variant = decode._Variant(
        device=0,
        head_dim=head_dim,
        quads=decode._quads(group),
        bf16=head_dim == 128,
        config=decode.CudaConfig(warps, 1),
        tiers=(tiers, tiers[::-1]),
        tables=tuple(tables),
    )
    text = nvrtc.full_text(decode._SOURCE, variant.defined())
    assert nvrtc.compile_source(text, "decode_attention.cu", architecture)


def test_decode_attention_without_tiles() -> None:
    config = decode.CudaConfig(8, 1)
    variant = decode._Variant(0, 128, 2, bf16=False, config=config, tiers=((), ()), tables=())
    assert nvrtc.compile_source(nvrtc.full_text(decode._SOURCE, variant.defined()), "decode_attention.cu", "sm_90")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_pack_tiles(fmt: object, head_dim: int) -> None:
    order, dtype = (Order.KEYS, torch.bfloat16) if head_dim == 64 else (Order.VALUES, torch.float32)
    text = nvrtc.full_text(pack._SOURCE, pack._defined(head_dim, fmt, order, dtype))  # type: ignore[arg-type]
    assert nvrtc.compile_source(text, "pack_tiles.cu", "sm_90")


def test_what_does_not_compile_is_said_with_the_compilers_words() -> None:
    with pytest.raises(nvrtc.BuildError, match=r"broken.cu does not compile:\n.*undefined_name"):
        nvrtc.compile_source("__global__ void f() { undefined_name(); }", "broken.cu", "sm_90")
