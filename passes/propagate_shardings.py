"""Sharding propagation, the second phase of completion: which axes split the dims of values and indices.

A *claim* states that an axis is to split a dim of a value (or an index of an op). Claims start at annotations
and propagate through the index rules, forward and backward. Every value and every op grants an axis to one
claim only, the least in the total order

    (class of the seed, worst class of op passed, hops, position of the seed, order inside its dim).

Under the policy "data", the default, the class of a seed is 0 for inputs and activations and 2 for
parameters, states and gradients. The policy "last" has the same classes, and counts positions from the end.
The class of a passed op is 3 for elementwise ops, 4 for contractions, and 5 for others. The key of a claim
only grows as the claim propagates, so the least claims can be granted first and finally (the argument of
Dijkstra's algorithm). The result is the unique fixpoint in which every value and op grants each axis to the
least claim that reaches it, whatever the order of the work list. An annotation grants all axes of its value.
A later claim is *lost* and recorded. An axis of one rank splits nothing: its claims propagate, because an
axis of that name may have more ranks on another mesh, but they are never lost.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.index_rule import OpLayout, Rule, representable
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import elementwise, lookup, rule_of
from distgraph.ir.sharding_spec import Origin, ShardSpec

Key = tuple[int, int, int, int, int]
_STEPS_PER_ITEM = 64
Policy = Literal["data", "parameters", "nearest", "last"]
# policy -> class of seeds that are (inputs or activations; parameters, states or gradients)
_SEED_CLASS = {"data": (0, 2), "parameters": (2, 0), "nearest": (0, 0), "last": (0, 2)}
POLICIES: tuple[Policy, ...] = get_args(Policy)


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of an axis to split a dim of a value or an index of an op.

    Attributes:
        key: its key in the total order.
        axis: the mesh axis.
        order: position of the axis among those that split the same dim at the seed (major first).
        origin: the annotation where it started.
    """

    key: Key
    axis: str
    order: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Lost:
    """A claim that was not granted.

    Attributes:
        op: name of the op where it was lost.
        source: file:line of the op.
        index: the index of the op's rule that it claimed ("" on a value).
        value: the value on whose dim it arrived.
        axis: the axis.
        claimed, held: origins of this claim and of the claim to which the axis is granted.
        reason: "taken" (another claim has the axis), "whole" (the op needs an unsplit dim) or "small" (the
            dim has fewer positions than parts).
    """

    op: str
    source: str
    index: str
    value: str
    axis: str
    claimed: Origin
    held: Origin
    reason: str


@dataclass(slots=True)
class Shardings:
    """The result of the propagation.

    Attributes:
        values: value name -> axis -> (dim or None, order, origin).
        ops: op name -> axis -> (index, order, origin).
        lost: claims that were not granted.
        split_whole: names of decomposable ops for which an axis claims an index that must not be split.
    """

    values: dict[str, dict[str, tuple[int | None, int, Origin]]] = field(default_factory=dict)
    ops: dict[str, dict[str, tuple[str, int, Origin]]] = field(default_factory=dict)
    lost: dict[tuple[str, str, str], Lost] = field(default_factory=dict)
    split_whole: dict[str, None] = field(default_factory=dict)


class _Propagation:
    """The propagation on one graph: a heap of claims on values; ops grant claims as soon as they arrive."""

    def __init__(self, graph: Graph, meshes: Mapping[str, ProcessMesh], policy: str) -> None:
        self.graph = graph
        self.policy = policy
        self.mesh_of = {v.name: meshes[op.name] for op in graph.ops for v in op.results}
        self.op_mesh = meshes
        self.rules: dict[str, Rule] = {op.name: rule_of(op) for op in graph.ops}
        self.op_class = {op.name: _class_of(op) for op in graph.ops}
        self.touching: dict[str, list[tuple[Op, bool, int]]] = {name: [] for name in graph.values}
        for op in graph.ops:
            if op.kind in SOURCES or op.kind == "reshard":
                continue  # sources infer nothing; a reshard of the user separates layouts
            for is_result, values in ((False, op.operands), (True, op.results)):
                for i, value in enumerate(values):
                    self.touching[value.name].append((op, is_result, i))
        self.result = Shardings({name: {} for name in graph.values}, {op.name: {} for op in graph.ops})
        self.heap: list[tuple[Key, str, str, int, int, int, Claim]] = []
        self.pushed = itertools.count()  # numbers the claims: equal ones are not compared

    def run(self) -> Shardings:
        """Grant claims in order until none is left. Raises ShardingError if this does not end (a bug)."""
        self.seed()
        limit = _STEPS_PER_ITEM * (len(self.graph.values) + len(self.graph.ops)) + 1024
        steps = 0
        while self.heap:
            _, _, name, dim, _, _, claim = heapq.heappop(self.heap)
            if claim.key[2] == 0:
                self.offer(claim, name, dim)
            else:
                self.grant_value(claim, name, dim)
            steps += 1
            if steps > limit:
                raise ShardingError(
                    f"completion of @{self.graph.name} does not end after {limit} steps; last change: axis "
                    f"{claim.axis} on dim {dim} of %{name}, claimed by {claim.origin}"
                )
        return self.result

    def seed(self) -> None:
        direction = -1 if self.policy == "last" else 1
        position = {name: direction * i for i, name in enumerate(self.graph.values)}
        for name, attr in self.graph.attrs.items():
            granted = self.result.values[name]
            for axis in attr.mesh.axes:
                granted[axis] = (None, 0, attr.origin)
            producer = self.graph.producers[name]
            weight = producer.kind in ("param", "state") or producer.role in ("backward", "optimize")
            kind = _SEED_CLASS[self.policy][bool(weight)]
            for dim, axes in enumerate(attr.spec.dims):
                for order, axis in enumerate(axes):
                    granted[axis] = (dim, order, attr.origin)
                    self.push(Claim((kind, 0, 0, position[name], order), axis, order, attr.origin), name, dim)

    def push(self, claim: Claim, name: str, dim: int) -> None:
        # claims with equal keys are ordered by axis, name, dim and order; equal claims may come in any order
        entry = (claim.key, claim.axis, name, dim, claim.order, next(self.pushed), claim)
        heapq.heappush(self.heap, entry)

    def grant_value(self, claim: Claim, name: str, dim: int) -> None:
        """Grant a claim on a dim of a value, unless the axis is granted already."""
        granted, axis = self.result.values[name], claim.axis
        if axis in granted:
            if granted[axis][0] != dim:
                self.lose(claim, self.graph.producers[name], "", name, granted[axis][2], "taken")
            return
        granted[axis] = (dim, claim.order, claim.origin)
        self.offer(claim, name, dim)

    def offer(self, claim: Claim, name: str, dim: int) -> None:
        """Propagate a granted claim on a dim to the index of the dim in every op that touches the value."""
        for op, is_result, position in self.touching[name]:
            if claim.axis not in self.op_mesh[op.name].sizes:
                continue
            rule = self.rules[op.name]
            term = (rule.results if is_result else rule.operands)[position][dim]
            if term:
                self.grant_op(claim, op, rule, term, name)

    def grant_op(self, claim: Claim, op: Op, rule: Rule, term: tuple[str, ...], via: str) -> None:
        """Grant a claim on an index of an op, unless the axis is granted or the index cannot be split."""
        granted, axis = self.result.ops[op.name], claim.axis
        if axis in granted:
            if granted[axis][0] not in term:
                self.lose(claim, op, term[0], via, granted[axis][2], "taken")
            return
        index = term[0] if len(term) == 1 else self.index_with_room(op, rule, term, axis)
        if index is None:
            self.lose(claim, op, " ".join(term), via, claim.origin, "small")
            return
        if index in rule.whole:
            if self.op_mesh[op.name].axis_size(axis) == 1:
                return
            if lookup(op.kind).decompose is not None:
                self.result.split_whole[op.name] = None
            self.lose(claim, op, index, via, claim.origin, "whole")
            return
        granted[axis] = (index, claim.order, claim.origin)
        layout = op_layout(self.op_mesh[op.name], granted)
        if (index in rule.composite or index in rule.joint) and not representable(rule, layout):
            del granted[axis]
            self.lose(claim, op, index, via, claim.origin, "small")
            return
        self.spread(claim, op, rule, index)

    def spread(self, claim: Claim, op: Op, rule: Rule, index: str) -> None:
        """Propagate a granted claim on an index to every dim that has the index."""
        seed, worst, hops, position, order = claim.key
        key = (seed, max(worst, self.op_class[op.name]), hops + 1, position, order)
        for is_result, tensor, dim in rule.dims_of(index):
            name = (op.results if is_result else op.operands)[tensor].name
            if claim.axis not in self.mesh_of[name].sizes:
                continue
            term = (rule.results if is_result else rule.operands)[tensor][dim]
            place = claim.order if len(term) == 1 else claim.order + 16 * term.index(index)
            granted = self.result.values[name].get(claim.axis)
            if granted is None or granted[0] != dim:
                self.push(Claim(key, claim.axis, place, claim.origin), name, dim)

    def index_with_room(self, op: Op, rule: Rule, term: tuple[str, ...], axis: str) -> str | None:
        """The index of a composite dim that a further axis splits: the major index until no part is left."""
        mesh, granted = self.op_mesh[op.name], self.result.ops[op.name]
        for index in term:
            parts, even = 1, True
            for other, (split, _, _) in granted.items():
                if split == index:
                    parts *= mesh.units((other,))
                    even = even and other not in mesh.weights
            if even and parts == rule.sizes[index]:
                continue
            return index if rule.sizes[index] % (parts * mesh.units((axis,))) == 0 else None
        return None

    def lose(self, claim: Claim, op: Op, index: str, value: str, held: Origin, reason: str) -> None:
        key = (op.name, index or value, claim.axis)
        if key not in self.result.lost and self.op_mesh[op.name].sizes.get(claim.axis) != 1:
            self.result.lost[key] = Lost(
                op.name, op.source, index, value, claim.axis, claim.origin, held, reason
            )


def propagate(graph: Graph, meshes: Mapping[str, ProcessMesh], policy: str = "data") -> Shardings:
    """Decide which dim of every value and which index of every op each axis splits.

    Args:
        graph: annotated graph.
        meshes: op name -> mesh (see `place`).
        policy: which seeds have precedence: "data" (inputs and activations), "parameters",
            "nearest" (none), or "last" (as "data", but of equal ones the last).

    Raises:
        ShardingError: an annotation does not fit its value.
    """
    for name, attr in graph.attrs.items():
        attr.spec.check(graph.values[name].shape, attr.mesh, f"%{name} ({attr.origin})")
    return _Propagation(graph, meshes, policy).run()


def op_layout(mesh: ProcessMesh, granted: Mapping[str, tuple[str, int, Origin]]) -> OpLayout:
    """Layout of an op from its granted axes; axes of one index are in the order of their seed, then of the
    mesh."""
    by_index: dict[str, list[tuple[int, int, str]]] = {}
    for axis, (index, order, _) in granted.items():
        if mesh.axis_size(axis) > 1:
            by_index.setdefault(index, []).append((order, mesh.axes.index(axis), axis))
    return OpLayout(
        mesh, tuple((index, tuple(a for _, _, a in sorted(by_index[index]))) for index in sorted(by_index))
    )


def value_spec(
    ndim: int, mesh: ProcessMesh, granted: Mapping[str, tuple[int | None, int, Origin]]
) -> ShardSpec:
    """Spec of a value from its granted axes."""
    dims: list[list[tuple[int, int, str]]] = [[] for _ in range(ndim)]
    for axis, (dim, order, _) in granted.items():
        if dim is not None and mesh.axis_size(axis) > 1:
            dims[dim].append((order, mesh.axes.index(axis), axis))
    return ShardSpec(tuple(tuple(a for _, _, a in sorted(dim)) for dim in dims))


def _class_of(op: Op) -> int:
    declared = lookup(op.kind)
    if declared.cost == "matmul" or declared.one_hot:
        return 4
    return 3 if declared.rule is elementwise else 5
