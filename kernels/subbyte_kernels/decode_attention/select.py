"""Which implementation computes a call: the CUDA kernel, the Triton kernel, or the PyTorch reference.

``auto`` takes the first of them that can do the call, on CUDA devices; elsewhere the reference. A named one raises
where it cannot. Each path that a process takes is logged once. A call that the CUDA kernel made before is made again
without asking.
"""

import logging
from functools import lru_cache

from torch import Tensor

from subbyte_kernels.decode_attention.cuda_kernel import (
    cuda_obstacle,
    decode_attention_cuda,
    repeat_attention_cuda,
)
from subbyte_kernels.decode_attention.reference import (
    AttentionResult,
    AttentionTiles,
    ExactTokens,
    decode_attention_reference,
)
from subbyte_kernels.decode_attention.triton_kernel import MAX_TOKENS, decode_attention_triton, triton_obstacle
from subbyte_kernels.nvrtc import BuildError


BACKENDS = ("auto", "cuda", "triton", "torch")

_KERNELS = {
    "cuda": (cuda_obstacle, decode_attention_cuda),
    "triton": (triton_obstacle, decode_attention_triton),
}
_log = logging.getLogger("subbyte_kernels")


@lru_cache(maxsize=64)
def _say_once(level: int, message: str) -> None:
    _log.log(level, message)


def decode_attention(
    query: Tensor,
    exact: ExactTokens,
    tiles: AttentionTiles | None,
    scaling: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    backend: str = "auto",
) -> AttentionResult:
    """Attention over exact tokens and packed tiles; arguments and result as in :func:`decode_attention_reference`.

    Args:
        query: ``[B, HQ, Sq, D]``.
        exact: tokens held exactly, with their mask.
        tiles: packed tokens, or None.
        scaling: factor of the scores.
        softcap: ``softcap * tanh(score / softcap)`` before the mask, or None.
        sink_logits: ``[HQ]`` logit of a sink in each head's softmax, or None.
        backend: one of :data:`BACKENDS`.

    Returns:
        Output, log-sum-exp and, from the reference, entropy of every query.

    Raises:
        ValueError: unknown backend, or the named one cannot do this call; says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}; there are {list(BACKENDS)}")
    if backend in ("auto", "cuda"):
        made = repeat_attention_cuda(query, exact, tiles, scaling, softcap, sink_logits)
        if made is not None:
            return made
    reasons = []
    for name, (obstacle, kernel) in _KERNELS.items():
        if backend not in (name, "auto") or (backend == "auto" and not query.is_cuda):
            continue
        reason = obstacle(query, exact, tiles, softcap, sink_logits)
        if reason is None:
            try:
                made = kernel(query, exact, tiles, scaling, softcap, sink_logits)
            except BuildError as problem:
                reason = str(problem)
            else:
                _say_once(logging.INFO, f"decode attention runs in the fused {name} kernel")
                return made
        if backend == name:
            raise ValueError(f"the {name} kernel cannot compute this attention: {reason}")
        reasons.append(f"{name}: {reason}")
    if reasons and tiles is not None and query.shape[2] <= MAX_TOKENS:
        _say_once(logging.WARNING, f"decode attention runs in plain PyTorch, which is slow ({'; '.join(reasons)})")
    return decode_attention_reference(query, exact, tiles, scaling, softcap, sink_logits)
