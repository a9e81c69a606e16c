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
from distgraph.ir.graph import SOURCES
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.cost_model import CostModel
from distgraph.passes.search.intra_op.decision_nodes import Nodes, OpNode, ValueNode
from distgraph.passes.search.intra_op.strategies import Ints, Specs, Strategies, local_bytes, parts_of
from distgraph.passes.search.layering.layer_folding import BACKWARD, FORWARD, Fold, FoldedOp, FoldedValue
from distgraph.passes.search.layering.liveness import Lifetimes


@dataclass(frozen=True, eq=False)
class Terms:
    """The terms of the problem before they are added up.

    Attributes:
        compute: for every node, seconds of computation in a step [options]; zero for values.
        copying: for every node, seconds of making the shared copy [options]; zero for ops.
        fixed: for every node, bytes for the whole step [options].
        activations: for every node, bytes for one micro-batch in flight [options].
        edges: (node, node) -> seconds of changes of layout [options, options].
        fixed_copies, activation_copies: some of these edges -> bytes [options, options] of copies that last
            as long as `fixed` and `activations`, because a value is read in another layout than its own.
    """

    compute: list[Floats]
    copying: list[Floats]
    fixed: list[Floats]
    activations: list[Floats]
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
        compute, copying, fixed, activations = ([np.zeros(size) for size in sizes] for _ in range(4))
        self._terms = Terms(compute, copying, fixed, activations, {}, {}, {})

    @cached_property
    def terms(self) -> Terms:
        """All terms."""
        for number, node in enumerate(self.nodes.all):
            if isinstance(node, OpNode):
                op = self.fold.ops[node.number]
                seconds = seconds_of(self.lifetimes, self.cost_model, op, node.strategies, self.mesh)
                self._terms.compute[number] += len(op.members) * runs_per_step(self.fold, op) * seconds
            else:
                self._add_copying(number, node)
        for number, value in enumerate(self.fold.values):
            self._add_edges(number, value)
            self._add_bytes(number, value)
        return self._terms

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
                self._terms.copying[number][i] = times * self._change_seconds(value, (spec,), (copy,))[0, 0]

    def _add_edges(self, number: int, value: FoldedValue) -> None:
        """Edges of one value: to its producer, its readers, and the parameter whose new value it is."""
        produced = self.nodes.produced(value)
        times = changes_per_step(self.fold, value)
        if number in self.nodes.of_value:
            self._add_storage_edges(number, value, produced, times)
            if self.lifetimes.of[number].kind in ("activation", "fixed"):
                self._add_copy_bytes(number, value)
        elif produced is not None:
            producer = self.nodes.of_op[value.producer]
            for (reader, positions), count in value.counts.items():
                cost = times * count * self._read_seconds(value, produced, None, reader, positions)
                self._add_edge(producer, self.nodes.of_op[reader], cost)
        if value.replaces >= 0:
            self._add_update(number, value, produced)
        summed = self.fold.ops[value.producer].op.kind == "accumulate"
        if summed and produced is not None and self.lifetimes.of[number].kind != "none":
            self._add_sum_copies(number, value, produced)

    def _add_storage_edges(self, number: int, value: FoldedValue, produced: Specs | None, times: int) -> None:
        """Edges between the storage node of a value and its producer and readers."""
        index, stored = self.nodes.of_value[number], self.nodes.stored(number)
        if produced is not None:
            seconds = self._change_seconds(value, produced, stored)
            self._add_edge(self.nodes.of_op[value.producer], index, times * len(value.members) * seconds)
        copies = tuple(copy for _, copy in self.nodes.options(number))
        for (reader, positions), count in value.counts.items():
            cost = times * count * self._read_seconds(value, stored, copies, reader, positions)
            self._add_edge(index, self.nodes.of_op[reader], cost)

    def _add_copy_bytes(self, number: int, value: FoldedValue) -> None:
        """Bytes of copies that are made for readers and outlive the task that makes them.

        Of a source that is loaded once these are all copies, of other values that depend on no micro-batch
        those that micro-batches read. Of a forward value they are the copies that the backward part reads and
        that the forward part may read too.
        """
        node, specs = self.nodes.of_value[number], self.nodes.stored(number)
        shared = self._forward_read_specs(value) if value.per_micro else None
        source = self.fold.ops[value.producer].op.kind in SOURCES
        copies = self._terms.activation_copies if value.per_micro else self._terms.fixed_copies
        for (reader, positions), count in value.counts.items():
            strategies, other = self.nodes.strategies(reader), self.nodes.of_op[reader]
            part = self.fold.ops[reader].part
            loaded = not value.per_micro and (part == FORWARD or source)
            if not (part == BACKWARD or loaded):
                continue
            for position in positions:
                read_specs = strategies.operand_specs[position]
                counted = [shared is None or spec in shared for spec in read_specs]
                nbytes = count * self._bytes(value, read_specs) * counted
                amounts = nbytes * (self._change_seconds(value, specs, read_specs) > 0)
                for i, (_, copy) in enumerate(self.nodes.options(number)):
                    if copy is not None:
                        amounts[i, strategies.options_reading(position, copy)] = 0.0
                amounts[:, _read_before(strategies, positions, position)] = 0.0
                self._add_copies(copies, node, other, amounts)

    def _add_sum_copies(self, number: int, value: FoldedValue, produced: Specs) -> None:
        """Bytes of the layouts, besides the one that it is summed in, of a sum over all micro-batches.

        It is copied to the layout that a storage node says, if it has one, and to those that ops read.
        """
        copies, source, specs = self._terms.fixed_copies, self.nodes.of_op[value.producer], produced
        if number in self.nodes.of_value:
            source, specs = self.nodes.of_value[number], self.nodes.stored(number)
            amounts = len(value.members) * self._copied_bytes(value, produced, specs)
            self._add_copies(copies, self.nodes.of_op[value.producer], source, amounts)
        for (reader, positions), count in value.counts.items():
            strategies, other = self.nodes.strategies(reader), self.nodes.of_op[reader]
            for position in positions:
                nbytes = count * self._copied_bytes(value, specs, strategies.operand_specs[position])
                nbytes[:, _read_before(strategies, positions, position)] = 0.0
                self._add_copies(copies, source, other, nbytes)

    def _copied_bytes(self, value: FoldedValue, sources: Specs, targets: Specs) -> Floats:
        """Bytes [sources, targets] of the target where it is a copy: slices are views, and partial values
        are reduced in place."""
        held, copied = self._bytes(value, sources)[:, None], self._bytes(value, targets)
        partial = np.array([bool(spec.partial) for spec in sources])[:, None]
        in_place = partial & (held == copied)
        return np.where(in_place | (self._change_seconds(value, sources, targets) <= 0), 0.0, copied)

    def _add_copies(
        self, copies: dict[tuple[int, int], Floats], first: int, second: int, amounts: Floats
    ) -> None:
        """Add bytes [options of the first, options of the second] of copies to those of an edge; there are
        none without an edge, because they take time."""
        if (first, second) in self._terms.edges:
            copies[first, second] = copies.get((first, second), 0.0) + amounts
        elif (second, first) in self._terms.edges:
            copies[second, first] = copies.get((second, first), 0.0) + amounts.T

    def _forward_read_specs(self, value: FoldedValue) -> set[ShardSpec]:
        """Layouts in which the forward part may read a value."""
        specs: set[ShardSpec] = set()
        for reader, positions in value.counts:
            if self.fold.ops[reader].part == FORWARD:
                operand_specs = self.nodes.strategies(reader).operand_specs
                specs.update(*(operand_specs[position] for position in positions))
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
        strategies = self.nodes.strategies(reader)
        total = np.zeros((len(stored), len(strategies.options)))
        for position in positions:
            read_specs = strategies.operand_specs[position]
            cost = self._change_seconds(value, stored, read_specs)
            if copies is not None:
                for i, copy in enumerate(copies):
                    if copy is not None:
                        cost[i, strategies.options_reading(position, copy)] = 0.0
            cost[:, _read_before(strategies, positions, position)] = 0.0
            total += cost
        return total

    def _add_update(self, number: int, value: FoldedValue, produced: Specs | None) -> None:
        """Seconds of bringing the new value of a parameter to the layout of the parameter, once a step."""
        if number in self.nodes.of_value:
            specs, source = self.nodes.stored(number), self.nodes.of_value[number]
        elif produced is not None:
            specs, source = produced, self.nodes.of_op[value.producer]
        else:
            return
        target, count = self.nodes.of_value.get(value.replaces), len(value.members)
        if target is None:
            whole = (ShardSpec.replicated(len(value.value.shape)),)
            self._terms.copying[source] += count * self._change_seconds(value, specs, whole)[:, 0]
        elif source != target:
            stored = self.nodes.stored(value.replaces)
            self._add_edge(source, target, count * self._change_seconds(value, specs, stored))

    def _add_edge(self, first: int, second: int, cost: Floats) -> None:
        edges = self._terms.edges
        if not cost.any():
            return
        if first == second:
            self._terms.copying[first] += np.diagonal(cost)
        elif (second, first) in edges:
            edges[second, first] = edges[second, first] + cost.T
        else:
            edges[first, second] = edges.get((first, second), 0.0) + cost

    # bytes

    def _add_bytes(self, number: int, value: FoldedValue) -> None:
        """Bytes of a value that outlives its task."""
        kind, members = self.lifetimes.of[number].kind, len(value.members)
        stored = self.storage_bytes(number) if kind in ("fixed", "activation") else None
        if stored is None:
            return
        index, amounts = stored
        if kind == "fixed":
            is_input = self.fold.ops[value.producer].op.kind == "input"
            self._terms.fixed[index] += members * (self.fold.graph.micro_batches if is_input else 1) * amounts
        else:
            self._terms.activations[index] += members * amounts

    def storage_bytes(self, number: int) -> tuple[int, Floats] | None:
        """The node that decides how one member of a value is stored, and its bytes [options].

        That is its storage node or else the node of its producer; None for a source without a node.
        """
        value = self.fold.values[number]
        if number not in self.nodes.of_value or self.fold.ops[value.producer].op.kind == "accumulate":
            produced = self.nodes.produced(value)
            if produced is None:
                return None
            parts = self.nodes.strategies(value.producer).result_parts(self.mesh, value.result)
            return self.nodes.of_op[value.producer], self._bytes(value, produced, parts)
        amounts = self._bytes(value, self.nodes.stored(number))
        copies = [(i, copy) for i, (_, copy) in enumerate(self.nodes.options(number)) if copy is not None]
        if copies:
            with_copy = [i for i, _ in copies]
            amounts[with_copy] += self._bytes(value, tuple(copy for _, copy in copies))
        return self.nodes.of_value[number], amounts

    def _bytes(self, value: FoldedValue, specs: Specs, parts: Ints | None = None) -> Floats:
        if self.mesh.weights:
            return self.cost_model.nbytes(value.value, specs, self.mesh)
        parts = parts_of(specs, self.mesh) if parts is None else parts
        return local_bytes(value.value.shape, itemsize(value.value.dtype), parts)


def _read_before(strategies: Strategies, positions: tuple[int, ...], position: int) -> list[bool]:
    """For each option of an op, whether it reads a value at an earlier position in the layout of this one."""
    specs = strategies.operand_specs
    earlier = positions[: positions.index(position)]
    if not earlier:
        return [False] * len(specs[position])
    return [any(specs[other][i] == spec for other in earlier) for i, spec in enumerate(specs[position])]
