"""Routers: states of a few tokens to logits, weights and experts, in one call.

``reference.py`` defines it, ``router.cu`` with ``cuda_kernel.py`` is one launch, ``triton_kernel.py`` the portable
one; ``select.py`` takes the first that can do a call.
"""

from subbyte_kernels.router.reference import (
    MAX_ROUTER_TOKENS,
    Routed,
    RouterMatrix,
    RouterSpec,
    router_reference,
)
from subbyte_kernels.router.select import router


__all__ = ["MAX_ROUTER_TOKENS", "Routed", "RouterMatrix", "RouterSpec", "router", "router_reference"]
