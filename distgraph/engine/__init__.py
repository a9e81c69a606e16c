"""Engine: trains, evaluates and runs a model that was written as if for one device."""

from distgraph.engine.engine import Engine

__all__ = ["Engine"]
