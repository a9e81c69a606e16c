"""Decision nodes: how every op is computed, and how every value is stored that several ops share.

*In:* a `Fold` and a mesh. *Out:* a `Node` for every folded op that computes, and one for every folded value
whose storage layout is a decision of its own. *Invariant:* an option for every node determines everything
that `reshard` inserts.

An op produces a value in layout P, the value is stored in layout S, and ops read it in layouts R1, R2, ...;
`reshard` moves it P -> S once, and S -> R once for every different R. A value with one reader is therefore an
edge between two ops. A value has a node of its own if it has several readers, lives longer than its task, is
annotated or is a source. Its options are

    S           every layout in which the value is produced or read, or the annotated one
    S and C     stored in S, with one copy in C that several readers share

Copies are options only where they can lower the cost. A parameter may have a copy that is coarser than S: it
is stored in parts and gathered once for all readers, as in ZeRO-3. An annotated value may have any copy. A
value with three or more readers may have a copy that neither contains S nor is contained in it. All other
copies are dominated: if C contains S, then storing C alone costs no more than S and C together. Readers that
share a second copy are charged for each; `Formulation.profile` charges once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import AxisAttr, DistAttr, OpAxes, ShardSpec
from distgraph.passes.redistribution.source_layout import follow
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.intra_op.axis_uses import AxisUses
from distgraph.passes.search.intra_op.strategies import Specs, Strategies, strategies_of
from distgraph.passes.search.layering.layer_folding import Fold, FoldedValue
from distgraph.passes.search.layering.liveness import Lifetimes

Stored = tuple[ShardSpec, ShardSpec | None]
_MOST_OPTIONS = 64  # of a value, copies included; beyond, only parameters and annotated values have copies


@dataclass(frozen=True, eq=False)
class OpNode:
    """The decision how a folded op is computed; `number` is its index in `Fold.ops`."""

    number: int
    strategies: Strategies

    def texts(self, mesh: ProcessMesh) -> tuple[str, ...]:
        """Every option as text."""
        return tuple(map(str, self.strategies.layouts(mesh)))


@dataclass(frozen=True, eq=False)
class ValueNode:
    """The decision how a folded value is stored.

    Attributes:
        number: index of the value in `Fold.values`.
        options: (layout, layout of a shared copy or None) of every option.
    """

    number: int
    options: tuple[Stored, ...]

    def texts(self) -> tuple[str, ...]:
        """Every option as text."""
        return tuple(str(spec) if copy is None else f"{spec} and {copy}" for spec, copy in self.options)


Node = OpNode | ValueNode


@dataclass(frozen=True, eq=False)
class Nodes:
    """All nodes of a folded graph.

    Attributes:
        all: the nodes.
        of_op, of_value: index of a folded op or value -> index of its node; absent where it has none.
        pinned: index of a folded value -> its annotation on this mesh.
    """

    all: list[Node]
    of_op: dict[int, int]
    of_value: dict[int, int]
    pinned: dict[int, DistAttr]

    def strategies(self, op: int) -> Strategies:
        """The strategies of a folded op that computes."""
        node = self.all[self.of_op[op]]
        assert isinstance(node, OpNode)
        return node.strategies

    def produced(self, value: FoldedValue) -> Specs | None:
        """The layouts of a value under every option of the op that produces it; None for a source."""
        if value.producer not in self.of_op:
            return None
        return self.strategies(value.producer).result_specs[value.result]

    def options(self, value: int) -> tuple[Stored, ...]:
        """The storage options of a folded value that has a node."""
        node = self.all[self.of_value[value]]
        assert isinstance(node, ValueNode)
        return node.options

    def stored(self, value: int) -> Specs:
        """The layouts of a folded value under every storage option."""
        return tuple(spec for spec, _ in self.options(value))


def nodes_of(fold: Fold, mesh: ProcessMesh, lifetimes: Lifetimes, uses: AxisUses | None = None) -> Nodes:
    """Nodes of ops and values on a mesh.

    Args:
        fold: the graph.
        mesh: where it is laid out.
        lifetimes: of the values.
        uses: what axes may split; None for anything.

    Raises:
        ShardingError: annotations do not fit the mesh or the uses of its axes, or contradict each other.
    """
    nodes = Nodes([], {}, {}, _annotations(fold, mesh))
    if uses is not None:
        for number, annotation in nodes.pinned.items():
            uses.check_annotation(number, annotation)
    for number, op in enumerate(fold.ops):
        if op.op.kind not in SOURCES:
            nodes.of_op[number] = len(nodes.all)
            attr, axes = nodes.pinned.get(op.results[0]), fold.graph.op_axes.get(op.op.name)
            every = _strategies(op.op, mesh, attr, axes)
            nodes.all.append(OpNode(number, every if uses is None else uses.strategies(number, every)))
    for number, value in enumerate(fold.values):
        if _has_node(fold, number, value, lifetimes, nodes.pinned):
            nodes.of_value[number] = len(nodes.all)
            nodes.all.append(ValueNode(number, _options(fold, number, mesh, nodes, uses)))
    return nodes


def _strategies(op: Op, mesh: ProcessMesh, attr: DistAttr | None, given: OpAxes | None = None) -> Strategies:
    """The strategies that the op's rule allows, of an op to which the user gave axes those with them; a
    `reshard` that the user wrote has one strategy."""
    if given is not None:
        return _with_axes(op, mesh, given)
    if op.kind != "reshard" or attr is None:
        return strategies_of(op, mesh)
    spec = without_unit_axes(attr.spec, mesh)
    return Strategies(((follow(op, attr).axes, ()),), ((spec,),), ((spec,),))


def _with_axes(op: Op, mesh: ProcessMesh, given: OpAxes) -> Strategies:
    """The strategies of an op that split its indices over the given axes and pass no partial sums."""
    every, numbers = strategies_of(op, mesh), options_with_axes(op, mesh, given)
    if not numbers:
        raise ShardingError(
            f"{op} is given the axes {given} ({given.origin.where}) but cannot be split so on {mesh}: an "
            f"index is shorter than its parts, or is needed whole; give it other axes"
        )
    return every.subset(numbers)


def options_with_axes(op: Op, mesh: ProcessMesh, given: OpAxes) -> list[int]:
    """Numbers of the strategies of an op that have the axes that the user gave it; none where an index is
    shorter than its parts. Raises ShardingError if the mesh does not have an axis."""
    axes = given.on(mesh, str(op))
    options = enumerate(strategies_of(op, mesh).options)
    return [n for n, (split, partial) in options if not partial and tuple(sorted(split)) == axes]


def _annotations(fold: Fold, mesh: ProcessMesh) -> dict[int, DistAttr]:
    """Annotations by folded value. Raises ShardingError if they contradict the mesh or each other."""
    annotations: dict[int, DistAttr] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for number, value in enumerate(fold.values):
        attr = value.pinned
        if isinstance(attr, AxisAttr):
            attr = attr.on(mesh, value.value.name)
        if attr is None:
            continue
        spec = without_unit_axes(attr.spec, attr.mesh)
        for axis in spec.axes:
            size, place = attr.mesh.axis_size(axis), f"%{value.value.name} ({attr.origin.where})"
            other_size, other_place = sizes.setdefault(axis, (size, place))
            if other_size != size:
                raise ShardingError(
                    f"{place}: splits over {axis}={size} but {other_place} over {axis}={other_size}; "
                    f"annotations of ops that run on one mesh need one size of every axis"
                )
            if mesh.sizes.get(axis) != size:
                raise ShardingError(
                    f"{place}: splits over {axis}={size} but is to be laid out on {mesh}; search a mesh with "
                    f"{axis}={size} or take the annotation out"
                )
        annotations[number] = DistAttr(mesh, spec, attr.origin)
    return annotations


def _has_node(
    fold: Fold, number: int, value: FoldedValue, lifetimes: Lifetimes, pinned: dict[int, DistAttr]
) -> bool:
    """Whether the storage layout of a value is a decision of its own."""
    producer = fold.ops[value.producer]
    if producer.op.kind in SOURCES:
        return value.value.shape != ()
    if number in pinned or value.leaves or len(value.readers) > 1:
        return True
    if value.replaces >= 0:
        return bool(value.readers)
    return lifetimes.of[number].kind in ("activation", "fixed") and producer.op.kind != "accumulate"


def _options(
    fold: Fold, number: int, mesh: ProcessMesh, nodes: Nodes, uses: AxisUses | None
) -> tuple[Stored, ...]:
    """The options of a value's storage: see the module docstring."""
    value = fold.values[number]
    op, produced = fold.ops[value.producer].op, nodes.produced(value)
    readers_of: dict[ShardSpec, set[int]] = {}  # layout -> folded ops that may read the value in it
    for reader, positions in value.counts:
        specs = nodes.strategies(reader).operand_specs
        for spec in dict.fromkeys(spec for position in positions for spec in specs[position]):
            readers_of.setdefault(spec, set()).add(reader)
    if number in nodes.pinned:
        single = [nodes.pinned[number].spec]
    elif produced is None:
        single = list(strategies_of(op, mesh).result_specs[0])
        if op.kind == "input" and uses is not None:
            single = uses.inputs(tuple(single))
    else:
        never_partial = value.leaves or value.replaces >= 0
        reduced = [spec.without_partial() for spec in produced]
        single = [
            spec
            for spec in dict.fromkeys((*produced, *reduced, *readers_of))
            if not spec.partial or (spec in readers_of and not never_partial)
        ]
    shared = [spec for spec, readers in readers_of.items() if len(readers) > 1 and not spec.partial]
    copied = _with_copies(single, shared, number in nodes.pinned, op.kind == "param", len(value.readers))
    return (*((spec, None) for spec in single), *copied)


def _with_copies(
    single: list[ShardSpec], shared: list[ShardSpec], pinned: bool, parameter: bool, readers: int
) -> list[Stored]:
    """The options with a copy, by the kind of the value; `shared` are layouts that several ops may read."""
    if pinned:
        return [(spec, copy) for spec in single for copy in shared if copy != spec]
    if parameter:
        return [(spec, copy) for spec in single for copy in shared if copy != spec and contains(copy, spec)]
    if readers < 3:
        return []
    pairs: list[Stored] = [
        (spec, copy)
        for spec in single
        for copy in shared
        if not spec.partial and not contains(copy, spec) and not contains(spec, copy)
    ]
    return pairs if len(single) + len(pairs) <= _MOST_OPTIONS else []


@lru_cache(maxsize=1 << 16)
def contains(coarse: ShardSpec, fine: ShardSpec) -> bool:
    """Whether every dim of `coarse` is split over some of the axes that split it in `fine`."""
    return all(set(a) <= set(b) for a, b in zip(coarse.dims, fine.dims, strict=True))
