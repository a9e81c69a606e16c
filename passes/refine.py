"""Move layouts that nobody pinned where that lowers the bytes on the wire.

In:   a completed graph.
Out:  the same graph; some unpinned values and ops have another layout, with origin "search".
Invariant: annotations stay; no contraction is computed with fewer parts than completion gave it (unless its
      result itself is annotated), no parameter or state is stored in fewer; the modelled cost never rises;
      deterministic.

Completion decides by priority, one axis at a time, and so leaves borders where two claims meet. Here the
borders move. With P(v) the layout in which a value is made, R(v) those in which it is read (with the windows
that ops read of it) and S(v) the one in which it is kept,

    cost = sum over values of times(v) * (min over S of  wire(P -> S) + sum over distinct R of wire(S -> R))
         + epsilon * bytes touched per rank,

where times is the number of micro-batches for values inside the micro-batch part. An op may also be computed
on its ranks in another order, where an op that slides reads less from others under it (`halo.nearest`): a
reversal of a split dim leaves its result on the ranks reversed, and sends nothing. Moves: best response of
one op, and flood moves in the manner of Kernighan and Lin (1970): give an op another layout, let the
neighbours follow one by one whatever it costs, keep the best prefix. Situations that look alike (repeated
layers) are tried once when they fail.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container
from dataclasses import dataclass, replace

from distgraph.dtypes import itemsize
from distgraph.graph import SOURCES, Graph, Op
from distgraph.mesh import ProcessMesh
from distgraph.ops.registry import Windows, linear_groups, lookup, operand_windows, rule_of
from distgraph.passes.halo import halo_tiles, halo_volume, nearest
from distgraph.passes.redistribute import Price, redistribute_cost, wire_price
from distgraph.passes.reshard import fetches
from distgraph.passes.tiles import busiest
from distgraph.passes.transfer import transfer_cost
from distgraph.rule import OpLayout, choices, operand_spec, result_spec
from distgraph.spec import DistAttr, Origin, ShardSpec

_TOUCH = 1e-4  # cost of a byte touched locally, in bytes on the wire
_GAIN = 0.5  # a move must save at least half a byte
_FLOOD = 40  # ops that one move may carry along
_OPTIONS = 64  # layouts of one op that are looked at, on its ranks in one order
_ORDERS = 4  # other orders of the ranks of one mesh that are looked at
_ROUNDS = 6


Read = tuple[DistAttr, Windows]


@dataclass(slots=True)
class _Node:
    """An op that may move: for every option the layouts (by number) in which it makes its results and reads
    its operands."""

    name: str
    options: list[OpLayout]
    made: list[tuple[int, ...]]
    need: list[tuple[int, ...]]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    around: tuple[int, ...] = ()
    neighbours: tuple[int, ...] = ()
    kind: tuple[object, ...] = ()


@dataclass(slots=True)
class _Edge:
    """A value: who makes it, who reads it, what it costs to move."""

    name: str
    kind: int  # values of one kind (shape, dtype, pinned layout, leaves the graph) share their costs
    producer: int
    position: int
    readers: list[tuple[int, int]]  # (op, operand)
    like: int  # value whose made layout this one must end in (update of a parameter), or -1
    times: int
    touch: float


class _Refiner:
    """Local search over the layouts of one graph; ops, values and layouts are numbers."""

    def __init__(self, graph: Graph, times: dict[str, int], price: Price) -> None:
        self.graph = graph
        self.price = price
        self.reads: list[Read] = []
        self.number: dict[Read, int] = {}
        self.split: list[int] = []
        self.kinds: dict[tuple[object, ...], int] = {}
        self.kind_list: list[tuple[tuple[int, ...], int, DistAttr | None, bool, bool]] = []
        self.cache: dict[tuple[int, int, tuple[int, ...]], tuple[float, int]] = {}
        self.failed: set[object] = set()
        self.orders = _orders(graph)
        position = {name: i for i, name in enumerate(graph.values)}
        self.nodes = [self._node(op, position) for op in graph.ops]
        self.choice = [node.options.index(op.layout) for node, op in zip(self.nodes, graph.ops, strict=True)]  # type: ignore[arg-type]
        self.edges = self._edges(position, times)
        self._connect()
        self.costs = [self.cost(i) for i in range(len(self.edges))]

    # ------------------------------------------------------------------ tables

    def _attr(self, attr: DistAttr, windows: Windows = ()) -> int:
        read = attr, windows
        if read not in self.number:
            self.number[read] = len(self.reads)
            self.reads.append(read)
            self.split.append(attr.mesh.count(a for dim in attr.spec.dims for a in dim))
        return self.number[read]

    def _node(self, op: Op, position: dict[str, int]) -> _Node:
        layout = op.layout
        assert layout is not None
        rule, linear, reduction = rule_of(op), linear_groups(op), lookup(op.kind).reduction
        fixed = op.kind == "reshard" or (op.kind in SOURCES and self.graph.attrs[op.name].pinned)
        options = [layout] if fixed else self._options(op, layout)
        if fixed:
            made = [tuple(self._attr(self.graph.attrs[v.name]) for v in op.results)]
            need = [made[0] * len(op.operands)]
        else:
            made = [
                tuple(
                    self._attr(DistAttr(o.mesh, result_spec(rule, i, o, reduction)))
                    for i in range(len(op.results))
                )
                for o in options
            ]
            need = [
                tuple(
                    self._attr(DistAttr(o.mesh, operand_spec(rule, i, o, linear)), operand_windows(op, i, o))
                    for i in range(len(op.operands))
                )
                for o in options
            ]
        shapes = tuple(v.shape for v in op.operands)
        operands = tuple(position[v.name] for v in op.operands)
        results = tuple(position[v.name] for v in op.results)
        return _Node(op.name, options, made, need, operands, results, kind=(op.kind, shapes))

    def _options(self, op: Op, completed: OpLayout) -> list[OpLayout]:
        costly = lookup(op.kind).cost == "matmul"
        groups = () if len(op.results) != 1 or costly or op.role == "optimize" else linear_groups(op)
        found = [o for o in choices(rule_of(op), completed.mesh, groups) if o != completed]
        asked = (
            op.role == "forward" and self.graph.attrs[op.name].pinned
        )  # the user wants it whole in many places
        if (costly and not asked) or op.kind in ("param", "state"):
            found = [o for o in found if _parts(o) >= _parts(completed)]
        found = [completed, *found[: _OPTIONS - 1]]
        others = self.orders.get(completed.mesh, ()) if op.operands else ()
        return found + [replace(option, mesh=mesh) for mesh in others for option in found]

    def _edges(self, position: dict[str, int], times: dict[str, int]) -> list[_Edge]:
        graph = self.graph
        replaced = {new.name: position[old] for old, new in graph.updates}
        leaving = {value.name for _, value in graph.outputs}
        edges = []
        for number, op in enumerate(graph.ops):
            for place, value in enumerate(op.results):
                attr = graph.attrs[value.name]
                pinned = attr if attr.pinned else None
                source = op.kind in SOURCES
                key = (value.shape, value.dtype, pinned, value.name in leaving, source)
                if key not in self.kinds:
                    self.kinds[key] = len(self.kinds)
                    self.kind_list.append(
                        (value.shape, itemsize(value.dtype), pinned, value.name in leaving, source)
                    )
                like = replaced.get(value.name, -1)
                touch = _TOUCH * value.nbytes
                edges.append(
                    _Edge(value.name, self.kinds[key], number, place, [], like, times[value.name], touch)
                )
        for number, node in enumerate(self.nodes):
            for place, value_number in enumerate(node.operands):
                edges[value_number].readers.append((number, place))
        return edges

    def _connect(self) -> None:
        updated_by: dict[int, list[int]] = {}
        for number, edge in enumerate(self.edges):
            if edge.like >= 0:
                updated_by.setdefault(edge.like, []).append(number)
        free = [
            self.graph.ops[e.producer].kind in SOURCES and self.kind_list[e.kind][0] == () for e in self.edges
        ]
        for number, node in enumerate(self.nodes):
            # scalars from outside cost nothing to move and would make neighbours of everything
            around = dict.fromkeys(v for v in (*node.operands, *node.results) if not free[v])
            for value in node.results:
                around.update(dict.fromkeys(updated_by.get(value, ())))
            node.around = tuple(around)
            near: dict[int, None] = {}
            for value in around:
                near[self.edges[value].producer] = None
                near.update(dict.fromkeys(reader for reader, _ in self.edges[value].readers))
                if self.edges[value].like >= 0:
                    near[self.edges[self.edges[value].like].producer] = None
            near.pop(number, None)
            node.neighbours = tuple(near)

    # ------------------------------------------------------------------ costs

    def made(self, value: int) -> int:
        """Layout in which a value is made."""
        edge = self.edges[value]
        return self.nodes[edge.producer].made[self.choice[edge.producer]][edge.position]

    def entry(self, value: int, wanted: set[int] | None = None) -> tuple[float, int]:
        """Bytes to move a value from where it is made to where it is read (or wanted), and the layout to
        keep it in."""
        edge = self.edges[value]
        made = self.nodes[edge.producer].made[self.choice[edge.producer]][edge.position]
        if wanted is None:
            wanted = {self.nodes[reader].need[self.choice[reader]][place] for reader, place in edge.readers}
        if edge.like >= 0:
            wanted.add(self.made(edge.like))
        key = (edge.kind, made, tuple(sorted(wanted)))
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = self._cheapest(edge.kind, made, key[2])
        return found

    def cost(self, value: int) -> float:
        """Cost of a value under the present choices."""
        edge = self.edges[value]
        return edge.times * self.entry(value)[0] + edge.touch / self.split[self.made(value)]

    def moves(self, value: int) -> bool:
        """True when the value costs something on the wire."""
        return self.costs[value] > self.edges[value].touch + _GAIN

    def _cheapest(self, kind: int, made: int, wanted: tuple[int, ...]) -> tuple[float, int]:
        shape, size, pinned, leaves, source = self.kind_list[kind]
        here = self.reads[made][0]
        reads = [self.reads[w] for w in wanted]
        if pinned is not None:
            candidates = [pinned]
        elif source:
            candidates = [here]  # what comes from outside is kept as it is loaded
        else:
            candidates = [here, DistAttr(here.mesh, here.spec.without_partial())]
            candidates += [attr for attr, _ in reads if attr.mesh == here.mesh]
            if leaves:
                candidates += [DistAttr(here.mesh, s) for s in _scattered(here.spec, shape, here.mesh)]
                candidates = [c for c in candidates if not c.spec.partial]
        best: tuple[float, str, DistAttr] | None = None
        for kept in dict.fromkeys(candidates):
            total = move_cost(shape, size, here, kept, self.price)
            total += read_cost(shape, size, kept, reads, self.price)
            if best is None or (total, str(kept)) < best[:2]:
                best = (total, str(kept), kept)
        assert best is not None
        return best[0], self._attr(best[2])

    def set(self, node: int, option: int) -> float:
        """Give an op another option; returns the change of the total."""
        change = 0.0
        self.choice[node] = option
        for value in self.nodes[node].around:
            cost = self.cost(value)
            change += cost - self.costs[value]
            self.costs[value] = cost
        return change

    # ------------------------------------------------------------------ moves

    def best_response(self, number: int, through: int = -1, moved: Container[int] = ()) -> tuple[float, int]:
        """Option of one op with the least cost.

        `through`: only options under which this value costs nothing to move between `moved` ops and this one.
        """
        node, present = self.nodes[number], self.choice[number]
        before = sum(self.costs[v] for v in node.around)
        best, best_option = 0.0, present
        found = through < 0
        for option in range(len(node.options)):
            self.choice[number] = option
            if through >= 0 and not self.agrees(through, number, moved):
                continue
            total = sum(map(self.cost, node.around)) - before
            if not found or total < best - 1e-9:
                best, best_option, found = total, option, True
        self.choice[number] = present
        return best, best_option

    def agrees(self, value: int, end: int, moved: Container[int]) -> bool:
        """True when a value moves for nothing between one of its ends and those in `moved`; the others may
        still follow."""
        edge = self.edges[value]
        wanted = {
            self.nodes[r].need[self.choice[r]][place] for r, place in edge.readers if r == end or r in moved
        }
        if edge.producer != end and edge.producer not in moved:
            return len(wanted) < 2
        return edge.times * self.entry(value, wanted)[0] <= _GAIN

    def relax(self, numbers: list[int]) -> None:
        """Best responses until none helps."""
        queue = deque(numbers)
        queued = set(numbers)
        while queue:
            number = queue.popleft()
            queued.discard(number)
            node = self.nodes[number]
            if len(node.options) < 2 or not any(self.moves(v) for v in node.around):
                continue
            gain, option = self.best_response(number)
            if gain < -_GAIN and option != self.choice[number]:
                self.set(number, option)
                for other in node.neighbours:
                    if other not in queued:
                        queued.add(other)
                        queue.append(other)

    def flood(self, number: int, option: int, worth: float) -> bool:
        """Give an op another option and let neighbours follow; keep the best prefix if it saves anything."""
        journal = [(number, self.choice[number])]
        total = self.set(number, option)
        best, best_length = (total, 1) if total < -_GAIN else (-_GAIN, 0)
        moved = {number}
        frontier = deque(self.nodes[number].around)
        while frontier and len(journal) < _FLOOD and total < 4 * worth:
            value = frontier.popleft()
            if not self.moves(value):
                continue
            edge = self.edges[value]
            for end in (edge.producer, *(reader for reader, _ in edge.readers)):
                if end in moved or len(self.nodes[end].options) < 2:
                    continue
                _, response = self.best_response(end, value, moved)
                if response == self.choice[end]:
                    continue
                journal.append((end, self.choice[end]))
                moved.add(end)
                total += self.set(end, response)
                frontier.extend(v for v in self.nodes[end].around if v != value)
                if total < best:
                    best, best_length = total, len(journal)
        for end, before in reversed(journal[best_length:]):
            self.set(end, before)
        return best_length > 0

    def situation(self, number: int) -> object:
        """What an op and its neighbours look like, so that repeated layers are recognised."""
        near = (number, *self.nodes[number].neighbours)
        return tuple((self.nodes[n].kind, self.nodes[n].options[self.choice[n]]) for n in near)

    def try_op(self, number: int, value: int) -> bool:
        """Flood from one end of a border with each option that does not raise the cost of the border.

        It may stay: a value that two readers want in different layouts costs the same until both have moved.
        """
        node = self.nodes[number]
        if len(node.options) < 2:
            return False
        key = (self.situation(number), self.edges[value].kind)
        if key in self.failed:
            return False
        improved = False
        for option in range(len(node.options)):
            worth = self.costs[value]
            present, self.choice[number] = self.choice[number], option
            promising = self.cost(value) <= worth + _GAIN
            self.choice[number] = present
            if option != present and promising:
                improved |= self.flood(number, option, worth)
        if not improved:
            self.failed.add(key)
        return improved

    def run(self) -> None:
        """Relax, then flood from every border, dearest first, until nothing helps."""
        everything = list(range(len(self.nodes)))
        self.relax(everything)
        for _ in range(_ROUNDS):
            borders = sorted(
                (v for v in range(len(self.edges)) if self.moves(v)), key=lambda v: (-self.costs[v], v)
            )
            improved = False
            for value in borders:
                edge = self.edges[value]
                for end in dict.fromkeys((edge.producer, *(reader for reader, _ in edge.readers))):
                    improved |= self.try_op(end, value)
            if not improved:
                return
            self.relax(everything)


def refine(graph: Graph, price: Price = wire_price) -> Graph:
    """Lower what a completed graph spends on communication; `price` is the cost of one collective."""
    return refined(graph, price)[1]


def refined(graph: Graph, price: Price = wire_price) -> tuple[float, Graph]:
    """As `refine`, with the cost that is left."""
    refiner = _Refiner(graph, multiplicity(graph), price)
    refiner.run()
    ops = [
        replace(op, layout=node.options[option])
        for op, node, option in zip(graph.ops, refiner.nodes, refiner.choice, strict=True)
    ]
    attrs = {}
    for number, (name, attr) in enumerate((e.name, graph.attrs[e.name]) for e in refiner.edges):
        kept = refiner.reads[refiner.entry(number)[1]][0]
        attrs[name] = (
            attr if kept == attr else replace(kept, origin=Origin("search", f"moves less than {attr.spec}"))
        )
    return sum(refiner.costs), graph.with_ops(ops, attrs=attrs)


def multiplicity(graph: Graph) -> dict[str, int]:
    """Value name -> how often it is made in one step."""
    phase: dict[str, int] = {}
    for op in graph.ops:
        inside = max((phase[v.name] for v in op.operands), default=0)
        if (op.kind == "input" and op.results[0].shape != ()) or lookup(op.kind).micro:
            inside = max(inside, 1)
        if op.kind == "accumulate":
            inside = 2
        for value in op.results:
            phase[value.name] = inside
    return {name: graph.micro_batches if at == 1 else 1 for name, at in phase.items()}


def move_cost(shape: tuple[int, ...], size: int, source: DistAttr, target: DistAttr, price: Price) -> float:
    """Price of a change of layout; by default the bytes that one rank sends."""
    if source == target:
        return 0.0
    if source.mesh == target.mesh:
        return redistribute_cost(shape, size, source.mesh, source.spec, target.spec, price)
    return transfer_cost(shape, size, source, target, price=price)


def read_cost(shape: tuple[int, ...], size: int, held: DistAttr, reads: list[Read], price: Price) -> float:
    """Price of all that is read of a value: layouts that it is moved to once each, and windows of them."""
    total, moved = 0.0, dict[DistAttr, None]()
    for attr, windows in reads:
        if not windows:
            moved[attr] = None
            continue
        mesh, spec = attr.mesh, attr.spec
        if fetches(held, attr):
            volume = busiest(halo_tiles(shape, mesh, spec, windows, held))
            total += _copied(shape, size, held, attr)
        else:
            moved[attr] = None
            volume = halo_volume(shape, mesh, spec, windows)
        axes = tuple(axis for dim, _ in windows for axis in spec.dims[dim])
        total += price("permute", float(size * volume), mesh.count(axes), mesh, axes) if volume else 0.0
    for attr in moved:
        total += move_cost(shape, size, held, attr, price) + _copied(shape, size, held, attr)
    return total


def _copied(shape: tuple[int, ...], size: int, held: DistAttr, attr: DistAttr) -> float:
    """What a rank copies to itself where a value goes to the same ranks in another order."""
    if held.mesh == attr.mesh or held.mesh.rank_set != attr.mesh.rank_set:
        return 0.0
    return _TOUCH * size * math.prod(attr.spec.local_shape(shape, attr.mesh, attr.mesh.members[0]))


def _orders(graph: Graph) -> dict[ProcessMesh, tuple[ProcessMesh, ...]]:
    """For every mesh those with its ranks in another order under which some op reads less from others."""
    found: dict[ProcessMesh, dict[ProcessMesh, None]] = {}
    for op in graph.ops:
        if op.layout is not None and rule_of(op).sliding:
            mesh = nearest(op, op.layout)
            if mesh != op.layout.mesh:
                found.setdefault(op.layout.mesh, {})[mesh] = None
    return {mesh: tuple(others)[:_ORDERS] for mesh, others in found.items()}


def _parts(layout: OpLayout) -> int:
    return layout.mesh.count(axis for _, axes in layout.axes for axis in axes)


def _scattered(spec: ShardSpec, shape: tuple[int, ...], mesh: ProcessMesh) -> list[ShardSpec]:
    """Layouts in which the pending axes split one dim each."""
    found = [ShardSpec(spec.dims)]
    for axis, _ in spec.partial:
        grown = []
        for base in found:
            for dim, axes in enumerate(base.dims):
                if shape[dim] % mesh.units((*axes, axis)) == 0:
                    grown.append(ShardSpec((*base.dims[:dim], (*axes, axis), *base.dims[dim + 1 :])))
        found = grown or found
    return found
