"""Seconds of ops and of changes of layout on the devices of a mesh, many layouts at once.

*In:* a cluster and the device of every rank. *Out:* seconds, remembered by shapes, so that repeated layers
and further formulations on the same mesh are priced once. *Invariant:* the numbers of the forecast: the same
work of an op (`passes.work`), the same patterns of groups (`resources.patterns`), the steps that
`redistribute` takes under `MeshCommunication.price`.

Every rank does what the rank with the largest blocks does; on a mesh of unequal devices the slowest counts.
Where the mesh has weights, an op takes what it takes on the slowest of the ranks, each with its own block; a
change of layout takes what it takes with equal blocks, as what the members of a group send together is the
same. Bytes that unequal ranks hold are those of the device with the least memory: what is held on another
counts by its share of that one's memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.dtypes import itemsize
from distgraph.ir.graph import Op, Value
from distgraph.ir.index_rule import OpLayout
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import (
    freeze,
    local_attrs,
    lookup,
    operand_layout,
    operand_windows,
    rule_of,
    window_bounds,
)
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.analysis.op_work import Work, work_of
from distgraph.passes.analysis.redistribution_cost import window_cost
from distgraph.passes.redistribution.planner import redistribute_cost
from distgraph.passes.search.intra_op.redistribution_costs import Routes, representatives, routes
from distgraph.passes.search.intra_op.strategies import (
    Specs,
    Strategies,
    block_bytes,
    even_blocks,
    own_blocks,
    parts_of,
)
from distgraph.resources import Cluster, ComputeCost
from distgraph.resources.mesh_communication import MeshCommunication

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Lengths = NDArray[np.int64]
MOST_AXES = 3
"""With more, pairs of layouts are priced one by one, as they come, and ops have thousands of layouts."""


@dataclass(frozen=True, eq=False)
class _Table:
    """Routes of one kind of shape: numbers of layouts in them, and of rows of layouts asked for before."""

    routes: Routes
    number: dict[ShardSpec, int]
    known: dict[Specs, Ints | None] = field(default_factory=dict)

    def positions(self, specs: Specs) -> Ints | None:
        """Numbers of layouts; None where one is not among the states, as pending maxima are not."""
        try:
            return self.known[specs]
        except KeyError:
            found = [self.number.get(spec, -1) for spec in specs]
            self.known[specs] = None if -1 in found else np.array(found, dtype=np.intp)
            return self.known[specs]


@dataclass(frozen=True, slots=True)
class _Member:
    """Ranks of a mesh that are priced as one: a rank of them, and one device of every kind that they have."""

    rank: int
    devices: tuple[int, ...]


@lru_cache(maxsize=1024)
def _numbered(axes: tuple[str, ...], shape: tuple[int, ...]) -> ProcessMesh:
    """The mesh with ranks from 0 on: one for all that differ in their ranks."""
    return ProcessMesh.grid(**dict(zip(axes, shape, strict=True)))


class Prices:
    """Seconds on a cluster.

    Args:
        cluster: with launch time, bandwidths, latencies and what computation costs.
        devices: device of every rank; rank i on device i by default.

    Example:
        >>> from distgraph.resources import load_cluster
        >>> prices = Prices(load_cluster("dgx_a100_pod"))
        >>> mesh, parse = ProcessMesh.grid(dp=4, tp=8), ShardSpec.parse
        >>> inside = prices.move_seconds((4096, 4096), "f32", mesh, parse("[_, tp]"), parse("[_, _]"))
        >>> inside < prices.move_seconds((4096, 4096), "f32", mesh, parse("[_, dp]"), parse("[_, _]"))
        True
    """

    def __init__(self, cluster: Cluster, devices: Sequence[int] | None = None) -> None:
        self.cluster = cluster
        self.communication = MeshCommunication(cluster, devices)
        self.price = self.communication.price
        self.compute = ComputeCost(cluster)
        self._tables: dict[object, _Table] = {}
        self._matrices: dict[object, Floats] = {}
        self._ops: dict[object, Floats] = {}
        self._streams: dict[object, Floats] = {}
        self._works: dict[object, float] = {}
        self._members: dict[ProcessMesh, tuple[_Member, ...]] = {}

    # changes of layout

    def move_seconds(
        self, shape: tuple[int, ...], dtype: str, mesh: ProcessMesh, source: ShardSpec, target: ShardSpec
    ) -> float:
        """Seconds to bring a tensor from one layout to another on one mesh."""
        return float(self.moves(shape, dtype, mesh, (source,), (target,))[0, 0])

    def moves(
        self, shape: tuple[int, ...], dtype: str, mesh: ProcessMesh, sources: Specs, targets: Specs
    ) -> Floats:
        """Seconds [sources, targets] of changes of layout of one tensor."""
        if sum(size > 1 for size in mesh.shape) <= MOST_AXES:
            table = self._table(shape, mesh)
            rows, columns = table.positions(sources), table.positions(targets)
            if rows is not None and columns is not None:
                nbytes = math.prod(shape) * itemsize(dtype)
                return self._matrix(table.routes, nbytes, mesh)[rows[:, None], columns]
        size = itemsize(dtype)
        found = [redistribute_cost(shape, size, mesh, s, t, self.price) for s in sources for t in targets]
        return np.array(found, dtype=np.float64).reshape(len(sources), len(targets))

    def _table(self, shape: tuple[int, ...], mesh: ProcessMesh) -> _Table:
        """Routes of a shape, and the number of every layout of it among their states."""
        key = (representatives(shape, mesh), mesh.axes, mesh.shape)
        if key not in self._tables:
            order = sorted(range(len(shape)), key=lambda dim: key[0][dim])
            found = routes(tuple(key[0][dim] for dim in order), _numbered(mesh.axes, mesh.shape))
            place = [order.index(dim) for dim in range(len(shape))]
            self._tables[key] = _Table(
                found,
                {
                    ShardSpec(tuple(state.dims[at] for at in place), state.partial): number
                    for number, state in enumerate(found.states)
                },
            )
        return self._tables[key]

    def _matrix(self, found: Routes, nbytes: int, mesh: ProcessMesh) -> Floats:
        key = (id(found), nbytes, mesh)
        if key not in self._matrices:

            def of_step(kind: str, axes: tuple[str, ...], sent: Floats) -> Floats:
                return self.communication.prices(kind, mesh, axes, sent) if axes else np.zeros_like(sent)

            self._matrices[key] = found.seconds(np.array([nbytes], dtype=np.float64), of_step)[0]
        return self._matrices[key]

    # ops

    def ops_seconds(self, op: Op, mesh: ProcessMesh, strategies: Strategies, *, adds: bool = False) -> Floats:
        """Seconds [strategies] of an op; `adds` where its result is added to what is there already."""
        shapes = tuple((v.shape, v.dtype) for v in (*op.operands, *op.results))
        attrs = freeze({k: v for k, v in op.attrs.items() if k != "salt"})
        key = (op.kind, shapes, attrs, strategies, mesh, adds)
        if key not in self._ops:
            found = self._computed(op, mesh, strategies, adds)
            sliding = rule_of(op).sliding
            for option, (axes, _) in enumerate(strategies.options if sliding else ()):
                if any(index in sliding for index, _ in axes):
                    found[option] += self._halo(op, strategies.layout(mesh, option))
            self._ops[key] = found
        return self._ops[key]

    def streamed(self, value: Value, specs: Specs, mesh: ProcessMesh, passes: int) -> Floats:
        """Seconds [layouts] to go over the block of a value several times, reading or writing."""
        key = (value.shape, value.dtype, specs, mesh, passes)
        if key not in self._streams:
            self._streams[key] = self._streamed(value, specs, mesh, passes)
        return self._streams[key]

    def _streamed(self, value: Value, specs: Specs, mesh: ProcessMesh, passes: int) -> Floats:
        found = np.zeros(len(specs))
        for member in self._of(mesh):
            blocks = (
                even_blocks(value.shape, parts_of(specs, mesh))
                if not mesh.weights
                else own_blocks(value.shape, specs, mesh, member.rank)
            )
            sizes = passes * block_bytes(blocks, itemsize(value.dtype))
            works = [Work("memory", nbytes=size, dtype=value.dtype) for size in sizes]
            found = np.maximum(found, [self._timed(member, work) for work in works])
        return found

    def nbytes(self, value: Value, specs: Specs, mesh: ProcessMesh) -> Floats:
        """Bytes [layouts] of a value on a mesh with weights, as of its device with the least memory."""
        least = min(self.cluster.devices[member.devices[0]].memory for member in self._of(mesh))
        found = np.zeros(len(specs))
        for member in self._of(mesh):
            scale = least / self.cluster.devices[member.devices[0]].memory
            blocks = own_blocks(value.shape, specs, mesh, member.rank)
            found = np.maximum(found, scale * block_bytes(blocks, itemsize(value.dtype)))
        return found

    def _computed(self, op: Op, mesh: ProcessMesh, strategies: Strategies, adds: bool) -> Floats:
        """Seconds of the computation alone, on the slowest of the ranks."""
        values = (*op.operands, *op.results)
        if not mesh.weights:
            parts = strategies.parts(mesh)
            blocks = [even_blocks(value.shape, part) for value, part in zip(values, parts, strict=True)]
            return self._on(self._of(mesh)[0], op, mesh, strategies, blocks, adds)
        specs = (*strategies.needed, *strategies.made)
        found = np.zeros(len(strategies.options))
        for member in self._of(mesh):
            blocks = [
                own_blocks(value.shape, layouts, mesh, member.rank)
                for value, layouts in zip(values, specs, strict=True)
            ]
            found = np.maximum(found, self._on(member, op, mesh, strategies, blocks, adds))
        return found

    def _on(
        self,
        member: _Member,
        op: Op,
        mesh: ProcessMesh,
        strategies: Strategies,
        blocks: Sequence[Lengths],
        adds: bool,
    ) -> Floats:
        """Seconds [strategies] with blocks of some lengths: equal ones are priced once."""
        if lookup(op.kind).cost == "memory" and not rule_of(op).sliding:
            return self._streaming(member, op, blocks, adds)
        joined = (
            np.concatenate(blocks, axis=1) if blocks else np.zeros((len(strategies.options), 0), np.int64)
        )
        unique, first, position = np.unique(joined, axis=0, return_index=True, return_inverse=True)
        seconds = np.empty(len(unique))
        for number, option in enumerate(first):
            local = [tuple(int(n) for n in block[option]) for block in blocks]
            seconds[number] = self._seconds(member, op, mesh, local, strategies, int(option), adds)
        return seconds[position.ravel()]

    def _streaming(self, member: _Member, op: Op, blocks: Sequence[Lengths], adds: bool) -> Floats:
        """Seconds of an op that goes over its operands and results once (see `passes.work`)."""
        values, total = (*op.operands, *op.results), np.zeros(len(blocks[0]))
        for position, (value, own) in enumerate(zip(values, blocks, strict=True)):
            twice = adds and position >= len(op.operands)
            total += (1 + twice) * block_bytes(own, itemsize(value.dtype))
        sizes, which = np.unique(total, return_inverse=True)
        kind = "memory" if all(math.prod(v.shape) for v in op.results) else "launch"
        works = [Work(kind, 0.0, float(size), values[0].dtype, op=op.kind) for size in sizes]
        return np.array([self._timed(member, work) for work in works])[which.ravel()]

    def _seconds(
        self,
        member: _Member,
        op: Op,
        mesh: ProcessMesh,
        local: Sequence[tuple[int, ...]],
        strategies: Strategies,
        option: int,
        adds: bool,
    ) -> float:
        attrs, count = op.attrs, len(op.operands)
        if lookup(op.kind).cost == "matmul" and lookup(op.kind).localize is not None:
            attrs = local_attrs(replace(op, layout=strategies.layout(mesh, option)), member.rank)
        if rule_of(op).sliding:
            local = [*self._windows(op, strategies.layout(mesh, option), member.rank), *local[count:]]
        own = replace(
            op,
            operands=tuple(replace(v, shape=s) for v, s in zip(op.operands, local[:count], strict=True)),
            results=tuple(replace(v, shape=s) for v, s in zip(op.results, local[count:], strict=True)),
            attrs=attrs,
            layout=None,
        )
        return self._timed(member, work_of(own, [v.nbytes for v in own.operands], adds))

    @staticmethod
    def _windows(op: Op, layout: OpLayout, rank: int) -> list[tuple[int, ...]]:
        """What a rank reads of every operand, neighbours' positions included."""
        found = []
        for position, value in enumerate(op.operands):
            spec, windows = operand_layout(op, position, layout), operand_windows(op, position, layout)
            bounds = window_bounds(value.shape, layout.mesh, spec, windows, rank)
            found.append(tuple(stop - start for start, stop in bounds))
        return found

    def _timed(self, member: _Member, work: Work) -> float:
        """Seconds of a work on the slowest device of a member."""
        key = (member.devices, work)
        if key not in self._works:
            self._works[key] = max(self.compute.time(device, *work.amounts) for device in member.devices)
        return self._works[key]

    def _of(self, mesh: ProcessMesh) -> tuple[_Member, ...]:
        """One member for all ranks of a mesh; one for each kind of device and weight where it has weights."""
        if mesh not in self._members:
            kinds: dict[object, dict[object, tuple[int, int]]] = {}
            for rank in mesh.members:
                device = self.cluster.devices[self.communication.device(rank)]
                at = zip(mesh.axes, mesh.coordinates(rank), strict=True)
                own = tuple(mesh.weights[axis][i] for axis, i in at if axis in mesh.weights)
                kind = device.type, device.model, device.origin, device.memory
                kinds.setdefault((own, kind) if own else (), {}).setdefault(kind, (rank, device.index))
            self._members[mesh] = tuple(
                _Member(next(rank for rank, _ in kind.values()), tuple(number for _, number in kind.values()))
                for kind in kinds.values()
            )
        return self._members[mesh]

    def _halo(self, op: Op, layout: OpLayout) -> float:
        """Seconds to fetch what an op reads beyond its blocks."""
        total = 0.0
        for position, value in enumerate(op.operands):
            windows = operand_windows(op, position, layout)
            if windows:
                stored = DistAttr(layout.mesh, operand_layout(op, position, layout))
                size = itemsize(value.dtype)
                total += window_cost(value.shape, size, stored, stored, windows, self.price)
        return total
