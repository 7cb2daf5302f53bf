"""Decode steps that are captured once in a CUDA graph and replayed inside ``generate()``."""

from hf_subbyte_moe.decode.fused import FUSED_FAMILIES
from hf_subbyte_moe.decode.runner import StepRunner, check_forward, graph_steps, run_eagerly


__all__ = ["FUSED_FAMILIES", "StepRunner", "check_forward", "graph_steps", "run_eagerly"]
