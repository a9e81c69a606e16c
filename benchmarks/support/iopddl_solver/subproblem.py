"""A flat network with some strategies struck out: what follows from that, and the smaller network that is
left.

Striking out goes on until every strategy has a permitted partner at each neighbour and fits, with the least
uses of all other nodes, into the room. Nodes with one strategy left are decided: their costs move to their
neighbours and to the constant, their memory is taken off the room. Times that cannot be exceeded any more are
dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.kernels._jit import exact
from distgraph.passes.search.solver.flat_problem import Flat, Ints
from distgraph.passes.search.solver.lagrangian_dual import Dual, Mask
from distgraph.passes.search.solver.reduced_problem import Network

__all__ = ["Mask", "PartDual", "Subproblem", "restrict", "shrink"]

_RESUMED = 0.3  # step length of the dual to go on with


@dataclass(frozen=True)
class Subproblem(Flat):
    """What is left of a network, and how it belongs to the network that all this began with.

    Attributes:
        names: [nodes], the number of every node in that network.
        numbers: [strategies], the number of every strategy in that network.
        fixed: [nodes of that network], strategies of the nodes that are decided.
    """

    names: Ints
    numbers: Ints
    fixed: Ints

    @staticmethod
    def of(network: Network) -> Subproblem:
        """The arrays of a network with which all this begins."""
        return _whole(Flat.of(network))

    def rebased(self) -> Subproblem:
        """The same network as one that others begin with."""
        return _whole(self)

    def expand(self, choice: Ints) -> Ints:
        """The choice [nodes] in the network that all this began with."""
        whole = self.fixed.copy()
        whole[self.names] = self.numbers[self.first[:-1] + choice]
        return whole

    def locate(self, whole: Ints) -> Ints:
        """The choice [nodes] that expands to a choice of the network that all this began with; its strategies
        must be left."""
        rank = np.flatnonzero(self.numbers == whole[self.names][self.owner])
        return rank - self.first[:-1]


def _whole(flat: Flat) -> Subproblem:
    return Subproblem(
        **{field.name: getattr(flat, field.name) for field in fields(Flat)},
        names=np.arange(flat.nodes),
        numbers=np.arange(len(flat.cost)) - np.repeat(flat.first[:-1], np.diff(flat.first)),
        fixed=np.zeros(flat.nodes, dtype=np.int64),
    )


class PartDual(Dual):
    """The dual of a subproblem, which may be gone on with."""

    flat: Subproblem

    def resume(self) -> None:
        """Go on from the best bound with longer steps: the target may have come closer."""
        self.restore()
        self._length, self._idle = max(self._length, _RESUMED), 0


def restrict(
    flat: Subproblem, mask: Mask, vectors: Floats, prices: Floats
) -> tuple[Subproblem, Floats, Floats] | None:
    """The network of the strategies in a mask, which is narrowed in place, with vectors and prices to match.

    Args:
        flat: a network.
        mask: [strategies], true for those that stay.
        vectors: of the messages on the network's edges.
        prices: of memory, [times].

    Returns:
        The network, its vectors and its prices; None where no choice is left.
    """
    if not _narrow(
        mask, flat.first, flat.ends, flat.table_first, flat.table, flat.user,
        flat.span, flat.amount_first, flat.amount, flat.room, flat.slack,
    ):  # fmt: skip
        return None
    return shrink(flat, mask, vectors, prices)


def shrink(
    flat: Subproblem, mask: Mask, vectors: Floats, prices: Floats
) -> tuple[Subproblem, Floats, Floats]:
    """As `restrict`, for a mask that leaves every node a strategy, without narrowing it."""
    sizes = np.add.reduceat(mask, flat.first[:-1], dtype=np.int64)
    only = flat.first[:-1] + _first_true(mask, flat.first)  # of every node the first strategy that stays
    open_nodes = sizes > 1
    number = np.cumsum(open_nodes) - 1
    cost, constant = _fold(flat, only, open_nodes)
    fixed = flat.fixed.copy()
    fixed[flat.names] = flat.numbers[only]
    edges = np.flatnonzero(open_nodes[flat.ends].all(axis=1))
    ends = number[flat.ends[edges]]
    kept_nodes = np.flatnonzero(open_nodes)
    first = _starts(sizes[kept_nodes])
    table_first = _starts(sizes[flat.ends[edges, 0]] * sizes[flat.ends[edges, 1]])
    side_first = _starts(sizes[flat.ends[edges].ravel()])
    table, kept_vectors = np.empty(table_first[-1]), np.empty(side_first[-1])
    _copy_tables(
        table, kept_vectors, edges, mask, flat.first, flat.ends, flat.table_first, flat.table, vectors,
        flat.side_first,
    )  # fmt: skip
    stays = mask & open_nodes[flat.owner]
    sides = ends.ravel()
    order = np.argsort(sides, kind="stable")
    room, uses, span, times = _memory(flat, mask, only, open_nodes)
    users = number[flat.user[uses]]
    amount_first = _starts(sizes[flat.user[uses]])
    amount = np.empty(amount_first[-1])
    _copy_amounts(amount, uses, mask, flat.first, flat.user, flat.amount_first, flat.amount)
    small = Subproblem(
        names=flat.names[kept_nodes],
        numbers=flat.numbers[stays],
        fixed=fixed,
        first=first,
        cost=cost[stays],
        ends=ends,
        table_first=table_first,
        table=table,
        touch_first=_starts(np.bincount(sides, minlength=len(kept_nodes))),
        touch=order,
        side_first=side_first,
        use_first=_starts(np.bincount(users, minlength=len(kept_nodes))),
        span=span,
        amount_first=amount_first,
        amount=amount,
        room=room,
        constant=constant,
    )
    return small, kept_vectors, prices[times]


def _fold(flat: Flat, only: Ints, open_nodes: Mask) -> tuple[Floats, float]:
    """Costs [strategies] with those of edges to decided nodes, and the cost of what is decided."""
    cost = flat.cost.copy()
    constant = flat.constant + float(cost[only[~open_nodes]].sum())
    constant += _fold_edges(cost, only, open_nodes, flat.first, flat.ends, flat.table_first, flat.table)
    return cost, constant


def _memory(flat: Flat, mask: Mask, only: Ints, open_nodes: Mask) -> tuple[Floats, Ints, Ints, Ints]:
    """Room, uses that stay, their spans, and the times that stay."""
    count = len(flat.room)
    least, most = np.empty(len(flat.span)), np.empty(len(flat.span))
    _extremes(least, most, mask, flat.first, flat.user, flat.amount_first, flat.amount)
    uses = np.flatnonzero(open_nodes[flat.user])
    decided = np.flatnonzero(~open_nodes[flat.user])
    room = flat.room - _spread(flat.span[decided], least[decided], count)
    times = np.flatnonzero(_spread(flat.span[uses], most[uses], count) > room + flat.slack)
    span = np.searchsorted(times, flat.span[uses])
    held = (span[:, 0] < span[:, 1]) & (most[uses] > 0)
    return room[times], uses[held], span[held], times


def _spread(span: Ints, amounts: Floats, count: int) -> Floats:
    steps = np.zeros(count + 1)
    np.add.at(steps, span[:, 0], amounts)
    np.subtract.at(steps, span[:, 1], amounts)
    return np.cumsum(steps)[:-1]


def _starts(sizes: Ints) -> Ints:
    starts = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


@exact
def _first_true(mask: Mask, first: Ints) -> Ints:
    found = np.zeros(len(first) - 1, dtype=np.int64)
    for i in range(len(first) - 1):
        while not mask[first[i] + found[i]]:
            found[i] += 1
    return found


@exact
def _narrow(
    mask: Mask, first: Ints, ends: Ints, table_first: Ints, table: Floats, user: Ints,
    span: Ints, amount_first: Ints, amount: Floats, room: Floats, slack: float,
) -> bool:  # fmt: skip
    """Strike out of the mask what has no permitted partner or no room; false where nothing is left."""
    least, most, head = np.empty(len(span)), np.empty(len(span)), np.empty(len(room))
    changed = True
    while changed:
        changed = False
        for e in range(len(ends)):
            u, v = ends[e, 0], ends[e, 1]
            own = table[table_first[e] : table_first[e + 1]].reshape((first[u + 1] - first[u], -1))
            rows, columns = mask[first[u] : first[u + 1]], mask[first[v] : first[v + 1]]
            changed |= _strike_lonely(rows, columns, own) or _strike_lonely(columns, rows, own.T)
        for i in range(len(first) - 1):
            if not mask[first[i] : first[i + 1]].any():
                return False
        _extremes(least, most, mask, first, user, amount_first, amount)
        head[:] = room
        for use in range(len(span)):
            if least[use] > 0:
                head[span[use, 0] : span[use, 1]] -= least[use]
        if len(head) and head.min() < -slack:
            return False
        for use in range(len(span)):
            if most[use] > least[use]:
                spare = head[span[use, 0] : span[use, 1]].min() + least[use] + slack
                if most[use] > spare:
                    own_mask = mask[first[user[use]] : first[user[use] + 1]]
                    own_mask &= amount[amount_first[use] : amount_first[use + 1]] <= spare
                    changed = True
    return True


@exact
def _strike_lonely(rows: Mask, columns: Mask, table: Floats) -> bool:
    """Strike out the rows without a permitted partner among the columns; whether there were any."""
    struck = False
    for r in range(len(rows)):
        if rows[r]:
            partner = False
            for c in range(len(columns)):
                if columns[c] and table[r, c] < np.inf:
                    partner = True
                    break
            if not partner:
                rows[r] = False
                struck = True
    return struck


@exact
def _fold_edges(
    cost: Floats, only: Ints, open_nodes: Mask, first: Ints, ends: Ints, table_first: Ints, table: Floats
) -> float:
    """Add the costs of edges with a decided end to the other end's strategies, or to the result."""
    constant = 0.0
    for e in range(len(ends)):
        u, v = ends[e, 0], ends[e, 1]
        columns = first[v + 1] - first[v]
        r, c = only[u] - first[u], only[v] - first[v]
        if open_nodes[u]:
            if not open_nodes[v]:
                for s in range(first[u + 1] - first[u]):
                    cost[first[u] + s] += table[table_first[e] + s * columns + c]
        elif open_nodes[v]:
            for s in range(columns):
                cost[first[v] + s] += table[table_first[e] + r * columns + s]
        else:
            constant += table[table_first[e] + r * columns + c]
    return constant


@exact
def _copy_tables(
    small: Floats, small_vectors: Floats, edges: Ints, mask: Mask, first: Ints, ends: Ints, table_first: Ints,
    table: Floats, vectors: Floats, side_first: Ints,
) -> None:  # fmt: skip
    at, place = 0, 0
    for e in edges:
        u, v = ends[e, 0], ends[e, 1]
        rows, columns = first[u + 1] - first[u], first[v + 1] - first[v]
        for r in range(rows):
            if mask[first[u] + r]:
                small_vectors[place] = vectors[side_first[2 * e] + r]
                place += 1
                for c in range(columns):
                    if mask[first[v] + c]:
                        small[at] = table[table_first[e] + r * columns + c]
                        at += 1
        for c in range(columns):
            if mask[first[v] + c]:
                small_vectors[place] = vectors[side_first[2 * e + 1] + c]
                place += 1


@exact
def _extremes(
    least: Floats, most: Floats, mask: Mask, first: Ints, user: Ints, amount_first: Ints, amount: Floats
) -> None:
    for use in range(len(user)):
        least[use], most[use] = np.inf, 0.0
        for s in range(first[user[use] + 1] - first[user[use]]):
            if mask[first[user[use]] + s]:
                least[use] = min(least[use], amount[amount_first[use] + s])
                most[use] = max(most[use], amount[amount_first[use] + s])


@exact
def _copy_amounts(
    small: Floats, uses: Ints, mask: Mask, first: Ints, user: Ints, amount_first: Ints, amount: Floats
) -> None:
    at = 0
    for use in uses:
        for s in range(first[user[use] + 1] - first[user[use]]):
            if mask[first[user[use]] + s]:
                small[at] = amount[amount_first[use] + s]
                at += 1
