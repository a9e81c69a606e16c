"""A program, and machines between which messages are slow."""

from __future__ import annotations

from typing import Any

from support.files.clusters import cluster_of
from support.programs.searched import Program, slow

from distgraph import nn, ops
from distgraph.resources import Cluster


class Wide(nn.Module):
    """Four equal layers whose gradients take long to exchange."""

    def __init__(self) -> None:
        self.layers = [nn.Linear(96, 96, bias=False, dtype="f64") for _ in range(4)]
        self.last = nn.Linear(96, 6, dtype="f64")

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.relu(layer(x))
        return self.last(x)


WIDE = Program(Wide, (96,), batch=16)


def far(latency: str) -> Cluster:
    """Two machines of one device, so far from each other."""
    document = slow(1, 1)
    for machine in document["machines"]:
        machine["nics"]["latency"] = latency
    return cluster_of(document)
