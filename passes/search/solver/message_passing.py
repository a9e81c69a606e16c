r"""Message passing on the dual of the local polytope relaxation: a lower bound, and estimates to round by.

Without memory, every choice of vectors a_e,i(s), one for each end i of each edge e = (i, j), gives the bound

    sum_i min_s [c_i(s) + sum_e a_e,i(s)]  +  sum_e min_ss' [c_e(s, s') - a_e,i(s) - a_e,j(s')].

A pass goes through the nodes in order. Each pulls from the edges behind it all that can be pulled,
a_e,i(s) = min_s' [c_e(s, s') - a_e,j(s')], and pushes a share 1 / max(edges before, edges behind) of its sum
to each edge ahead; passes alternate in direction. The bound never falls, and after a pass its second sum is
zero.

Source: Kolmogorov, "Convergent tree-reweighted message passing for energy minimization" (PAMI 2006); in the
form of reparametrisations: Kolmogorov, "A new look at reweighted message passing" (PAMI 2015).
"""

from __future__ import annotations

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.kernels._jit import exact
from distgraph.passes.search.solver.flat_problem import Flat, Ints, add_multiple

__all__ = ["Messages"]


class Messages:
    """The vectors of all ends of edges, improved pass by pass."""

    def __init__(self, flat: Flat, vectors: Floats | None = None) -> None:
        self.flat = flat
        self.vectors = np.zeros(int(flat.side_first[-1])) if vectors is None else vectors

    def sweep(self, cost: Floats, choice: Ints, *, backward: bool) -> float:
        """One pass over the nodes with the given costs [strategies].

        Args:
            cost: of every strategy, memory included.
            choice: [nodes], overwritten with a choice rounded along the pass.
            backward: last node first.

        Returns:
            The bound after the pass; inf where the relaxation has no solution.
        """
        f = self.flat
        return float(
            _sweep(
                cost, choice, self.vectors, backward,
                f.first, f.ends, f.table_first, f.table, f.touch_first, f.touch, f.side_first,
            )
        )  # fmt: skip

    def least(self, cost: Floats) -> Floats:
        """For every strategy a lower bound on the cost of all choices that take it, [strategies].

        Pulling all that the edges of node i hold into i leaves the minima of the other nodes and what the
        other edges hold; both stay in the bound.
        """
        f = self.flat
        costs, total = cost.copy(), cost.copy()
        held = np.zeros(len(f.ends))
        _pull_all(costs, total, held, self.vectors, f.first, f.ends, f.table_first, f.table, f.side_first)
        minima = np.minimum.reduceat(costs, f.first[:-1])
        around = np.zeros(f.nodes)
        np.add.at(around, f.ends.ravel(), np.repeat(held, 2))
        rest = minima.sum() - minima + held.sum() - around
        total += rest[f.owner]
        return total

    def reparametrised(self, cost: Floats) -> tuple[Floats, Floats]:
        """The terms of the first and of the second sum above, [strategies] and [table].

        They give every choice the same cost as before.
        """
        f = self.flat
        sides = f.ends.ravel()
        sizes = f.first[sides + 1] - f.first[sides]
        strategy = np.repeat(f.first[sides] - f.side_first[:-1], sizes) + np.arange(len(self.vectors))
        edge, row, column = f.pairs
        moved = self.vectors[f.side_first[2 * edge] + row] + self.vectors[f.side_first[2 * edge + 1] + column]
        return cost + np.bincount(strategy, self.vectors, len(cost)), f.table - moved


@exact
def _pull(
    out: Floats, vectors: Floats, side: int, first: Ints, ends: Ints, table_first: Ints, table: Floats,
    side_first: Ints,
) -> None:  # fmt: skip
    """out[s] = min over s' of table(s, s') - the vector at the other end of the edge."""
    edge = side // 2
    rows = first[ends[edge, 0] + 1] - first[ends[edge, 0]]
    columns = first[ends[edge, 1] + 1] - first[ends[edge, 1]]
    offset, other = table_first[edge], side_first[side ^ 1]
    if side % 2 == 0:
        for r in range(rows):
            best = np.inf
            for c in range(columns):
                best = min(best, table[offset + r * columns + c] - vectors[other + c])
            out[r] = best
    else:
        out[:columns] = np.inf
        for r in range(rows):
            message = vectors[other + r]
            for c in range(columns):
                out[c] = min(out[c], table[offset + r * columns + c] - message)


@_pull.without_numba
def _pull_arrays(
    out: Floats, vectors: Floats, side: int, first: Ints, ends: Ints, table_first: Ints, table: Floats,
    side_first: Ints,
) -> None:  # fmt: skip
    edge, (lower, upper) = side // 2, ends[side // 2]
    rows, columns = first[lower + 1] - first[lower], first[upper + 1] - first[upper]
    entries = table[table_first[edge] : table_first[edge + 1]].reshape(rows, columns)
    if side % 2 == 1:
        entries = entries.T
    with np.errstate(invalid="ignore"):  # inf - inf is left out
        pulled = entries - vectors[side_first[side ^ 1] :][: entries.shape[1]]
    out[: len(entries)] = np.fmin.reduce(pulled, axis=1, initial=np.inf)


@exact
def _sweep(
    cost: Floats, choice: Ints, vectors: Floats, backward: bool,
    first: Ints, ends: Ints, table_first: Ints, table: Floats, touch_first: Ints, touch: Ints,
    side_first: Ints,
) -> float:  # fmt: skip
    nodes = len(first) - 1
    widest = 0
    for i in range(nodes):
        widest = max(widest, first[i + 1] - first[i])
    total, estimate = np.empty(widest), np.empty(widest)
    behind = 1 if backward else 0  # side of an edge at whose end the pass has been already
    bound = 0.0
    for step in range(nodes):
        i = nodes - 1 - step if backward else step
        count = first[i + 1] - first[i]
        total[:count] = cost[first[i] : first[i + 1]]
        estimate[:count] = total[:count]
        ahead = 0
        for t in range(touch_first[i], touch_first[i + 1]):
            side = touch[t]
            mine = vectors[side_first[side] : side_first[side] + count]
            if side % 2 == behind:
                ahead += 1
                add_multiple(estimate, 1.0, mine)
            else:
                _pull(mine, vectors, side, first, ends, table_first, table, side_first)
                other = choice[ends[side // 2, behind]]
                columns = first[ends[side // 2, 1] + 1] - first[ends[side // 2, 1]]
                offset, stride = (other * columns, 1) if behind == 0 else (other, columns)
                offset += table_first[side // 2]
                add_multiple(estimate, 1.0, table[offset : offset + count * stride : stride])
            add_multiple(total, 1.0, mine)
        least = total[:count].min()
        choice[i] = np.argmin(estimate[:count])
        if least == np.inf:
            return np.inf
        share = 1.0 / max(ahead, touch_first[i + 1] - touch_first[i] - ahead, 1)
        for t in range(touch_first[i], touch_first[i + 1]):
            if touch[t] % 2 == behind:
                offset = side_first[touch[t]]
                add_multiple(vectors[offset : offset + count], -share, total[:count])
        bound += (1.0 - share * ahead) * least
    return bound


@exact
def _pull_all(
    costs: Floats, total: Floats, held: Floats, vectors: Floats,
    first: Ints, ends: Ints, table_first: Ints, table: Floats, side_first: Ints,
) -> None:  # fmt: skip
    """Add to own what every end of an edge holds, to total what could be pulled there; held is what is left
    of each edge without pulling."""
    pulled = np.empty(len(total))
    for side in range(2 * len(ends)):
        _pull(pulled, vectors, side, first, ends, table_first, table, side_first)
        i = ends[side // 2, side % 2]
        least = np.inf
        for s in range(first[i + 1] - first[i]):
            mine = vectors[side_first[side] + s]
            total[first[i] + s] += pulled[s]
            costs[first[i] + s] += mine
            least = min(least, pulled[s] - mine)
        held[side // 2] = least
