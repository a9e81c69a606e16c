"""The part of a program that one rank runs: local shapes, local attributes, explicit communication.

In:   the tasks of a lowered graph (see `phases`) and a rank.
Out:  a RankProgram: for each task of the rank its local ops, and the local type of every value it touches.
Invariant: ranks of one mesh run the same ops in the same order; only shapes, offsets and partners differ.

    %h : f32[64, 512] [dp, tp] = matmul(%x, %w1)      ->      rank 3: h : f32[32, 256] = matmul(x, w1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distgraph.ir.collective_registry import Collective, RankCall, is_collective, of_one_tensor, wire_dtype
from distgraph.ir.collectives import collective_of
from distgraph.ir.dtypes import itemsize
from distgraph.ir.gc_pause import collector_paused
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.loops import Loop
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import Attrs, local_attrs, local_shapes, lookup, window_bounds
from distgraph.ir.sharding_spec import DistAttr
from distgraph.passes.pass_registry import PassContext, register_pass
from distgraph.passes.redistribution.halo import halo_tiles, inside_window
from distgraph.passes.redistribution.tiles import Tile, tiles_by_rank
from distgraph.passes.split_tasks import Part, Parts

LocalType = tuple[tuple[int, ...], str]
Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class LocalOp:
    """One op as one rank runs it.

    Attributes:
        op: the global op.
        mode: compute, loop, comm, send, recv, exchange or accumulate.
        attrs: local attributes of a computation, programs of the bodies of a loop, or arguments of the
            collective.
        tail: runs with the last micro-batch only.
    """

    op: Op
    mode: str
    attrs: Mapping[str, Any]
    tail: bool = False

    @property
    def collective(self) -> Collective | None:
        """The declaration of what the rank does with others of its group, or a slice or mask; else None."""
        return collective_of(self.mode)


@dataclass(frozen=True, slots=True)
class LocalTask:
    """One task on one rank."""

    name: str
    kind: str
    per_micro: bool
    ops: tuple[LocalOp, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """All that a rank runs in one step.

    Attributes:
        rank: the rank.
        tasks: its tasks.
        types: value name -> local shape and dtype, for every value that is stored on the rank.
        parts: the tasks of all ranks.
    """

    rank: int
    tasks: tuple[LocalTask, ...]
    types: dict[str, LocalType]
    parts: Parts = field(repr=False)

    @property
    def graph(self) -> Graph:
        """The lowered graph."""
        return self.parts.graph

    @property
    def ops(self) -> Iterator[LocalOp]:
        """The ops of all its tasks."""
        return (local for task in self.tasks for local in task.ops)

    def makers(self) -> dict[str, LocalOp]:
        """Value -> the op by which it comes to be on the rank."""
        return {value.name: local for local in self.ops if local.mode != "send" for value in local.op.results}

    def received(self) -> set[str]:
        """Values that come from another mesh."""
        return {local.op.result.name for local in self.ops if local.mode == "recv"}

    def constant(self, value: str) -> Any:
        """The rank's block of an array that stands in the program; a number as it is."""
        payload = self.graph.producers[value].attrs["value"]
        if np.ndim(payload) == 0:
            return payload
        attr = self.graph.attrs[value]
        return np.ascontiguousarray(payload[attr.spec.slices(payload.shape, attr.mesh, self.rank)])

    def bytes_sent(self) -> float:
        """Bytes that the rank sends in one step (ring algorithms), counted op by op."""
        micro = self.graph.micro_batches
        total = 0.0
        for task in self.tasks:
            for local in task.ops:
                times = micro if task.per_micro and not local.tail else 1
                total += times * float(local.attrs.get("wire", 0.0))
        return total


@collector_paused()
def partition(parts: Parts, rank: int) -> RankProgram:
    """The program of one rank."""
    types: dict[str, LocalType] = {}
    for mesh, blocks in parts.blocks.items():
        if rank in mesh:
            for (shape, dtype, spec, windows), names in blocks.items():
                bounds = window_bounds(shape, mesh, spec, windows, rank)
                held = tuple(stop - start for start, stop in bounds)  # with the halo where there is one
                types.update(dict.fromkeys(names, (held, dtype)))
    tasks = tuple(_local_task(parts, part, rank) for part in parts.tasks if rank in part.mesh)
    return RankProgram(rank, tasks, types, parts)


def _local_task(parts: Parts, part: Part, rank: int) -> LocalTask:
    graph, numbers, ops = parts.graph, parts.numbers, []
    for op in part.body:
        tail = op.name in part.tail
        if op.kind == "comm.transfer":
            moves = _transfer(graph, op, part.mesh, rank, numbers[op.name])
            ops.append(LocalOp(op, moves[0], {**moves[1], "per_micro": parts.phase[op.name] == 1}, tail))
        elif is_collective(op):
            mode, attrs = _comm(graph, op, rank, numbers[op.name])
            ops.append(LocalOp(op, mode, {**attrs, "per_micro": parts.phase[op.name] == 1}, tail))
        elif op.kind == "accumulate":
            ops.append(LocalOp(op, "accumulate", {}, False))
        elif op.name in parts.loops:
            ops.append(LocalOp(op, "loop", _loop(op, parts.loops[op.name], rank), tail))
        elif op.kind not in SOURCES:
            ops.append(LocalOp(op, *_computation(op, rank), tail))
    return LocalTask(part.name, part.kind, part.per_micro, tuple(ops))


def _computation(op: Op, rank: int) -> tuple[str, Attrs]:
    """Mode and attributes of a computation; a result that is a part of the operand becomes a view of it."""
    attrs, part = local_attrs(op, rank), lookup(op.kind).part
    where = None if part is None else part(attrs, local_shapes(op, rank)[0][0])
    return ("compute", attrs) if where is None else ("comm.slice", {"slices": where})


def _loop(op: Op, bodies: Mapping[str, Parts], rank: int) -> dict[str, Any]:
    """The programs of the bodies of a loop on one rank."""
    programs = {name: partition(parts, rank) for name, parts in bodies.items()}
    turns = Loop(op).turns
    return {"programs": programs, "wire": turns * sum(each.bytes_sent() for each in programs.values())}


def communication(graph: Graph, op: Op, rank: int) -> LocalOp:
    """A change of layout of a lowered graph, as a rank of the mesh that it reads from runs it; with tag 0."""
    if op.kind == "comm.transfer":
        mode, attrs = _transfer(graph, op, graph.attrs[op.operands[0].name].mesh, rank, 0)
    else:
        mode, attrs = _comm(graph, op, rank, 0)
    return LocalOp(op, mode, attrs)


def receives(graph: Graph, op: Op, rank: int) -> bool:
    """Whether a rank gets a part of a transfer from another rank."""
    moves = tiles_by_rank(op.result.shape, graph.attrs[op.operands[0].name], graph.attrs[op.result.name])
    return any(tile.target_rank == rank != tile.source_rank for tile in moves.get(rank, ()))


def _comm(graph: Graph, op: Op, rank: int, number: int) -> tuple[str, dict[str, Any]]:
    """Mode and attributes of a collective on one rank: on its group, tile by tile, or on its block alone."""
    source, target = graph.attrs[op.operands[0].name], graph.attrs[op.name]
    mesh = source.mesh
    declared = collective_of(op.kind)
    assert declared is not None, op.kind
    if "windows" in op.attrs:  # a halo, whose axes are those of the mesh that reads
        return "exchange", _halo(op, source, target, rank, number)
    if declared.traffic == "tiles":
        tiles = tiles_by_rank(op.result.shape, source, target).get(rank, ())
        return "exchange", _exchange(op, tiles, source, target, rank, number)
    group = () if declared.local else mesh.group(rank, tuple(op.attrs.get("axes", ())))
    calls = [
        RankCall(single, graph.attrs[single.operands[0].name], graph.attrs[single.name], rank, group)
        for single in (of_one_tensor(op, position) for position in range(len(op.results)))
    ]
    arguments = _arguments(declared, op, calls)
    if declared.local:
        return op.kind, arguments
    larger = op.results if declared.growth > 0 else op.operands
    shapes = (graph.attrs[value.name].spec.local_shape(value.shape, mesh, rank) for value in larger)
    size = itemsize(wire_dtype(op)) * sum(map(math.prod, shapes))
    return op.kind, {"group": group, **arguments, "wire": declared.sent_share(len(group)) * size}


def _arguments(declared: Collective, op: Op, calls: Sequence[RankCall]) -> dict[str, Any]:
    """Arguments of the transport call: of pieces of several tensors, one of each for every tensor.

    What the op states once, such as the reduction, is stated once.
    """
    if declared.arguments is None:
        return {}
    if len(calls) == 1 or declared.fusible != "pieces":
        return dict(declared.arguments(calls[0]))
    each = [declared.arguments(call) for call in calls]
    return {name: op.attrs.get(name, tuple(given[name] for given in each)) for name in each[0]}


def _halo(op: Op, source: DistAttr, target: DistAttr, rank: int, number: int) -> dict[str, Any]:
    """An exchange after which every rank holds its window."""
    shape, windows = op.result.shape, op.attrs["windows"]
    tiles = halo_tiles(shape, target.mesh, target.spec, windows, source)
    want = window_bounds(shape, target.mesh, target.spec, windows, rank)
    attrs = _exchange(op, tiles, source, target, rank, number)
    landing = [(tile, inside_window(tile, want, shape)) for tile in tiles if tile.target_rank == rank]
    recvs = tuple((tile.source_rank, where) for tile, where in landing if not tile.local)
    local = tuple(where for tile, where in landing if tile.local)
    copies = tuple((have, where) for (have, _), where in zip(attrs["copies"], local, strict=True))
    return {**attrs, "recvs": recvs, "copies": copies}


def _transfer(graph: Graph, op: Op, mesh: ProcessMesh, rank: int, number: int) -> tuple[str, dict[str, Any]]:
    """A rank's part of a move between meshes, in the task of one of them: its sends, or its receives.

    Where both have the same ranks, one task does both.
    """
    source, target = graph.attrs[op.operands[0].name], graph.attrs[op.result.name]
    moves = tiles_by_rank(op.result.shape, source, target)
    attrs = _exchange(op, moves.get(rank, ()), source, target, rank, number)
    if source.mesh.rank_set == target.mesh.rank_set:
        return "exchange", attrs
    if mesh.rank_set == target.mesh.rank_set:
        return "recv", {**attrs, "sends": (), "wire": 0.0}
    return "send", {**attrs, "recvs": (), "copies": ()}


def _exchange(
    op: Op, tiles: tuple[Tile, ...], source: DistAttr, target: DistAttr, rank: int, number: int
) -> dict[str, Any]:
    """Slices of the local blocks that a rank sends, receives and copies to itself."""
    sends: list[tuple[int, Slices]] = []
    recvs: list[tuple[int, Slices]] = []
    copies: list[tuple[Slices, Slices]] = []
    wire, shape = 0.0, op.result.shape
    have = source.spec.bounds(shape, source.mesh, rank) if rank in source.mesh else ()
    want = target.spec.bounds(shape, target.mesh, rank) if rank in target.mesh else ()
    for tile in tiles:
        if tile.source_rank == rank and tile.target_rank == rank:
            copies.append((_inside(tile, have), _inside(tile, want)))
        elif tile.source_rank == rank:
            sends.append((tile.target_rank, _inside(tile, have)))
            wire += itemsize(op.result.dtype) * tile.volume
        elif tile.target_rank == rank:
            recvs.append((tile.source_rank, _inside(tile, want)))
    moved = {"sends": tuple(sends), "recvs": tuple(recvs), "copies": tuple(copies)}
    return {**moved, "tag": number, "wire": wire}


def _inside(tile: Tile, block: tuple[tuple[int, int], ...]) -> Slices:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(tile.bounds, block, strict=True))


@register_pass("partition", requires="tasks", stage="rank")
def _run(parts: Parts, context: PassContext) -> RankProgram:
    """Make the program of one rank: local shapes and partners."""
    return partition(parts, context.rank)
