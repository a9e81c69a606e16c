r"""The intra-operator problem: one strategy for every node, least cost, within a memory limit.

Node i has strategies s with costs c_i(s); an edge (i, j) has a cost c_ij(s, s') for every pair of strategies
of its ends; a use of node i takes u_i(s) units of memory at every time of a half-open interval [start, stop).
With x_i(s) = 1 where node i takes strategy s, and y_ij(s, s') = 1 where an edge meets that pair:

    minimise    sum_i sum_s c_i(s) x_i(s)  +  sum_ij sum_ss' c_ij(s, s') y_ij(s, s')
    subject to  sum_s x_i(s) = 1                                       for every node i
                sum_s' y_ij(s, s') = x_i(s),  sum_s y_ij(s, s') = x_j(s')   for every edge (i, j)
                sum of u_i(s) x_i(s) over the uses alive at t  <=  limit    for every time t
                x, y in {0, 1}

An infinite cost forbids a strategy or a pair. `distgraph.passes.search.solver.solve` solves it.

Source: Zheng et al., Alpa (OSDI 2022), section 4.2, without the limit; Moffitt and Fegade, "The ASPLOS 2025 /
EuroSys 2025 Contest on Intra-Operator Parallelism for Distributed Deep Learning", with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import GraphError
from distgraph.ir.float_arrays import Floats

__all__ = ["Problem", "Solution", "Status", "Use", "gap_of"]

Status = Literal["optimal", "feasible", "infeasible", "unknown"]

_ROUNDING = 1e-12  # of the limit: sums of floats are not exact


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """Memory that a node holds at the times start <= t < stop; amounts [strategies], 0 or more units each."""

    start: int
    stop: int
    amounts: Floats


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes with strategies, edges with pairwise costs, memory over time; arrays must not be written to.

    Attributes:
        name: for messages.
        costs: for every node the cost of each strategy, [strategies]; inf forbids one.
        edges: pairs of different nodes; several edges between the same two add up.
        edge_costs: for every edge [strategies of the first, strategies of the second]; inf forbids a pair.
        uses: for every node its uses of memory, any number of them; empty where no node has any.
        limit: units that may be used at any one time; None where memory is no matter.
        labels: a name for every node, for messages; empty for "node 7".

    Raises:
        GraphError: where shapes do not fit together, a number is not one, or an interval is empty.

    Example:
        >>> a, b = np.array([1.0, 5.0]), np.array([4.0, 2.0])
        >>> problem = Problem("two", (a, b), ((0, 1),), (np.array([[9.0, 0.0], [0.0, 9.0]]),))
        >>> problem.objective((0, 1))
        3.0
    """

    name: str
    costs: tuple[Floats, ...]
    edges: tuple[tuple[int, int], ...] = ()
    edge_costs: tuple[Floats, ...] = ()
    uses: tuple[tuple[Use, ...], ...] = ()
    limit: float | None = None
    labels: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.uses:
            object.__setattr__(self, "uses", ((),) * len(self.costs))
        self._check_nodes()
        self._check_edges()
        self._check_uses()

    def label(self, node: int) -> str:
        """The name of a node for messages."""
        return self.labels[node] if self.labels else f"node {node}"

    def objective(self, choice: Sequence[int]) -> float:
        """Cost of a choice [nodes] of strategies; inf where it takes something forbidden."""
        chosen = self._check_choice(choice)
        (costs, first), (tables, table_first, ends, widths) = self._flat_costs, self._flat_edges
        pairs = tables[table_first + chosen[ends[:, 0]] * widths + chosen[ends[:, 1]]]
        return float(costs[first + chosen].sum() + pairs.sum())

    def peak(self, choice: Sequence[int]) -> tuple[int, float]:
        """The time at which a choice uses most memory, the first of several, and the units used then."""
        chosen = self._check_choice(choice)
        amounts, first, users = self._flat_amounts
        return self._peak(amounts[first + chosen[users]])

    def feasible(self, choice: Sequence[int]) -> bool:
        """Whether a choice takes nothing forbidden and stays within the limit at every time."""
        if not math.isfinite(self.objective(choice)):
            return False
        return self.limit is None or self.peak(choice)[1] <= self.limit + _ROUNDING * abs(self.limit)

    def least_peak(self) -> tuple[int, float]:
        """A lower bound on the peak of any choice, and its time: every use as small as its node allows."""
        least = [
            u.amounts[finite].min() if (finite := np.isfinite(self.costs[i])).any() else 0.0
            for i, u in self._flat_uses
        ]
        return self._peak(np.array(least, dtype=np.float64))

    def _peak(self, amounts: Floats) -> tuple[int, float]:
        if not len(amounts):
            return 0, 0.0
        starts, stops, times = self._moments
        steps = np.zeros(len(times) + 1)
        np.add.at(steps, starts, amounts)
        np.subtract.at(steps, stops, amounts)
        used = np.cumsum(steps)[:-1]
        first = int(np.argmax(used))
        return int(times[first]), float(used[first])

    @cached_property
    def _flat_uses(self) -> list[tuple[int, Use]]:
        return [(i, use) for i, uses in enumerate(self.uses) for use in uses]

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return np.array([len(costs) for costs in self.costs], dtype=np.int64)

    @cached_property
    def _flat_costs(self) -> tuple[Floats, NDArray[np.int64]]:
        """All costs of strategies, and where those of every node begin."""
        return _joined(self.costs), np.cumsum(self._sizes) - self._sizes

    @cached_property
    def _flat_edges(self) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All costs of pairs; for every edge where they begin, its ends, and how many its second end has."""
        ends = np.array(self.edges, dtype=np.int64).reshape(-1, 2)
        sizes = self._sizes[ends]
        areas = sizes[:, 0] * sizes[:, 1]
        return (
            _joined([costs.ravel() for costs in self.edge_costs]),
            np.cumsum(areas) - areas,
            ends,
            sizes[:, 1],
        )

    @cached_property
    def _flat_amounts(self) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
        """All amounts, and of every use where they begin and its node."""
        users = np.array([i for i, _ in self._flat_uses], dtype=np.int64)
        sizes = self._sizes[users]
        return _joined([use.amounts for _, use in self._flat_uses]), np.cumsum(sizes) - sizes, users

    @cached_property
    def _moments(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
        """Positions of every use's start and stop among the sorted times at which any use begins."""
        starts = np.array([u.start for _, u in self._flat_uses], dtype=np.int64)
        stops = np.array([u.stop for _, u in self._flat_uses], dtype=np.int64)
        times = np.unique(starts)
        return np.searchsorted(times, starts), np.searchsorted(times, stops), times

    def _check_nodes(self) -> None:
        if self.labels and len(self.labels) != len(self.costs):
            raise GraphError(f"{self.name}: {len(self.labels)} labels but {len(self.costs)} nodes; name all")
        for i, costs in enumerate(self.costs):
            if costs.ndim != 1 or not len(costs):
                raise GraphError(
                    f"{self.name}: costs of {self.label(i)} have shape {costs.shape}, "
                    f"expected one number for each of 1 or more strategies"
                )
        if self.costs and not _are_costs(np.concatenate(self.costs)):
            bad = next(i for i, costs in enumerate(self.costs) if not _are_costs(costs))
            raise GraphError(f"{self.name}: costs of {self.label(bad)} hold nan or -inf; use inf to forbid")

    def _check_edges(self) -> None:
        if len(self.edges) != len(self.edge_costs):
            raise GraphError(
                f"{self.name}: {len(self.edges)} edges but {len(self.edge_costs)} arrays of edge costs"
            )
        for (u, v), costs in zip(self.edges, self.edge_costs, strict=True):
            if u == v or not (0 <= u < len(self.costs) and 0 <= v < len(self.costs)):
                raise GraphError(
                    f"{self.name}: edge ({u}, {v}) must join two different nodes of 0..{len(self.costs) - 1}"
                )
            expected = (len(self.costs[u]), len(self.costs[v]))
            if costs.shape != expected:
                raise GraphError(
                    f"{self.name}: costs of edge {self.label(u)} - {self.label(v)} have shape {costs.shape} "
                    f"but the strategies of its ends are {expected}"
                )
        if self.edges and not _are_costs(np.concatenate([c.ravel() for c in self.edge_costs])):
            bad = next(e for e, costs in enumerate(self.edge_costs) if not _are_costs(costs))
            raise GraphError(
                f"{self.name}: costs of edge {self.edges[bad]} hold nan or -inf; use inf to forbid"
            )

    def _check_uses(self) -> None:
        if self.limit is not None and not math.isfinite(self.limit):
            raise GraphError(f"{self.name}: the limit is {self.limit}; use None for no limit")
        if len(self.uses) != len(self.costs):
            raise GraphError(f"{self.name}: uses of {len(self.uses)} nodes but {len(self.costs)} nodes")
        for i, use in self._flat_uses:
            if use.start >= use.stop:
                raise GraphError(
                    f"{self.name}: a use of {self.label(i)} lasts from {use.start} to {use.stop}; leave out "
                    f"uses that last no time"
                )
            if use.amounts.shape != self.costs[i].shape:
                raise GraphError(
                    f"{self.name}: a use of {self.label(i)} has amounts of shape {use.amounts.shape} but the "
                    f"node has {len(self.costs[i])} strategies"
                )
        amounts = [use.amounts for _, use in self._flat_uses]
        if amounts and not _are_amounts(np.concatenate(amounts)):
            bad = next(i for i, use in self._flat_uses if not _are_amounts(use.amounts))
            raise GraphError(f"{self.name}: a use of {self.label(bad)} is negative, nan or infinite")

    def _check_choice(self, choice: Sequence[int]) -> NDArray[np.int64]:
        """The choice as an array."""
        if len(choice) != len(self.costs):
            raise GraphError(f"{self.name}: a choice of {len(choice)} strategies for {len(self.costs)} nodes")
        chosen = np.array(choice, dtype=np.int64)
        wrong = np.flatnonzero((chosen < 0) | (chosen >= self._sizes))
        if len(wrong):
            i = int(wrong[0])
            has, takes = self._sizes[i], chosen[i]
            raise GraphError(
                f"{self.name}: {self.label(i)} has {has} strategies, the choice takes number {takes}"
            )
        return chosen


@dataclass(frozen=True, slots=True)
class Solution:
    """What is known about a problem when a search ends.

    Attributes:
        choice: a strategy for every node, never one that breaks a constraint; None where none was found.
        objective: its cost; inf without a choice.
        bound: no choice costs less than this.
        gap: (objective - bound) / |objective|; inf without a choice.
        status: "optimal" (proved to the gap of rounding), "feasible", "infeasible" (proved) or "unknown".
        seconds: wall-clock seconds of every phase, in the order in which they ran.
        time: of an infeasible problem, where memory is the reason: a time at which it cannot be met.
        missing: units by which the least use at that time exceeds the limit, at least.
        message: what else there is to say, such as what stopped the search.
        cut: whether the wall clock stopped it, so that another run may find another choice.
        interrupted: whether the user did.
    """

    choice: tuple[int, ...] | None
    objective: float
    bound: float
    gap: float
    status: Status
    seconds: Mapping[str, float] = field(default_factory=dict)
    time: int | None = None
    missing: float = 0.0
    message: str = ""
    cut: bool = False
    interrupted: bool = False


def gap_of(objective: float, bound: float) -> float:
    """(objective - bound) / |objective|, never negative; inf without an objective or a bound.

    Example:
        >>> gap_of(200.0, 199.0)
        0.005
    """
    if not (math.isfinite(objective) and math.isfinite(bound)):
        return math.inf
    return max(0.0, objective - bound) / max(abs(objective), 1e-300)


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate(arrays) if len(arrays) else np.zeros(0)


def _are_costs(numbers: Floats) -> bool:
    return not bool(np.isnan(numbers).any() or np.isneginf(numbers).any())


def _are_amounts(numbers: Floats) -> bool:
    return bool((np.isfinite(numbers) & (numbers >= 0)).all())
