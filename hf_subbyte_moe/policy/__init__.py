"""How many bits each head's keys and values get: measured on the prompt, chosen under a budget."""

from hf_subbyte_moe.policy.calibrate import calibrate
from hf_subbyte_moe.policy.calibration import (
    SIDECAR_NAME,
    CalibratedPolicy,
    Calibration,
    find_sidecar,
    load_calibration,
    remember_sidecar,
    resolve,
)
from hf_subbyte_moe.policy.policies import (
    CANDIDATES,
    KEYS,
    SIDES,
    VALUES,
    ChunkStatistics,
    Measured,
    Needs,
    Policy,
    budget_bits,
    make_policy,
    side_bits,
    side_codec,
    unmeasured,
)
from hf_subbyte_moe.policy.sharing import gather_chunks, own_needs
from hf_subbyte_moe.policy.statistics import (
    AttentionForm,
    RowProbe,
    SideCodec,
    attention_states,
    output_weight,
    plain_weight,
    positions_on,
    sample_positions,
)


__all__ = [
    "CANDIDATES",
    "KEYS",
    "SIDECAR_NAME",
    "SIDES",
    "VALUES",
    "AttentionForm",
    "CalibratedPolicy",
    "Calibration",
    "ChunkStatistics",
    "Measured",
    "Needs",
    "Policy",
    "RowProbe",
    "SideCodec",
    "attention_states",
    "budget_bits",
    "calibrate",
    "find_sidecar",
    "gather_chunks",
    "load_calibration",
    "make_policy",
    "output_weight",
    "own_needs",
    "plain_weight",
    "positions_on",
    "remember_sidecar",
    "resolve",
    "sample_positions",
    "side_bits",
    "side_codec",
    "unmeasured",
]
