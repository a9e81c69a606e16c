"""Sharding propagation: from the ops whose layout is configured to all others, least redistribution first.

*In:* a serial graph with some annotations, a mesh. *Out:* `Layouts` of every op and value.
*Invariant:* annotated values are sharded as annotated; no op is decided twice; deterministic.

MindSpore's `sharding_propagation`: the layouts that an op may have are enumerated (`strategies_of`), and a
breadth-first search from the configured ops gives every op that it reaches the layout that causes least
redistribution towards the ops that are decided already, where it stops at ops that are configured
themselves. The redistribution of the gradient counts too: a slice is free, but the gradient of what was
sliced is gathered. The reduction of an op's own partials is no redistribution. Between equal layouts the
reduction decides, then the work and the bytes of one rank.

Gradients and updates follow in program order once the forward part is decided: the gradient of a value is
needed in the layout of the value, recomputed ops have the layout of the first time, and a source has the
layout that its first reader needs. In the end every value is stored in the layout that costs least: as it is
made, as it is read, or reduced.

    %x = input()         # [x, y] annotated        %x  [x, y]
    %r = relu(%x)                          ->      %r  {i0:x, i1:y}
    %z = matmul(%r, %w)                            %z  {m:x, k:y}: %w [y, _], %z is partial(y)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from distgraph.errors import ShardingError
from distgraph.ir.dtypes import is_float, itemsize
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops, linear_groups, lookup, rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.redistribution.planner import Price, redistribute_cost, wire_price
from distgraph.passes.redistribution.source_layout import follow
from distgraph.passes.redistribution.tiles import without_unit_axes
from distgraph.passes.search.intra_op.chosen_layouts import Layouts
from distgraph.passes.search.intra_op.strategies import Strategies, local_bytes, strategies_in, strategies_of


def propagate(graph: Graph, mesh: ProcessMesh, price: Price = wire_price) -> Layouts:
    """Layouts of a whole graph from those of the ops and values that are annotated.

    Raises:
        ShardingError: nothing is annotated, or an annotation does not fit the mesh.
    """
    return laid_out(graph, mesh, spread(graph, mesh, price, {}), price, "sharding_propagation")


def spread(
    graph: Graph,
    mesh: ProcessMesh,
    price: Price,
    configured: Mapping[str, OpLayout],
    allowed: Callable[[Op, OpLayout], bool] | None = None,
) -> dict[str, OpLayout]:
    """The layout of every op from those of some.

    Args:
        graph, mesh, price: see `propagate`.
        configured: op name -> layout, in addition to what is annotated.
        allowed: whether an op may have a layout that its rule permits; all of them by default.

    Raises:
        ShardingError: see `propagate`.
    """
    propagation = _Propagation(graph, mesh, price, allowed)
    seeds = propagation.configure(configured)
    if not seeds:
        raise ShardingError(
            f"graph @{graph.name} has no op with a layout on {mesh} to propagate from; annotate an input or "
            f"a parameter with shard_tensor, or search in another mode"
        )
    propagation.spread(seeds)
    propagation.finish()
    chosen = propagation.chosen
    return {op.name: propagation.strategies(op).layout(mesh, chosen[op.name]) for op in graph.ops}


def laid_out(
    graph: Graph, mesh: ProcessMesh, ops: Mapping[str, OpLayout], price: Price, mode: str
) -> Layouts:
    """Layouts of all ops as given, and of values as they cost least between the ops."""
    propagation = _Propagation(graph, mesh, price)
    for op in graph.ops:
        if not propagation.is_pinned(op):
            reduction = lookup(op.kind).reduction
            only = strategies_in([ops[op.name]], rule_of(op), linear_groups(op), reduction)
            propagation.options[op.name] = only
        propagation.chosen[op.name] = 0
    return propagation.layouts(Origin("search", mode))


def pins(graph: Graph, mesh: ProcessMesh) -> dict[str, ShardSpec]:
    """Annotated layouts by value, on a mesh with the same axes.

    Raises:
        ShardingError: an annotation splits over an axis that the mesh does not have, or has in another size.
    """
    pinned = {}
    for name, attr in graph.attrs.items():
        spec = without_unit_axes(attr.spec, attr.mesh)
        for axis in spec.axes:
            if mesh.sizes.get(axis) != attr.mesh.axis_size(axis):
                raise ShardingError(
                    f"%{name} ({attr.origin.where}): splits over {axis}={attr.mesh.axis_size(axis)} but is "
                    f"to be laid out on {mesh}; search a mesh with that axis or take the annotation out"
                )
        pinned[name] = spec
    return pinned


@dataclass(frozen=True, slots=True)
class _Around:
    """What is decided around an op.

    Attributes:
        sources: layout of each operand; None where it is open.
        readers: layouts in which each result is read, or kept.
        gradients: layout of the value whose gradient each result is, none or one.
    """

    sources: tuple[ShardSpec | None, ...]
    readers: tuple[frozenset[ShardSpec], ...]
    gradients: tuple[frozenset[ShardSpec], ...]


class _Propagation:
    """Layouts decided so far."""

    def __init__(
        self,
        graph: Graph,
        mesh: ProcessMesh,
        price: Price,
        allowed: Callable[[Op, OpLayout], bool] | None = None,
    ) -> None:
        self.graph, self.mesh, self.price, self.allowed = graph, mesh, price, allowed
        # with more than one micro-batch, sums that can be deferred to the end of the step are deferred
        self.times = multiplicity(replace(graph, micro_batches=max(2, graph.micro_batches)))
        self.pinned = pins(graph, mesh)
        self.chosen: dict[str, int] = {}
        self.place: dict[str, tuple[Op, int]] = {}
        self.readers: dict[str, list[tuple[Op, int]]] = {}
        for op in graph.ops:
            for i, value in enumerate(op.results):
                self.place[value.name] = op, i
                self.readers[value.name] = []
            for i, value in enumerate(op.operands):
                self.readers[value.name].append((op, i))
        self.replaced = {value.name: source for source, value in graph.updates}
        self.options: dict[str, Strategies] = {}
        self.restricted: dict[tuple[int, tuple[int, ...]], tuple[Strategies, Strategies]] = {}
        self.decided: dict[object, int] = {}

    def strategies(self, op: Op) -> Strategies:
        """The layouts that an op may have: those of its rule, or the one to which it is pinned."""
        if op.name not in self.options:
            self.options[op.name] = self._strategies(op)
        return self.options[op.name]

    def is_pinned(self, op: Op) -> bool:
        """Whether an annotation decides an op entirely: a source, or a redistribution."""
        return op.name in self.pinned and (op.kind in SOURCES or op.kind == "reshard")

    def _strategies(self, op: Op) -> Strategies:
        if self.is_pinned(op):
            spec = self.pinned[op.name]
            layout = follow(op, DistAttr(self.mesh, spec))
            return Strategies(((layout.axes, layout.partial),), ((spec,),), ((spec,),) * len(op.operands))
        every = strategies_of(op, self.mesh)
        if self.allowed is None:
            return every
        layouts = every.layouts(self.mesh)
        numbers = tuple(i for i, layout in enumerate(layouts) if self.allowed(op, layout))
        key = id(every), numbers
        if key not in self.restricted:
            self.restricted[key] = every, every.subset(numbers)  # keeps `every`, so that its id stays its own
        return self.restricted[key][1]

    def configure(self, given: Mapping[str, OpLayout]) -> list[Op]:
        """Decide the ops that are configured: those given, annotated sources, ops with annotated results."""
        seeds = []
        for op in self.graph.ops:
            layout = given.get(op.name)
            if layout is not None:
                options = self.strategies(op).options
                if (layout.axes, layout.partial) not in options:
                    raise ShardingError(
                        f"{op} cannot be computed as {layout} on {self.mesh}; see its index rule"
                    )
                self.chosen[op.name] = options.index((layout.axes, layout.partial))
            elif any(v.name in self.pinned for v in op.results):
                self.decide(op)
            else:
                continue
            seeds.append(op)
        return seeds

    def spread(self, seeds: Iterable[Op]) -> None:
        """Breadth-first over the forward part; what no seed reaches starts a search of its own."""
        queue = deque(seeds)
        rest = (op for op in self.graph.ops if _forward(op))
        while True:
            while queue:
                for near in self.neighbours(queue.popleft()):
                    if near.name not in self.chosen and _forward(near):
                        self.decide(near)
                        queue.append(near)
            start = next((op for op in rest if op.name not in self.chosen and op.kind not in SOURCES), None)
            if start is None:
                return
            self.decide(start)
            queue.append(start)

    def finish(self) -> None:
        """Decide all other ops in program order, and their sources as they want them."""
        for op in self.graph.ops:
            if op.kind in SOURCES:
                continue
            if op.name not in self.chosen:
                self.decide(op)
            for value in op.operands:
                source = self.place[value.name][0]
                if source.name not in self.chosen:
                    self.decide(source)
        for op in self.graph.ops:
            if op.name not in self.chosen:
                self.decide(op)

    def neighbours(self, op: Op) -> list[Op]:
        """Ops that read its results, then those that make its operands."""
        after = [reader for value in op.results for reader, _ in self.readers[value.name]]
        return [*after, *(self.place[value.name][0] for value in op.operands)]

    def decide(self, op: Op) -> None:
        """Give an op the layout of least redistribution; equal ops between equal layouts share the choice."""
        strategies, before = self.strategies(op), self.before(op)
        if len(strategies.options) == 1 or before is not None:
            self.chosen[op.name] = before or 0
            return
        around = _Around(
            tuple(map(self.left, op.operands)),
            tuple(frozenset(self.needed(value)) for value in op.results),
            tuple(frozenset(self.expected(op, i)) for i in range(len(op.results))),
        )
        values = (*op.operands, *op.results)
        made_by = tuple(_forward(self.place[v.name][0]) for v in values)
        key = (id(strategies), op.kind, tuple((v.type, self.times[v.name]) for v in values), made_by, around)
        if key not in self.decided:
            work = self.work(op)
            self.decided[key] = min(
                range(len(work)),
                key=lambda o: (
                    self.redistribution(op, o, around),
                    self.reduction(op, o, around),
                    *work[o],
                    o,
                ),
            )
        self.chosen[op.name] = self.decided[key]

    def redistribution(self, op: Op, option: int, around: _Around) -> float:
        """Price of the changes of layout between an op and what is decided around it."""
        strategies, total = self.strategies(op), 0.0
        for value, needed, source in zip(op.operands, strategies.operand_specs, around.sources, strict=True):
            if source is not None:
                total += self.times[value.name] * self.move(value, source, needed[option])
        ends = zip(op.results, strategies.result_specs, around.readers, around.gradients, strict=True)
        for value, made, readers, gradients in ends:
            for target in readers | gradients:
                total += self.times[value.name] * self.move(value, made[option], target)
        return total

    def before(self, op: Op) -> int | None:
        """The option of the forward op that a backward op computes again."""
        if op.role != "backward" or op.link not in self.chosen:
            return None
        first = self.place[op.link][0]
        same = first.kind == op.kind and self.strategies(first) is self.strategies(op)
        return self.chosen[first.name] if same else None

    def expected(self, op: Op, result: int) -> set[ShardSpec]:
        """The layout of the value whose gradient a backward op computes: the operand of the same shape."""
        if op.role != "backward" or op.link not in self.place:
            return set()
        linked = self.place[op.link][0]
        values = linked.results if linked.kind in SOURCES else linked.operands
        same_shape = [v for v in values if v.shape == op.results[result].shape]
        if not same_shape:
            return set()
        earlier = sum(v.shape == same_shape[0].shape for v in op.results[:result])
        spec = self.left(same_shape[min(earlier, len(same_shape) - 1)])
        return set() if spec is None else {spec.without_partial()}

    def left(self, value: Value) -> ShardSpec | None:
        """Layout in which a value is made; None where that is not decided yet."""
        if value.name in self.pinned:
            return self.pinned[value.name]
        op, i = self.place[value.name]
        return self.strategies(op).result_specs[i][self.chosen[op.name]] if op.name in self.chosen else None

    def needed(self, value: Value) -> set[ShardSpec]:
        """Layouts in which ops that are decided need a value."""
        if value.name in self.pinned:
            return {self.pinned[value.name]}
        specs = {
            self.strategies(reader).operand_specs[i][self.chosen[reader.name]]
            for reader, i in self.readers[value.name]
            if reader.name in self.chosen
        }
        if value.name in self.replaced:
            source = self.left(self.graph.values[self.replaced[value.name]])
            specs |= set() if source is None else {source}
        return specs

    def move(self, value: Value, source: ShardSpec, target: ShardSpec) -> float:
        """Cost of a redistribution, and of that of the gradient.

        The reduction of partials belongs to the op that makes them (`reduction`).
        """
        if source.partial and source.partial != target.partial:
            source = source.without_partial()
        back = 0.0
        if _forward(self.place[value.name][0]) and is_float(value.dtype) and not target.partial:
            back = self.cost(value, target, source.without_partial())
        return self.cost(value, source, target) + back

    def cost(self, value: Value, source: ShardSpec, target: ShardSpec) -> float:
        """Cost of a redistribution."""
        if source == target:
            return 0.0
        size = itemsize(value.dtype)
        return redistribute_cost(value.shape, size, self.mesh, source, target, self.price)

    def reduction(self, op: Op, option: int, around: _Around) -> float:
        """Cost of reducing the partials that an op makes, and those that it cannot take as partials."""
        strategies, total = self.strategies(op), 0.0
        for value, made, readers in zip(op.results, strategies.result_specs, around.readers, strict=True):
            if made[option].partial and readers != {made[option]}:
                total += self.times[value.name] * self.reduce_cost(value, made[option])
        for value, needed, source in zip(op.operands, strategies.operand_specs, around.sources, strict=True):
            if source is not None and source.partial not in ((), needed[option].partial):
                total += self.times[value.name] * self.reduce_cost(value, source)
        return total

    def reduce_cost(self, value: Value, spec: ShardSpec) -> float:
        """Cost of reducing partials."""
        return self.cost(value, spec, spec.without_partial())

    def work(self, op: Op) -> list[tuple[float, float]]:
        """(FLOP, bytes touched) of one rank under every option."""
        strategies = self.strategies(op)
        touched = np.zeros(len(strategies.options))
        for value, parts in zip((*op.operands, *op.results), strategies.parts(self.mesh), strict=True):
            touched += local_bytes(value.shape, itemsize(value.dtype), parts)
        total = 0.0 if op.kind in SOURCES else float(flops(op))
        flop = [
            total / self.mesh.count(a for _, axes in layout.axes for a in axes)
            for layout in strategies.layouts(self.mesh)
        ]
        return list(zip(flop, touched.tolist(), strict=True))

    def layouts(self, origin: Origin) -> Layouts:
        """The layouts of all ops and values."""
        ops = {op.name: self.strategies(op).layout(self.mesh, self.chosen[op.name]) for op in self.graph.ops}
        values: dict[str, DistAttr] = {}
        for op in self.graph.ops:
            for value in op.results:
                if value.name in self.pinned:
                    values[value.name] = DistAttr(
                        self.mesh, self.pinned[value.name], self.graph.attrs[value.name].origin
                    )
                else:
                    values[value.name] = DistAttr(self.mesh, self.stored(op, value), origin)
        return Layouts(ops, values)

    def stored(self, op: Op, value: Value) -> ShardSpec:
        """The layout of a value between the op that makes it and those that read it."""
        made = self.left(value)
        assert made is not None
        if op.kind in SOURCES:
            return made
        if value.name in self.replaced:
            source = self.left(self.graph.values[self.replaced[value.name]])
            assert source is not None
            return source
        needed = self.needed(value)
        if len(needed) < 2 and not (made.partial and value.name in self.graph.live_out):
            return made  # no third layout in between is cheaper
        candidates = [made, made.without_partial(), *sorted(needed, key=str)]
        if value.name in self.graph.live_out:
            candidates = [spec for spec in candidates if not spec.partial]

        def total(spec: ShardSpec) -> float:
            return self.cost(value, made, spec) + sum(self.cost(value, spec, w) for w in needed)

        return min(candidates, key=total)


def _forward(op: Op) -> bool:
    return op.role in ("forward", "data")
