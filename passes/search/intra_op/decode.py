"""Conversion between a choice (an option for every node) and the layouts of every op and value.

*In:* a folded graph, its nodes, an option for each. *Out:* `Layouts` of the whole graph. *Invariant:* all
members of a folded op have the same layout, so that equal layers have equal layouts.
"""

from __future__ import annotations

from collections.abc import Sequence

from distgraph.errors import ShardingError
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.passes.redistribution.source_layout import follow
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.decision_nodes import Nodes, OpNode, ValueNode
from distgraph.passes.search.layering.layer_folding import Fold, FoldedValue

_ORIGIN = Origin("search", "least time of a step")


class ValueSpecs:
    """The layouts in which values are produced, stored and read under one choice."""

    def __init__(self, fold: Fold, nodes: Nodes, choice: Sequence[int]) -> None:
        self.fold, self.nodes, self.choice = fold, nodes, choice

    def produced(self, value: FoldedValue) -> ShardSpec | None:
        """The layout in which its op produces a value; None for a source."""
        produced = self.nodes.produced(value)
        return None if produced is None else produced[self.choice[self.nodes.of_op[value.producer]]]

    def read(self, op: int, position: int) -> ShardSpec:
        """The layout in which a folded op reads an operand."""
        return self.nodes.strategies(op).operand_specs[position][self.choice[self.nodes.of_op[op]]]

    def stored(self, number: int) -> ShardSpec:
        """The layout in which a folded value is stored.

        A value with one reader is stored in the layout in which it is read, so that its collective starts
        early. The new value of a parameter is stored in the layout of the parameter.
        """
        value = self.fold.values[number]
        if number in self.nodes.of_value:
            return self.nodes.options(number)[self.choice[self.nodes.of_value[number]]][0]
        if value.replaces >= 0:
            return self.stored(value.replaces)
        produced = self.produced(value)
        if produced is None:
            return ShardSpec.replicated(len(value.value.shape))
        specs = {self.read(op, position) for op, positions in value.counts for position in positions}
        return specs.pop() if len(specs) == 1 else produced


def decode_choice(fold: Fold, nodes: Nodes, mesh: ProcessMesh, choice: Sequence[int]) -> Layouts:
    """Layouts of every op and value under a choice."""
    specs = ValueSpecs(fold, nodes, choice)
    values: dict[str, DistAttr] = {}
    for number, value in enumerate(fold.values):
        attr = nodes.pinned.get(number, DistAttr(mesh, specs.stored(number), _ORIGIN))
        values.update(dict.fromkeys(value.members, attr))
    ops: dict[str, OpLayout] = {}
    for number, op in enumerate(fold.ops):
        if number not in nodes.of_op or op.op.kind == "reshard":
            layout = follow(op.op, values[op.op.name])
        else:
            layout = nodes.strategies(number).layout(mesh, choice[nodes.of_op[number]])
        ops.update(dict.fromkeys(op.members, layout))
    return Layouts(ops, values)


def encode_layouts(fold: Fold, nodes: Nodes, mesh: ProcessMesh, layouts: Layouts) -> tuple[int, ...]:
    """The choice that decodes to given layouts, in which equal layers have equal layouts.

    An option with a copy is chosen where several readers share the copy.

    Raises:
        ShardingError: the layout of an op or value is not among the options of its node.
    """
    choice = [0] * len(nodes.all)
    for number, node in enumerate(nodes.all):
        if isinstance(node, OpNode):
            op = fold.ops[node.number]
            layout = _key(layouts.ops[op.op.name])
            options = {_key(OpLayout(mesh, *option)): i for i, option in enumerate(node.strategies.options)}
            if len(options) > 1 and layout not in options:
                raise ShardingError(
                    f"{op.op}: {layouts.ops[op.op.name]} is not among its strategies on {mesh}"
                )
            choice[number] = options.get(layout, 0)
    specs = ValueSpecs(fold, nodes, choice)
    for number, node in enumerate(nodes.all):
        if isinstance(node, ValueNode):
            choice[number] = _storage_option(fold, node, specs, layouts, mesh)
    return tuple(choice)


def _key(layout: OpLayout) -> tuple[object, object]:
    """A key that is equal for equivalent layouts: axes of one rank are left out, and the order is fixed."""
    plain = layout.without_unit_axes
    return tuple(sorted(plain.axes)), tuple(sorted(plain.partial))


def _storage_option(
    fold: Fold, node: ValueNode, specs: ValueSpecs, layouts: Layouts, mesh: ProcessMesh
) -> int:
    """The option that stores a value in its layout, with the copy that most readers share, if any."""
    value = fold.values[node.number]
    spec = without_unit_axes(layouts.values[value.value.name].spec, mesh)
    read_specs = [specs.read(op, position) for op, positions in value.counts for position in positions]
    options = [i for i, (stored, _) in enumerate(node.options) if stored == spec]
    if not options:
        raise ShardingError(
            f"%{value.value.name}: {spec} is not among the layouts in which it may be stored on {mesh}"
        )

    def readers_of_copy(option: int) -> int:
        copy = node.options[option][1]
        return 0 if copy is None else read_specs.count(copy)

    best = max(options, key=lambda option: (readers_of_copy(option), -option))
    return best if readers_of_copy(best) > 1 else options[0]
