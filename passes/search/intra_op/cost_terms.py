"""The terms of the problem: what options of nodes cost and hold, what pairs of options cost.

*In:* a folded graph, its nodes, prices. *Out:* `Terms`; see `formulate` for the formulas. *Invariant:*
seconds are those of a whole step on one mesh, bytes those of one rank; members of a folded node count once
each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.dtypes import itemsize
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.passes.search.intra_op.cost_model import Prices
from distgraph.passes.search.intra_op.decision_nodes import Nodes, OpNode, ValueNode
from distgraph.passes.search.intra_op.strategies import Ints, Specs, Strategies, local_bytes, parts_of
from distgraph.passes.search.layering.layer_folding import BACKWARD, FORWARD, Fold, FoldedOp, FoldedValue
from distgraph.passes.search.layering.liveness import Lifetimes

Floats = NDArray[np.float64]
Interval = tuple[int, int, Floats]


@dataclass(frozen=True, eq=False)
class Terms:
    """The parts of the problem before they are added up.

    Attributes:
        compute: seconds of a step of every node's options: computing; zero for values.
        copying: seconds of the shared copies of values' options; zero for ops.
        fixed, held: bytes of every node's options; `held` of one micro-batch in flight.
        temporary: (start, stop, bytes of every option) of every node.
        edges: (node, node) -> seconds of changes of layout [options, options].
        fixed_copies, held_copies: some of these edges -> bytes [options, options] that stay, as `fixed` and
            `held`, because a value is read in another layout than it is stored in.
    """

    compute: tuple[Floats, ...]
    copying: tuple[Floats, ...]
    fixed: tuple[Floats, ...]
    held: tuple[Floats, ...]
    temporary: tuple[tuple[Interval, ...], ...]
    edges: dict[tuple[int, int], Floats]
    fixed_copies: dict[tuple[int, int], Floats]
    held_copies: dict[tuple[int, int], Floats]


def seconds_of(
    lifetimes: Lifetimes, prices: Prices, op: FoldedOp, strategies: Strategies, mesh: ProcessMesh
) -> Floats:
    """Seconds [options] of one member of a folded op, each time it runs."""
    result = op.results[0]
    if op.op.kind == "reshard" or lifetimes.is_view(result):
        return np.zeros(len(strategies.options))
    if op.op.kind != "accumulate":
        return prices.ops_seconds(op.op, mesh, strategies, adds=lifetimes.adds(result))
    if lifetimes.adds(op.operands[0]):
        return np.zeros(len(strategies.options))
    added = prices.streamed(op.op.result, strategies.made[0], mesh, 3)
    divided = prices.streamed(op.op.result, strategies.made[0], mesh, 2)  # once a step, by their number
    return added + divided / lifetimes.micro


def times_of(fold: Fold, op: FoldedOp) -> int:
    """How often one member of a folded op runs in a step."""
    return fold.graph.micro_batches if op.part in (FORWARD, BACKWARD) else 1


def moves_of(fold: Fold, value: FoldedValue) -> int:
    """How often one member of a folded value changes its layout in a step, if it does."""
    return fold.graph.micro_batches if value.per_micro else 1


class Assembly:
    """Builds the terms of one folded graph on one mesh."""

    def __init__(
        self, fold: Fold, nodes: Nodes, lifetimes: Lifetimes, mesh: ProcessMesh, prices: Prices
    ) -> None:
        self.fold, self.nodes, self.lifetimes, self.mesh, self.prices = fold, nodes, lifetimes, mesh, prices
        sizes = [len(n.strategies.options if isinstance(n, OpNode) else n.options) for n in nodes.all]
        self.compute, self.copying, self.fixed, self.held = (
            [np.zeros(size) for size in sizes] for _ in range(4)
        )
        self.temporary: list[list[Interval]] = [[] for _ in sizes]
        self.edges: dict[tuple[int, int], Floats] = {}
        self.fixed_copies: dict[tuple[int, int], Floats] = {}
        self.held_copies: dict[tuple[int, int], Floats] = {}

    @cached_property
    def terms(self) -> Terms:
        """All terms."""
        for number, node in enumerate(self.nodes.all):
            if isinstance(node, OpNode):
                op = self.fold.ops[node.number]
                one = seconds_of(self.lifetimes, self.prices, op, node.strategies, self.mesh)
                self.compute[number] += len(op.members) * times_of(self.fold, op) * one
            else:
                self._copies(number, node)
        for number, value in enumerate(self.fold.values):
            self._connect(number, value)
            self._hold(number, value)
        return Terms(
            tuple(self.compute),
            tuple(self.copying),
            tuple(self.fixed),
            tuple(self.held),
            tuple(tuple(intervals) for intervals in self.temporary),
            self.edges,
            self.fixed_copies,
            self.held_copies,
        )

    # seconds

    def _moves(self, value: FoldedValue, sources: Specs, targets: Specs) -> Floats:
        return self.prices.moves(value.value.shape, value.value.dtype, self.mesh, sources, targets)

    def _copies(self, number: int, node: ValueNode) -> None:
        value = self.fold.values[node.number]
        times = len(value.members) * moves_of(self.fold, value)
        for i, (spec, copy) in enumerate(node.options):
            if copy is not None:
                self.copying[number][i] = times * self._moves(value, (spec,), (copy,))[0, 0]

    def _connect(self, number: int, value: FoldedValue) -> None:
        """Edges of one value: maker, readers, and the parameter whose new value it is."""
        made = self._strategies(value.producer)
        times = moves_of(self.fold, value)
        node = self.nodes.of_value.get(number)
        if node is not None:
            self._store(node, value, made, times)
            if self.lifetimes.of[number].kind in ("held", "fixed"):
                self._keep_copies(node, value)
        elif made is not None:
            maker = self.nodes.of_op[value.producer]
            specs = made.made[value.result]
            for (reader, positions), count in value.counts.items():
                cost = times * count * self._read(value, specs, None, reader, positions)
                self._add(maker, self.nodes.of_op[reader], cost)
        if value.replaces >= 0:
            self._replace(number, value, made)

    def _store(self, node: int, value: FoldedValue, made: Strategies | None, times: int) -> None:
        found = self.nodes.all[node]
        assert isinstance(found, ValueNode)
        stored = tuple(spec for spec, _ in found.options)
        if made is not None:
            cost = times * len(value.members) * self._moves(value, made.made[value.result], stored)
            self._add(self.nodes.of_op[value.producer], node, cost)
        copies = tuple(copy for _, copy in found.options)
        for (reader, positions), count in value.counts.items():
            cost = times * count * self._read(value, stored, copies, reader, positions)
            self._add(node, self.nodes.of_op[reader], cost)

    def _keep_copies(self, node: int, value: FoldedValue) -> None:
        """Copies that reading brings about and that stay: of what is loaded once, all that the micro-batches
        read; of a forward value those that the backward part reads and the forward part may want too."""
        stored = self.nodes.all[node]
        assert isinstance(stored, ValueNode)
        specs = tuple(spec for spec, _ in stored.options)
        shared = self._wanted_forward(value) if value.per_micro else None
        for (reader, positions), count in value.counts.items():
            strategies, other = self._strategies(reader), self.nodes.of_op[reader]
            part = self.fold.ops[reader].part
            key = (node, other) if (node, other) in self.edges else (other, node)
            late = part == BACKWARD or (part == FORWARD and not value.per_micro)
            if strategies is None or not late or key not in self.edges:
                continue
            for position in positions:
                needed = strategies.needed[position]
                counted = [shared is None or spec in shared for spec in needed]
                nbytes = count * self._bytes(value, needed) * counted
                amounts = nbytes * (self._moves(value, specs, needed) > 0)
                for i, (_, copy) in enumerate(stored.options):
                    if copy is not None:
                        amounts[i, strategies.reading(position, copy)] = 0.0
                found = self.held_copies if value.per_micro else self.fixed_copies
                found[key] = found.get(key, 0.0) + (amounts if key[0] == node else amounts.T)

    def _wanted_forward(self, value: FoldedValue) -> set[ShardSpec]:
        """Layouts in which the forward part may read a value."""
        found: set[ShardSpec] = set()
        for reader, positions in value.counts:
            strategies = self._strategies(reader)
            if strategies is not None and self.fold.ops[reader].part == FORWARD:
                found.update(*(strategies.needed[position] for position in positions))
        return found

    def _read(
        self,
        value: FoldedValue,
        stored: Specs,
        copies: tuple[ShardSpec | None, ...] | None,
        reader: int,
        positions: tuple[int, ...],
    ) -> Floats:
        """Seconds [layouts, options of the reader] of reading a value: a move for each different layout."""
        strategies = self._strategies(reader)
        assert strategies is not None
        total = np.zeros((len(stored), len(strategies.options)))
        for rank, position in enumerate(positions):
            needed = strategies.needed[position]
            cost = self._moves(value, stored, needed)
            if copies is not None:
                for i, copy in enumerate(copies):
                    if copy is not None:
                        cost[i, strategies.reading(position, copy)] = 0.0
            for earlier in positions[:rank]:
                same = [a == b for a, b in zip(needed, strategies.needed[earlier], strict=True)]
                cost[:, same] = 0.0
            total += cost
        return total

    def _replace(self, number: int, value: FoldedValue, made: Strategies | None) -> None:
        """The new value of a parameter goes where the old one lies, once a step."""
        target = self.nodes.of_value.get(value.replaces)
        source = self.nodes.of_value.get(number)
        if made is None and source is None:
            return
        if source is not None:
            node = self.nodes.all[source]
            assert isinstance(node, ValueNode)
            specs, at = tuple(spec for spec, _ in node.options), source
        else:
            assert made is not None
            specs, at = made.made[value.result], self.nodes.of_op[value.producer]
        count = len(value.members)
        if target is None:
            whole = (ShardSpec.replicated(len(value.value.shape)),)
            self.copying[at] += count * self._moves(value, specs, whole)[:, 0]
            return
        found = self.nodes.all[target]
        assert isinstance(found, ValueNode)
        if at != target:
            self._add(at, target, count * self._moves(value, specs, tuple(s for s, _ in found.options)))

    def _strategies(self, op: int) -> Strategies | None:
        """Strategies of a folded op; None of a source."""
        node = self.nodes.of_op.get(op)
        if node is None:
            return None
        found = self.nodes.all[node]
        assert isinstance(found, OpNode)
        return found.strategies

    def _add(self, first: int, second: int, cost: Floats) -> None:
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

    def _hold(self, number: int, value: FoldedValue) -> None:
        lifetime = self.lifetimes.of[number]
        if lifetime.kind == "none":
            return
        at = self.nodes.of_value.get(number)
        op = self.fold.ops[value.producer]
        if at is None or op.op.kind == "accumulate":
            if value.producer not in self.nodes.of_op:
                return
            at = self.nodes.of_op[value.producer]
            strategies = self._strategies(value.producer)
            assert strategies is not None
            parts = strategies.made_parts(self.mesh, value.result)
            amounts = self._bytes(value, strategies.made[value.result], parts)
        else:
            node = self.nodes.all[at]
            assert isinstance(node, ValueNode)
            amounts = self._bytes(value, tuple(spec for spec, _ in node.options))
            copies = [(i, copy) for i, (_, copy) in enumerate(node.options) if copy is not None]
            if copies:
                where = [i for i, _ in copies]
                amounts[where] += self._bytes(value, tuple(copy for _, copy in copies))
        members = len(value.members)
        if lifetime.kind == "fixed":
            rounds = self.fold.graph.micro_batches if op.op.kind == "input" else 1
            self.fixed[at] += members * rounds * amounts
        elif lifetime.kind == "held":
            self.held[at] += members * amounts
        else:
            self.temporary[at].append((lifetime.start, lifetime.stop, amounts))

    def _bytes(self, value: FoldedValue, specs: Specs, parts: Ints | None = None) -> Floats:
        if self.mesh.weights:
            return self.prices.nbytes(value.value, specs, self.mesh)
        parts = parts_of(specs, self.mesh) if parts is None else parts
        return local_bytes(value.value.shape, itemsize(value.value.dtype), parts)
