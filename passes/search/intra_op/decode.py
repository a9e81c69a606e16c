"""From a choice to layouts of every op and value, and back.

*In:* a folded graph, its nodes, an option for each. *Out:* `Layouts` of the whole graph. *Invariant:* members
of a folded op are computed alike, so that equal layers have equal layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.errors import ShardingError
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.complete import follow
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.decision_nodes import Nodes, OpNode, ValueNode
from distgraph.passes.search.layering.layer_folding import Fold, FoldedValue

_FOUND = Origin("search", "least time of a step")


class Reading:
    """How values lie under one choice: made, stored, read."""

    def __init__(self, fold: Fold, nodes: Nodes, choice: Sequence[int]) -> None:
        self.fold, self.nodes, self.choice = fold, nodes, choice

    def made(self, value: FoldedValue) -> ShardSpec | None:
        """Layout in which a value is made; None of what comes from outside."""
        node = self.nodes.of_op.get(value.producer)
        if node is None:
            return None
        found = self.nodes.all[node]
        assert isinstance(found, OpNode)
        return found.strategies.made[value.result][self.choice[node]]

    def needed(self, op: int, position: int) -> ShardSpec:
        """Layout in which a folded op reads an operand."""
        node = self.nodes.of_op[op]
        found = self.nodes.all[node]
        assert isinstance(found, OpNode)
        return found.strategies.needed[position][self.choice[node]]

    def stored(self, number: int) -> ShardSpec:
        """Layout in which a folded value is stored.

        One that a single op reads lies as it is read, so that what has to be sent leaves early; the new value
        of a parameter lies as the parameter.
        """
        node = self.nodes.of_value.get(number)
        value = self.fold.values[number]
        if node is not None:
            found = self.nodes.all[node]
            assert isinstance(found, ValueNode)
            return found.options[self.choice[node]][0]
        if value.replaces >= 0:
            return self.stored(value.replaces)
        made = self.made(value)
        if made is None:
            return ShardSpec.replicated(len(value.value.shape))
        needed = {self.needed(op, position) for op, positions in value.counts for position in positions}
        return needed.pop() if len(needed) == 1 else made


def decoded(fold: Fold, nodes: Nodes, mesh: ProcessMesh, choice: Sequence[int]) -> Layouts:
    """Layouts of every op and value under a choice."""
    reading = Reading(fold, nodes, choice)
    values: dict[str, DistAttr] = {}
    for number, value in enumerate(fold.values):
        attr = nodes.pinned.get(number, DistAttr(mesh, reading.stored(number), _FOUND))
        values.update(dict.fromkeys(value.members, attr))
    ops: dict[str, OpLayout] = {}
    for number, op in enumerate(fold.ops):
        node = nodes.of_op.get(number)
        if node is None or op.op.kind == "reshard":
            layout = follow(op.op, values[op.op.name])
        else:
            found = nodes.all[node]
            assert isinstance(found, OpNode)
            layout = found.strategies.layout(mesh, choice[node])
        ops.update(dict.fromkeys(op.members, layout))
    return Layouts(ops, values)


def encoded(fold: Fold, nodes: Nodes, mesh: ProcessMesh, layouts: Layouts) -> tuple[int, ...]:
    """The choice of some layouts, where equal layers lie alike; copies are made where readers share them.

    Raises:
        ShardingError: an op or value lies in no way that a node offers.
    """
    choice = [0] * len(nodes.all)
    for number, node in enumerate(nodes.all):
        if isinstance(node, OpNode):
            op = fold.ops[node.number]
            layout = _without_idle(layouts.ops[op.op.name], mesh)
            options = {_key(*option): i for i, option in enumerate(node.strategies.options)}
            if len(options) > 1 and layout not in options:
                raise ShardingError(
                    f"{op.op}: {layouts.ops[op.op.name]} is not among its strategies on {mesh}"
                )
            choice[number] = options.get(layout, 0)
    reading = Reading(fold, nodes, choice)
    for number, node in enumerate(nodes.all):
        if isinstance(node, ValueNode):
            choice[number] = _option(fold, node, reading, layouts, mesh)
    return tuple(choice)


def _key(
    axes: tuple[tuple[str, tuple[str, ...]], ...], partial: tuple[tuple[str, int], ...]
) -> tuple[object, object]:
    return tuple(sorted(axes)), tuple(sorted(partial))


def _without_idle(layout: OpLayout, mesh: ProcessMesh) -> tuple[object, object]:
    """What of a layout matters: axes of more than one rank, in one order."""
    axes = [(index, tuple(a for a in split if mesh.axis_size(a) > 1)) for index, split in layout.axes]
    partial = [(axis, group) for axis, group in layout.partial if mesh.axis_size(axis) > 1]
    return _key(tuple((index, split) for index, split in axes if split), tuple(partial))


def _option(fold: Fold, node: ValueNode, reading: Reading, layouts: Layouts, mesh: ProcessMesh) -> int:
    value = fold.values[node.number]
    spec = without_unit_axes(layouts.values[value.value.name].spec, mesh)
    readers = [reading.needed(op, position) for op, positions in value.counts for position in positions]
    found = [i for i, (stored, _) in enumerate(node.options) if stored == spec]
    if not found:
        raise ShardingError(
            f"%{value.value.name}: {spec} is not among the layouts in which it may be stored on {mesh}"
        )

    def shared(option: int) -> int:
        copy = node.options[option][1]
        return 0 if copy is None else readers.count(copy)

    best = max(found, key=lambda option: (shared(option), -option))
    return best if shared(best) > 1 else found[0]
