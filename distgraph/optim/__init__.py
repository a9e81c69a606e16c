"""Optimisers, clipping of gradients, layouts of optimiser states, and learning rates over time."""

from distgraph.optim.lr_schedules import Schedule
from distgraph.optim.optimizers import (
    SGD,
    Adafactor,
    Adam,
    AdamW,
    Optimizer,
    StateSpec,
    clip_by_global_norm,
    matrices_only,
    shard_states,
)

__all__ = [
    "SGD", "Adafactor", "Adam", "AdamW", "Optimizer", "Schedule", "StateSpec", "clip_by_global_norm",
    "matrices_only", "shard_states",
]  # fmt: skip
