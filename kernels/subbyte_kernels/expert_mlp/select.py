"""Which implementation computes experts: the CUDA kernel, the Triton kernels, or the PyTorch reference.

As for decode attention: ``auto`` takes the first that can do a call, on CUDA devices; elsewhere the reference.
"""

import logging
from functools import lru_cache

from torch import Tensor

from subbyte_kernels.expert_mlp.cuda_kernel import cuda_obstacle, expert_mlp_cuda
from subbyte_kernels.expert_mlp.reference import ExpertCall, expert_mlp_reference
from subbyte_kernels.expert_mlp.triton_kernel import expert_mlp_triton, triton_obstacle
from subbyte_kernels.nvrtc import BuildError


_KERNELS = {"cuda": (cuda_obstacle, expert_mlp_cuda), "triton": (triton_obstacle, expert_mlp_triton)}
_log = logging.getLogger("subbyte_kernels")


@lru_cache(maxsize=64)
def _say_once(level: int, message: str) -> None:
    _log.log(level, message)


def expert_mlp(
    call: ExpertCall, out: Tensor | None = None, workspace: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Experts of a few tokens, as in :func:`expert_mlp_reference`.

    Args:
        call: what is to be computed.
        out: ``[T, H]`` in the tokens' dtype, written; allocated if None.
        workspace: uint8, at least ``workspace_bytes(call)``; allocated where it is needed if None.
        backend: "auto", "cuda", "triton" or "torch".

    Returns:
        ``[T, H]``: ``out``, if it was given.

    Raises:
        ValueError: the named backend cannot do this call; says why.
    """
    reasons = []
    for name, (obstacle, kernel) in _KERNELS.items():
        if backend not in (name, "auto") or (backend == "auto" and not call.hidden.is_cuda):
            continue
        reason = obstacle(call)
        if reason is None:
            try:
                return kernel(call, out, workspace)
            except BuildError as problem:
                reason = str(problem)
        if backend == name:
            raise ValueError(f"the {name} kernel cannot compute these experts: {reason}")
        reasons.append(f"{name}: {reason}")
    if reasons:
        _say_once(logging.WARNING, f"experts run in plain PyTorch, which is slow ({'; '.join(reasons)})")
    made = expert_mlp_reference(call)
    return made if out is None else out.copy_(made)
