"""Engine: trains, evaluates and runs a model that was written as if for one device."""

from distgraph.engine.engine import Engine
from distgraph.engine.graphs import train_graph

__all__ = ["Engine", "train_graph"]
