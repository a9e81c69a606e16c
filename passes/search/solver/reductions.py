"""Exact reductions: a smaller network with the same optimum, from which every choice can be expanded.

Until hardly anything changes:

- arc consistency: a strategy without a permitted partner at some neighbour goes;
- dominance: a strategy that another one always beats goes (`dominance`);
- followers: where every strategy of a node permits one strategy of a neighbour only, the neighbour joins it;
- degree 0, 1 and 2: a node without uses is minimised out; with one neighbour and uses it is, too, where one
  of its strategies is best for cost and memory at once, and otherwise it joins the neighbour while the pairs
  that are not beaten are no more than both had strategies;
- the times of the limit that matter (`times`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.float_arrays import Floats
from distgraph.kernels._jit import exact
from distgraph.passes.search.solver.dominance import undominated
from distgraph.passes.search.solver.memory_limit_times import tighten
from distgraph.passes.search.solver.reduced_problem import Network, Numbers
from distgraph.passes.search.solver.work import Work

__all__ = ["reduce_network"]

_WORTH = 0.97  # another round must be promised by a network that shrank to this part in the last
_HUB = 16  # neighbours above which a node follows none that has more strategies
_TABLE = 1 << 22  # entries that minimising a node out between two neighbours may look at


def reduce_network(
    network: Network, left: Callable[[], float] = lambda: math.inf, work: Work | None = None
) -> None:
    """Reduce a network in place until hardly any rule applies, or no seconds are left.

    Every strategy that remains has a permitted partner at each neighbour. `network.dead` tells that no choice
    is feasible.
    """
    pending, patterns, before = set(network.costs), _Patterns(), math.inf
    while pending and _settle_nodes(network, pending, patterns, left, work):
        size = sum(len(cost) for cost in network.costs.values()) + len(network.times)
        if size > _WORTH * before or left() <= 0:
            return
        pending = {i for i in tighten(network) if i in network.costs}
        before = size


def _settle_nodes(
    network: Network,
    pending: set[int],
    patterns: _Patterns,
    left: Callable[[], float],
    work: Work | None,
) -> bool:
    """Apply the rules to nodes until none of them changes any, arc consistency alone once no seconds are
    left; whether a choice may remain."""
    queue = _Queue(pending)
    while queue.nodes and not network.dead:
        node = queue.pop()
        if node not in network.costs or not _strike_lonely(network, node, queue, patterns):
            continue
        if left() > 0:
            if work is not None:
                tables = sum(table.size for table in network.near[node].values())
                work.add_node(len(network.costs[node]) * tables)
            _reduce_node(network, node, queue, patterns)
    return not network.dead


class _Queue:
    """Nodes to look at, first come first served, each once."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes = deque(sorted(nodes))
        self._waiting = set(self.nodes)

    def pop(self) -> int:
        node = self.nodes.popleft()
        self._waiting.remove(node)
        return node

    def push(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            if node not in self._waiting:
                self._waiting.add(node)
                self.nodes.append(node)


def _strike_lonely(network: Network, node: int, queue: _Queue, patterns: _Patterns) -> bool:
    """Arc consistency: leave the node the strategies that have a permitted partner at each neighbour; whether
    there are any."""
    strategies = np.flatnonzero(_permitted(network, node, patterns))
    if len(strategies) < len(network.costs[node]):
        network.keep(node, strategies)
        queue.push(network.near[node])
    return len(strategies) > 0


def _reduce_node(network: Network, node: int, queue: _Queue, patterns: _Patterns) -> None:
    if len(network.costs[node]) > 1:
        strategies = undominated(network, node)
        if len(strategies) < len(network.costs[node]):
            network.keep(node, strategies)
            queue.push(network.near[node])
    if not _lead(network, node, queue, patterns):
        _minimise_out(network, node, queue)


def _permitted(network: Network, node: int, patterns: _Patterns) -> NDArray[np.bool_]:
    permitted = np.isfinite(network.costs[node])
    for other, table in network.near[node].items():
        if patterns.of(node, other, table)[0]:
            permitted &= np.isfinite(table).any(axis=1)
    return permitted


def _lead(network: Network, node: int, queue: _Queue, patterns: _Patterns) -> bool:
    """Let neighbours follow the node, or the node follow a neighbour; whether the node is gone."""
    for other, table in list(network.near[node].items()):
        dead_rows, dead_columns, row_leads, column_leads = patterns.of(node, other, table)
        if dead_rows or dead_columns:
            continue  # arc consistency comes first
        smaller = _weight(network, node) < _weight(network, other)
        if column_leads and (smaller or not row_leads) and _shrinks(network, node, other):
            _follow(network, node, other, np.isfinite(table).argmax(axis=0), queue)
            return True
        if row_leads and _shrinks(network, other, node):
            _follow(network, other, node, np.isfinite(table).argmax(axis=1), queue)
    return False


def _weight(network: Network, node: int) -> int:
    """Arrays that move when a node follows another."""
    return len(network.near[node]) + len(network.uses[node])


class _Patterns:
    """What the finite entries of every table say: rows and columns without any, rows and columns with one
    each.

    Facts are kept until the table is another object.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Floats, tuple[bool, bool, bool, bool]]] = {}

    def of(self, node: int, other: int, table: Floats) -> tuple[bool, bool, bool, bool]:
        cached = self._known.get((node, other))
        if cached is None or cached[0] is not table:
            cached = self._known[node, other] = (table, _pattern(table))
        return cached[1]


@exact
def _pattern(table: Floats) -> tuple[bool, bool, bool, bool]:
    rows, columns = table.shape
    in_column = np.zeros(columns, dtype=np.int64)
    dead_rows, one_each = False, True
    for r in range(rows):
        pattern = 0
        for c in range(columns):
            if table[r, c] < np.inf:
                pattern += 1
                in_column[c] += 1
        dead_rows = dead_rows or pattern == 0
        one_each = one_each and pattern == 1
    return dead_rows, in_column.min() == 0, one_each, in_column.max() == 1


def _shrinks(network: Network, node: int, leader: int) -> bool:
    """Whether a network's tables hold no more numbers when a node follows a leader."""
    if len(network.costs[leader]) <= len(network.costs[node]):
        return True
    if len(network.near[node]) > _HUB:
        return False
    width = sum(len(network.costs[v]) for v in network.near[node]) - len(network.costs[leader])
    before = len(network.costs[node]) * (width + len(network.costs[leader]))
    return len(network.costs[leader]) * width <= before


def _follow(network: Network, node: int, leader: int, taken: Numbers, queue: _Queue) -> None:
    queue.push(network.near[node])
    network.follow(node, leader, taken)
    queue.push([leader])


def _minimise_out(network: Network, node: int, queue: _Queue) -> bool:
    """Take a node of degree 0, 1 or 2 out where that is exact; whether it is gone."""
    near = network.near[node]
    match list(near):
        case []:
            if network.uses[node]:
                return False
            network.settle(node, int(np.argmin(network.costs[node])))
            return True
        case [leader]:
            return _join_only_neighbour(network, node, leader, queue)
        case [left, right] if not network.uses[node]:
            size = len(network.costs[left]) * len(network.costs[right]) * len(network.costs[node])
            if size > _TABLE:
                return False
            total = near[left].T[:, :, None] + (network.costs[node][:, None] + near[right])[None, :, :]
            taken = total.argmin(axis=1)
            table = np.take_along_axis(total, taken[:, None, :], axis=1)[:, 0, :]
            network.bridge(node, left, right, taken, table)
            queue.push([left, right])
            return True
    return False


def _join_only_neighbour(network: Network, node: int, leader: int, queue: _Queue) -> bool:
    """Merge a node of degree 1 into its neighbour: pairs (leader's strategy, own strategy) that are not
    beaten by another own strategy in cost and in every use."""
    total = network.costs[node][None, :] + network.near[leader][node]
    uses = [use.amounts for use in network.uses[node]]
    rows, columns = _unbeaten(total, uses)
    if len(rows) > len(network.costs[leader]) + len(network.costs[node]):
        return False
    network.product(leader, node, rows, columns)
    queue.push([leader, *network.near[leader]])
    return True


def _unbeaten(total: Floats, uses: list[Floats]) -> tuple[Numbers, Numbers]:
    """Positions of the finite entries of total [rows, strategies] that no other of their row beats in cost
    and in all uses at once."""
    count = total.shape[1]
    finite = np.isfinite(total)
    first = np.arange(count)[:, None] < np.arange(count)[None, :]
    no_more = np.ones((count, count), dtype=bool)  # [b, a]: b uses no more than a
    less = np.zeros((count, count), dtype=bool)
    for amounts in uses:
        no_more &= amounts[:, None] <= amounts[None, :]
        less |= amounts[:, None] < amounts[None, :]
    better = total[:, :, None] <= total[:, None, :]
    strictly = (total[:, :, None] < total[:, None, :]) | less | first
    beaten = (better & strictly & no_more & finite[:, :, None]).any(axis=1)
    rows, columns = np.nonzero(finite & ~beaten)
    return rows, columns
