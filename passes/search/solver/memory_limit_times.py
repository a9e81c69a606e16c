"""Which times of the memory limit matter: what no choice can avoid is taken off the limit, then times that
can never be reached or that another time implies are dropped.

For every use, u(s) = min u + (u(s) - min u): the first part leaves less room, the second may be zero. A time
whose uses fit together at their largest binds nothing. A time t is implied by t' where
sum_i max_s (use of i at t - use of i at t') <= room(t) - room(t'). Both are exact; costs are not looked at.
"""

from __future__ import annotations

import numpy as np

from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.solver.problem import Use
from distgraph.passes.search.solver.reduced_problem import Network, Numbers

__all__ = ["tighten"]

_ROUNDING = 1e-12


def tighten(network: Network) -> set[int]:
    """Reduce the times and uses of a network; where a time has no room left, leaves that time alone and marks
    the network dead.

    Returns:
        The nodes of which a strategy was forbidden (its cost is inf now) or uses were dropped.
    """
    if not len(network.times):
        return set()
    slack = _ROUNDING * float(np.abs(network.room).max())
    varying = {i: len(uses) for i, uses in network.uses.items() if uses}
    for uses in network.uses.values():
        _split_fixed(uses, network.room)
    if (network.room < -slack).any():
        worst = int(np.argmin(network.room))
        network.times, network.room, network.dead = network.times[[worst]], network.room[[worst]], True
        return set()
    changed = {i for i in varying if _forbid(network, i, slack)}
    _keep_times(network, _binding(network, slack))
    return changed | {i for i, count in varying.items() if len(network.uses[i]) < count}


def _split_fixed(uses: list[Use], room: Floats) -> None:
    """Leave of every use what varies, and take the rest off the room."""
    varying = []
    for use in uses:
        least = float(use.amounts.min())
        if least:
            room[use.start : use.stop] -= least
            use = Use(use.start, use.stop, use.amounts - least)
        if use.amounts.any():
            varying.append(use)
    uses[:] = varying


def _forbid(network: Network, node: int, slack: float) -> bool:
    """Forbid the strategies of a node of which one use alone exceeds the room."""
    cost = network.costs[node]
    too_much = np.zeros(len(cost), dtype=bool)
    for use in network.uses[node]:
        too_much |= use.amounts > float(network.room[use.start : use.stop].min()) + slack
    too_much &= np.isfinite(cost)
    if not too_much.any():
        return False
    network.costs[node] = np.where(too_much, np.inf, cost)
    return True


def _binding(network: Network, slack: float) -> Numbers:
    """Positions of the times that can be exceeded, and that no kept time before or behind them implies."""
    count = len(network.times)
    steps = np.zeros(count + 1)
    begins: list[list[tuple[int, Use]]] = [[] for _ in range(count + 1)]
    ends: list[list[tuple[int, Use]]] = [[] for _ in range(count + 1)]
    for node, uses in network.uses.items():
        for use in uses:
            largest = float(use.amounts.max())
            steps[use.start] += largest
            steps[use.stop] -= largest
            begins[use.start].append((node, use))
            ends[use.stop].append((node, use))
    reachable = np.cumsum(steps)[:-1] > network.room + slack
    binding: list[int] = []
    change = _Change()
    for t in range(count):
        for node, use in begins[t]:
            change.add(node, use.amounts)
        for node, use in ends[t]:
            change.add(node, -use.amounts)
        if not reachable[t]:
            continue
        if binding:
            more = float(network.room[t] - network.room[binding[-1]])
            if change.most <= more:
                continue
            if change.least >= more:
                binding.pop()
        binding.append(t)
        change = _Change()
    return np.array(binding, dtype=np.intp)


class _Change:
    """Bounds, over all choices, on what all nodes use at one time less what they use at another."""

    def __init__(self) -> None:
        self.most = self.least = 0.0
        self._nodes: dict[int, Floats] = {}

    def add(self, node: int, amounts: Floats) -> None:
        """Let a node use more, [strategies]."""
        before = self._nodes.get(node)
        if before is not None:
            self.most -= float(before.max())
            self.least -= float(before.min())
            amounts = before + amounts
        self._nodes[node] = amounts
        self.most += float(amounts.max())
        self.least += float(amounts.min())


def _keep_times(network: Network, times: Numbers) -> None:
    """Renumber the times; uses of one node over the same times become one use."""
    network.times, network.room = network.times[times], network.room[times]
    for node, uses in network.uses.items():
        merged: dict[tuple[int, int], Floats] = {}
        for use in uses:
            span = (int(np.searchsorted(times, use.start)), int(np.searchsorted(times, use.stop)))
            if span[0] < span[1]:
                merged[span] = merged[span] + use.amounts if span in merged else use.amounts
        network.uses[node] = [Use(*span, amounts) for span, amounts in merged.items()]
