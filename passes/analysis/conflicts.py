"""Where two annotations want the same mesh axis, what that costs, and which change of annotation saves it.

In:   a completed graph, whose `lost` lists the claims that found their axis taken
      (see `propagate_shardings`).
Out:  one Conflict a lost claim: both sides with their origins, the moves of data that follow, their bytes
      and, with a cluster's price, their seconds; and the change of annotation after which a step moves least.
Invariant: the graph stays as it is.

    %y matmul (train.py:31): axis tp is wanted for index n by train.py:12 but held by train.py:9
      %h [_, tp] -> [_, _]: all_gather, 32 KiB a rank and step
      fix: take tp out of the annotation at train.py:12; a step then moves 12 KiB a rank instead of 44 KiB
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from distgraph.errors import ShardingError
from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.op_registry import operand_layout, result_layout
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.step_phases import multiplicity
from distgraph.passes.analysis.redistribution_cost import move_cost
from distgraph.passes.pass_pipeline import run_completion
from distgraph.passes.propagate_shardings import Lost
from distgraph.passes.redistribution.cross_mesh import transfer
from distgraph.passes.redistribution.planner import Price, redistribute, step_bytes, wire_price
from distgraph.passes.reshard import reshard
from distgraph.resources.units import format_bytes, format_si

Plan = Callable[[Graph], Graph]
_LEAST = 0.5  # bytes that a change of annotation must save to be worth a word


@dataclass(frozen=True, slots=True)
class Move:
    """A change of layout: which value, from where to where, by which collectives, at what cost.

    Attributes:
        value: name.
        source, target: layouts.
        collectives: kinds, in order.
        nbytes: bytes that a rank sends for it in one step.
        seconds: by the cluster's price in one step; None without one.
    """

    value: str
    source: DistAttr
    target: DistAttr
    collectives: tuple[str, ...]
    nbytes: float
    seconds: float | None = None

    def __str__(self) -> str:
        there = f" on {self.target.mesh}" if self.source.mesh != self.target.mesh else ""
        cost = f"{format_bytes(self.nbytes)} a rank and step"
        cost += "" if self.seconds is None else f", {format_si(self.seconds, 's')}"
        kinds = ", ".join(self.collectives) or "local"
        return f"%{self.value} {self.source.spec} -> {self.target.spec}{there}: {kinds}, {cost}"


@dataclass(frozen=True, slots=True)
class Fix:
    """A change of the annotations of one source line.

    Attributes:
        where: file:line of the annotation.
        axis: the axis to take out of it; "" where the whole annotation goes.
        before, after: bytes that a rank sends in a step without and with the change.
    """

    where: str
    axis: str
    before: float
    after: float

    def __str__(self) -> str:
        what = f"take {self.axis} out of" if self.axis else "drop"
        return (
            f"{what} the annotation at {self.where}; a step then moves {format_bytes(self.after)} a rank "
            f"instead of {format_bytes(self.before)}"
        )


@dataclass(frozen=True, slots=True)
class Conflict:
    """A claim that lost, and what follows from it.

    Attributes:
        lost: the claim, with both origins and the op where it was lost.
        kind: kind of that op.
        moves: changes of layout at that op which concern the axis.
        fix: the change of annotation after which a step moves fewest bytes; None where none saves any.
    """

    lost: Lost
    kind: str
    moves: tuple[Move, ...]
    fix: Fix | None

    @property
    def nbytes(self) -> float:
        """Bytes that a rank sends in a step because of it."""
        return sum(move.nbytes for move in self.moves)

    def __str__(self) -> str:
        lines = [_lost_text(self.lost, self.kind), *(f"  {move}" for move in self.moves)]
        if not self.moves:
            lines.append("  no data moves because of it")
        if self.fix is not None:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def _lost_text(lost: Lost, kind: str) -> str:
    where = f" ({lost.source})" if lost.source else ""
    claimed = f"index {lost.index}" if lost.index else f"another dim of %{lost.value}"
    text = f"%{lost.op} {kind}{where}: axis {lost.axis} is wanted for {claimed} by {_where(lost.claimed)}"
    if lost.reason == "taken":
        return f"{text} but held by {_where(lost.held)}"
    return text + (
        " but the op needs it whole" if lost.reason == "whole" else " but it is too small to be split so"
    )


def _where(origin: Origin) -> str:
    return origin.where or str(origin)


def conflicts(
    graph: Graph, *, seconds: Price | None = None, plan: Plan | None = run_completion
) -> tuple[Conflict, ...]:
    """What completion had to decide against an annotation, most bytes first.

    Args:
        graph: a completed graph.
        seconds: seconds of one collective on the cluster (see `planner.Price`).
        plan: completes a graph; the changes of annotation are tried with it. None tries none: no conflict has
            a fix then, and the report is cheap.
    """
    fixes: dict[tuple[str, Origin, Origin], Fix | None] = {}
    times = multiplicity(graph)
    reports = []
    for lost in graph.lost:
        op = graph.producers.get(lost.op)
        if op is None or op.layout is None:
            continue
        moves = tuple(_moves_of(graph, op, lost, times, seconds))
        key = (lost.axis, lost.claimed, lost.held)
        if key not in fixes and moves and plan is not None:
            fixes[key] = _best_fix(graph, lost, plan)
        reports.append(Conflict(lost, op.kind, moves, fixes.get(key) if moves else None))
    return tuple(sorted(reports, key=lambda c: -c.nbytes))


def moves_at(graph: Graph, op: Op, times: Mapping[str, int], seconds: Price | None = None) -> Iterator[Move]:
    """Changes of layout between what an op reads and leaves and what is stored."""
    if op.layout is None or op.kind in SOURCES or op.kind == "reshard":
        return
    for i, value in enumerate(op.operands):
        stored = graph.attrs[value.name]
        needed = DistAttr(op.layout.mesh, operand_layout(op, i))
        if stored != needed:
            yield _move(value, stored, needed, times, seconds)
    for i, value in enumerate(op.results):
        result = DistAttr(op.layout.mesh, result_layout(op, i))
        if graph.attrs[value.name] != result:
            yield _move(value, result, graph.attrs[value.name], times, seconds)


def _moves_of(
    graph: Graph, op: Op, lost: Lost, times: Mapping[str, int], seconds: Price | None
) -> Iterator[Move]:
    seen = set()
    readers = graph.users[lost.value] if not lost.index else ()
    for each in (op, *readers):
        for move in moves_at(graph, each, times, seconds):
            concerned = _place(move.source.spec, lost.axis) != _place(move.target.spec, lost.axis)
            if concerned and (move.value, move.target) not in seen:
                seen.add((move.value, move.target))
                yield move


def _place(spec: ShardSpec, axis: str) -> tuple[int, str | None]:
    """The dim that an axis splits, or the reduction that is pending over it."""
    return next((d for d, axes in enumerate(spec.dims) if axis in axes), -1), spec.reduction(axis)


def _move(
    value: Value, source: DistAttr, target: DistAttr, times: Mapping[str, int], seconds: Price | None
) -> Move:
    size, count = itemsize(value.dtype), times[value.name]
    cost = count * move_cost(value.shape, size, source, target, wire_price)
    if source.mesh == target.mesh:
        steps = redistribute(value.shape, size, source.mesh, source.spec, target.spec)
        cost = count * sum(step_bytes(step, value.shape, size, source.mesh) for step in steps)
        kinds = tuple(step.kind for step in steps if not step.local)
    else:
        crossing = transfer(value.shape, size, source, target)
        before, after = (
            [step.kind for step in steps if not step.local] for steps in (crossing.before, crossing.after)
        )
        kinds = (*before, "transfer", *after)
    time = None if seconds is None else count * move_cost(value.shape, size, source, target, seconds)
    return Move(value.name, source, target, kinds, cost, time)


def traffic(graph: Graph) -> float:
    """Bytes that a rank sends in one step of a completed graph, summed over its changes of layout."""
    moved = reshard(graph)
    times = multiplicity(moved)
    total = 0.0
    for op in moved.ops:
        if op.kind == "reshard":
            value = op.result
            source, target = moved.attrs[op.operands[0].name], moved.attrs[value.name]
            cost = move_cost(value.shape, itemsize(value.dtype), source, target, wire_price)
            total += times[value.name] * cost
    return total


def _best_fix(graph: Graph, lost: Lost, plan: Plan) -> Fix | None:
    """Of both sides' annotations, without the axis or gone, the change that leaves the least traffic."""
    serial = _serial(graph)
    before = traffic(plan(serial))
    best: Fix | None = None
    for origin in dict.fromkeys((lost.claimed, lost.held)):
        for axis in (lost.axis, ""):
            changed = _without(serial, origin, axis)
            if changed is None:
                continue
            try:
                after = traffic(plan(changed))
            except ShardingError:
                continue  # nothing names a mesh any more
            if after < before - _LEAST and (best is None or after < best.after - _LEAST):
                best = Fix(_where(origin), axis, before, after)
    return best


def _serial(graph: Graph) -> Graph:
    """The graph as it was before completion: annotations only."""
    pinned = {name: attr for name, attr in graph.attrs.items() if attr.pinned}
    return replace(graph, ops=tuple(op.with_layout(None) for op in graph.ops), attrs=pinned, lost=())


def _without(graph: Graph, origin: Origin, axis: str) -> Graph | None:
    """A graph without an axis in the annotations of one source line, or without these annotations at all."""
    touched = {
        n: a for n, a in graph.attrs.items() if a.origin == origin and (not axis or axis in a.spec.axes)
    }
    if not touched:
        return None
    attrs = {name: attr for name, attr in graph.attrs.items() if axis or name not in touched}
    for name, attr in touched.items() if axis else ():
        dims = tuple(tuple(a for a in dim if a != axis) for dim in attr.spec.dims)
        partial = tuple((a, kind) for a, kind in attr.spec.partial if a != axis)
        attrs[name] = replace(attr, spec=ShardSpec(dims, partial))
    borders = {op.name for op in graph.ops if op.kind == "reshard"}
    if not axis and borders & set(touched):
        return None  # a reshard op without its layout means nothing
    return replace(graph, attrs=attrs)


def explain(graph: Graph, name: str) -> str:
    """Who decided the layout of a value (%name or name), what was lost there, and what changes of it follow.

    Raises:
        GraphError: there is no such value, or it has no layout yet.
    """
    value = graph.value(name)
    if value.name not in graph.attrs:
        return f"%{value.name} : {value.type} has no layout yet; run the pass complete"
    attr, producer = graph.attrs[value.name], graph.producers[value.name]
    lines = [f"%{value.name} : {value.type} {attr.spec} on {attr.mesh}, decided by {attr.origin}"]
    lines += [f"  {axis}: {_chain(graph, value, axis)}" for axis in attr.spec.axes]
    lines += [f"  task {producer.task}, {producer.role}"] if producer.task else []
    times = multiplicity(graph)
    for op in (producer, *graph.users[value.name]):
        where = f" ({op.source})" if op.source else ""
        lines += [
            f"  at %{op.name} {op.kind}{where}: {move}"
            for move in moves_at(graph, op, times)
            if move.value == value.name
        ]
    for lost in graph.lost:
        if lost.value == value.name or lost.op == producer.name:
            lines.append(f"  lost: {_lost_text(lost, graph.producers[lost.op].kind)}")
    return "\n".join(lines)


def _chain(graph: Graph, value: Value, axis: str) -> str:
    """The shortest way on which an axis came here from an annotation, through values that it splits."""
    came: dict[str, tuple[str, Op] | None] = {value.name: None}
    queue = [value.name]
    for name in queue:
        if graph.attrs[name].pinned:
            return _written(graph, came, name)
        for op in (graph.producers[name], *graph.users[name]):
            for other in (*op.operands, *op.results):
                if other.name not in came and axis in graph.attrs[other.name].spec.axes:
                    came[other.name] = (name, op)
                    queue.append(other.name)
    return "no annotation; the op that makes it leaves it so"


def _written(graph: Graph, came: Mapping[str, tuple[str, Op] | None], name: str) -> str:
    text = f"%{name} is annotated at {_where(graph.attrs[name].origin)}"
    step = came[name]
    while step is not None:
        name, op = step
        text += f", through {op.kind} to %{name}"
        step = came[name]
    return text
