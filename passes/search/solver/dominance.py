"""Strategies that another strategy of the same node always beats (dead-end elimination).

Strategy a of node i is dominated by b when b uses no more memory at any time and, whatever the neighbours
choose,  c_i(b) - c_i(a) + sum_j max_s' (c_ij(b, s') - c_ij(a, s')) <= 0.

Source: Goldstein, "Efficient rotamer elimination", Biophysical Journal 66 (1994), the criterion without
    memory.
"""

from __future__ import annotations

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.kernels._jit import exact
from distgraph.passes.search.solver.reduced_problem import Network, Numbers

__all__ = ["undominated"]


def undominated(network: Network, node: int) -> Numbers:
    """The strategies of a node that no other one dominates, at least one."""
    cost = network.costs[node]
    regret = cost[:, None] - cost[None, :]  # [b, a]: what b costs more than a at worst
    for table in network.near[node].values():
        if not _add_worst(regret, np.ascontiguousarray(table)):
            return np.arange(len(cost))
    for amounts in {use.amounts.tobytes(): use.amounts for use in network.uses[node]}.values():
        regret[amounts[:, None] > amounts[None, :]] = np.inf
    return np.flatnonzero(_survivors(regret))


@exact
def _add_worst(regret: Floats, table: Floats) -> int:
    """Add max over columns s of table[b, s] - table[a, s] to regret[b, a]; columns that forbid a say nothing.

    Returns:
        How many pairs of different strategies have a finite regret still.
    """
    count, width = table.shape
    finite = 0
    for b in range(count):
        for a in range(count):
            sofar = regret[b, a]
            if a == b or sofar == np.inf:
                continue
            worst = -np.inf
            for s in range(width):
                if table[a, s] == np.inf:
                    continue
                more = table[b, s] - table[a, s]
                worst = max(worst, more)
                if worst == np.inf:
                    break
            regret[b, a] = sofar + worst
            finite += regret[b, a] < np.inf
    return finite


@_add_worst.without_numba
def _add_worst_by_rows(regret: Floats, table: Floats) -> int:
    permitted, different = table < np.inf, np.ones(len(table), dtype=bool)
    finite, subtracted = 0, np.where(permitted, table, 0.0)
    for b in range(len(table)):
        different[b] = False
        pairs = different & (regret[b] < np.inf)
        more = np.where(permitted[pairs], table[b] - subtracted[pairs], -np.inf)
        regret[b, pairs] += more.max(axis=1)
        finite += int(np.count_nonzero(regret[b, pairs] < np.inf))
        different[b] = True
    return finite


@exact
def _survivors(regret: Floats) -> Floats:
    """One for every strategy that stays; of strategies that dominate each other the first stays."""
    count = len(regret)
    alive = np.ones(count)
    for a in range(count):
        for b in range(count):
            if b != a and alive[b] > 0 and regret[b, a] <= 0:
                alive[a] = 0
                break
    return alive
