"""Choose between completions where annotations compete for an axis, and refine when asked to.

In:   an annotated serial graph.
Out:  a completed graph.
Invariant: annotations stay; of several completions one that is computed in fewer parts than the first is
      never taken; ties go to the first policy, so that a program without competing annotations is completed
      as `complete` does.

    %x : f32[256, 512] [x, _]   # user        policy "data":        w1, w2 gathered, their gradients scattered
    %w1 : f32[512, 2048] [_, x] # user   ->   policy "parameters":  x gathered, the result scattered
    %w2 : f32[2048, 512] [x, _] # user
"""

from __future__ import annotations

from collections.abc import Callable

from distgraph.graph import Graph
from distgraph.mesh import ProcessMesh
from distgraph.ops.registry import flops
from distgraph.passes.claims import POLICIES
from distgraph.passes.complete import complete
from distgraph.passes.lower import lower
from distgraph.passes.partition import partition
from distgraph.passes.phases import phases
from distgraph.passes.redistribute import Price, wire_price
from distgraph.passes.refine import refined
from distgraph.passes.reshard import reshard

_COLLECTIVE = 16384.0  # bytes that could be sent in the time that starting one collective takes
_GAIN = 0.5  # bytes
_SLACK = 1.01  # computation per rank that a completion may have above the first one


def arrange(
    graph: Graph, default: ProcessMesh | None = None, *, price: Price = wire_price, search: bool = True
) -> Graph:
    """Complete under every policy where annotations compete for an axis, keep the cheapest.

    Args:
        graph: annotated graph.
        default: mesh of a graph that names none.
        price: cost of one collective, for the search.
        search: also refine each completion (`refine`); without, they are compared by the bytes that a rank
        sends.
    """
    first = complete(graph, default)
    compete = any(lost.reason == "taken" for lost in first.lost)
    policies = POLICIES[1:] if compete else ()
    if not (policies or search):
        return first
    measure: Callable[[Graph], tuple[float, Graph]]
    measure = (
        (lambda completed: refined(completed, price))
        if search
        else (lambda completed: (sent(completed), completed))
    )
    cost, best = measure(first)
    work = operations(first)
    for policy in policies:
        completed = complete(graph, default, policy)
        if not search and operations(completed) > _SLACK * work:
            continue
        other_cost, other = measure(completed)
        if other_cost < cost - _GAIN:
            cost, best = other_cost, other
    return best


def latency_price(kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]) -> float:
    """Bytes on the wire plus a fixed charge a collective, for programs that will really run."""
    return sent + _COLLECTIVE if sent else 0.0


def sent(completed: Graph) -> float:
    """Bytes that the first rank of every mesh sends in a step."""
    parts = phases(lower(reshard(completed)))
    return sum(partition(parts, rank).bytes_sent() for rank in {mesh.members[0] for mesh in completed.meshes})


def operations(completed: Graph) -> float:
    """Floating point operations of the largest part of every op, summed."""
    total = 0.0
    for op in completed.ops:
        if op.layout is not None and op.operands:
            total += flops(op) / op.layout.mesh.count(axis for _, axes in op.layout.axes for axis in axes)
    return total
