"""When communication runs: reductions that wait for others, share a message, or cross meshes once a step."""

from distgraph.passes.communication import fuse_reductions

__all__ = ["fuse_reductions"]
