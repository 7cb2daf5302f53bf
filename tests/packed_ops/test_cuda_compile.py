"""The CUDA kernels compile, for every tier and shape that the launchers let through; no GPU is needed for that."""

from pathlib import Path

import pytest
import torch

from hf_subbyte_moe.codecs import codecs
from subbyte_kernels import nvrtc
from subbyte_kernels.decode_attention import cuda_kernel as decode
from subbyte_kernels.formats import kernel_kind
from subbyte_kernels.lanes import Order
from subbyte_kernels.pack_tiles import cuda_kernel as pack
from subbyte_kernels.pack_tiles import shaped


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


NAMED = {fmt.name: fmt for fmt in FORMATS}


@pytest.mark.parametrize(
    ("keys", "values", "head_dim", "group", "warps", "architecture"),
    [
        (["fp6", "vq175"], ["vq2", "vq3"], 128, 4, 8, "sm_90"),
        (["vq2"], ["vq4"], 64, 8, 12, "sm_80"),
        (["fp8"], ["fp6"], 128, 16, 4, "sm_90"),
        (["vq3"], ["vq175"], 128, 8, 8, "sm_80"),
        (["vq4"], ["fp8"], 64, 1, 16, "sm_90"),
    ],
)
def test_decode_attention(
    keys: list[str], values: list[str], head_dim: int, group: int, warps: int, architecture: str
) -> None:
    formats = [NAMED[name] for name in (*keys, *values)]
    tables = sorted({(fmt.entries, fmt.vector_dim) for fmt in formats if fmt.entries}, reverse=True)
    tiers = [
        (fmt.tier_id, str(kernel_kind(fmt)), tables.index((fmt.entries, fmt.vector_dim)) if fmt.entries else -1)
        for fmt in formats
    ]
    variant = decode._Variant(
        device=0,
        head_dim=head_dim,
        quads=decode._quads(group),
        bf16=head_dim == 128,
        config=decode.CudaConfig(warps, 1),
        tiers=(tuple(tiers[: len(keys)]), tuple(tiers[len(keys) :])),
        pairs=tuple((key, value) for key in range(len(keys)) for value in range(len(values))),
        tables=tuple(tables),
    )
    text = nvrtc.full_text(decode._SOURCE, variant.defined())
    assert nvrtc.compile_source(text, "decode_attention.cu", architecture)


def test_every_tier_is_compiled_on_both_sides() -> None:
    (given,) = (mark.args[1] for mark in test_decode_attention.pytestmark)  # type: ignore[attr-defined]
    assert (
        {name for keys, *_ in given for name in keys}
        == {name for _, values, *_ in given for name in values}
        == set(NAMED)
    )


def test_decode_attention_without_tiles() -> None:
    config = decode.CudaConfig(8, 1)
    variant = decode._Variant(0, 128, 2, bf16=False, config=config, tiers=((), ()), pairs=(), tables=())
    assert nvrtc.compile_source(nvrtc.full_text(decode._SOURCE, variant.defined()), "decode_attention.cu", "sm_90")


@pytest.mark.parametrize(
    ("name", "head_dim", "order", "dtype", "mean", "architecture"),
    [
        ("fp8", 256, Order.VALUES, torch.bfloat16, False, "sm_90"),
        ("fp6", 128, Order.KEYS, torch.bfloat16, True, "sm_80"),
        ("vq4", 64, Order.VALUES, torch.float16, False, "sm_90"),
        ("vq3", 80, Order.KEYS, torch.float32, True, "sm_90"),
        ("vq2", 128, Order.VALUES, torch.bfloat16, False, "sm_90"),
        ("vq175", 96, Order.KEYS, torch.bfloat16, True, "sm_80"),
    ],
)
def test_pack_tiles(name: str, head_dim: int, order: Order, dtype: torch.dtype, mean: bool, architecture: str) -> None:
    defined = pack.defined_for(head_dim, NAMED[name], order, dtype, mean)
    for source in (pack._SOURCE, pack._UNPACK_SOURCE):
        assert nvrtc.compile_source(nvrtc.full_text(source, defined), source.name, architecture)
    if pack.packs_head_dim(head_dim) and head_dim % 64 == 0 and NAMED[name].entries:
        text = nvrtc.full_text(shaped._SOURCE, {**defined, "WARPS": shaped._WARPS})
        assert nvrtc.compile_source(text, "shape_tiles.cu", architecture)


def test_every_packed_tier_is_compiled() -> None:
    (given,) = (mark.args[1] for mark in test_pack_tiles.pytestmark)  # type: ignore[attr-defined]
    assert {case[0] for case in given} == set(NAMED)


def test_what_does_not_compile_is_said_with_the_compilers_words() -> None:
    with pytest.raises(nvrtc.BuildError, match=r"broken.cu does not compile:\n.*undefined_name"):
        nvrtc.compile_source("__global__ void f() { undefined_name(); }", "broken.cu", "sm_90")


def test_machine_code_is_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBBYTE_KERNELS_CACHE", str(tmp_path / "kept"))
    text = 'extern "C" __global__ void f(int *x) { *x = 1; }'
    first = nvrtc.built(text, "f.cu", "sm_90")
    (file,) = (tmp_path / "kept").iterdir()
    monkeypatch.setattr(nvrtc, "compile_source", lambda *given: pytest.fail("compiled again"))
    assert nvrtc.built(text, "f.cu", "sm_90") == first
    made = []
    monkeypatch.setattr(nvrtc, "compile_source", lambda *given: made.append(given) or first)
    nvrtc.built(text, "f.cu", "sm_80")  # another machine's
    nvrtc.built(text + " ", "f.cu", "sm_90")  # another text
    file.write_bytes(file.read_bytes()[:-40])  # a disk that was full
    assert nvrtc.built(text, "f.cu", "sm_90") == first
    assert len(made) == 3
    assert nvrtc.built(text, "f.cu", "sm_90") == first
    assert len(made) == 3


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("SUBBYTE_KERNELS_CACHE", str(tmp_path / "file" / "kept"))
    assert nvrtc.built("__global__ void f() {}", "f.cu", "sm_90")
