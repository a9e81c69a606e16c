"""Seconds of ops and of changes of layout on the devices of a mesh, many layouts at once.

*In:* a cluster and the device of every rank. *Out:* seconds, remembered by shapes, so that repeated layers
and further formulations on the same mesh are priced once. *Invariant:* the numbers of the forecast: the same
work of an op (`passes.work`), the same patterns of groups (`resources.patterns`), the steps that
`redistribute` takes under `Prices.price`.

Every rank does what the rank with the largest blocks does; on a mesh of unequal devices the slowest counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from distgraph.dtypes import itemsize
from distgraph.graph import Op, Value
from distgraph.mesh import ProcessMesh
from distgraph.ops.registry import (
    freeze,
    linear_groups,
    local_attrs,
    lookup,
    operand_layout,
    operand_windows,
    rule_of,
    window_bounds,
)
from distgraph.passes.halo import halo_volume
from distgraph.passes.redistribute import STEP_PRICES, redistribute_cost
from distgraph.passes.search.routes import Routes, representatives, routes
from distgraph.passes.search.strategies import Specs, Strategies, local_bytes, parts_of
from distgraph.passes.work import Work, work_of
from distgraph.resources import Cluster, CollectiveCost, ComputeCost
from distgraph.resources.collective import held_bytes
from distgraph.resources.patterns import Groups, patterns
from distgraph.rule import OpLayout, operand_spec, result_spec
from distgraph.spec import ShardSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
_TRACE = 1e-9  # seconds for every unit of `STEP_PRICES`: orders equals, decides nothing else
_MOST_AXES = 2  # with more, pairs of layouts are priced one by one, as they come


@dataclass(frozen=True, eq=False)
class _Table:
    """Routes of one kind of shape: numbers of layouts in them, and of rows of layouts asked for before."""

    routes: Routes
    number: dict[ShardSpec, int]
    known: dict[Specs, Ints | None] = field(default_factory=dict)


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
        self.devices = None if devices is None else tuple(devices)
        self.collective = CollectiveCost(cluster)
        self.compute = ComputeCost(cluster)
        self._patterns: dict[tuple[ProcessMesh, tuple[str, ...]], tuple[Groups, ...]] = {}
        self._tables: dict[object, _Table] = {}
        self._matrices: dict[object, Floats] = {}
        self._ops: dict[object, Floats] = {}
        self._works: dict[object, float] = {}
        self._models: dict[ProcessMesh, tuple[int, ...]] = {}

    # collectives

    def price(
        self, kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]
    ) -> float:
        """Seconds of a collective; what `redistribute`, `lower` and `build` take as `price`."""
        if group_size == 1 or not sent:
            return 0.0
        return float(self._collective(kind, mesh, axes, np.array([sent]))[0])

    def _collective(self, kind: str, mesh: ProcessMesh, axes: tuple[str, ...], sent: Floats) -> Floats:
        """Seconds of collectives along some axes; bytes that a rank sends."""
        sizes = held_bytes(kind, mesh.count(axes), sent)
        found = np.zeros_like(sizes)
        for groups in self._groups(mesh, axes):
            found = np.maximum(found, self.collective.times(kind, groups[0], sizes, groups[1:]))
        return np.where(sent > 0, found + STEP_PRICES.get(kind, 1e-3) * _TRACE, 0.0)

    def _groups(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> tuple[Groups, ...]:
        key = (mesh, axes)
        if key not in self._patterns:
            placed = [tuple(self.device(rank) for rank in group) for group in mesh.groups(axes)]
            self._patterns[key] = patterns(self.cluster, placed)
        return self._patterns[key]

    def device(self, rank: int) -> int:
        """Number of the device of a rank."""
        return rank if self.devices is None else self.devices[rank]

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
        if sum(size > 1 for size in mesh.shape) <= _MOST_AXES:
            rows, columns = self._positions(shape, mesh, sources), self._positions(shape, mesh, targets)
            if rows is not None and columns is not None:
                return self._matrix(shape, itemsize(dtype), mesh)[np.ix_(rows, columns)]
        size = itemsize(dtype)
        found = [redistribute_cost(shape, size, mesh, s, t, self.price) for s in sources for t in targets]
        return np.array(found, dtype=np.float64).reshape(len(sources), len(targets))

    def _table(self, shape: tuple[int, ...], mesh: ProcessMesh) -> _Table:
        """Routes of a shape, and the number of every layout of it among their states."""
        key = (representatives(shape, mesh), mesh.axes, mesh.shape)
        if key not in self._tables:
            order = sorted(range(len(shape)), key=lambda dim: key[0][dim])
            found = routes(tuple(key[0][dim] for dim in order), ProcessMesh.grid(**mesh.sizes))
            place = [order.index(dim) for dim in range(len(shape))]
            self._tables[key] = _Table(
                found,
                {
                    ShardSpec(tuple(state.dims[at] for at in place), state.partial): number
                    for number, state in enumerate(found.states)
                },
            )
        return self._tables[key]

    def _positions(self, shape: tuple[int, ...], mesh: ProcessMesh, specs: Specs) -> Ints | None:
        """Numbers of layouts; None where one is not among the states, as pending maxima are not."""
        table = self._table(shape, mesh)
        if specs not in table.known:
            found = [table.number.get(spec, -1) for spec in specs]
            table.known[specs] = None if -1 in found else np.array(found, dtype=np.intp)
        return table.known[specs]

    def _matrix(self, shape: tuple[int, ...], size: int, mesh: ProcessMesh) -> Floats:
        found = self._table(shape, mesh).routes
        nbytes = float(math.prod(shape) * size)
        key = (id(found), nbytes, mesh)
        if key not in self._matrices:

            def of_step(kind: str, axes: tuple[str, ...], sent: Floats) -> Floats:
                return self._collective(kind, mesh, axes, sent) if axes else np.zeros_like(sent)

            self._matrices[key] = found.seconds(np.array([nbytes]), of_step)[0]
        return self._matrices[key]

    # ops

    def op_seconds(self, op: Op, layout: OpLayout) -> float:
        """Seconds of an op under a layout, with the positions that it fetches from its neighbours."""
        rule = rule_of(op)
        reduction, linear = lookup(op.kind).reduction, linear_groups(op)
        one = Strategies(
            ((layout.axes, layout.partial),),
            tuple((result_spec(rule, i, layout, reduction),) for i in range(len(op.results))),
            tuple((operand_spec(rule, i, layout, linear),) for i in range(len(op.operands))),
        )
        return float(self.ops_seconds(op, layout.mesh, one)[0])

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
        sizes = passes * local_bytes(value.shape, itemsize(value.dtype), parts_of(specs, mesh))
        return np.array([self._timed(mesh, Work("memory", nbytes=size, dtype=value.dtype)) for size in sizes])

    def _computed(self, op: Op, mesh: ProcessMesh, strategies: Strategies, adds: bool) -> Floats:
        """Seconds of the computation alone: equal local shapes are priced once."""
        parts = strategies.parts(mesh)
        if lookup(op.kind).cost == "memory" and not rule_of(op).sliding:
            return self._streaming(op, mesh, parts, adds)
        shapes = [v.shape for v in (*op.operands, *op.results)]
        blocks = [
            -(-np.array(shape, dtype=np.int64) // part) for shape, part in zip(shapes, parts, strict=True)
        ]
        joined = (
            np.concatenate(blocks, axis=1) if blocks else np.zeros((len(strategies.options), 0), np.int64)
        )
        unique, first, position = np.unique(joined, axis=0, return_index=True, return_inverse=True)
        seconds = np.empty(len(unique))
        for number, option in enumerate(first):
            local = [tuple(int(n) for n in block[option]) for block in blocks]
            seconds[number] = self._seconds(op, mesh, local, strategies, int(option), adds)
        return seconds[position.ravel()]

    def _streaming(self, op: Op, mesh: ProcessMesh, parts: Sequence[Ints], adds: bool) -> Floats:
        """Seconds of an op that goes over its operands and results once (see `passes.work`)."""
        values, total = (*op.operands, *op.results), np.zeros(len(parts[0]))
        for position, (value, part) in enumerate(zip(values, parts, strict=True)):
            twice = adds and position >= len(op.operands)
            total += (1 + twice) * local_bytes(value.shape, itemsize(value.dtype), part)
        sizes, which = np.unique(total, return_inverse=True)
        kind = "memory" if all(math.prod(v.shape) for v in op.results) else "launch"
        works = [Work(kind, 0.0, float(size), values[0].dtype, op=op.kind) for size in sizes]
        return np.array([self._timed(mesh, work) for work in works])[which.ravel()]

    def _seconds(
        self,
        op: Op,
        mesh: ProcessMesh,
        local: Sequence[tuple[int, ...]],
        strategies: Strategies,
        option: int,
        adds: bool,
    ) -> float:
        attrs, count = op.attrs, len(op.operands)
        if lookup(op.kind).cost == "matmul" and lookup(op.kind).localize is not None:
            attrs = local_attrs(replace(op, layout=strategies.layout(mesh, option)), mesh.members[0])
        if rule_of(op).sliding:
            local = [*self._windows(op, strategies.layout(mesh, option)), *local[count:]]
        own = replace(
            op,
            operands=tuple(replace(v, shape=s) for v, s in zip(op.operands, local[:count], strict=True)),
            results=tuple(replace(v, shape=s) for v, s in zip(op.results, local[count:], strict=True)),
            attrs=attrs,
            layout=None,
        )
        return self._timed(mesh, work_of(own, [v.nbytes for v in own.operands], adds))

    @staticmethod
    def _windows(op: Op, layout: OpLayout) -> list[tuple[int, ...]]:
        """What the first rank reads of every operand, neighbours' positions included."""
        found = []
        for position, value in enumerate(op.operands):
            spec, windows = operand_layout(op, position, layout), operand_windows(op, position, layout)
            bounds = window_bounds(value.shape, layout.mesh, spec, windows, layout.mesh.members[0])
            found.append(tuple(stop - start for start, stop in bounds))
        return found

    def _timed(self, mesh: ProcessMesh, work: Work) -> float:
        """Seconds of a work on the slowest device of a mesh."""
        key = (mesh, work)
        if key not in self._works:
            self._works[key] = max(
                self.compute.time(device, work.kind, work.flops, work.nbytes, work.dtype, work.dims, work.op)
                for device in self._kinds(mesh)
            )
        return self._works[key]

    def _kinds(self, mesh: ProcessMesh) -> tuple[int, ...]:
        """One device of every kind on a mesh."""
        if mesh not in self._models:
            found: dict[object, int] = {}
            for device in map(self.device, mesh.members):
                entry = self.cluster.devices[device]
                found.setdefault((entry.type, entry.model, entry.origin), device)
            self._models[mesh] = tuple(found.values())
        return self._models[mesh]

    def _halo(self, op: Op, layout: OpLayout) -> float:
        """Seconds to fetch what an op reads beyond its blocks."""
        total = 0.0
        for position, value in enumerate(op.operands):
            windows = operand_windows(op, position, layout)
            if windows:
                spec = operand_layout(op, position, layout)
                sent = itemsize(value.dtype) * halo_volume(value.shape, layout.mesh, spec, windows)
                axes = tuple(axis for dim, _ in windows for axis in spec.dims[dim])
                total += self.price("permute", float(sent), layout.mesh.count(axes), layout.mesh, axes)
        return total
