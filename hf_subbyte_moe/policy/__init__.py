"""How many bits each head's keys and values get: measured on the prompt, chosen under a budget."""

from hf_subbyte_moe.policy.policies import (
    CANDIDATES,
    KEYS,
    SIDES,
    VALUES,
    ChunkStatistics,
    Measured,
    Policy,
    budget_bits,
    make_policy,
    unmeasured,
)
from hf_subbyte_moe.policy.statistics import MIN_QUERIES, RowProbe, SideCodec, output_weight, sample_positions


__all__ = [
    "CANDIDATES",
    "KEYS",
    "MIN_QUERIES",
    "SIDES",
    "VALUES",
    "ChunkStatistics",
    "Measured",
    "Policy",
    "RowProbe",
    "SideCodec",
    "budget_bits",
    "make_policy",
    "output_weight",
    "sample_positions",
    "unmeasured",
]
