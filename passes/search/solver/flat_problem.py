"""A network as flat arrays, for compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats
from distgraph.kernels._jit import exact
from distgraph.passes.search.solver.reduced_problem import Network

__all__ = ["Flat", "Ints"]

Ints = NDArray[np.int64]

_REMEMBERED = 1 << 24  # bytes of choices, and of what is known of them


@dataclass(frozen=True)
class Flat:
    """Arrays of a network; its nodes are numbered 0.. in the order of `sorted(network.costs)`.

    Attributes:
        first: [nodes + 1], where the strategies of a node begin among all strategies.
        cost: [strategies].
        ends: [edges, 2], the lower node first.
        table_first: [edges + 1], where the table of an edge begins, lower end's strategies being the rows.
        table: all tables.
        touch_first, touch: [nodes + 1] and, for every end of an edge, 2 * edge + (0 for the lower end).
        side_first: [2 * edges], where the vector of an end of an edge begins among all such vectors.
        use_first: [nodes + 1], where the uses of a node begin.
        span: [uses, 2], start and stop.
        amount_first, amount: where the amounts of a use begin, and all of them.
        room: [times].
    """

    first: Ints
    cost: Floats
    ends: Ints
    table_first: Ints
    table: Floats
    touch_first: Ints
    touch: Ints
    side_first: Ints
    use_first: Ints
    span: Ints
    amount_first: Ints
    amount: Floats
    room: Floats
    constant: float

    @staticmethod
    def of(network: Network) -> Flat:
        """The arrays of a network."""
        names = sorted(network.costs)
        number = {name: i for i, name in enumerate(names)}
        sizes = [len(network.costs[name]) for name in names]
        pairs = [(u, v) for u in names for v in network.near[u] if u < v]
        ends = np.array([(number[u], number[v]) for u, v in pairs], dtype=np.int64).reshape(-1, 2)
        touching: list[list[int]] = [[] for _ in names]
        for e, (u, v) in enumerate(ends.tolist()):
            touching[u].append(2 * e)
            touching[v].append(2 * e + 1)
        uses = [use for name in names for use in network.uses[name]]
        return Flat(
            _offsets(sizes),
            _joined([network.costs[name] for name in names]),
            ends,
            _offsets([network.near[u][v].size for u, v in pairs]),
            _joined([network.near[u][v] for u, v in pairs]),
            _offsets([len(edges) for edges in touching]),
            np.array([t for edges in touching for t in edges], dtype=np.int64),
            _offsets([sizes[i] for i in ends.ravel().tolist()]),
            _offsets([len(network.uses[name]) for name in names]),
            np.array([(use.start, use.stop) for use in uses], dtype=np.int64).reshape(-1, 2),
            _offsets([len(use.amounts) for use in uses]),
            _joined([use.amounts for use in uses]),
            network.room.copy(),
            network.constant,
        )

    @property
    def nodes(self) -> int:
        """How many nodes."""
        return len(self.first) - 1

    @cached_property
    def owner(self) -> Ints:
        """The node of every strategy."""
        return np.repeat(np.arange(self.nodes), np.diff(self.first))

    @cached_property
    def user(self) -> Ints:
        """The node of every use."""
        return np.repeat(np.arange(self.nodes), np.diff(self.use_first))

    @cached_property
    def pairs(self) -> tuple[Ints, Ints, Ints]:
        """For every entry of `table` its edge, and the strategies of the edge's lower and upper end, numbered
        within their nodes."""
        edge = np.repeat(np.arange(len(self.ends)), np.diff(self.table_first))
        upper = self.ends[edge, 1]
        row, column = np.divmod(
            np.arange(len(self.table)) - self.table_first[edge], self.first[upper + 1] - self.first[upper]
        )
        return edge, row, column

    def objective(self, choice: Ints) -> float:
        """Cost of a choice [nodes], the constant included; inf where it takes something forbidden."""
        lower, upper, width = self._sides
        pairs = self.table[self.table_first[:-1] + choice[lower] * width + choice[upper]]
        return float(self.cost[self.first[:-1] + choice].sum() + pairs.sum()) + self.constant

    @cached_property
    def _sides(self) -> tuple[Ints, Ints, Ints]:
        """For every edge its lower and its upper end, and the strategies of the upper one."""
        lower, upper = np.ascontiguousarray(self.ends.T)
        return lower, upper, self.first[upper + 1] - self.first[upper]

    def used(self, choice: Ints) -> Floats:
        """Units [times] that a choice uses; not to be changed, as it is kept for the next time."""
        key = choice.tobytes()
        units = self._used.get(key)
        if units is None:
            amounts = self.amount[self.amount_first[:-1] + choice[self.user]]
            steps = np.zeros(len(self.room) + 1)
            np.add.at(steps, self.span[:, 0], amounts)
            np.subtract.at(steps, self.span[:, 1], amounts)
            units = np.cumsum(steps)[:-1]
            if len(self._used) * (len(key) + units.nbytes) > _REMEMBERED:
                self._used.clear()
            self._used[key] = units
        return units

    @cached_property
    def _used(self) -> dict[bytes, Floats]:
        """What `used` returned: the passes of the dual round to the same few choices again and again."""
        return {}

    def fits(self, choice: Ints) -> bool:
        """Whether a choice stays within the room at every time."""
        return not len(self.room) or bool((self.used(choice) <= self.room + self.slack).all())

    @cached_property
    def ceiling(self) -> float:
        """No permitted choice costs more: the sum of the largest finite costs."""
        if not self.nodes:
            return self.constant
        costs = np.where(np.isfinite(self.cost), self.cost, -np.inf)
        pairs = np.where(np.isfinite(self.table), self.table, -np.inf)
        total = np.maximum.reduceat(costs, self.first[:-1]).sum()
        if len(self.ends):
            total += np.maximum.reduceat(pairs, self.table_first[:-1]).sum()
        return self.constant + float(total)

    @cached_property
    def slack(self) -> float:
        """Rounding that a sum of uses is allowed."""
        return 1e-12 * float(np.abs(self.room).max(initial=0.0))

    def priced(self, prices: Floats) -> Floats:
        """Costs [strategies] with every unit of memory at its price [times]."""
        if not len(self.room):
            return self.cost
        sums = np.zeros(len(prices) + 1)
        np.cumsum(prices, out=sums[1:])
        rent = sums[self.span[:, 1]] - sums[self.span[:, 0]]
        total = self.cost.copy()
        _add_rents(total, rent, self.first, self.use_first, self.amount_first, self.amount)
        return total


@exact
def add_multiple(total: Floats, factor: float, more: Floats) -> None:
    """Add a multiple of some numbers to the first numbers of `total`."""
    for s in range(len(more)):
        total[s] += factor * more[s]


@add_multiple.without_numba
def _add_multiple_arrays(total: Floats, factor: float, more: Floats) -> None:
    total[: len(more)] += factor * more


@exact
def _add_rents(
    total: Floats, rent: Floats, first: Ints, use_first: Ints, amount_first: Ints, amount: Floats
) -> None:
    for i in range(len(first) - 1):
        for use in range(use_first[i], use_first[i + 1]):
            if rent[use] != 0:
                amounts = amount[amount_first[use] : amount_first[use + 1]]
                add_multiple(total[first[i] : first[i + 1]], rent[use], amounts)


def _offsets(sizes: Sequence[int]) -> Ints:
    return np.array(list(accumulate(sizes, initial=0)), dtype=np.int64)


def _joined(arrays: Sequence[Floats]) -> Floats:
    return np.concatenate([a.ravel() for a in arrays]) if arrays else np.zeros(0)
