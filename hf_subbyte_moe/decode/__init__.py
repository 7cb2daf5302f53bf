"""Decode steps that are captured once in a CUDA graph and replayed inside ``generate()``."""

from hf_subbyte_moe.decode.runner import StepRunner, graph_steps, run_eagerly


__all__ = ["StepRunner", "graph_steps", "run_eagerly"]
