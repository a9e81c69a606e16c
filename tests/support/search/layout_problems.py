"""Problems for the solver of layouts: small random ones with their optimum, and one that needs branching."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from distgraph.passes.search.solver.problem import Problem, Use

LAST_TIME = 16
"""Uses of random problems end before it."""


def random_problem(seed: int) -> Problem:
    """2 to 7 nodes of 1 to 4 strategies; some forbidden; chains, stars, cycles; memory more or less tight."""
    random = np.random.default_rng(seed)
    nodes = int(random.integers(2, 8))
    sizes = random.integers(1, 5, size=nodes)
    forbidding = random.choice([0.0, 0.2, 0.5])

    def costs(*shape: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        numbers = random.integers(0, random.choice([3, 40]), size=shape).astype(np.float64)
        numbers[random.random(shape) < forbidding] = math.inf
        return numbers

    pairs = list(itertools.combinations(range(nodes), 2))
    chosen = random.random(len(pairs)) < random.choice([0.3, 0.6])
    edges = [
        (u, v) if random.random() < 0.5 else (v, u)
        for (u, v), take in zip(pairs, chosen, strict=True)
        if take
    ]
    edges += [edges[0]] if edges and random.random() < 0.2 else []  # a parallel edge
    tables = [costs(int(sizes[u]), int(sizes[v])) for u, v in edges]
    if edges and random.random() < 0.4:  # a follower: one permitted pair in each row
        u, v = edges[0]
        tables[0] = np.full((sizes[u], sizes[v]), math.inf)
        tables[0][np.arange(sizes[u]), random.integers(0, sizes[v], size=sizes[u])] = 1.0
    uses = []
    for size in sizes:
        own = []
        for _ in range(int(random.integers(0, 3))):
            begin = int(random.integers(0, 8))
            own.append(
                Use(begin, begin + int(random.integers(1, 6)), random.integers(0, 9, size).astype(float))
            )
        uses.append(tuple(own))
    limit = None if random.random() < 0.25 else float(random.integers(2, 25))
    node_costs = tuple(
        np.where(np.isinf(c := costs(int(k))), random.choice([1.0, math.inf]), c) for k in sizes
    )
    return Problem(f"random{seed}", node_costs, tuple(edges), tuple(tables), tuple(uses), limit)


def brute_force(problem: Problem) -> float:
    """Least cost by looking at every choice; costs and memory are summed here anew.

    Each choice is an element of an array that has a dim for every node.
    """
    sizes = [len(costs) for costs in problem.costs]

    def spread(table: np.ndarray, *nodes: int) -> np.ndarray:
        """A table of one or two nodes as an array with a dim for every node."""
        ordered = np.transpose(table, np.argsort(nodes))
        return ordered.reshape([size if i in nodes else 1 for i, size in enumerate(sizes)])

    cost = np.zeros(sizes)
    for node, costs in enumerate(problem.costs):
        cost += spread(costs, node)
    for edge, table in zip(problem.edges, problem.edge_costs, strict=True):
        cost += spread(table, *edge)
    for t in range(0 if problem.limit is None else LAST_TIME):
        used = np.zeros(sizes)
        for node, own in enumerate(problem.uses):
            for use in own:
                if use.start <= t < use.stop:
                    used += spread(use.amounts, node)
        cost[used > problem.limit] = math.inf
    return float(cost.min())


def cost_of(problem: Problem, choice: tuple[int, ...]) -> float:
    """The cost of a choice, inf for a forbidden one."""
    cost = sum(c[s] for c, s in zip(problem.costs, choice, strict=True))
    pairs = zip(problem.edges, problem.edge_costs, strict=True)
    return float(cost + sum(table[choice[u], choice[v]] for (u, v), table in pairs))


def fits(problem: Problem, choice: tuple[int, ...]) -> bool:
    """Whether a choice stays within the limit at every time."""
    used = [
        sum(
            use.amounts[s]
            for own, s in zip(problem.uses, choice, strict=True)
            for use in own
            if use.start <= t < use.stop
        )
        for t in range(LAST_TIME)
    ]
    return problem.limit is None or max(used) <= problem.limit


def hard_problem(side: int = 6) -> Problem:
    """A grid with tight memory, which neither reductions nor the first bounds decide."""
    random = np.random.default_rng(3)
    strategies = 5
    node = np.arange(side * side).reshape(side, side)
    edges = [*zip(node[:, :-1].ravel().tolist(), node[:, 1:].ravel().tolist(), strict=True)]
    edges += [*zip(node[:-1].ravel().tolist(), node[1:].ravel().tolist(), strict=True)]
    costs = tuple(random.integers(0, 50, strategies).astype(float) for _ in range(side * side))
    tables = tuple(random.integers(0, 50, (strategies, strategies)).astype(float) for _ in edges)
    uses = tuple((Use(0, 1, random.integers(0, 50, strategies).astype(float)),) for _ in costs)
    return Problem("hard", costs, tuple(edges), tables, uses, limit=600.0 * (side / 6) ** 2)
