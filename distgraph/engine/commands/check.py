"""Partitioned == serial: every value of a program on in-process ranks against the serial interpreter.

Two comparisons, so that the first op that diverges is named and not one further down:

* *op by op*: each op of the lowered graph, collectives too, is run serially on what the ranks held before it,
  put together, and compared with what they held after it;
* *whole program*: each value of the serial graph is compared with the interpreter's run from the same inputs.

What rounding may change is measured, not guessed: the serial side runs again with its operands moved in
their last digit. With d the largest change that makes, m the largest element, n the number of terms that the
op sums and eps of the dtype, an op may be off by 16 (d + sqrt(n) eps m), a value of the whole program by that
times the square root of the longest path of ops to it. The operand of an op may be a sum that ranks hold in
parts: its last digit is that of the largest part, since parts may cancel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.collective_registry import is_collective
from distgraph.ir.dtypes import epsilon, to_numpy
from distgraph.ir.graph import SOURCES, Graph, Op, Value
from distgraph.ir.op_registry import lookup, rule_of
from distgraph.ir.printer import draw, print_op
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.pass_pipeline import Pipeline, pipeline
from distgraph.passes.pass_registry import Pass
from distgraph.runtime.execute.process_group import InProcessWorld
from distgraph.runtime.execute.worker import Worker
from distgraph.runtime.program.build import Build, build

Array = Any
Arrays = Mapping[str, Array]
_SAFETY = 16.0
_NOT_JOINED = ("comm.halo", "comm.reduce")
"""Blocks of a halo overlap, and a reduce has a result on one rank: the op that reads it is compared."""
_NOT_SHOWN = (*SOURCES, *_NOT_JOINED)
_DRAWS = 3  # last-digit changes tried; one alone may cancel by chance
_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True, slots=True)
class Difference:
    """One value on which the partitioned and the serial program differ.

    Attributes:
        op: that makes it.
        value: its name.
        error: largest difference of an element; inf where one side is no finite number, or replicas differ.
        bound: what rounding explains.
        largest: largest element of the serial value.
        where: index of the worst element.
        how: "op by op", "whole program" or "replicas".
    """

    op: Op
    value: Value
    error: float
    bound: float
    largest: float
    where: tuple[int, ...]
    how: str

    @property
    def wrong(self) -> bool:
        """Whether rounding does not explain it."""
        return not self.error <= self.bound


@dataclass(frozen=True, slots=True)
class Report:
    """Outcome of a check.

    Attributes:
        graph: the lowered graph.
        ranks: how many took part.
        compared: values compared, op by op and over the whole program.
        first: the first that diverges, in program order; None when all agree.
        outputs: label -> difference from the serial program.
        gradients: parameter -> difference of its gradient from the serial program's.
        widened: whether gradients were sent in f32 where the program sends them in 16 bits.
    """

    graph: Graph
    ranks: int
    compared: int
    first: Difference | None
    outputs: dict[str, Difference]
    gradients: dict[str, Difference]
    widened: bool = False

    @property
    def ok(self) -> bool:
        """Whether partitioned equals serial."""
        return self.first is None

    def __str__(self) -> str:
        lines = [f"compared {self.compared} values on {self.ranks} ranks, forward, backward and optimizer"]
        for label, error in self.outputs.items():
            lines.append(f"  output {label}: {_size(error)}")
        if self.gradients:
            name, worst = max(self.gradients.items(), key=lambda item: _ratio(item[1]))
            lines.append(
                f"  gradients of {len(self.gradients)} parameters; nearest its bound: {name}, {_size(worst)}"
            )
        if self.widened:
            lines.append("  gradients were sent in f32, not in 16 bits, whose rounding would be a difference")
        lines.append("partitioned == serial" if self.first is None else self._diverged(self.first))
        return "\n".join(lines)

    def _diverged(self, first: Difference) -> str:
        op = first.op
        line = print_op(self.graph if op.name in self.graph.producers else Graph("", (op,)), op)
        scope = f" in {op.scope}" if op.scope else ""
        reason = {
            "op by op": "its operands, put together, give another result serially",
            "whole program": "each op does what it says, but the serial program has another value here",
            "replicas": "ranks that should hold the same block hold different ones",
        }[first.how]
        return (
            f"first diverging op: {op}{scope} [{op.role}]\n"
            f"  %{first.value.name} at {list(first.where)} is off by {first.error:.3g}, rounding explains "
            f"{first.bound:.3g} (largest element {first.largest:.3g}); {reason}\n"
            f"{reason}\n" + draw(line, 0, len(first.value.name) + 1)
        )


def _size(difference: Difference) -> str:
    return f"off by {difference.error:.3g} of {difference.largest:.3g}, bound {difference.bound:.3g}"


def _ratio(difference: Difference) -> float:
    return difference.error / difference.bound if difference.bound else math.inf if difference.error else 0.0


def check(
    completed: Graph,
    inputs: Arrays,
    params: Arrays,
    serial: Graph | None = None,
    passes: Pipeline | None = None,
) -> Report:
    """Compare a partitioned program with its serial meaning.

    Args:
        completed: graph of one micro-batch, with layouts.
        inputs: name of an input -> whole array or number.
        params: name of a param or state -> whole array.
        serial: the graph before completion; the completed one by default.
        passes: those that the program is compiled by; by default `PIPELINE`.

    Raises:
        GraphError: an input or param is missing or has another shape.
        RuntimeFault: a rank failed.
    """
    chosen = passes or pipeline()
    widened = any(each.name == _NARROWS for each in chosen.passes)
    if widened:
        chosen = chosen.changed([f"-{_NARROWS}"])
    built = build(completed, passes=chosen.with_pass(_EXPOSE))
    sources = _sources(built.lowered, inputs, params)
    blocks = _run(built, sources)
    whole, replicas, parts = _join_all(built.lowered, blocks, sources)
    shown = [op for op in built.lowered.ops if op.kind not in _NOT_SHOWN]
    local = [error for op in shown for error in _op_by_op(op, whole, parts)]
    program = _whole_program(serial or completed, inputs, params, whole)
    position = {v.name: i for i, v in enumerate(built.lowered.values.values())}
    wrong = [d for d in (*replicas, *local) if d.wrong] or [d for d in program.values() if d.wrong]
    first = min(wrong, key=lambda d: position[d.value.name], default=None)
    outputs = {label: program[v.name] for label, v in completed.outputs if v.name in program}
    gradients = {
        op.link: program[op.name]
        for op in completed.ops
        if op.kind == "accumulate" and op.role == "backward" and op.name in program
    }
    ranks = len(built.ranks)
    return Report(built.lowered, ranks, len(local) + len(program), first, outputs, gradients, widened)


def _expose(lowered: Graph) -> Graph:
    """Make every value an output, and update nothing in place."""
    shown = tuple((v.name, v) for op in lowered.ops if op.kind not in _NOT_SHOWN for v in op.results)
    return replace(lowered, outputs=shown, updates=())


_NARROWS = "narrow_gradients"
_EXPOSE = Pass("expose_values", _expose, requires="lowered", stage="lowered")


def _sources(graph: Graph, inputs: Arrays, params: Arrays) -> dict[str, Array]:
    """Value name -> whole array of every source."""
    arrays = {}
    for op in graph.sources():
        value, dtype = op.result, to_numpy(op.result.dtype)
        if op.kind == "constant":
            arrays[op.name] = np.broadcast_to(np.asarray(op.attrs["value"], dtype), value.shape)
            continue
        given, name = (inputs if op.kind == "input" else params), str(op.attrs["name"])
        if name not in given or np.shape(given[name]) != value.shape:
            there = f"shape {np.shape(given[name])}" if name in given else "nothing"
            raise GraphError(f"{op.kind} {name} is {value.type} but {there} is given to the check")
        arrays[op.name] = np.asarray(given[name], dtype)
    return arrays


def _run(built: Build, blocks: Arrays) -> list[dict[str, Array]]:
    graph, world = built.lowered, InProcessWorld(max(built.ranks) + 1)

    def work(rank: int) -> dict[str, Array]:
        if rank not in built.ranks:
            return {}
        sources, feeds = {}, {}
        for op in graph.sources("input", "param", "state"):
            attr, array = graph.attrs[op.name], blocks[op.name]
            if rank not in attr.mesh:
                continue
            block = np.array(array[attr.spec.slices(array.shape, attr.mesh, rank)])
            if op.kind != "input":
                sources[op.name] = block
            else:
                feeds[str(op.attrs["name"])] = [block] if array.shape else array[()]
        worker = Worker(built.program(rank), built.schedule, world.transport(rank), np, sources)
        return {name: np.array(block) for name, block in worker.step(feeds).items()}

    try:
        return list(world.run(work).values())
    finally:
        world.close()


def _join_all(
    graph: Graph, held: list[dict[str, Array]], sources: Arrays
) -> tuple[dict[str, Array], list[Difference], dict[str, float]]:
    """Whole tensors of all values, differences of replicas, and the largest part of sums held in parts."""
    whole, replicas, parts = dict(sources), [], dict[str, float]()
    for op in graph.ops:
        if op.kind in _NOT_JOINED:
            whole[op.name] = whole[op.operands[0].name]
            parts[op.name] = parts.get(op.operands[0].name, 0.0)
        for value in op.results:
            if value.name in whole:
                continue
            attr = graph.attrs[value.name]
            blocks = {rank: held[rank][value.name] for rank in attr.mesh.members}
            array, spread, where = join(value, attr, blocks)
            whole[value.name] = array
            largest = _largest(array)
            if any(reduction == "sum" for _, reduction in attr.spec.partial):
                parts[value.name] = max(_largest(block) for block in blocks.values())
            bound = _SAFETY * epsilon(value.dtype) * largest * math.sqrt(attr.mesh.size)
            replicas.append(Difference(op, value, spread, bound, largest, where, "replicas"))
    return whole, replicas, parts


def join(value: Value, attr: DistAttr, blocks: Mapping[int, Array]) -> tuple[Array, float, tuple[int, ...]]:
    """The whole tensor from the ranks' blocks: pending reductions done, replicas compared.

    Returns:
        the tensor, the largest difference between two replicas, and where it is.
    """
    mesh, spec = attr.mesh, attr.spec
    axes = tuple(axis for axis, _ in spec.partial)
    sizes = tuple(mesh.axis_size(axis) for axis in axes)
    stacked = np.zeros((*sizes, *value.shape), to_numpy(value.dtype))
    seen = np.zeros((*sizes, *value.shape), bool)
    worst, where = 0.0, (0,) * len(value.shape)
    for rank, block in blocks.items():
        place = tuple(mesh.index(rank, (axis,)) for axis in axes)
        slices = spec.slices(value.shape, mesh, rank)
        position: Any = (*place, *slices)
        before = seen[position]
        if before.any():
            error, index = _difference(np.where(before, stacked[position], block), block)
            if error > worst:
                worst = error
                where = tuple(i + s.start for i, s in zip(index, slices, strict=True))
        stacked[position] = np.where(before, stacked[position], block)
        seen[position] = True
    for _, reduction in spec.partial:  # the first is the innermost
        stacked = _REDUCE[reduction].reduce(stacked, axis=0).astype(stacked.dtype)
    return stacked, worst, where


def _op_by_op(op: Op, whole: Arrays, parts: Mapping[str, float]) -> list[Difference]:
    """One op on the operands that the ranks held."""
    operands = {value.name: value for value in op.operands}
    ops = [Op("input", (), (v,), {"name": v.name}) for v in operands.values()]
    alone = Graph("alone", (*ops, op), tuple((v.name, v) for v in op.results))
    given = {name: whole[name] for name in operands}
    return list(_compare(alone, {op.name: 1.0}, given, {}, whole, "op by op", parts).values())


def _whole_program(serial: Graph, inputs: Arrays, params: Arrays, whole: Arrays) -> dict[str, Difference]:
    shown = tuple((v.name, v) for op in serial.ops if op.kind not in SOURCES for v in op.results)
    depth: dict[str, int] = {}
    for op in serial.ops:
        longest = 1 + max((depth[v.name] for v in op.operands), default=0)
        depth.update(dict.fromkeys((v.name for v in op.results), longest))
    graph = replace(serial, outputs=shown, updates=())
    factors = {op.name: math.sqrt(depth[op.name]) for op in serial.ops}
    return _compare(graph, factors, inputs, params, whole, "whole program")


def _compare(
    graph: Graph,
    factors: Mapping[str, float],
    inputs: Arrays,
    params: Arrays,
    whole: Arrays,
    how: str,
    parts: Mapping[str, float] | None = None,
) -> dict[str, Difference]:
    """Value name -> difference between what the ranks hold and a serial run, with what rounding explains."""
    base, _ = interpret(graph, inputs, params)
    moved = dict.fromkeys(base, 0.0)
    with np.errstate(all="ignore"):
        for draw_number in range(_DRAWS):
            rng = np.random.default_rng(draw_number)
            near, _ = interpret(graph, _nudged(inputs, rng, parts or {}), _nudged(params, rng, {}))
            for name, array in near.items():
                moved[name] = max(moved[name], _difference(array, base[name])[0])
    differences = {}
    for op in graph.ops:
        for value in op.results:
            if value.name not in base or value.name not in whole:
                continue
            error, where = _difference(whole[value.name], base[value.name])
            largest = _largest(base[value.name])
            rounding = moved[value.name] + math.sqrt(_terms(op)) * epsilon(value.dtype) * largest
            bound = _SAFETY * factors[op.name] * rounding
            differences[value.name] = Difference(op, value, error, bound, largest, where, how)
    return differences


def _nudged(arrays: Arrays, rng: np.random.Generator, parts: Mapping[str, float]) -> dict[str, Array]:
    """Floats moved up or down by their last digit, or by that of their largest part; all else as it is."""
    moved = {}
    for name, given in arrays.items():
        array = np.asarray(given)
        if array.dtype.kind in "fV" or array.dtype.name == "bfloat16":
            eps = epsilon("bf16") if array.dtype.name == "bfloat16" else float(np.finfo(array.dtype).eps)
            exact = array.astype(np.float64)
            digit = eps * np.maximum(np.abs(exact), parts.get(name, 0.0))
            array = (exact + digit * rng.choice((-1.0, 1.0), array.shape)).astype(array.dtype)
        moved[name] = array
    return moved


def _terms(op: Op) -> int:
    """How many terms an element of the first result is made of."""
    if op.kind in SOURCES or is_collective(op) or not lookup(op.kind).rule:
        return 1
    rule = rule_of(op)
    indices = set().union(*(rule.reduced(i) for i in range(len(op.results)))) | rule.whole
    return max(1, math.prod(rule.sizes[index] for index in indices))


def _difference(left: Array, right: Array) -> tuple[float, tuple[int, ...]]:
    """Largest difference of two arrays and its index; inf where only one is finite."""
    if left.size == 0:
        return 0.0, (0,) * left.ndim
    with np.errstate(all="ignore"):
        a, b = np.asarray(left, np.float64), np.asarray(right, np.float64)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        error = np.where(same, 0.0, np.abs(a - b))
    error = np.where(np.isnan(error), np.inf, error)
    where = np.unravel_index(int(error.argmax()), error.shape)
    return float(error[where]), tuple(int(i) for i in where)


def _largest(array: Array) -> float:
    if array.size == 0:
        return 0.0
    magnitude = np.abs(np.asarray(array, np.float64))
    return float(np.where(np.isfinite(magnitude), magnitude, 0.0).max())
