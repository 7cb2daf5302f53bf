"""Experts of 1 to 16 tokens: gate_up with activation, then down with the weighted sum, read where they lie.

``reference.py`` defines it, ``layout.py`` says how experts lie in memory (the model's dtype, int4, fp8),
``expert_mlp.cu`` with ``cuda_kernel.py`` is the fast kernel, ``triton_kernel.py`` the portable one; ``select.py``
takes the first that can do a call.
"""

from subbyte_kernels.expert_mlp.cuda_kernel import workspace_bytes
from subbyte_kernels.expert_mlp.layout import ExpertFormat, ExpertLayout
from subbyte_kernels.expert_mlp.reference import (
    ACTIVATIONS,
    MAX_EXPERT_TOKENS,
    ExpertCall,
    SharedExpert,
    expert_mlp_reference,
)
from subbyte_kernels.expert_mlp.select import expert_mlp


__all__ = [
    "ACTIVATIONS",
    "MAX_EXPERT_TOKENS",
    "ExpertCall",
    "ExpertFormat",
    "ExpertLayout",
    "SharedExpert",
    "expert_mlp",
    "expert_mlp_reference",
    "workspace_bytes",
]
