"""Shared by the tests: tiny models, and ways to compare."""
