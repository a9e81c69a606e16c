"""Memory that the choices of two nodes take together, as nodes of their own.

*In:* a problem, and the units that pairs of choices use. *Out:* a problem whose further nodes, behind those
of the given one, have these uses. *Invariant:* every choice of the given problem goes with exactly one choice
of the further nodes that is not forbidden, with the same objective.

A problem has uses of single nodes. Where u and v use B[i, j] units if u chooses i and v chooses j, the edge
(u, v) is replaced by a node w between them, with one strategy for each pair of

    a class of strategies of v whose columns of costs and of units are equal, and one of the units in them.

The edge (u, w) costs what (u, v) does, and is forbidden where i takes other units with that class; the edge
(w, v) only forbids strategies of other classes. The end with fewer such pairs takes the part of v.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.problem import Problem, Use

__all__ = ["with_pair_uses"]


def with_pair_uses(
    problem: Problem, amounts: Mapping[tuple[int, int], Floats], start: int, stop: int
) -> Problem:
    """A problem in which pairs of choices use memory, too.

    Args:
        problem: no two of its edges join the same nodes.
        amounts: for some of its edges, units [strategies of the first, strategies of the second].
        start, stop: the units are used at the times start <= t < stop.
    """
    edges = dict(zip(problem.edges, problem.edge_costs, strict=True))
    costs, uses = list(problem.costs), list(problem.uses)
    labels = [problem.label(node) for node in range(len(costs))]
    for edge, units in amounts.items():
        first, second = edge
        allowed = np.isfinite(edges[edge] + costs[first][:, None] + costs[second])
        units = np.where(allowed, units, 0.0)
        if not units.any():
            continue
        table = edges.pop(edge)
        one, other = _pairs(table, units), _pairs(table.T, units.T)
        node, pairs = len(costs), one
        if len(other.units) < len(one.units):
            (first, second), table, pairs = (second, first), table.T, other
        costs.append(np.zeros(len(pairs.units)))
        uses.append((Use(start, stop, pairs.units),))
        labels.append(f"{labels[edge[0]]} with {labels[edge[1]]}")
        edges[first, node] = np.where(pairs.possible, table[:, pairs.columns], np.inf)
        edges[node, second] = np.where(pairs.classes[:, None] == pairs.class_of, 0.0, np.inf)
    return replace(
        problem,
        costs=tuple(costs),
        edges=tuple(edges),
        edge_costs=tuple(edges.values()),
        uses=tuple(uses),
        labels=tuple(labels),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """The strategies of a further node.

    Attributes:
        class_of: class of each column of the table [columns].
        classes: class of each strategy [strategies].
        columns: a column of that class [strategies].
        units: that each strategy uses [strategies].
        possible: whether a row takes these units with that class [rows, strategies].
    """

    class_of: np.ndarray
    classes: np.ndarray
    columns: np.ndarray
    units: Floats
    possible: np.ndarray


def _pairs(table: Floats, units: Floats) -> _Pairs:
    """The pairs of a class of equal columns and units; both arguments are [rows, columns]."""
    _, columns, class_of = np.unique(
        np.vstack((table, units)), axis=1, return_index=True, return_inverse=True
    )
    strategies = [(number, amount) for number, j in enumerate(columns) for amount in np.unique(units[:, j])]
    classes = np.array([number for number, _ in strategies])
    amounts = np.array([amount for _, amount in strategies], dtype=np.float64)
    of_strategies = columns[classes]
    return _Pairs(class_of.ravel(), classes, of_strategies, amounts, units[:, of_strategies] == amounts)
