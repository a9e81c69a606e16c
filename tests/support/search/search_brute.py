"""The least cost of laying a small graph out, by trying everything: what the formulation must agree with.

Nothing here comes from the formulation. Costs are tensors over the layouts of all ops at once; moves are
priced by `redistribute_cost`, one pair of layouts after the other, and a value may be stored in any layout
there is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout, choices, operand_spec, result_spec
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import linear_groups, lookup, rule_of
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.redistribution.planner import redistribute_cost
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.strategies import Strategies
from distgraph.passes.search.solver.problem import Problem

Array = Any


def layouts_of(op: Op, mesh: ProcessMesh) -> tuple[OpLayout, ...]:
    """Every layout of an op but those that sum through a contraction which makes more than it reads."""
    found = choices(rule_of(op), mesh, linear_groups(op))
    if lookup(op.kind).cost == "matmul":
        written = sum(v.nbytes for v in op.results)
        small = [
            number
            for number, group in enumerate(linear_groups(op))
            if written < sum(op.operands[i].nbytes for i in group)
        ]
        found = tuple(o for o in found if all(group in small for _, group in o.partial))
    return found


@cache
def every_spec(shape: tuple[int, ...], mesh: ProcessMesh) -> tuple[ShardSpec, ...]:
    """All layouts of a tensor without sums pending, in which no dim has more parts than positions."""
    found = []
    for places in itertools.product(range(len(shape) + 1), repeat=len(mesh.axes)):
        dims = tuple(
            tuple(a for a, p in zip(mesh.axes, places, strict=True) if p == d) for d in range(len(shape))
        )
        if all(mesh.count(d) <= n for d, n in zip(dims, shape, strict=True)):
            found.append(ShardSpec(dims))
    return tuple(found)


class Brute:
    """All op layouts of one graph on one mesh."""

    def __init__(self, graph: Graph, mesh: ProcessMesh, cost_model: CostModel) -> None:
        self.graph, self.mesh, self.cost_model = graph, mesh, cost_model
        self.ops = [op for op in graph.ops if op.kind not in SOURCES]
        self.axis = {op.name: i for i, op in enumerate(self.ops)}
        self.layouts = [layouts_of(op, mesh) for op in self.ops]
        self.times = multiplicity(graph)
        self.moved: dict[object, dict[tuple[ShardSpec, ShardSpec], float]] = {}

    @property
    def size(self) -> int:
        """Combinations of op layouts."""
        return math.prod(map(len, self.layouts))

    def least(self) -> float:
        """Least cost of a step."""
        total: Array = np.zeros([len(layouts) for layouts in self.layouts])
        for i, op in enumerate(self.ops):
            costs = np.array([self.op_cost(op, layout) for layout in self.layouts[i]])
            total = total + self._spread(costs, [i])
        for op in self.graph.ops:
            for position, value in enumerate(op.results):
                if value.shape or op.kind not in SOURCES:
                    total = total + self._value(op, position, value)
        return float(total.min())

    def op_cost(self, op: Op, layout: OpLayout) -> float:
        """Seconds in a step; views are free."""
        if self.is_view(op):
            return 0.0
        rule = rule_of(op)
        reduction, linear = lookup(op.kind).reduction, linear_groups(op)
        strategies = Strategies(
            ((layout.axes, layout.partial),),
            tuple((result_spec(rule, i, layout, reduction),) for i in range(len(op.results))),
            tuple((operand_spec(rule, i, layout, linear),) for i in range(len(op.operands))),
        )
        return self.times[op.name] * float(self.cost_model.ops_seconds(op, layout.mesh, strategies)[0])

    def is_view(self, op: Op) -> bool:
        """Whether an op only gives memory another shape; what leaves the graph has memory of its own."""
        if not lookup(op.kind).view or any(op.name == v.name for _, v in self.graph.outputs):
            return False
        return op.kind != "reshape" or self.in_order(op.operands[0])

    def in_order(self, value: Value) -> bool:
        """Whether a value's elements lie in the order of its shape."""
        op = self.graph.producers[value.name]
        if op.kind in SOURCES or not lookup(op.kind).view or op.kind == "reshape":
            return True
        return op.kind in ("identity", "stop_gradient") and self.in_order(op.operands[0])

    def move(self, value: Value, source: ShardSpec, target: ShardSpec) -> float:
        """Seconds of one change of layout."""
        return self.moves(value)(source, target)

    def moves(self, value: Value) -> Callable[[ShardSpec, ShardSpec], float]:
        """Seconds of changes of layout of one value, as a function of the two layouts."""
        seconds = self.moved.setdefault((value.shape, value.dtype), {})
        size = itemsize(value.dtype)

        def move(source: ShardSpec, target: ShardSpec) -> float:
            known = seconds.get((source, target))
            if known is None:
                known = seconds[source, target] = redistribute_cost(
                    value.shape, size, self.mesh, source, target, self.cost_model.price
                )
            return known

        return move

    def _spread(self, costs: Array, axes: Sequence[int]) -> Array:
        shape = [1] * len(self.ops)
        for axis, size in zip(axes, costs.shape, strict=True):
            shape[axis] = size
        order = np.argsort(axes)
        return costs.transpose(order).reshape(shape)

    def _value(self, op: Op, position: int, value: Value) -> Array:
        """Cost tensor over the layouts of the maker and all readers of a value."""
        users = list(self.graph.users[value.name])
        made: list[ShardSpec | None] = [None]
        axes = []
        if op.kind not in SOURCES:
            axes.append(self.axis[op.name])
            made = [
                result_spec(rule_of(op), position, o, lookup(op.kind).reduction)
                for o in self.layouts[self.axis[op.name]]
            ]
        needed: list[list[frozenset[ShardSpec]]] = []
        for user in users:
            axes.append(self.axis[user.name])
            places = [i for i, v in enumerate(user.operands) if v.name == value.name]
            needed.append(
                [
                    frozenset(operand_spec(rule_of(user), i, o, linear_groups(user)) for i in places)
                    for o in self.layouts[self.axis[user.name]]
                ]
            )
        known: dict[object, float] = {}
        shape = ([len(made)] if op.kind not in SOURCES else []) + [len(n) for n in needed]
        costs = np.zeros(shape)
        for at in np.ndindex(*shape):
            rest = at if op.kind in SOURCES else at[1:]
            first = made[0] if op.kind in SOURCES else made[at[0]]
            wanted = frozenset().union(*(n[i] for n, i in zip(needed, rest, strict=True)))
            key = (first, wanted)
            if key not in known:
                known[key] = self._store(value, first, wanted)
            costs[at] = known[key]
        return self.times[value.name] * self._spread(costs, axes) if shape else 0.0

    def _store(self, value: Value, made: ShardSpec | None, wanted: frozenset[ShardSpec]) -> float:
        leaves = any(v.name == value.name for _, v in self.graph.outputs)
        pinned = self.graph.attrs.get(value.name)
        if pinned is not None:
            candidates = [pinned.spec]
        else:
            candidates = list(every_spec(value.shape, self.mesh))
            if not leaves:
                candidates += [spec for spec in (made, *wanted) if spec is not None and spec.partial]
            if made is None:
                candidates = [c for c in candidates if not c.partial]
        move = self.moves(value)
        return min(
            (0.0 if made is None else move(made, kept)) + sum(move(kept, spec) for spec in wanted)
            for kept in candidates
        )


def eliminate(problem: Problem) -> float:
    """Least objective of a problem without a limit, one node after the other minimised away."""
    factors: list[tuple[tuple[int, ...], Array]] = [((i,), c) for i, c in enumerate(problem.costs)]
    factors += [(edge, cost) for edge, cost in zip(problem.edges, problem.edge_costs, strict=True)]
    left = set(range(len(problem.costs)))
    total = 0.0
    while left:
        node = min(left, key=lambda n: _product_size(problem, _scope(factors, n)))
        left.discard(node)
        mine = [f for f in factors if node in f[0]]
        factors = [f for f in factors if node not in f[0]]
        scope = _scope(mine, node)
        joined = reduce(np.add, (_expand(f, scope) for f in mine))
        reduced = joined.min(axis=scope.index(node))
        rest = tuple(n for n in scope if n != node)
        if rest:
            factors.append((rest, reduced))
        else:
            total += float(reduced)
    return total


def _scope(factors: Sequence[tuple[tuple[int, ...], Array]], node: int) -> tuple[int, ...]:
    return tuple(sorted({n for scope, _ in factors if node in scope for n in scope}))


def _product_size(problem: Problem, scope: Sequence[int]) -> int:
    return math.prod(len(problem.costs[n]) for n in scope)


def _expand(factor: tuple[tuple[int, ...], Array], scope: tuple[int, ...]) -> Array:
    own, array = factor
    order = sorted(range(len(own)), key=lambda i: scope.index(own[i]))
    sizes: Mapping[int, int] = {own[i]: array.shape[i] for i in range(len(own))}
    return array.transpose(order).reshape([sizes.get(n, 1) for n in scope])
