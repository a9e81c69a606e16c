"""Layers of a train graph: contiguous sequences of ops, equal layers deduplicated, lifetimes of values."""
