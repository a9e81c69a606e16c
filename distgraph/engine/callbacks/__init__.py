"""Callbacks: objects that an engine calls between the steps of training.

Under MPI every process calls them with the same numbers; those that print or write a file do so on rank 0.
"""

from distgraph.engine.callbacks.adapt import Adapt, Proposal
from distgraph.engine.callbacks.callback import Callback, Logs
from distgraph.engine.callbacks.monitored_callbacks import EarlyStopping, ModelCheckpoint
from distgraph.engine.callbacks.training_output import CSVLogger, ProgressBar, TensorBoard, Timeline

__all__ = [
    "Callback", "Logs", "ModelCheckpoint", "EarlyStopping", "CSVLogger", "Timeline", "TensorBoard",
    "ProgressBar", "Adapt", "Proposal",
]  # fmt: skip
