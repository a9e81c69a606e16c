"""The cost terms of the intra-operator problem: seconds and bytes of every option and pair of options.

*In:* a folded graph, its nodes, a cost model. *Out:* `Terms`; see `formulate` for the formulas. *Invariant:*
seconds are those of a whole step on one mesh, bytes those of one rank; every member of a folded node counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distgraph.ir.dtypes import itemsize
from distgraph.ir.float_arrays import Floats
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.decision_nodes import Nodes, OpNode, ValueNode
from distgraph.passes.search.intra_op.strategies import Ints, Specs, Strategies, local_bytes, parts_of
from distgraph.passes.search.layering.layer_folding import BACKWARD, FORWARD, Fold, FoldedOp, FoldedValue
from distgraph.passes.search.layering.liveness import Lifetimes

Interval = tuple[int, int, Floats]


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of the problem before they are added up.

    Attributes:
        compute: for every node, seconds of computation in a step [options]; zero for values.
        copying: for every node, seconds of making the shared copy [options]; zero for ops.
        fixed: for every node, bytes for the whole step [options].
        activations: for every node, bytes for one micro-batch in flight [options].
        temporary: for every node, (start, stop, bytes [options]) of its temporary values.
        edges: (node, node) -> seconds of changes of layout [options, options].
        fixed_copies, activation_copies: some of these edges -> bytes [options, options] of copies that last
            as long as `fixed` and `activations`, because a value is read in another layout than its own.
    """

    compute: tuple[Floats, ...]
    copying: tuple[Floats, ...]
    fixed: tuple[Floats, ...]
    activations: tuple[Floats, ...]
    temporary: tuple[tuple[Interval, ...], ...]
    edges: dict[tuple[int, int], Floats]
    fixed_copies: dict[tuple[int, int], Floats]
    activation_copies: dict[tuple[int, int], Floats]


def seconds_of(
    lifetimes: Lifetimes, cost_model: CostModel, op: FoldedOp, strategies: Strategies, mesh: ProcessMesh
) -> Floats:
    """Seconds [options] of one run of one member of a folded op."""
    result = op.results[0]
    if op.op.kind == "reshard" or lifetimes.is_view(result):
        return np.zeros(len(strategies.options))
    if op.op.kind != "accumulate":
        return cost_model.ops_seconds(op.op, mesh, strategies, adds=lifetimes.adds(result))
    if lifetimes.adds(op.operands[0]):
        return np.zeros(len(strategies.options))
    addition = cost_model.streaming_seconds(op.op.result, strategies.result_specs[0], mesh, 3)
    division = cost_model.streaming_seconds(op.op.result, strategies.result_specs[0], mesh, 2)  # once a step
    return addition + division / lifetimes.micro


def runs_per_step(fold: Fold, op: FoldedOp) -> int:
    """How often one member of a folded op runs in a step."""
    return fold.graph.micro_batches if op.part in (FORWARD, BACKWARD) else 1


def changes_per_step(fold: Fold, value: FoldedValue) -> int:
    """How often a change of layout of one member of a folded value runs in a step."""
    return fold.graph.micro_batches if value.per_micro else 1


class TermBuilder:
    """Computes the terms of one folded graph on one mesh."""

    def __init__(
        self, fold: Fold, nodes: Nodes, lifetimes: Lifetimes, mesh: ProcessMesh, cost_model: CostModel
    ) -> None:
        self.fold, self.nodes, self.lifetimes = fold, nodes, lifetimes
        self.mesh, self.cost_model = mesh, cost_model
        sizes = [len(n.strategies.options if isinstance(n, OpNode) else n.options) for n in nodes.all]
        self.compute, self.copying, self.fixed, self.activations = (
            [np.zeros(size) for size in sizes] for _ in range(4)
        )
        self.temporary: list[list[Interval]] = [[] for _ in sizes]
        self.edges: dict[tuple[int, int], Floats] = {}
        self.fixed_copies: dict[tuple[int, int], Floats] = {}
        self.activation_copies: dict[tuple[int, int], Floats] = {}

    @cached_property
    def terms(self) -> Terms:
        """All terms."""
        for number, node in enumerate(self.nodes.all):
            if isinstance(node, OpNode):
                op = self.fold.ops[node.number]
                seconds = seconds_of(self.lifetimes, self.cost_model, op, node.strategies, self.mesh)
                self.compute[number] += len(op.members) * runs_per_step(self.fold, op) * seconds
            else:
                self._add_copying(number, node)
        for number, value in enumerate(self.fold.values):
            self._add_edges(number, value)
            self._add_bytes(number, value)
        return Terms(
            tuple(self.compute),
            tuple(self.copying),
            tuple(self.fixed),
            tuple(self.activations),
            tuple(tuple(intervals) for intervals in self.temporary),
            self.edges,
            self.fixed_copies,
            self.activation_copies,
        )

    # seconds

    def _change_seconds(self, value: FoldedValue, sources: Specs, targets: Specs) -> Floats:
        return self.cost_model.change_seconds(
            value.value.shape, value.value.dtype, self.mesh, sources, targets
        )

    def _add_copying(self, number: int, node: ValueNode) -> None:
        """Seconds of making the shared copy, for the options that have one."""
        value = self.fold.values[node.number]
        times = len(value.members) * changes_per_step(self.fold, value)
        for i, (spec, copy) in enumerate(node.options):
            if copy is not None:
                self.copying[number][i] = times * self._change_seconds(value, (spec,), (copy,))[0, 0]

    def _add_edges(self, number: int, value: FoldedValue) -> None:
        """Edges of one value: to its producer, its readers, and the parameter whose new value it is."""
        strategies = self._strategies(value.producer)
        times = changes_per_step(self.fold, value)
        node = self.nodes.of_value.get(number)
        if node is not None:
            self._add_storage_edges(node, value, strategies, times)
            if self.lifetimes.of[number].kind in ("activation", "fixed"):
                self._add_copy_bytes(node, value)
        elif strategies is not None:
            producer = self.nodes.of_op[value.producer]
            specs = strategies.result_specs[value.result]
            for (reader, positions), count in value.counts.items():
                cost = times * count * self._read_seconds(value, specs, None, reader, positions)
                self._add_edge(producer, self.nodes.of_op[reader], cost)
        if value.replaces >= 0:
            self._add_update(number, value, strategies)

    def _add_storage_edges(
        self, index: int, value: FoldedValue, strategies: Strategies | None, times: int
    ) -> None:
        """Edges between the storage node of a value and its producer and readers."""
        node = self.nodes.all[index]
        assert isinstance(node, ValueNode)
        stored = tuple(spec for spec, _ in node.options)
        if strategies is not None:
            seconds = self._change_seconds(value, strategies.result_specs[value.result], stored)
            self._add_edge(self.nodes.of_op[value.producer], index, times * len(value.members) * seconds)
        copies = tuple(copy for _, copy in node.options)
        for (reader, positions), count in value.counts.items():
            cost = times * count * self._read_seconds(value, stored, copies, reader, positions)
            self._add_edge(index, self.nodes.of_op[reader], cost)

    def _add_copy_bytes(self, node: int, value: FoldedValue) -> None:
        """Bytes of copies that are made for readers and outlive the task that makes them.

        Of a value that is loaded once these are all copies that micro-batches read. Of a forward value they
        are the copies that the backward part reads and that the forward part may read too.
        """
        stored = self.nodes.all[node]
        assert isinstance(stored, ValueNode)
        specs = tuple(spec for spec, _ in stored.options)
        shared = self._forward_read_specs(value) if value.per_micro else None
        for (reader, positions), count in value.counts.items():
            strategies, other = self._strategies(reader), self.nodes.of_op[reader]
            part = self.fold.ops[reader].part
            key = (node, other) if (node, other) in self.edges else (other, node)
            late = part == BACKWARD or (part == FORWARD and not value.per_micro)
            if strategies is None or not late or key not in self.edges:
                continue
            for position in positions:
                read_specs = strategies.operand_specs[position]
                counted = [shared is None or spec in shared for spec in read_specs]
                nbytes = count * self._bytes(value, read_specs) * counted
                amounts = nbytes * (self._change_seconds(value, specs, read_specs) > 0)
                for i, (_, copy) in enumerate(stored.options):
                    if copy is not None:
                        amounts[i, strategies.options_reading(position, copy)] = 0.0
                copies = self.activation_copies if value.per_micro else self.fixed_copies
                copies[key] = copies.get(key, 0.0) + (amounts if key[0] == node else amounts.T)

    def _forward_read_specs(self, value: FoldedValue) -> set[ShardSpec]:
        """Layouts in which the forward part may read a value."""
        specs: set[ShardSpec] = set()
        for reader, positions in value.counts:
            strategies = self._strategies(reader)
            if strategies is not None and self.fold.ops[reader].part == FORWARD:
                specs.update(*(strategies.operand_specs[position] for position in positions))
        return specs

    def _read_seconds(
        self,
        value: FoldedValue,
        stored: Specs,
        copies: tuple[ShardSpec | None, ...] | None,
        reader: int,
        positions: tuple[int, ...],
    ) -> Floats:
        """Seconds [stored layouts, options of the reader] of the changes of layout before a read.

        An op that reads a value several times in one layout pays for one change.
        """
        strategies = self._strategies(reader)
        assert strategies is not None
        total = np.zeros((len(stored), len(strategies.options)))
        for rank, position in enumerate(positions):
            read_specs = strategies.operand_specs[position]
            cost = self._change_seconds(value, stored, read_specs)
            if copies is not None:
                for i, copy in enumerate(copies):
                    if copy is not None:
                        cost[i, strategies.options_reading(position, copy)] = 0.0
            for earlier in positions[:rank]:
                same = [a == b for a, b in zip(read_specs, strategies.operand_specs[earlier], strict=True)]
                cost[:, same] = 0.0
            total += cost
        return total

    def _add_update(self, number: int, value: FoldedValue, strategies: Strategies | None) -> None:
        """Seconds of bringing the new value of a parameter to the layout of the parameter, once a step."""
        target = self.nodes.of_value.get(value.replaces)
        storage = self.nodes.of_value.get(number)
        if strategies is None and storage is None:
            return
        if storage is not None:
            node = self.nodes.all[storage]
            assert isinstance(node, ValueNode)
            specs, source = tuple(spec for spec, _ in node.options), storage
        else:
            assert strategies is not None
            specs, source = strategies.result_specs[value.result], self.nodes.of_op[value.producer]
        count = len(value.members)
        if target is None:
            whole = (ShardSpec.replicated(len(value.value.shape)),)
            self.copying[source] += count * self._change_seconds(value, specs, whole)[:, 0]
            return
        parameter = self.nodes.all[target]
        assert isinstance(parameter, ValueNode)
        if source != target:
            stored = tuple(spec for spec, _ in parameter.options)
            self._add_edge(source, target, count * self._change_seconds(value, specs, stored))

    def _strategies(self, op: int) -> Strategies | None:
        """Strategies of a folded op; None for a source."""
        index = self.nodes.of_op.get(op)
        if index is None:
            return None
        node = self.nodes.all[index]
        assert isinstance(node, OpNode)
        return node.strategies

    def _add_edge(self, first: int, second: int, cost: Floats) -> None:
        if not cost.any():
            return
        if first == second:
            self.copying[first] += np.diagonal(cost)
        elif (second, first) in self.edges:
            self.edges[second, first] = self.edges[second, first] + cost.T
        elif (first, second) in self.edges:
            self.edges[first, second] = self.edges[first, second] + cost
        else:
            self.edges[first, second] = cost

    # bytes

    def _add_bytes(self, number: int, value: FoldedValue) -> None:
        """Bytes of a value, at its storage node or else at the node of its producer."""
        lifetime = self.lifetimes.of[number]
        if lifetime.kind == "none":
            return
        index = self.nodes.of_value.get(number)
        op = self.fold.ops[value.producer]
        if index is None or op.op.kind == "accumulate":
            if value.producer not in self.nodes.of_op:
                return
            index = self.nodes.of_op[value.producer]
            strategies = self._strategies(value.producer)
            assert strategies is not None
            parts = strategies.result_parts(self.mesh, value.result)
            amounts = self._bytes(value, strategies.result_specs[value.result], parts)
        else:
            node = self.nodes.all[index]
            assert isinstance(node, ValueNode)
            amounts = self._bytes(value, tuple(spec for spec, _ in node.options))
            copies = [(i, copy) for i, (_, copy) in enumerate(node.options) if copy is not None]
            if copies:
                with_copy = [i for i, _ in copies]
                amounts[with_copy] += self._bytes(value, tuple(copy for _, copy in copies))
        members = len(value.members)
        if lifetime.kind == "fixed":
            copies_of_input = self.fold.graph.micro_batches if op.op.kind == "input" else 1
            self.fixed[index] += members * copies_of_input * amounts
        elif lifetime.kind == "activation":
            self.activations[index] += members * amounts
        else:
            self.temporary[index].append((lifetime.start, lifetime.stop, amounts))

    def _bytes(self, value: FoldedValue, specs: Specs, parts: Ints | None = None) -> Floats:
        if self.mesh.weights:
            return self.cost_model.nbytes(value.value, specs, self.mesh)
        parts = parts_of(specs, self.mesh) if parts is None else parts
        return local_bytes(value.value.shape, itemsize(value.value.dtype), parts)
