"""Which implementation routes: the CUDA kernel, the Triton kernels, or the PyTorch reference.

As for decode attention: ``auto`` takes the first that can do a call, on CUDA devices; elsewhere the reference.
"""

import logging
from functools import lru_cache

from torch import Tensor

from subbyte_kernels.nvrtc import BuildError
from subbyte_kernels.router.cuda_kernel import cuda_obstacle, router_cuda
from subbyte_kernels.router.reference import MAX_ROUTER_TOKENS, Routed, RouterMatrix, RouterSpec, router_reference
from subbyte_kernels.router.triton_kernel import router_triton, triton_obstacle


_KERNELS = {"cuda": (cuda_obstacle, router_cuda), "triton": (triton_obstacle, router_triton)}
_log = logging.getLogger("subbyte_kernels")


@lru_cache(maxsize=64)
def _say_once(level: int, message: str) -> None:
    _log.log(level, message)


def router(
    hidden: Tensor,
    matrix: RouterMatrix,
    spec: RouterSpec,
    following: RouterMatrix | None = None,
    following_top_k: int = 0,
    backend: str = "auto",
) -> Routed:
    """Logits, weights and experts of tokens; arguments and result as in :func:`router_reference`.

    Args:
        hidden: ``[T, H]``.
        matrix: the router's weights.
        spec: what it does.
        following: weights of a router whose choice for the same states is wanted too, or None.
        following_top_k: experts of that choice.
        backend: "auto" (on a CUDA device the first that can; elsewhere the reference), "cuda", "triton" or "torch".

    Returns:
        Logits, weights, experts, and the other router's experts.

    Raises:
        ValueError: the named backend cannot do this call; says why.
    """
    reasons = []
    for name, (obstacle, kernel) in _KERNELS.items():
        if backend not in (name, "auto") or (backend == "auto" and not hidden.is_cuda):
            continue
        reason = obstacle(hidden, matrix, spec, following, following_top_k)
        if reason is None:
            try:
                return kernel(hidden, matrix, spec, following, following_top_k)
            except BuildError as problem:
                reason = str(problem)
        if backend == name:
            raise ValueError(f"the {name} kernel cannot compute this router: {reason}")
        reasons.append(f"{name}: {reason}")
    if reasons and hidden.shape[0] <= MAX_ROUTER_TOKENS:
        _say_once(logging.WARNING, f"routers run in plain PyTorch, which is slow ({'; '.join(reasons)})")
    return router_reference(hidden, matrix, spec, following, following_top_k)
