"""Second phase of completion: which axis splits which dim of every value and which index of every op.

A *claim* says "axis a wants dim d of value v" (or "index i of op o"). Claims start at what the user wrote
and travel through the index rules, forward and backward. Every value and every op gives an axis to one claim
only: the least in the total order

    (class of the seed, worst class of op passed, hops, position of the seed, order inside its dim)

where the class of a seed (under the policy "data", the default) is 0 for inputs and activations, 2 for
parameters, states and gradients, and the class of an op passed is 3 for elementwise ones, 4 for
contractions, 5 for the rest. A claim only ever gets greater as it travels, so the least claims can be
settled first and for good (the argument of Dijkstra's algorithm): the result is the unique fixpoint in which
every value and op holds the least claim that reaches it, whatever order the work-list has. A user's spec
settles all axes of its value at once. A claim that comes second is kept as *lost*. Over an axis of one rank
nothing is split: such a claim travels on, for the axis of that name may be longer on another mesh, but it
loses nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.index_rule import OpLayout, Rule, representable
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import elementwise, lookup, rule_of
from distgraph.ir.sharding_spec import Origin, ShardSpec

Key = tuple[int, int, int, int, int]
_CONTRACTIONS = ("matmul", "einsum", "conv", "attention", "embedding")
_STEPS_PER_ITEM = 64
# policy -> class of a seed that is (no, a) parameter, state or gradient
_SEED_CLASS = {"data": (0, 2), "parameters": (2, 0), "nearest": (0, 0)}
POLICIES = tuple(_SEED_CLASS)


@dataclass(frozen=True, slots=True)
class Claim:
    """An axis that wants a dim of a value or an index of an op.

    Attributes:
        key: place in the total order.
        axis: mesh axis.
        order: position of the axis among those that split the same dim at the seed (major first).
        origin: the user annotation it started from.
    """

    key: Key
    axis: str
    order: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Lost:
    """A claim that found its axis taken.

    Attributes:
        op: name of the op where it was lost.
        source: file:line of the op.
        index: index of the op's rule that it wanted ("" on a value).
        value: value on whose dim it arrived.
        axis: the axis.
        claimed, held: origins of the claim that lost and of the one that holds the axis.
        reason: "taken", "whole" (the op needs the dim whole) or "small" (fewer positions than parts).
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
class Settled:
    """What the propagation found.

    Attributes:
        values: value name -> axis -> (dim or None, order, origin).
        ops: op name -> axis -> (index, order, origin).
        lost: claims that were dropped.
        split_whole: names of ops whose whole index arrived split and that could be decomposed.
    """

    values: dict[str, dict[str, tuple[int | None, int, Origin]]] = field(default_factory=dict)
    ops: dict[str, dict[str, tuple[str, int, Origin]]] = field(default_factory=dict)
    lost: dict[tuple[str, str, str], Lost] = field(default_factory=dict)
    split_whole: dict[str, None] = field(default_factory=dict)


class _Propagation:
    """Work-list over one graph: a heap of claims on values; an op settles as soon as a claim reaches it."""

    def __init__(self, graph: Graph, meshes: Mapping[str, ProcessMesh], policy: str) -> None:
        self.graph = graph
        self.policy = policy
        self.mesh_of = {v.name: meshes[op.name] for op in graph.ops for v in op.results}
        self.op_mesh = meshes
        self.rules: dict[str, Rule] = {op.name: rule_of(op) for op in graph.ops}
        self.hop = {op.name: _class_of(op) for op in graph.ops}
        self.touching: dict[str, list[tuple[Op, bool, int]]] = {name: [] for name in graph.values}
        for op in graph.ops:
            if op.kind in SOURCES or op.kind == "reshard":
                continue  # nothing to infer, or a border that the user drew
            for is_result, values in ((False, op.operands), (True, op.results)):
                for i, value in enumerate(values):
                    self.touching[value.name].append((op, is_result, i))
        self.result = Settled({name: {} for name in graph.values}, {op.name: {} for op in graph.ops})
        self.heap: list[tuple[Key, str, str, int, int, Claim]] = []

    def run(self) -> Settled:
        """Settle claims in order until none is left. Raises ShardingError if that does not end (our bug)."""
        self.seed()
        limit = _STEPS_PER_ITEM * (len(self.graph.values) + len(self.graph.ops)) + 1024
        steps = 0
        while self.heap:
            _, _, name, dim, _, claim = heapq.heappop(self.heap)
            if claim.key[2] == 0:
                self.offer(claim, name, dim)
            else:
                self.settle_value(claim, name, dim)
            steps += 1
            if steps > limit:
                raise ShardingError(
                    f"completion of @{self.graph.name} does not end after {limit} steps; last change: axis "
                    f"{claim.axis} on dim {dim} of %{name}, claimed by {claim.origin}"
                )
        return self.result

    def seed(self) -> None:
        position = {name: i for i, name in enumerate(self.graph.values)}
        for name, attr in self.graph.attrs.items():
            settled = self.result.values[name]
            for axis in attr.mesh.axes:
                settled[axis] = (None, 0, attr.origin)
            producer = self.graph.producers[name]
            weight = producer.kind in ("param", "state") or producer.role in ("backward", "optimize")
            kind = _SEED_CLASS[self.policy][bool(weight)]
            for dim, axes in enumerate(attr.spec.dims):
                for order, axis in enumerate(axes):
                    settled[axis] = (dim, order, attr.origin)
                    self.push(Claim((kind, 0, 0, position[name], order), axis, order, attr.origin), name, dim)

    def push(self, claim: Claim, name: str, dim: int) -> None:
        # equal keys are told apart by axis, name and dim, never by the order of insertion
        heapq.heappush(self.heap, (claim.key, claim.axis, name, dim, len(self.heap), claim))

    def settle_value(self, claim: Claim, name: str, dim: int) -> None:
        settled, axis = self.result.values[name], claim.axis
        if axis in settled:
            if settled[axis][0] != dim:
                self.lose(claim, self.graph.producers[name], "", name, settled[axis][2], "taken")
            return
        settled[axis] = (dim, claim.order, claim.origin)
        self.offer(claim, name, dim)

    def offer(self, claim: Claim, name: str, dim: int) -> None:
        """A settled dim claims the index it stands for in every op that touches the value."""
        for op, is_result, position in self.touching[name]:
            if claim.axis not in self.op_mesh[op.name].sizes:
                continue
            rule = self.rules[op.name]
            term = (rule.results if is_result else rule.operands)[position][dim]
            if term:
                self.settle_op(claim, op, rule, term, name)

    def settle_op(self, claim: Claim, op: Op, rule: Rule, term: tuple[str, ...], via: str) -> None:
        settled, axis = self.result.ops[op.name], claim.axis
        if axis in settled:
            if settled[axis][0] not in term:
                self.lose(claim, op, term[0], via, settled[axis][2], "taken")
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
        settled[axis] = (index, claim.order, claim.origin)
        layout = op_layout(self.op_mesh[op.name], settled)
        if index in rule.composite and not representable(rule, layout):
            del settled[axis]
            self.lose(claim, op, index, via, claim.origin, "small")
            return
        self.spread(claim, op, rule, index)

    def spread(self, claim: Claim, op: Op, rule: Rule, index: str) -> None:
        """An index that got an axis passes the claim on to every dim that carries it."""
        seed, worst, hops, position, order = claim.key
        key = (seed, max(worst, self.hop[op.name]), hops + 1, position, order)
        for is_result, tensor, dim in rule.dims_of(index):
            name = (op.results if is_result else op.operands)[tensor].name
            if claim.axis not in self.mesh_of[name].sizes:
                continue
            term = (rule.results if is_result else rule.operands)[tensor][dim]
            place = claim.order if len(term) == 1 else claim.order + 16 * term.index(index)
            held = self.result.values[name].get(claim.axis)
            if held is None or held[0] != dim:
                self.push(Claim(key, claim.axis, place, claim.origin), name, dim)

    def index_with_room(self, op: Op, rule: Rule, term: tuple[str, ...], axis: str) -> str | None:
        """The index of a composite dim that a further axis splits: the major one until it is used up."""
        mesh, settled = self.op_mesh[op.name], self.result.ops[op.name]
        for index in term:
            parts, even = 1, True
            for other, (held, _, _) in settled.items():
                if held == index:
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


def propagate(graph: Graph, meshes: Mapping[str, ProcessMesh], policy: str = "data") -> Settled:
    """Settle every axis on every value and op.

    Args:
        graph: annotated graph.
        meshes: op name -> mesh (see `place`).
        policy: which seeds win: "data" (inputs and activations), "parameters", or "nearest" (no class of
        seeds).

    Raises:
        ShardingError: an annotation does not fit its value.
    """
    for name, attr in graph.attrs.items():
        attr.spec.check(graph.values[name].shape, attr.mesh, f"%{name} ({attr.origin})")
    return _Propagation(graph, meshes, policy).run()


def op_layout(mesh: ProcessMesh, settled: Mapping[str, tuple[str, int, Origin]]) -> OpLayout:
    """Layout of an op from its settled axes; axes on one index stand in the order of their seed, then of the
    mesh."""
    by_index: dict[str, list[tuple[int, int, str]]] = {}
    for axis, (index, order, _) in settled.items():
        if mesh.axis_size(axis) > 1:
            by_index.setdefault(index, []).append((order, mesh.axes.index(axis), axis))
    return OpLayout(
        mesh, tuple((index, tuple(a for _, _, a in sorted(by_index[index]))) for index in sorted(by_index))
    )


def value_spec(
    ndim: int, mesh: ProcessMesh, settled: Mapping[str, tuple[int | None, int, Origin]]
) -> ShardSpec:
    """Spec of a value from its settled axes."""
    dims: list[list[tuple[int, int, str]]] = [[] for _ in range(ndim)]
    for axis, (dim, order, _) in settled.items():
        if dim is not None and mesh.axis_size(axis) > 1:
            dims[dim].append((order, mesh.axes.index(axis), axis))
    return ShardSpec(tuple(tuple(a for _, _, a in sorted(dim)) for dim in dims))


def _class_of(op: Op) -> int:
    if op.kind.removesuffix("_grad") in _CONTRACTIONS:
        return 4
    return 3 if lookup(op.kind).rule is elementwise else 5
