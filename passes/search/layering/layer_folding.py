"""Layer folding: equal layers of a train graph are deduplicated, so that each is decided once.

*In:* a serial train graph and a `Layering`. *Out:* `Fold`: ops at the same position of equal layers become
one folded op, their results become folded values, and the numbers of reads are counted. *Invariant:* the
counts add up to those of the graph. Without a layering every op is a folded op of its own.

    layer 0: %a = matmul(%x, %w)   %b = gelu(%a)        matmul x2: reads x once and b once
    layer 1: %c = matmul(%b, %v)   %d = gelu(%c)   ->   gelu x2:   reads a twice
    after:   %y = mean(%d)                              mean:      reads b once

Every op belongs to a part of the step. LOAD ops depend on no micro-batch and run once. FORWARD and BACKWARD
ops run once for each micro-batch. STEP ops follow an `accumulate` and run once a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.op_registry import lookup
from distgraph.ir.sharding_spec import AxisAttr, DistAttr
from distgraph.passes.search.layering.layer_sequence import REST, Layering

LOAD, FORWARD, BACKWARD, STEP = range(4)
Ints = NDArray[np.intp]
Reader = tuple[int, tuple[int, ...]]  # folded op, positions at which it reads the value


@dataclass(frozen=True, eq=False)
class FoldedOp:
    """Ops at one position of equal layers.

    Attributes:
        op: the representative: the last of the ops in program order.
        members: names of all ops.
        layers: layer of each op.
        part: LOAD, FORWARD, BACKWARD or STEP.
        time: position of `op` in the graph.
        operands, results: indices of folded values.
    """

    op: Op
    members: tuple[str, ...]
    layers: Ints
    part: int
    time: int
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Pattern:
    """Members of a folded value that corresponding ops read.

    Attributes:
        readers: the folded ops that read each member, in program order.
        producer_layers: layer of each member [members].
        reader_layers: layer of each reader [readers, members].
    """

    readers: tuple[Reader, ...]
    producer_layers: Ints
    reader_layers: Ints


@dataclass(frozen=True, eq=False)
class FoldedValue:
    """Results of one folded op.

    Attributes:
        value: the result of the representative `FoldedOp.op`.
        members: names of all values.
        producer, result: index of the folded op, and of the result among its results.
        per_micro: whether it is computed once for each micro-batch.
        patterns: the members grouped by their readers.
        counts: reader -> number of members that it reads.
        pinned: the user's annotation of the representative, by axes alone or on a mesh; None where there is
            none.
        leaves: whether it is an output of the graph.
        replaces: folded value (a parameter or state) whose new value it is at the end of a step; -1 if none.
    """

    value: Value
    members: tuple[str, ...]
    producer: int
    result: int
    per_micro: bool
    patterns: tuple[Pattern, ...]
    counts: dict[Reader, int]
    pinned: DistAttr | AxisAttr | None
    leaves: bool
    replaces: int

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """Indices of the folded ops that read it."""
        return tuple(dict.fromkeys(reader for reader, _ in self.counts))


@dataclass(frozen=True, eq=False)
class Fold:
    """The folded graph.

    Attributes:
        graph: the graph that was folded.
        layers: number of layers.
        ops, values: in program order of their first members.
        place: name of a value -> index of its folded value.
        parts: op name -> part of the step.
    """

    graph: Graph
    layers: int
    ops: tuple[FoldedOp, ...]
    values: tuple[FoldedValue, ...]
    place: dict[str, int] = field(repr=False)
    parts: dict[str, int] = field(repr=False)

    @cached_property
    def times(self) -> dict[str, int]:
        """Op name -> position in the graph."""
        return {op.name: time for time, op in enumerate(self.graph.ops)}

    def is_gradient(self, value: FoldedValue) -> bool:
        """Whether changes of the layout of a value synchronise a gradient, once a step.

        With one micro-batch the operand of an `accumulate` is the gradient as much as the result is.
        """
        if self.ops[value.producer].op.kind == "accumulate":
            return True
        kinds = {self.ops[reader].op.kind for reader, _ in value.counts}
        return self.graph.micro_batches == 1 and kinds == {"accumulate"}


@dataclass(slots=True)
class _Members:
    """The ops that are collected for one folded op."""

    ops: list[Op] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    time: int = 0


def fold(graph: Graph, layering: Layering | None = None) -> Fold:
    """Fold the equal layers of a graph; without a layering nothing is folded."""
    keys: dict[Hashable, int] = {}
    groups: list[_Members] = []
    folded_op: dict[str, int] = {}  # value -> folded op
    layer_of: dict[str, int] = {}
    for time, op in enumerate(graph.ops):
        key: Hashable = op.name if layering is None else layering.position.get(op.name, op.name)
        number = keys.setdefault(key, len(groups))
        if number == len(groups):
            groups.append(_Members())
        group = groups[number]
        layer = REST if layering is None else layering.of.get(op.name, REST)
        group.ops.append(op)
        group.layers.append(layer)
        group.time = time
        for value in op.results:
            folded_op[value.name], layer_of[value.name] = number, layer
    place, first = _places(groups)
    parts = parts_of_step(graph)
    reads = _reads(graph, folded_op, layer_of)
    values = _fold_values(graph, groups, place, parts, reads)
    ops = tuple(
        FoldedOp(
            group.ops[-1],
            tuple(op.name for op in group.ops),
            np.array(group.layers, dtype=np.intp),
            parts[group.ops[-1].name],
            group.time,
            tuple(place[v.name] for v in group.ops[-1].operands),
            tuple(first[number] + i for i in range(len(group.ops[-1].results))),
        )
        for number, group in enumerate(groups)
    )
    return Fold(graph, 0 if layering is None else len(layering.layers), ops, values, place, parts)


def parts_of_step(graph: Graph) -> dict[str, int]:
    """Op name -> the part of the step it runs in; an `accumulate` runs in the part of its operand."""
    micro: dict[str, int] = {}  # value -> 0 before, 1 in, 2 after the micro-batches
    parts: dict[str, int] = {}
    backward: set[str] = set()
    for op in graph.ops:
        phase = max((micro[v.name] for v in op.operands), default=0)
        if (op.kind == "input" and op.result.shape != ()) or lookup(op.kind).micro:
            phase = max(phase, 1)
        is_backward = op.role == "backward" or any(v.name in backward for v in op.operands)
        inside = phase == 1 or (op.kind == "accumulate" and phase < 2)
        parts[op.name] = (BACKWARD if is_backward else FORWARD) if inside else STEP if phase == 2 else LOAD
        phase = 2 if op.kind == "accumulate" else phase
        for value in op.results:
            micro[value.name] = phase
            if parts[op.name] == BACKWARD:
                backward.add(value.name)
    return parts


def _places(groups: list[_Members]) -> tuple[dict[str, int], list[int]]:
    """Value name -> folded value, and the first folded value of every folded op."""
    place: dict[str, int] = {}
    first = []
    count = 0
    for group in groups:
        first.append(count)
        for op in group.ops:
            for i, value in enumerate(op.results):
                place[value.name] = count + i
        count += len(group.ops[0].results)
    return place, first


def _reads(
    graph: Graph, folded_op: dict[str, int], layer_of: dict[str, int]
) -> dict[str, list[tuple[int, tuple[int, ...], int]]]:
    """Value name -> (folded op, positions, layer) of every op that reads it."""
    reads: dict[str, list[tuple[int, tuple[int, ...], int]]] = {name: [] for name in folded_op}
    for op in graph.ops:
        if not op.operands:
            continue
        first = op.results[0].name
        number, layer = folded_op[first], layer_of[first]
        names = [value.name for value in op.operands]
        for position, name in enumerate(names):
            positions: tuple[int, ...] = (position,)
            if names.count(name) > 1:
                if names.index(name) != position:
                    continue
                positions = tuple(i for i, other in enumerate(names) if other == name)
            reads[name].append((number, positions, layer))
    return reads


def _fold_values(
    graph: Graph,
    groups: list[_Members],
    place: dict[str, int],
    parts: dict[str, int],
    reads: dict[str, list[tuple[int, tuple[int, ...], int]]],
) -> tuple[FoldedValue, ...]:
    leaving = {value.name for _, value in graph.outputs}
    replaced = {new.name: place[old] for old, new in graph.updates}
    folded = []
    for number, group in enumerate(groups):
        last = group.ops[-1]
        inside = parts[last.name] in (FORWARD, BACKWARD) and last.kind != "accumulate"
        for i, value in enumerate(last.results):
            names = tuple(op.results[i].name for op in group.ops)
            patterns = _patterns(names, group.layers, reads)
            counts: Counter[Reader] = Counter()
            for pattern in patterns:
                for reader in pattern.readers:
                    counts[reader] += len(pattern.producer_layers)
            attr = graph.attrs.get(value.name)
            folded.append(
                FoldedValue(
                    value,
                    names,
                    number,
                    i,
                    inside,
                    patterns,
                    dict(counts),
                    attr if attr is not None and attr.pinned else graph.axis_attrs.get(value.name),
                    any(name in leaving for name in names),
                    next((replaced[name] for name in names if name in replaced), -1),
                )
            )
    return tuple(folded)


def _patterns(
    names: tuple[str, ...], layers: list[int], reads: dict[str, list[tuple[int, tuple[int, ...], int]]]
) -> tuple[Pattern, ...]:
    """Members grouped by the folded ops that read them, and the positions at which they do."""
    groups: dict[tuple[Reader, ...], list[tuple[int, list[int]]]] = {}
    for name, layer in zip(names, layers, strict=True):
        readers = tuple([entry[:2] for entry in reads[name]])
        groups.setdefault(readers, []).append((layer, [entry[2] for entry in reads[name]]))
    return tuple(
        Pattern(
            readers,
            np.array([layer for layer, _ in members], dtype=np.intp),
            np.array([read for _, read in members], dtype=np.intp).reshape(len(members), len(readers)).T,
        )
        for readers, members in groups.items()
    )


def is_source(op: Op) -> bool:
    """Whether an op is an input, a parameter, a state or another source."""
    return op.kind in SOURCES
