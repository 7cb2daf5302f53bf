"""Attention mass and squared weights of tokens under sampled queries. ``reference.py`` defines it."""

from subbyte_kernels.attention_statistics.reference import TokenStatistics, attention_statistics_reference


__all__ = ["TokenStatistics", "attention_statistics_reference"]
