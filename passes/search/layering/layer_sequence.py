"""The sequence of layers of a train graph: contiguous forward ops, and the ops that belong to them.

*In:* a serial train graph. *Out:* `Layer`s that cover its forward ops in program order, and a `Layering`,
which assigns every op to a layer and finds equal layers. *Invariant:* each forward op that computes is in
exactly one layer. Equal layers have the same ops in the same order, so that a position in a class of equal
layers identifies one op in each of its layers.

The repeats of the program are layers: the sequence of ops is searched for a repeated sequence in which each
repeat reads results of the previous one (if blocks alternate, each block is a layer). Equal blocks are then
equal layers, whose costs `intra_op.formulate` computes once. The ops between the repeats are split into L
layers of about the same FLOP by the dynamic programme of Alpa (Zheng et al., OSDI 2022, section 5.2,
"operator clustering"). With ops 1..K, C(i, k) the bytes that ops i..k read of results of ops before i, and
G(k, r) the least possible maximum of C over the layers when ops 1..k form r layers,

    G(k, r) = min over i <= k of max(G(i - 1, r - 1), C(i, k)),
    where FLOP(i..k) <= (1 + delta) FLOP(1..K) / L,

and of the partitions that attain G(K, L) the most uniform one is chosen, with the least sum of squared FLOP:

    V(k, r) = min over i <= k of V(i - 1, r - 1) + FLOP(i..k)^2,  where also C(i, k) <= G(K, L).

This takes two passes, because a prefix with a larger maximum may be more uniform. If no partition satisfies
the limit (a single op may exceed it), the least limit that some partition satisfies is used. Ties prefer cuts
between modules.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distgraph.errors import GraphError
from distgraph.ir.float_arrays import Floats
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.op_registry import flops, freeze, lookup
from distgraph.passes.search.layering.layer_clustering import Read, balanced_cuts

REST = -1
"""Layer number of ops that belong to no layer: learning rate, norm of all gradients, shared constants."""

_LAYERS = 16  # at most, in a program without repeats
_DELTA = 0.5  # of the limit on the FLOP of a layer


@dataclass(frozen=True, slots=True)
class Layer:
    """Contiguous forward ops.

    Attributes:
        ops: their names in program order, without sources (parameters, inputs, ...).
    """

    ops: tuple[str, ...]


@dataclass(frozen=True)
class Layering:
    """The assignment of every op of a train graph to a layer.

    Attributes:
        layers: the layers in program order.
        of: op name -> number of its layer, or `REST`; for ops of all roles.
        classes: class of each layer, numbered by first appearance; layers of a class are equal up to names.
        position: op name -> (class, position in the layer); (`REST`, number) for ops of no layer.
    """

    layers: tuple[Layer, ...]
    of: Mapping[str, int]
    classes: tuple[int, ...]
    position: Mapping[str, tuple[int, int]]


def cluster_layers(graph: Graph, count: int | None = None) -> tuple[Layer, ...]:
    """Cluster forward ops into contiguous layers (see the module docstring).

    Where the user marked layers (`dg.pipeline_boundary` without a mesh), they are those.

    Args:
        graph: a serial graph; its forward ops, without sources, are clustered.
        count: number of layers. Fewer than the program has are runs of its layers of about the same FLOP, of
            more all ops are clustered by the dynamic programme.

    Raises:
        GraphError: there are no forward ops, fewer than `count`, or another number of layers is marked.

    Example:
        >>> from distgraph.engine.compile.train_graph import train_graph
        >>> from distgraph.models import GPT, GPTConfig
        >>> model = GPT(GPTConfig(hidden=16, layers=3, heads=2, vocabulary=40, sequence=8))
        >>> graph = train_graph(model, (((4, 8), "i32"), ((4, 8), "i32")))
        >>> [len(layer.ops) for layer in cluster_layers(graph)]
        [2, 26, 26, 26, 6]
    """
    ops = [op for op in graph.ops if op.role == "forward" and op.kind not in SOURCES]
    if not ops:
        raise GraphError(f"graph @{graph.name} has no forward ops to cluster; trace a model that computes")
    if graph.layer_starts:
        names = [op.name for op in ops]
        borders = (0, *map(names.index, graph.layer_starts), len(ops))
        if count not in (None, len(borders) - 1):
            raise GraphError(
                f"graph @{graph.name} is marked to have {len(borders) - 1} layers but {count} are given; "
                f"take dg.pipeline_boundary out, or leave the number out"
            )
    else:
        borders = (0, *_cuts(_Program.of(ops), count, graph.name), len(ops))
    return tuple(Layer(tuple(op.name for op in ops[start:stop])) for start, stop in pairwise(borders))


@dataclass(frozen=True, slots=True)
class _Program:
    """The properties of forward ops on which the cuts depend, as arrays."""

    cost: Floats
    products: npt.NDArray[np.int64]  # number of matrix products before each position
    reads: tuple[Read, ...]
    signature: npt.NDArray[np.int64]  # equal for ops of one kind, attributes and shapes
    crossing: Floats  # bytes of values that cross a cut before each op
    depth: npt.NDArray[np.int64]  # number of nested modules that contain the ops on both sides of a cut
    border: npt.NDArray[np.bool_]  # whether these ops are in different modules

    @staticmethod
    def of(ops: Sequence[Op]) -> _Program:
        """The properties of a sequence of ops."""
        position = {value.name: i for i, op in enumerate(ops) for value in op.results}
        readers: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            for name in dict.fromkeys(v.name for v in op.operands):
                if name in position:
                    readers.setdefault(name, []).append(i)
        size = {value.name: float(value.nbytes) for op in ops for value in op.results}
        reads = tuple((position[name], tuple(positions), size[name]) for name, positions in readers.items())
        crossing = np.zeros(len(ops) + 1)
        for producer, positions, nbytes in reads:
            crossing[producer + 1] += nbytes
            crossing[positions[-1] + 1] -= nbytes
        scopes = [tuple(op.scope.split(".")) if op.scope else () for op in ops]
        shared = [0] + [_shared(a, b) for a, b in pairwise(scopes)]
        numbers: dict[Hashable, int] = {}
        return _Program(
            cost=np.array([float(flops(op)) for op in ops]),
            products=np.concatenate([[0], np.cumsum([lookup(op.kind).cost == "matmul" for op in ops])]),
            reads=reads,
            signature=np.array([numbers.setdefault(_signature(op), len(numbers)) for op in ops]),
            crossing=np.cumsum(crossing)[:-1],
            depth=np.array(shared),
            border=np.array([False] + [a != b for a, b in pairwise(scopes)]),
        )

    def has_product(self, start: int, stop: int) -> bool:
        """Whether there is a matrix product between two positions."""
        return bool(self.products[stop] > self.products[start])

    def cut(self, start: int, stop: int, count: int) -> tuple[int, ...]:
        """Cuts of ops start:stop into `count` parts."""
        reads = []
        for producer, readers, nbytes in self.reads:
            inside = tuple(r - start for r in readers if start <= r < stop)
            if inside and producer >= start:
                reads.append((producer - start, inside, nbytes))
        penalty = [float(d) for d in self.depth[start:stop]]
        return tuple(c + start for c in balanced_cuts(self.cost[start:stop], reads, count, _DELTA, penalty))

    def chained(self, start: int, period: int) -> bool:
        """Whether ops of the second period read results of the first period."""
        middle = start + period
        return any(
            start <= producer < middle and any(middle <= r < middle + period for r in readers)
            for producer, readers, _ in self.reads
        )


def _shared(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    """Number of leading parts that two module paths share."""
    for depth, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return depth
    return min(len(a), len(b))


def _signature(op: Op) -> Hashable:
    """A key that is equal for repeats of an op."""
    shapes = tuple((v.shape, v.dtype) for v in (*op.operands, *op.results))
    return op.kind, len(op.operands), shapes, _attributes(op)


def _attributes(op: Op) -> Hashable:
    """Attributes on which layouts and costs depend; not the content of a source or the key of a random op."""
    if op.kind in SOURCES:
        return ()
    return tuple(sorted((k, freeze(v)) for k, v in op.attrs.items() if k != "salt"))


def _cuts(program: _Program, count: int | None, name: str) -> tuple[int, ...]:
    """Cuts at the repeats of the program, or into `count` layers."""
    size = len(program.cost)
    if count is not None and count > size:
        raise GraphError(f"graph @{name} has {size} forward ops, which make no {count} layers; take fewer")
    cuts = _cuts_at_repeats(program)
    if count is None or count == len(cuts) + 1:
        return cuts
    if count > len(cuts) + 1:
        return program.cut(0, size, count)
    work = np.cumsum([float(program.cost[a:b].sum()) for a, b in pairwise((0, *cuts, size))])
    numbers: list[int] = []  # of the layer with which each run of layers begins
    for run in range(1, count):
        nearest = int(np.abs(work - work[-1] * run / count).argmin()) + 1
        least, most = (numbers[-1] if numbers else 0) + 1, len(cuts) + 1 - (count - run)
        numbers.append(min(max(nearest, least), most))
    return tuple(cuts[number - 1] for number in numbers)


def _cuts_at_repeats(program: _Program) -> tuple[int, ...]:
    """Cuts at the repeats of the program; the ops between repeats are cut into layers of similar FLOP."""
    size = len(program.cost)
    parts = [pair for borders in _repeated_sequences(program) for pair in pairwise(borders)]
    if not parts:
        return program.cut(0, size, max(1, min(int(program.products[-1]), _LAYERS)))
    mean = float(np.mean([program.cost[a:b].sum() for a, b in parts]))
    cuts = {0, size, *(border for part in parts for border in part)}
    for start, stop in set(pairwise(sorted(cuts))) - set(parts):
        products = int(program.products[stop] - program.products[start])
        share = round(float(program.cost[start:stop].sum()) / mean) if mean else 1
        cuts.update(program.cut(start, stop, max(1, min(products, share))))
    return tuple(sorted(cuts - {0, size}))


def _repeated_sequences(program: _Program) -> list[tuple[int, ...]]:
    """Sequences of repeats, each as the borders of its layers; the longest first, then those in the gaps.

    A sequence with less FLOP than the mean layer so far is left out: it is a part of a layer.
    """
    sequences: list[tuple[int, ...]] = []
    layers: list[float] = []
    gaps = [(0, len(program.cost))]
    while gaps:
        start, stop = gaps.pop()
        borders = _longest_sequence(program, start, stop)
        if borders is None or (layers and program.cost[borders[0] : borders[-1]].sum() < np.mean(layers)):
            continue
        sequences.append(borders)
        layers += [float(program.cost[a:b].sum()) for a, b in pairwise(borders)]
        gaps += [(start, borders[0]), (borders[-1], stop)]
    return sequences


def _longest_sequence(program: _Program, start: int, stop: int) -> tuple[int, ...] | None:
    """Borders of the repeats that cover most of ops start:stop; None if nothing repeats.

    Each repeat has a matrix product and reads results of the previous one. Of sequences that cover the same
    number of ops the one with the shorter period is chosen.
    """
    best: tuple[int, int, int, int] | None = None  # ops covered, first, period, end of the repeats
    signature, size = program.signature[start:stop], stop - start
    for period in range(1, size // 2 + 1):
        if best is not None and best[0] == size:
            break
        same = np.concatenate([[False], signature[period:] == signature[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for first, last in edges.reshape(-1, 2):
            count = int(last - first) // period + 1
            covered = count * period
            begin = start + int(first)
            if count < 2 or (best is not None and covered <= best[0]):
                continue
            if program.has_product(begin, begin + period) and program.chained(begin, period):
                best = covered, begin, period, begin + int(last - first) + period
    if best is None:
        return None
    covered, first, period, last = best
    start = _phase(program, range(first, last - covered + 1), period, covered)
    return _divided(program, start, covered // period, period)


def _phase(program: _Program, starts: range, period: int, covered: int) -> int:
    """Start of the first repeat: least bytes across the borders, then borders between outermost modules."""

    def badness(start: int) -> tuple[float, int, int]:
        cuts = [c for c in range(start, start + covered + 1, period) if 0 < c < len(program.cost)]
        return (
            max((float(program.crossing[c]) for c in cuts), default=0.0),
            max((int(program.depth[c]) for c in cuts), default=0),
            start,
        )

    return min(starts, key=badness)


def _divided(program: _Program, first: int, count: int, period: int) -> tuple[int, ...]:
    """Borders of repeats that are divided into their blocks, where different blocks alternate.

    A repeat is divided between modules of the same depth as between repeats, if no more bytes cross there and
    both parts have a matrix product.
    """
    border = first + period
    cuts = [0]
    for offset in range(1, period):
        position = border + offset
        if (
            position < len(program.cost)
            and program.border[position]
            and program.border[border]
            and program.depth[position] <= program.depth[border]
            and program.crossing[position] <= program.crossing[border]
            and program.has_product(border + cuts[-1], position)
            and program.has_product(position, border + period)
        ):
            cuts.append(offset)
    starts = [first + period * i + cut for i in range(count) for cut in cuts]
    return (*starts, first + period * count)


def layering(graph: Graph, layers: Sequence[Layer]) -> Layering:
    """The layer of every op, and the classes of equal layers.

    A backward op belongs to the layer of the forward op that it is linked to, an update and its states to the
    layer of their parameter, and a parameter to the layer of its first reader. A constant or input that one
    layer reads belongs to that layer; one that several layers read belongs to none.

    Raises:
        GraphError: a layer names an op that is not in the graph, or a forward op is in no layer or in two.
    """
    of = _assign(graph, layers)
    members: dict[int, list[Op]] = {number: [] for number in (REST, *range(len(layers)))}
    for op in graph.ops:
        members[of[op.name]].append(op)
    replaced = {value.name: source for source, value in graph.updates}
    outputs = {value.name for _, value in graph.outputs}
    numbers: dict[Hashable, int] = {}
    classes = []
    for number in range(len(layers)):
        key = _canonical_form(graph, members[number], replaced, outputs)
        classes.append(numbers.setdefault(key, len(numbers)))
    position = {
        op.name: (REST if number == REST else classes[number], i)
        for number, ops in members.items()
        for i, op in enumerate(ops)
    }
    return Layering(tuple(layers), of, tuple(classes), position)


def _assign(graph: Graph, layers: Sequence[Layer]) -> dict[str, int]:
    """Layer of every op by its name."""
    of: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for name in layer.ops:
            if name not in graph.producers:
                raise GraphError(f"layer {number} has op %{name} but graph @{graph.name} does not")
            if name in of:
                raise GraphError(
                    f"op %{name} is in layer {of[name]} and in layer {number}; take it out of one"
                )
            of[name] = number
    for op in graph.ops:
        if op.kind not in SOURCES and op.role == "forward" and op.name not in of:
            raise GraphError(f"{op} is a forward op of graph @{graph.name} but in no layer")
    _read_forward(graph, of)
    for op in graph.ops:
        if op.name not in of and op.kind not in SOURCES:
            of[op.name] = of.get(op.link, REST) if op.link else _only(_large_operands(graph, op, of))
    for op in reversed(graph.ops):
        if of.get(op.name, REST) == REST and (op.kind in SOURCES or any(v.shape for v in op.results)):
            of[op.name] = _only([of[user.name] for v in op.results for user in graph.users[v.name]])
    return of


def _read_forward(graph: Graph, of: dict[str, int]) -> None:
    """Assign the sources that the forward part reads; a parameter or state is in its first reader's layer."""
    layers = {}
    for op in graph.ops:
        if op.kind in SOURCES:
            readers = [of[u.name] for v in op.results for u in graph.users[v.name] if u.name in of]
            if readers:
                layers[op.name] = readers[0] if op.kind in ("param", "state") else _only(readers)
    of.update(layers)


def _large_operands(graph: Graph, op: Op, of: Mapping[str, int]) -> list[int]:
    """Layers of the operands that are not scalars: a sum over all layers is made of scalars."""
    return [of.get(graph.producers[v.name].name, REST) for v in op.operands if v.shape]


def _only(layers: Sequence[int]) -> int:
    """The only layer among these; `REST` if there are none or several."""
    different = set(layers) - {REST}
    return different.pop() if len(different) == 1 else REST


def _canonical_form(
    graph: Graph, ops: Sequence[Op], replaced: Mapping[str, str], outputs: set[str]
) -> Hashable:
    """A key that is equal for equal layers: without names, contents of sources and keys of random ops.

    A value from another layer is numbered by the order in which the layer first reads such values.
    """
    place: dict[str, tuple[object, ...]] = {}
    outside: dict[str, int] = {}

    def reference(name: str) -> tuple[object, ...]:
        if name in place:
            return place[name]
        return ("outside", outside.setdefault(name, len(outside)))

    form = []
    for number, op in enumerate(ops):
        operands = tuple((reference(v.name), v.shape, v.dtype) for v in op.operands)
        results = []
        for i, value in enumerate(op.results):
            place[value.name] = (number, i)
            pinned = graph.attrs.get(value.name)
            by_axes = graph.axis_attrs.get(value.name)
            layout = by_axes if pinned is None else (pinned.mesh, pinned.spec)
            updates = reference(replaced[value.name]) if value.name in replaced else None
            results.append((value.shape, value.dtype, layout, updates, value.name in outputs))
        placed = graph.placements.get(op.name)
        axes = graph.op_axes.get(op.name)
        form.append((op.kind, op.role, _attributes(op), operands, tuple(results), placed, axes))
    return tuple(form)
