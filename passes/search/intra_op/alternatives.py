"""The alternatives of one decision: what the chosen option costs, and how much more every other would cost.

*In:* a problem, a choice, one node. *Out:* `Decision`: the cost terms of the chosen option, and for every
option the increase of the objective. *Invariant:* every figure is a difference of objectives of two choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.problem import Problem


@dataclass(frozen=True, eq=False)
class Decision:
    """One node under a choice; seconds of a step, bytes of a rank.

    Attributes:
        chosen: number of its option.
        options: every option as text.
        compute: seconds of its ops.
        communication: seconds of the changes of layout to and from its neighbours, and of its own copies.
        nbytes: bytes that it occupies for the whole step.
        fixed: for every option, the increase of the objective if no other node changes.
        followed: for every option, the increase of the objective if the neighbours then take their best
            options, one after the other.
    """

    chosen: int
    options: tuple[str, ...]
    compute: float
    communication: float
    nbytes: float
    fixed: Floats
    followed: Floats

    @property
    def runner_up(self) -> int | None:
        """The best other option once the neighbours have followed; None where there is no other."""
        others = [i for i in range(len(self.options)) if i != self.chosen]
        return min(others, key=lambda i: float(self.followed[i]), default=None)


class Neighbourhoods:
    """The edges of a problem by node; computes the figures of `Decision`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.edges: list[list[tuple[int, Floats]]] = [[] for _ in problem.costs]
        for (u, v), costs in zip(problem.edges, problem.edge_costs, strict=True):
            self.edges[u].append((v, costs))
            self.edges[v].append((u, costs.T))

    def fixed(self, choice: Sequence[int], node: int) -> Floats:
        """Change of the objective [options] when one node takes another option."""
        total = self._cost(choice, node)
        change: Floats = total - total[choice[node]]
        return change

    def followed(self, choice: Sequence[int], node: int) -> Floats:
        """Change of the objective [options] when the neighbours then take their best options in turn."""
        change = self.fixed(choice, node)
        options = np.arange(len(change))
        changed: dict[int, NDArray[np.intp]] = {node: options}  # node -> its option under each option of node
        for other in dict.fromkeys(neighbour for neighbour, _ in self.edges[node]):
            total = np.tile(self.problem.costs[other], (len(options), 1))
            for neighbour, costs in self.edges[other]:
                if neighbour in changed:
                    total += costs[:, changed[neighbour]].T
                else:
                    total += costs[:, choice[neighbour]]
            changed[other] = total.argmin(axis=1)
            change = change + total.min(axis=1) - total[:, choice[other]]
        change[choice[node]] = 0.0
        return change

    def _cost(self, choice: Sequence[int], node: int) -> Floats:
        """The terms of the objective that depend on a node [options], with its neighbours as chosen."""
        total = self.problem.costs[node].copy()
        for other, costs in self.edges[node]:
            total += costs[:, choice[other]]
        return total
