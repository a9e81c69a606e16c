"""Layers whose weight may stay in place: those between which activations are split the other way round.

A layer in dataflow RS reads activations split by rows along the samples and leaves them split by cols, or the
other way round. So it needs a partner: layers that leave the activations turned, and layers that turn them
back, with nothing else between them that reads them. In a transformer the projections of queries, keys and
values and the one behind the attention are such a group, and the two layers of an MLP.

    %q : [rows, _, cols] -> [cols, _, rows]      attention      %out : [cols, _, rows] -> [rows, _, cols]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from distgraph.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Group:
    """Names of the ops that turn activations, and of those that turn them back."""

    leaving: frozenset[str]
    returning: frozenset[str]


def weight_stationary_groups(graph: Graph, linear: Collection[str], allowed: Collection[str]) -> list[Group]:
    """Groups of layers between which all activations are turned, in program order; no two share a layer.

    Args:
        graph: serial.
        linear: names of the ops of all linear layers.
        allowed: of those that may be in a group.
    """
    if not allowed:
        return []
    inputs, escaping = _reaching(graph, linear)
    consumers: dict[str, set[str]] = {name: set() for name in inputs}
    for name, sources in inputs.items():
        for source in sources:
            consumers[source].add(name)
    groups: list[Group] = []
    free = set(allowed) - escaping
    for name in inputs:
        if name not in free:
            continue
        leaving, returning, grown = {name}, set[str](), True
        while grown and leaving <= free and returning <= set(allowed) and not leaving & returning:
            size = len(leaving) + len(returning)
            returning = set().union(*(consumers[each] for each in leaving))
            leaving = leaving.union(*(inputs[each] for each in returning))
            grown = len(leaving) + len(returning) > size
        grouped = {each for group in groups for each in group.leaving | group.returning}
        members = leaving | returning
        if returning and leaving <= free and members <= set(allowed) - grouped and not leaving & returning:
            groups.append(Group(frozenset(leaving), frozenset(returning)))
            free -= members
    return groups


def _reaching(graph: Graph, linear: Collection[str]) -> tuple[dict[str, frozenset[str]], set[str]]:
    """The linear layers whose results each one reads, through other ops; and those that an end reads."""
    forward = [op for op in graph.ops if op.role == "forward"]
    read = {value.name for op in forward for value in op.operands}
    none: frozenset[str] = frozenset()
    sources: dict[str, frozenset[str]] = {}
    inputs: dict[str, frozenset[str]] = {}
    escaping: set[str] = set()
    for op in forward:
        reaching = none.union(*(sources.get(value.name, none) for value in op.operands))
        if op.name in linear:
            inputs[op.name], reaching = reaching, frozenset({op.name})
        sources.update(dict.fromkeys((value.name for value in op.results), reaching))
        if not any(value.name in read for value in op.results):
            escaping |= reaching
    return inputs, escaping
