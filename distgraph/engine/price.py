"""Prices of collectives on a cluster, for the choice between ways to change a layout."""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.mesh import ProcessMesh
from distgraph.passes.redistribute import STEP_PRICES, Price
from distgraph.resources import Cluster, CollectiveCost


def price_on(cluster: Cluster, devices: Sequence[int] | None = None) -> Price:
    """Seconds of a collective on a cluster.

    Args:
        cluster: with launch time, bandwidths and latencies.
        devices: device of every rank; rank i on device i by default.
    """
    cost = CollectiveCost(cluster)

    def price(kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]) -> float:
        if group_size == 1 or not sent:
            return 0.0
        groups = mesh.groups(axes)
        placed = [tuple(rank if devices is None else devices[rank] for rank in group) for group in groups]
        return (
            cost.time(kind, placed[0], _on_one_rank(kind, sent, group_size), placed[1:])
            + STEP_PRICES.get(kind, 1e-3) * 1e-9
        )

    return price


def _on_one_rank(kind: str, sent: float, group_size: int) -> float:
    """Bytes on one rank (see `wire_bytes`) when it sends `sent`."""
    if kind in ("broadcast", "permute", "send"):
        return sent
    share = (group_size - 1) / group_size
    return sent / (2 * share if kind == "all_reduce" else share)
