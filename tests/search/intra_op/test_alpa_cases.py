"""Training graphs of multi-layer perceptrons whose optimum is published: Alpa's tests of its solver.

The cost of a collective over mesh axis d of n devices that leaves V bytes on a device is a_d + b_d f(n) V,
cut to an integer, plus a small constant by kind. Computation is free, but no two devices compute the same
part of a matmul. A layout names for each of the two dims of a tensor the mesh axis that splits it; two axes
never split the same dim or loop, as in those tests (`allow_mixed_mesh_shape` is off).

Source: alpa-projects/alpa, tests/shard_parallel/test_mlp.py and test_solver_mlp.py.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from distgraph.passes.search.solver import solve
from distgraph.passes.search.solver.problem import Problem

Layout = tuple[frozenset[int], frozenset[int]]


@dataclass(frozen=True)
class Mesh:
    shape: tuple[int, int]
    alpha: tuple[float, float] = (1.0, 1.0)
    beta: tuple[float, float] = (1.0, 1.0)
    gathers: bool = True

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(d for d in (0, 1) if self.shape[d] > 1)

    def _cost(self, d: int, part: float, size: float, extra: float) -> float:
        return int(self.alpha[d] + self.beta[d] * part * size) + extra

    def all_reduce(self, d: int, size: float) -> float:
        n = self.shape[d]
        return self._cost(d, 2 * (n - 1) / n, size, 0.01)

    def all_gather(self, d: int, size: float) -> float:
        n = self.shape[d]
        return self._cost(d, (n - 1) / n, size, 0.1) if self.gathers else math.inf

    def reduce_scatter(self, d: int, size: float) -> float:
        n = self.shape[d]
        return self._cost(d, (n - 1) / n, size, 0.001)

    def all_to_all(self, d: int, size: float) -> float:
        n = self.shape[d]
        return self._cost(d, 1.5 * (n - 1) / n**2, size, 0.001)

    def local(self, shape: tuple[int, int], layout: Layout) -> float:
        """Bytes on a device."""
        devices = math.prod(self.shape[d] for axes in layout for d in axes)
        return 4 * math.prod(shape) / devices

    def layouts(self, dims: tuple[bool, bool] = (True, True)) -> list[Layout]:
        """Every layout; of a vector, only one dim can be split."""
        found = []
        for where in itertools.product((None, 0, 1), repeat=len(self.axes)):
            split = [dim for dim in where if dim is not None]
            if all(dims[dim] for dim in split) and len(split) == len(set(split)):
                axes = [
                    frozenset(d for d, dim in zip(self.axes, where, strict=True) if dim == k) for k in (0, 1)
                ]
                found.append((axes[0], axes[1]))
        return found

    def reshard(self, shape: tuple[int, int], have: Layout, want: Layout) -> float:
        """Cost from one layout to another: axes leave by all_gather, move by all_to_all, come for nothing."""
        cost = 0.0
        for d in self.axes:
            before = next((k for k in (0, 1) if d in have[k]), None)
            after = next((k for k in (0, 1) if d in want[k]), None)
            if before is not None and after is None:
                cost += self.all_gather(d, self.local(shape, want))
            elif before is not None and before != after:
                cost += self.all_to_all(d, self.local(shape, want) * self.shape[d])
        return cost


@dataclass
class Strategy:
    cost: float
    result: Layout
    operands: list[Layout]
    batch: frozenset[int] = frozenset()


@dataclass
class Graph:
    """Collects nodes; every operand becomes an edge with the cost of getting it into the layout wanted."""

    mesh: Mesh
    force_batch: bool = False
    shapes: list[tuple[int, int]] = field(default_factory=list)
    strategies: list[list[Strategy]] = field(default_factory=list)
    edges: list[tuple[int, int]] = field(default_factory=list)
    tables: list[np.ndarray] = field(default_factory=list)

    def add(self, shape: tuple[int, int], strategies: list[Strategy], *operands: int) -> int:
        node = len(self.shapes)
        self.shapes.append(shape)
        self.strategies.append(strategies)
        for position, operand in enumerate(operands):
            table = [
                [
                    self.mesh.reshard(self.shapes[operand], have.result, want.operands[position])
                    for want in strategies
                ]
                for have in self.strategies[operand]
            ]
            self.edges.append((operand, node))
            self.tables.append(np.array(table))
        return node

    def value(self, rows: int, columns: int) -> int:
        layouts = self.mesh.layouts((rows > 1, columns > 1))
        return self.add((rows, columns), [Strategy(0.0, layout, []) for layout in layouts])

    def elementwise(self, *operands: int) -> int:
        """Same layout for all, but a vector operand is split only along its columns."""
        shape = self.shapes[operands[0]]
        strategies = []
        for layout in self.mesh.layouts((shape[0] > 1, shape[1] > 1)):
            wanted = [
                layout if self.shapes[i][0] == shape[0] else (frozenset[int](), layout[1]) for i in operands
            ]
            strategies.append(Strategy(0.0, layout, wanted))
        return self.add(shape, strategies, *operands)

    def matmul(self, left: int, right: int, flip: tuple[bool, bool] = (False, False), batch: str = "") -> int:
        """Every mesh axis splits one loop: i (rows), j (columns) or k (sum, then reduced or scattered)."""
        (m, _), (_, n) = (
            self.shapes[operand][:: -1 if f else 1] for operand, f in zip((left, right), flip, strict=True)
        )
        strategies = []
        for loops in itertools.product(("i", "j", "k", "k>0", "k>1"), repeat=len(self.mesh.axes)):
            if len({of[0] for of in loops}) < len(loops):
                continue
            split = {
                loop: frozenset(d for d, of in zip(self.mesh.axes, loops, strict=True) if of[0] == loop)
                for loop in "ijk"
            }
            if self.force_batch and batch and 0 not in split[batch]:
                continue
            result = [split["i"], split["j"]]
            cost, size = 0.0, self.mesh.local((m, n), (result[0], result[1]))
            for d, of in zip(self.mesh.axes, loops, strict=True):
                if of == "k":
                    cost += self.mesh.all_reduce(d, size)
                elif of[0] == "k":
                    cost += self.mesh.reduce_scatter(d, size)
                    result[int(of[2])] |= {d}
            if max(len(axes) for axes in result) > 1:
                continue
            a, b = (split["i"], split["k"]), (split["k"], split["j"])
            wanted = [a[::-1] if flip[0] else a, b[::-1] if flip[1] else b]
            strategies.append(Strategy(cost, (result[0], result[1]), wanted))
        return self.add((m, n), strategies, left, right)

    def column_sum(self, operand: int) -> int:
        columns = self.shapes[operand][1]
        strategies = []
        for rows in itertools.product((True, False), repeat=len(self.mesh.axes)):
            over = frozenset(d for d, r in zip(self.mesh.axes, rows, strict=True) if r)
            rest = frozenset(self.mesh.axes) - over
            size = self.mesh.local((1, columns), (frozenset(), rest))
            cost = sum(self.mesh.all_reduce(d, size) for d in over)
            strategies.append(Strategy(cost, (frozenset(), rest), [(over, rest)]))
        return self.add((1, columns), strategies, operand)

    def same_layout(self, first: int, second: int) -> None:
        self.edges.append((first, second))
        table = [
            [0.0 if a.result == b.result else math.inf for b in self.strategies[second]]
            for a in self.strategies[first]
        ]
        self.tables.append(np.array(table))

    def problem(self) -> Problem:
        costs = tuple(np.array([s.cost for s in own]) for own in self.strategies)
        return Problem("mlp", costs, tuple(self.edges), tuple(self.tables))


def mlp(
    mesh: Mesh, layers: int, batch: int, width: int, *, biases: bool = False, force: bool = False
) -> Problem:
    graph = Graph(mesh, force)
    hidden = [graph.value(batch, width)]
    weights = [graph.value(width, width) for _ in range(layers)]
    bias = [graph.value(1, width) for _ in range(layers)] if biases else []
    for k in range(layers):
        h = graph.matmul(hidden[-1], weights[k], batch="i")
        hidden.append(graph.elementwise(h, bias[k]) if biases else h)
    gradient = graph.elementwise(graph.elementwise(hidden[-1], graph.value(batch, width)))
    for k in reversed(range(layers)):
        gw = graph.matmul(hidden[k], gradient, (True, False), batch="k")
        graph.same_layout(weights[k], graph.elementwise(weights[k], gw))
        if biases:
            graph.same_layout(bias[k], graph.elementwise(bias[k], graph.column_sum(gradient)))
        if k:
            gradient = graph.matmul(gradient, weights[k], (False, True), batch="i")
    return graph.problem()


def optimum(problem: Problem) -> float:
    found = solve(problem, seconds=60)
    assert found.status == "optimal"
    assert found.choice is not None
    assert problem.objective(found.choice) == pytest.approx(found.objective)
    return found.objective


ROW = [(4, 1), (1, 4)]


@pytest.mark.parametrize("shape", ROW)
@pytest.mark.parametrize(
    ("layers", "batch", "width", "expected"),
    [
        (2, 1024, 128, 196610.02),
        (2, 128, 1024, 786433.01),
        (12, 1024, 128, 1179660.12),
        (12, 128, 1024, 8650763.11),
    ],
)
def test_one_axis(shape: tuple[int, int], layers: int, batch: int, width: int, expected: float) -> None:
    assert optimum(mlp(Mesh(shape), layers, batch, width)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "shape", "expected"),
    [
        (2, (4, 8), 26872.03),
        (2, (8, 4), 58330.03),
        (2, (3, 4), 46314.03),
        (12, (4, 8), 172702.23),
        (12, (8, 4), 354900.23),
        (12, (3, 4), 290994.23),
    ],
)
def test_two_axes(layers: int, shape: tuple[int, int], expected: float) -> None:
    mesh = Mesh(shape, beta=(1.0, 0.01))
    assert optimum(mlp(mesh, layers, 1024, 128)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shape", ROW)
def test_biases_reduced_with_the_gradients(shape: tuple[int, int]) -> None:
    assert optimum(mlp(Mesh(shape), 2, 1024, 128, biases=True)) == pytest.approx(198148.04, rel=1e-6)


def test_forced_batch_without_gathers() -> None:
    problem = mlp(Mesh((4, 1), gathers=False), 2, 128, 1024, force=True)
    assert optimum(problem) == pytest.approx(12582914.02, rel=1e-6)
