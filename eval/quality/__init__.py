"""The quality harness: what a packed cache costs a model, measured by decoding through it. ``eval/run.py`` runs it."""
