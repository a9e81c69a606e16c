"""When communication runs: reductions that wait for others, share a message, or cross meshes once a step."""

from distgraph.passes.communication import (
    bucket_gradients,
    bucket_parameters,
    fuse_reductions,
    gather_parameters,
    narrow_gradients,
    shard_gradients,
)

__all__ = [
    "bucket_gradients",
    "bucket_parameters",
    "fuse_reductions",
    "gather_parameters",
    "narrow_gradients",
    "shard_gradients",
]
