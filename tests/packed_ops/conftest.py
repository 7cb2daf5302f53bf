"""The fused kernels that a test of ``decode_attention`` runs with: Triton's in its interpreter without CUDA."""

import pytest

from support.attention import CUDA, Kernel


_ON_GPU = [pytest.mark.gpu] if CUDA else []
_NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]


@pytest.fixture(params=[pytest.param("triton", marks=_ON_GPU), pytest.param("cuda", marks=_NEEDS_GPU)])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs triton")
        from subbyte_kernels.decode_attention.triton_kernel import decode_attention_triton, triton_obstacle

        return Kernel("triton", triton_obstacle, decode_attention_triton)
    from subbyte_kernels.decode_attention.cuda_kernel import cuda_obstacle, decode_attention_cuda

    return Kernel("cuda", cuda_obstacle, decode_attention_cuda)
