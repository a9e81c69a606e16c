"""Forward ops in contiguous layers, every op of the train graph in one of them, and which layers are equal.

*In:* a serial train graph. *Out:* `Layer`s that cover its forward ops in program order, and a `Layering`.
*Invariant:* each forward op that computes is in exactly one layer; equal layers hold the same ops in the same
order, so that a position within a class names one op of each of its layers.

Given the number of layers L, they are the dynamic programme of Alpa (Zheng et al., OSDI 2022, section 5.2,
"operator clustering"). With ops 1..K, C(i, k) the bytes that ops i..k read of what ops before i made, and
G(k, r) the least possible greatest C of a layer when ops 1..k make r layers,

    G(k, r) = min over i <= k of max(G(i - 1, r - 1), C(i, k)),
    where FLOP(i..k) <= (1 + delta) FLOP(1..K) / L,

and of the partitions that reach G(K, L), the most uniform one, which has the least sum of squared FLOP:

    V(k, r) = min over i <= k of V(i - 1, r - 1) + FLOP(i..k)^2,  where besides C(i, k) <= G(K, L).

Two passes, for a prefix with a larger maximum may be the more uniform one. Where no partition keeps the limit
(one op may exceed it alone) the least limit that some partition keeps takes its place. Ties prefer cuts where
modules meet.

Without a number, the program is asked: where the sequence of ops repeats itself and each repeat reads of the
one before it, the repeats are the layers (of blocks that alternate, each block); what lies between is cut by
the dynamic programme into layers of about the same FLOP. So equal blocks are equal layers, which
`passes.search.formulate` prices once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from distgraph.errors import GraphError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.op_registry import flops, freeze, lookup
from distgraph.passes.search.layering.layer_clustering import Floats, Read, balanced_cuts

REST = -1
"""Layer of what belongs to none: learning rate, norm of all gradients, constants of many layers."""

_LAYERS = 16  # of a program without repeats


@dataclass(frozen=True, slots=True)
class Layer:
    """A contiguous run of the forward ops that compute.

    Attributes:
        ops: their names in program order; sources (parameters, inputs, ...) are not among them.
    """

    ops: tuple[str, ...]


@dataclass(frozen=True)
class Layering:
    """Every op of a train graph in its layer.

    Attributes:
        layers: in program order.
        of: op name -> number of its layer, or `REST`; all roles.
        classes: class of each layer, numbered as they appear; layers of a class are equal up to names.
        position: op name -> (class, position in the layer); (`REST`, number) for ops of no layer.
    """

    layers: tuple[Layer, ...]
    of: Mapping[str, int]
    classes: tuple[int, ...]
    position: Mapping[str, tuple[int, int]]


def cluster_layers(graph: Graph, count: int | None = None, delta: float = 0.5) -> tuple[Layer, ...]:
    """Forward ops as contiguous layers (see the module for the programme that is solved).

    Args:
        graph: a serial graph; ops of role forward that are no sources are clustered.
        count: number of layers; None to find the repeats of the program.
        delta: a layer has at most (1 + delta) times the mean FLOP.

    Raises:
        GraphError: no forward ops, fewer than `count`, or delta is negative.

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
    if delta < 0:
        raise GraphError(f"delta of cluster_layers is {delta} but must be 0 or more")
    if count is not None and not 1 <= count <= len(ops):
        raise GraphError(
            f"cluster_layers was asked for {count} layers but graph @{graph.name} has {len(ops)} forward "
            f"ops; ask for 1 to {len(ops)}"
        )
    program = _Program.of(ops)
    cuts = program.cut(0, len(ops), count, delta) if count is not None else _repeats(program, delta)
    return tuple(
        Layer(tuple(op.name for op in ops[start:stop])) for start, stop in pairwise((0, *cuts, len(ops)))
    )


@dataclass(frozen=True, slots=True)
class _Program:
    """Forward ops as numbers."""

    cost: Floats
    products: npt.NDArray[np.int64]  # ops before each position that a matrix unit computes
    reads: tuple[Read, ...]
    signature: npt.NDArray[np.int64]  # equal for ops of one kind, attributes and shapes
    crossing: Floats  # bytes alive across a cut before each op
    depth: npt.NDArray[np.int64]  # modules that the ops on both sides of a cut share
    border: npt.NDArray[np.bool_]  # whether they lie in different modules

    @staticmethod
    def of(ops: Sequence[Op]) -> _Program:
        """Read what the cuts depend on."""
        position = {value.name: i for i, op in enumerate(ops) for value in op.results}
        readers: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            for name in dict.fromkeys(v.name for v in op.operands):
                if name in position:
                    readers.setdefault(name, []).append(i)
        size = {value.name: float(value.nbytes) for op in ops for value in op.results}
        reads = tuple((position[name], tuple(at), size[name]) for name, at in readers.items())
        crossing = np.zeros(len(ops) + 1)
        for producer, at, nbytes in reads:
            crossing[producer + 1] += nbytes
            crossing[at[-1] + 1] -= nbytes
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
        """Whether a matrix unit has work between two positions."""
        return bool(self.products[stop] > self.products[start])

    def cut(self, start: int, stop: int, count: int, delta: float) -> tuple[int, ...]:
        """Positions that cut ops start:stop into `count` parts."""
        reads = []
        for producer, readers, nbytes in self.reads:
            inside = tuple(r - start for r in readers if start <= r < stop)
            if inside and producer >= start:
                reads.append((producer - start, inside, nbytes))
        penalty = [float(d) for d in self.depth[start:stop]]
        return tuple(c + start for c in balanced_cuts(self.cost[start:stop], reads, count, delta, penalty))

    def chained(self, start: int, period: int) -> bool:
        """Whether the ops of the second period read what those of the first make."""
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
    """What repeats of an op have in common."""
    shapes = tuple((v.shape, v.dtype) for v in (*op.operands, *op.results))
    return op.kind, len(op.operands), shapes, _attributes(op)


def _attributes(op: Op) -> Hashable:
    """Attributes that layouts and costs depend on: not what a source holds, nor the key of a random op."""
    if op.kind in SOURCES:
        return ()
    return tuple(sorted((k, freeze(v)) for k, v in op.attrs.items() if k != "salt"))


def _repeats(program: _Program, delta: float) -> tuple[int, ...]:
    """Cuts at the repeats of the program and, between them, into layers of about the same FLOP."""
    size = len(program.cost)
    parts = [pair for run in _runs(program) for pair in pairwise(run)]
    if not parts:
        return program.cut(0, size, max(1, min(int(program.products[-1]), _LAYERS)), delta)
    mean = float(np.mean([program.cost[a:b].sum() for a, b in parts]))
    cuts = {0, size, *(border for part in parts for border in part)}
    for start, stop in set(pairwise(sorted(cuts))) - set(parts):
        products = int(program.products[stop] - program.products[start])
        share = round(float(program.cost[start:stop].sum()) / mean) if mean else 1
        cuts.update(program.cut(start, stop, max(1, min(products, share)), delta))
    return tuple(sorted(cuts - {0, size}))


def _runs(program: _Program) -> list[tuple[int, ...]]:
    """Runs of repeats, each as the borders of its layers; the longest first, then what lies beside it.

    Every run does at least the FLOP of a layer of those before it: shorter ones are parts of a layer.
    """
    found: list[tuple[int, ...]] = []
    layers: list[float] = []
    gaps = [(0, len(program.cost))]
    while gaps:
        start, stop = gaps.pop()
        run = _longest_run(program, start, stop)
        if run is None or (layers and program.cost[run[0] : run[-1]].sum() < np.mean(layers)):
            continue
        found.append(run)
        layers += [float(program.cost[a:b].sum()) for a, b in pairwise(run)]
        gaps += [(start, run[0]), (run[-1], stop)]
    return found


def _longest_run(program: _Program, start: int, stop: int) -> tuple[int, ...] | None:
    """Borders of the repeats that cover most of ops start:stop; None where nothing repeats.

    A repeat does products, and reads of the one before it; of equal coverage the shorter period counts.
    """
    best: tuple[int, int, int, int] | None = None  # ops covered, first, period, end of what repeats
    signature, size = program.signature[start:stop], stop - start
    for period in range(1, size // 2 + 1):
        if best is not None and best[0] == size:
            break
        same = np.concatenate([[False], signature[period:] == signature[:-period], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for first, last in edges.reshape(-1, 2):
            count = int(last - first) // period + 1
            covered = count * period
            at = start + int(first)
            if count < 2 or (best is not None and covered <= best[0]):
                continue
            if program.has_product(at, at + period) and program.chained(at, period):
                best = covered, at, period, at + int(last - first) + period
    if best is None:
        return None
    covered, first, period, last = best
    start = _phase(program, range(first, last - covered + 1), period, covered)
    return _divided(program, start, covered // period, period)


def _phase(program: _Program, starts: range, period: int, covered: int) -> int:
    """Where the first repeat starts: least bytes across the borders, then borders of outermost modules."""

    def badness(at: int) -> tuple[float, int, int]:
        cuts = [c for c in range(at, at + covered + 1, period) if 0 < c < len(program.cost)]
        return (
            max((float(program.crossing[c]) for c in cuts), default=0.0),
            max((int(program.depth[c]) for c in cuts), default=0),
            at,
        )

    return min(starts, key=badness)


def _divided(program: _Program, first: int, count: int, period: int) -> tuple[int, ...]:
    """Borders of repeats, each divided where modules as far out meet as between repeats and no more bytes
    pass (blocks that alternate); every part does products."""
    border = first + period
    cuts = [0]
    for offset in range(1, period):
        at = border + offset
        if (
            at < len(program.cost)
            and program.border[at]
            and program.border[border]
            and program.depth[at] <= program.depth[border]
            and program.crossing[at] <= program.crossing[border]
            and program.has_product(border + cuts[-1], at)
            and program.has_product(at, border + period)
        ):
            cuts.append(offset)
    starts = [first + period * i + cut for i in range(count) for cut in cuts]
    return (*starts, first + period * count)


def layering(graph: Graph, layers: Sequence[Layer]) -> Layering:
    """Every op in a layer, and the classes of equal layers.

    A backward op belongs to the layer of the forward op that it is linked to, an update and its states to
    that of their parameter, a parameter to that of the first op that reads it. What a single layer reads
    belongs to it; a constant or input of several layers belongs to none.

    Raises:
        GraphError: a layer names an op that the graph lacks, or a forward op is in no layer or in two.
    """
    of = _assign(graph, layers)
    members: dict[int, list[Op]] = {number: [] for number in (REST, *range(len(layers)))}
    for op in graph.ops:
        members[of[op.name]].append(op)
    replaced = {value.name: source for source, value in graph.updates}
    left = {value.name for _, value in graph.outputs}
    numbers: dict[Hashable, int] = {}
    classes = []
    for number in range(len(layers)):
        key = _described(graph, members[number], replaced, left)
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
    """Sources that the forward part reads: parameters and states lie where they are read first."""
    found = {}
    for op in graph.ops:
        if op.kind in SOURCES:
            readers = [of[u.name] for v in op.results for u in graph.users[v.name] if u.name in of]
            if readers:
                found[op.name] = readers[0] if op.kind in ("param", "state") else _only(readers)
    of.update(found)


def _large_operands(graph: Graph, op: Op, of: Mapping[str, int]) -> list[int]:
    """Layers of the operands that are no scalars: a sum over all layers runs through scalars."""
    return [of.get(graph.producers[v.name].name, REST) for v in op.operands if v.shape]


def _only(layers: Sequence[int]) -> int:
    """The one layer among these, `REST` where there is none or several."""
    found = set(layers) - {REST}
    return found.pop() if len(found) == 1 else REST


def _described(graph: Graph, ops: Sequence[Op], replaced: Mapping[str, str], left: set[str]) -> Hashable:
    """What equal layers have in common: everything but names, sources' contents and keys of random ops.

    A value from another layer is known by the order in which the layer reads such values.
    """
    place: dict[str, tuple[object, ...]] = {}
    outside: dict[str, int] = {}

    def reference(name: str) -> tuple[object, ...]:
        if name in place:
            return place[name]
        return ("outside", outside.setdefault(name, len(outside)))

    found = []
    for number, op in enumerate(ops):
        operands = tuple((reference(v.name), v.shape, v.dtype) for v in op.operands)
        results = []
        for i, value in enumerate(op.results):
            place[value.name] = (number, i)
            pinned = graph.attrs.get(value.name)
            layout = None if pinned is None else (pinned.mesh, pinned.spec)
            updates = reference(replaced[value.name]) if value.name in replaced else None
            results.append((value.shape, value.dtype, layout, updates, value.name in left))
        placed = graph.placements.get(op.name)
        found.append((op.kind, op.role, _attributes(op), operands, tuple(results), placed))
    return tuple(found)
