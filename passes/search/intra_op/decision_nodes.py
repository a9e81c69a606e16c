"""What is decided: how every op is computed, and how values are stored that several ops share.

*In:* a `Fold` and a mesh. *Out:* a `Node` for every folded op that computes, and one for every folded value
that is stored apart from how it is made and read. *Invariant:* under the options of all nodes together,
everything that `reshard` would do is determined.

A value is made in layout P, stored in S, and read in layouts R1, R2, ...; `reshard` moves it P -> S once, and
S -> R once for every different R. So a value that one op reads is an edge between two ops; one with several
readers, one that is kept, pinned or comes from outside has a node of its own, with

    options  S           of all layouts in which it is made or read, or those of its annotation
             S and C     stored in S, with one copy in C that several readers share

Copies are offered where they can pay: of parameters, coarser than S (stored in parts, gathered once for all
readers, as in ZeRO-3); of what is pinned, any; of what three ops or more read, those that neither contain S
nor are contained in it. All other copies are dominated: what is gained by S and C together with C containing
S, is gained by storing C. Readers that share a second copy are charged for each; `Formulation.profile`
charges once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.intra_op.strategies import Strategies, strategies_of
from distgraph.passes.search.layering.layer_folding import Fold, FoldedValue
from distgraph.passes.search.layering.liveness import Lifetimes

Stored = tuple[ShardSpec, ShardSpec | None]
_MOST_OPTIONS = 64  # of a value, copies included; beyond, only copies of parameters and pinned values


@dataclass(frozen=True, eq=False)
class OpNode:
    """How a folded op is computed."""

    number: int
    strategies: Strategies

    def texts(self, mesh: ProcessMesh) -> tuple[str, ...]:
        """Every option for people."""
        return tuple(map(str, self.strategies.layouts(mesh)))


@dataclass(frozen=True, eq=False)
class ValueNode:
    """How a folded value is stored: (layout, layout of a shared copy or None) for every option."""

    number: int
    options: tuple[Stored, ...]

    def texts(self) -> tuple[str, ...]:
        """Every option for people."""
        return tuple(str(spec) if copy is None else f"{spec} and {copy}" for spec, copy in self.options)


Node = OpNode | ValueNode


@dataclass(frozen=True, eq=False)
class Nodes:
    """All nodes of a folded graph.

    Attributes:
        all: the nodes.
        of_op, of_value: folded op or value -> its node; those without one are missing.
        pinned: folded value -> its annotation on this mesh.
    """

    all: tuple[Node, ...]
    of_op: dict[int, int]
    of_value: dict[int, int]
    pinned: dict[int, DistAttr]


def nodes_of(fold: Fold, mesh: ProcessMesh, lifetimes: Lifetimes) -> Nodes:
    """Nodes of ops and values on a mesh.

    Raises:
        ShardingError: annotations that do not fit the mesh or each other.
    """
    pinned = _pins(fold, mesh)
    found: list[Node] = []
    of_op: dict[int, int] = {}
    of_value: dict[int, int] = {}
    for number, op in enumerate(fold.ops):
        if op.op.kind not in SOURCES:
            of_op[number] = len(found)
            attr = pinned.get(op.results[0])
            found.append(OpNode(number, _strategies(op.op, mesh, attr)))
    for number, value in enumerate(fold.values):
        if _has_node(fold, number, value, lifetimes, pinned):
            of_value[number] = len(found)
            found.append(ValueNode(number, _options(fold, number, mesh, found, of_op, pinned)))
    return Nodes(tuple(found), of_op, of_value, pinned)


def _strategies(op: Op, mesh: ProcessMesh, attr: DistAttr | None) -> Strategies:
    """Those of the rule; of a change of layout that the user wrote, just that."""
    if op.kind != "reshard" or attr is None:
        return strategies_of(op, mesh)
    spec = without_unit_axes(attr.spec, mesh)
    terms = rule_of(op).results[0]
    axes = tuple(
        sorted((term[0], split) for term, split in zip(terms, spec.dims, strict=True) if split and term)
    )
    return Strategies(((axes, ()),), ((spec,),), ((spec,),))


def _pins(fold: Fold, mesh: ProcessMesh) -> dict[int, DistAttr]:
    """Annotations by folded value. Raises ShardingError where they contradict the mesh or each other."""
    found: dict[int, DistAttr] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for number, value in enumerate(fold.values):
        attr = value.pinned
        if attr is None:
            continue
        spec = without_unit_axes(attr.spec, attr.mesh)
        for axis in spec.axes:
            size, here = attr.mesh.axis_size(axis), f"%{value.value.name} ({attr.origin.where})"
            known, there = sizes.setdefault(axis, (size, here))
            if known != size:
                raise ShardingError(
                    f"{here}: splits over {axis}={size} but {there} over {axis}={known}; annotations of ops "
                    f"that run on one mesh need one size of every axis"
                )
            if mesh.sizes.get(axis) != size:
                raise ShardingError(
                    f"{here}: splits over {axis}={size} but is to be laid out on {mesh}; search a mesh with "
                    f"{axis}={size} or take the annotation out"
                )
        found[number] = DistAttr(mesh, spec, attr.origin)
    return found


def _has_node(
    fold: Fold, number: int, value: FoldedValue, lifetimes: Lifetimes, pinned: dict[int, DistAttr]
) -> bool:
    made = fold.ops[value.producer]
    if made.op.kind in SOURCES:
        return value.value.shape != ()
    if number in pinned or value.leaves or len(value.readers) > 1:
        return True
    if value.replaces >= 0:
        return bool(value.readers)
    return lifetimes.of[number].kind in ("held", "fixed") and made.op.kind != "accumulate"


def _options(
    fold: Fold,
    number: int,
    mesh: ProcessMesh,
    nodes: list[Node],
    of_op: dict[int, int],
    pinned: dict[int, DistAttr],
) -> tuple[Stored, ...]:
    value = fold.values[number]
    op = fold.ops[value.producer].op
    source = op.kind in SOURCES
    made = strategies_of(op, mesh).made[0] if source else _of(nodes, of_op, value.producer).made[value.result]
    wanted: dict[ShardSpec, set[int]] = {}
    for reader, positions in value.counts:
        strategies = _of(nodes, of_op, reader)
        for spec in dict.fromkeys(spec for position in positions for spec in strategies.needed[position]):
            wanted.setdefault(spec, set()).add(reader)
    single: list[ShardSpec]
    if number in pinned:
        single = [pinned[number].spec]
    elif source:
        single = list(made)
    else:
        final = value.leaves or value.replaces >= 0
        whole = [spec.without_partial() for spec in made]
        single = [
            spec
            for spec in dict.fromkeys((*made, *whole, *wanted))
            if not spec.partial or (spec in wanted and not final)
        ]
    several = [spec for spec, readers in wanted.items() if len(readers) > 1 and not spec.partial]
    copied = _copies(single, several, number in pinned, op.kind == "param", len(value.readers))
    return (*((spec, None) for spec in single), *copied)


def _of(nodes: list[Node], of_op: dict[int, int], op: int) -> Strategies:
    node = nodes[of_op[op]]
    assert isinstance(node, OpNode)
    return node.strategies


def _copies(
    single: list[ShardSpec], several: list[ShardSpec], pinned: bool, parameter: bool, readers: int
) -> list[Stored]:
    if pinned:
        return [(spec, copy) for spec in single for copy in several if copy != spec]
    if parameter:
        return [(spec, copy) for spec in single for copy in several if copy != spec and contains(copy, spec)]
    if readers < 3:
        return []
    found = [
        (spec, copy)
        for spec in single
        for copy in several
        if not spec.partial and not contains(copy, spec) and not contains(spec, copy)
    ]
    return list(found) if len(single) + len(found) <= _MOST_OPTIONS else []


@lru_cache(maxsize=1 << 16)
def contains(coarse: ShardSpec, fine: ShardSpec) -> bool:
    """Whether every dim of `coarse` is split over some of the axes that split it in `fine`."""
    return all(set(a) <= set(b) for a, b in zip(coarse.dims, fine.dims, strict=True))
