"""Checkpoints of an engine: loading them, and which of them are kept."""
