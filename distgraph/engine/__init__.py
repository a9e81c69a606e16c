"""Engine: trains, evaluates and runs a model that was written as if for one device."""

from distgraph.engine.compile.train_graph import train_graph
from distgraph.engine.engine import Engine

__all__ = ["Engine", "train_graph"]
