"""The resource graph: clusters, resource files, the cost of collectives, rank mapping."""

from distgraph.resources.cluster import (
    Cluster,
    Compute,
    Device,
    DeviceMesh,
    Link,
    Machine,
    MatmulRate,
    MeasuredTable,
    Network,
    Switch,
)
from distgraph.resources.cluster_builder import with_torus_shape
from distgraph.resources.collective_cost import CollectiveCost, Estimate, shared_cost, wire_bytes
from distgraph.resources.compute_cost import ComputeCost
from distgraph.resources.describe import describe, summarize
from distgraph.resources.load import load_cluster, local_cluster, register_cluster, shipped_clusters
from distgraph.resources.paddle_cluster_json import load_paddle
from distgraph.resources.rank_mapping import RankMapping, Requirement, map_ranks

__all__ = [
    "Cluster", "Compute", "ComputeCost", "Device", "DeviceMesh", "Link", "Machine", "MatmulRate",
    "MeasuredTable", "Network", "Switch", "describe", "load_cluster", "load_paddle", "local_cluster",
    "register_cluster", "shipped_clusters", "summarize", "CollectiveCost", "Estimate", "shared_cost",
    "wire_bytes", "RankMapping", "Requirement", "map_ranks", "with_torus_shape",
]  # fmt: skip
