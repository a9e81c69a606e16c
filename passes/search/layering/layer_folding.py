"""A train graph with equal layers laid on top of each other.

*In:* a serial train graph and a `Layering`. *Out:* `Fold`: ops at the same position of equal layers are one
folded op, their results folded values, with how often each is read by whom. *Invariant:* the counts add up to
those of the graph; without a layering every op is its own.

    layer 0: %a = matmul(%x, %w)   %b = gelu(%a)        matmul x2: reads x once and b once
    layer 1: %c = matmul(%b, %v)   %d = gelu(%c)   ->   gelu x2:   reads a twice
    after:   %y = mean(%d)                              mean:      reads b once

An op belongs to a part of the step, as in `phases`: what depends on no micro-batch is loaded once, forward
and backward run once a micro-batch, what follows an `accumulate` runs once a step.
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
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.search.layering.layer_sequence import REST, Layering

LOAD, FORWARD, BACKWARD, STEP = range(4)
Ints = NDArray[np.intp]
Reader = tuple[int, tuple[int, ...]]  # folded op, positions at which it reads the value


@dataclass(frozen=True, eq=False)
class FoldedOp:
    """Ops at one position of equal layers.

    Attributes:
        op: one of them, the last in program order.
        members: names of all.
        layers: layer of each.
        part: LOAD, FORWARD, BACKWARD or STEP.
        time: position of `op` in the graph.
        operands, results: folded values.
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
    """Members of a folded value that are read alike.

    Attributes:
        readers: who reads each of them, in program order.
        made: layer of each member [members].
        read: layer of each reader [readers, members].
    """

    readers: tuple[Reader, ...]
    made: Ints
    read: Ints


@dataclass(frozen=True, eq=False)
class FoldedValue:
    """Results of one folded op.

    Attributes:
        value: that of the op in `FoldedOp.op`.
        members: names of all.
        producer, result: folded op and which of its results.
        per_micro: whether it is made once a micro-batch.
        patterns: how its members are read.
        counts: reader -> how many members are read so.
        pinned: what the user wrote for the representative; None without.
        leaves: whether it is an output of the graph.
        replaces: folded value of which it is the new value at the end of a step; -1 without.
    """

    value: Value
    members: tuple[str, ...]
    producer: int
    result: int
    per_micro: bool
    patterns: tuple[Pattern, ...]
    counts: dict[Reader, int]
    pinned: DistAttr | None
    leaves: bool
    replaces: int

    @cached_property
    def readers(self) -> tuple[int, ...]:
        """Folded ops that read it."""
        return tuple(dict.fromkeys(reader for reader, _ in self.counts))


@dataclass(frozen=True, eq=False)
class Fold:
    """The folded graph.

    Attributes:
        graph: what was folded.
        layers: number of layers.
        ops, values: in program order of their first members.
        place: name of a value -> its folded value.
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


@dataclass(slots=True)
class _Members:
    """A folded op in the making."""

    names: list[Op] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    time: int = 0


def fold(graph: Graph, layering: Layering | None = None) -> Fold:
    """Fold the equal layers of a graph; None folds nothing."""
    keys: dict[Hashable, int] = {}
    groups: list[_Members] = []
    of: dict[str, int] = {}  # value -> folded op
    layer_of: dict[str, int] = {}
    for time, op in enumerate(graph.ops):
        key: Hashable = op.name if layering is None else layering.position.get(op.name, op.name)
        number = keys.setdefault(key, len(groups))
        if number == len(groups):
            groups.append(_Members())
        group = groups[number]
        layer = REST if layering is None else layering.of.get(op.name, REST)
        group.names.append(op)
        group.layers.append(layer)
        group.time = time
        for value in op.results:
            of[value.name], layer_of[value.name] = number, layer
    place, first = _places(groups)
    parts = parts_of_step(graph)
    read = _readings(graph, of, layer_of)
    values = _fold_values(graph, groups, place, parts, read)
    ops = tuple(
        FoldedOp(
            group.names[-1],
            tuple(op.name for op in group.names),
            np.array(group.layers, dtype=np.intp),
            parts[group.names[-1].name],
            group.time,
            tuple(place[v.name] for v in group.names[-1].operands),
            tuple(first[number] + i for i in range(len(group.names[-1].results))),
        )
        for number, group in enumerate(groups)
    )
    return Fold(graph, 0 if layering is None else len(layering.layers), ops, values, place, parts)


def parts_of_step(graph: Graph) -> dict[str, int]:
    """Op name -> the part of the step it runs in; an `accumulate` runs with what it sums."""
    micro: dict[str, int] = {}  # value -> 0 before, 1 in, 2 after the micro-batches
    found: dict[str, int] = {}
    backward: set[str] = set()
    for op in graph.ops:
        phase = max((micro[v.name] for v in op.operands), default=0)
        if (op.kind == "input" and op.result.shape != ()) or lookup(op.kind).micro:
            phase = max(phase, 1)
        behind = op.role == "backward" or any(v.name in backward for v in op.operands)
        inside = phase == 1 or (op.kind == "accumulate" and phase < 2)
        found[op.name] = (BACKWARD if behind else FORWARD) if inside else STEP if phase == 2 else LOAD
        phase = 2 if op.kind == "accumulate" else phase
        for value in op.results:
            micro[value.name] = phase
            if found[op.name] == BACKWARD:
                backward.add(value.name)
    return found


def _places(groups: list[_Members]) -> tuple[dict[str, int], list[int]]:
    """Value name -> folded value, and the first folded value of every folded op."""
    place: dict[str, int] = {}
    first = []
    count = 0
    for group in groups:
        first.append(count)
        for op in group.names:
            for i, value in enumerate(op.results):
                place[value.name] = count + i
        count += len(group.names[0].results)
    return place, first


def _readings(
    graph: Graph, of: dict[str, int], layer_of: dict[str, int]
) -> dict[str, list[tuple[int, tuple[int, ...], int]]]:
    """Value name -> (folded op, positions, layer) of every op that reads it."""
    found: dict[str, list[tuple[int, tuple[int, ...], int]]] = {name: [] for name in of}
    for op in graph.ops:
        if not op.operands:
            continue
        first = op.results[0].name
        number, layer = of[first], layer_of[first]
        names = [value.name for value in op.operands]
        for position, name in enumerate(names):
            positions: tuple[int, ...] = (position,)
            if names.count(name) > 1:
                if names.index(name) != position:
                    continue
                positions = tuple(i for i, other in enumerate(names) if other == name)
            found[name].append((number, positions, layer))
    return found


def _fold_values(
    graph: Graph,
    groups: list[_Members],
    place: dict[str, int],
    parts: dict[str, int],
    read: dict[str, list[tuple[int, tuple[int, ...], int]]],
) -> tuple[FoldedValue, ...]:
    leaving = {value.name for _, value in graph.outputs}
    replaced = {new.name: place[old] for old, new in graph.updates}
    found = []
    for number, group in enumerate(groups):
        last = group.names[-1]
        inside = parts[last.name] in (FORWARD, BACKWARD) and last.kind != "accumulate"
        for i, value in enumerate(last.results):
            names = tuple(op.results[i].name for op in group.names)
            patterns = _patterns(names, group.layers, read)
            counts: Counter[Reader] = Counter()
            for pattern in patterns:
                for reader in pattern.readers:
                    counts[reader] += len(pattern.made)
            attr = graph.attrs.get(value.name)
            found.append(
                FoldedValue(
                    value,
                    names,
                    number,
                    i,
                    inside,
                    patterns,
                    dict(counts),
                    attr if attr is not None and attr.pinned else None,
                    any(name in leaving for name in names),
                    next((replaced[name] for name in names if name in replaced), -1),
                )
            )
    return tuple(found)


def _patterns(
    names: tuple[str, ...], layers: list[int], read: dict[str, list[tuple[int, tuple[int, ...], int]]]
) -> tuple[Pattern, ...]:
    alike: dict[tuple[Reader, ...], list[tuple[int, list[int]]]] = {}
    for name, layer in zip(names, layers, strict=True):
        reading = read[name]
        readers = tuple([entry[:2] for entry in reading])
        alike.setdefault(readers, []).append((layer, [entry[2] for entry in reading]))
    return tuple(
        Pattern(
            readers,
            np.array([made for made, _ in members], dtype=np.intp),
            np.array([at for _, at in members], dtype=np.intp).reshape(len(members), len(readers)).T,
        )
        for readers, members in alike.items()
    )


def is_source(op: Op) -> bool:
    """Whether an op brings data in."""
    return op.kind in SOURCES
