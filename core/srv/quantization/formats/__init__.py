"""Formats of checkpoints: how each is recognised and checked, as which scheme layers hold it, and its conversion."""
