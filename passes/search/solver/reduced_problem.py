"""A problem while it is being reduced: nodes and strategies leave it, and every step can be undone.

Nodes keep the numbers of the problem; a strategy is numbered within what is left of its node. Two nodes share
at most one table of costs, kept in both orientations. Times are the positions in `times`, and `room` is what
the limit leaves at each of them after the parts of all uses that no choice can avoid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.problem import Problem, Use

__all__ = ["Network", "Numbers"]

Numbers = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Follow:
    """A node takes the strategy that `taken` [strategies of the leader] names."""

    node: int
    leader: int
    taken: Numbers


@dataclass(frozen=True, slots=True)
class _Between:
    """A node takes the strategy that `taken` [strategies of left, strategies of right] names."""

    node: int
    left: int
    right: int
    taken: Numbers


@dataclass(frozen=True, slots=True)
class _Renumber:
    """Strategy s of a node was number `before[s]`."""

    node: int
    before: Numbers


@dataclass(slots=True)
class Network:
    """What is left of a problem.

    Attributes:
        costs: for every remaining node the costs of its remaining strategies.
        near: for every remaining node its neighbours, with the table [own strategies, neighbour's
            strategies].
        uses: for every remaining node its uses of memory; starts and stops are positions in `times`.
        times: the times of the problem at which memory still matters, ascending.
        room: units left at each of them.
        constant: cost already decided.
        dead: set where no choice remains at all; a time is named where memory is the reason.
    """

    costs: dict[int, Floats]
    near: dict[int, dict[int, Floats]]
    uses: dict[int, list[Use]]
    times: NDArray[np.int64]
    room: Floats
    constant: float = 0.0
    dead: bool = False
    _fixed: dict[int, int] = field(default_factory=dict)
    _steps: list[_Follow | _Between | _Renumber] = field(default_factory=list)

    @staticmethod
    def of(problem: Problem) -> Network:
        """The network of a whole problem, nothing reduced yet."""
        near: dict[int, dict[int, Floats]] = {i: {} for i in range(len(problem.costs))}
        uses: dict[int, list[Use]] = {i: [] for i in range(len(problem.costs))}
        times = np.zeros(0, dtype=np.int64)
        if problem.limit is not None:
            times = np.unique([use.start for uses in problem.uses for use in uses]).astype(np.int64)
            for i, uses_of_node in enumerate(problem.uses):
                uses[i] = [_placed(use, times) for use in uses_of_node]
        room = np.full(len(times), problem.limit or 0.0)
        network = Network(dict(enumerate(problem.costs)), near, uses, times, room)
        for (u, v), table in zip(problem.edges, problem.edge_costs, strict=True):
            network.join(u, v, table)
        return network

    def join(self, u: int, v: int, table: Floats) -> None:
        """Add costs [strategies of u, strategies of v] between two nodes."""
        before = self.near[u].get(v)
        table = table if before is None else before + table
        self.near[u][v] = table
        self.near[v][u] = table.T

    def keep(self, node: int, strategies: Numbers) -> None:
        """Leave a node only the strategies that are listed; several times the same one is allowed."""
        if not len(strategies):
            self.dead = True
            return
        self.costs[node] = self.costs[node][strategies]
        for v, table in self.near[node].items():
            table = table[strategies]
            self.near[node][v] = table
            self.near[v][node] = table.T
        self.uses[node] = [Use(u.start, u.stop, u.amounts[strategies]) for u in self.uses[node]]
        self._steps.append(_Renumber(node, strategies))

    def follow(self, node: int, leader: int, taken: Numbers) -> None:
        """Take a node out: for strategy s of the leader it has strategy `taken[s]`; the leader inherits all
        its costs, uses and neighbours."""
        table = self.near[node].pop(leader, None)
        rows = np.arange(len(taken))
        cost = self.costs[leader] + self.costs[node][taken]
        if table is not None:
            del self.near[leader][node]
            cost = cost + table[taken, rows]
        self.costs[leader] = cost
        for v, other in self.near[node].items():
            del self.near[v][node]
            self.join(leader, v, other[taken])
        self.uses[leader] += [Use(u.start, u.stop, u.amounts[taken]) for u in self.uses[node]]
        self._remove(node)
        self._steps.append(_Follow(node, leader, taken))

    def bridge(self, node: int, left: int, right: int, taken: Numbers, table: Floats) -> None:
        """Take a node without uses out between its only two neighbours, which then share `table`
        [strategies of left, strategies of right] besides what they share already."""
        del self.near[left][node], self.near[right][node]
        self.join(left, right, table)
        self._remove(node)
        self._steps.append(_Between(node, left, right, taken))

    def settle(self, node: int, strategy: int) -> None:
        """Decide a node that has neither neighbours nor uses."""
        self.constant += float(self.costs[node][strategy])
        self._fixed[node] = strategy
        self._remove(node)

    def product(self, node: int, other: int, rows: Numbers, columns: Numbers) -> None:
        """Let one node stand for two: its strategies become the pairs (rows[p], columns[p])."""
        self.keep(node, rows)
        if not self.dead:
            self.follow(other, node, columns)

    def expand(self, strategies: Mapping[int, int]) -> tuple[int, ...]:
        """The choice of the whole problem that a choice for every remaining node stands for."""
        chosen = {**strategies, **self._fixed}
        for step in reversed(self._steps):
            match step:
                case _Renumber(node, before):
                    chosen[node] = int(before[chosen[node]])
                case _Follow(node, leader, taken):
                    chosen[node] = int(taken[chosen[leader]])
                case _Between(node, left, right, taken):
                    chosen[node] = int(taken[chosen[left], chosen[right]])
        return tuple(chosen[i] for i in range(len(chosen)))

    def _remove(self, node: int) -> None:
        del self.costs[node], self.near[node], self.uses[node]


def _placed(use: Use, times: NDArray[np.int64]) -> Use:
    return Use(int(np.searchsorted(times, use.start)), int(np.searchsorted(times, use.stop)), use.amounts)
