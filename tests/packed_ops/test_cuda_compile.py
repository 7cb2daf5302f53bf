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
