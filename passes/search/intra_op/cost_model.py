"""The cost model of the search: seconds of ops and of changes of layout, for arrays of layouts.

*In:* a cluster and the device of every rank. *Out:* seconds, cached by shapes, so that repeated layers and
further formulations on the same mesh are computed once. *Invariant:* the seconds agree with the forecast: ops
have the same work (`passes.analysis.op_work`), and changes of layout take the steps that
`redistribution.planner` plans under `MeshCommunication.price`.

All ranks are assumed to have the largest block; on a mesh of unequal devices the slowest device counts. On a
mesh with weights the time of an op is that of the slowest rank, each with its own block. A change of layout
takes the time that it takes with equal blocks, because the members of a group send the same bytes in total.
Bytes on ranks with unequal memory are scaled to the device with the least memory, so that one limit holds for
all: half of the memory of any device counts as half of the least memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from distgraph.ir.dtypes import itemsize
from distgraph.ir.float_arrays import Floats
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
from distgraph.passes.search.intra_op.redistribution_cost_table import StepGraph, representatives, step_graph
from distgraph.passes.search.intra_op.strategies import (
    Specs,
    Strategies,
    block_bytes,
    blocks_of_rank,
    even_blocks,
    parts_of,
)
from distgraph.resources import Cluster, ComputeCost
from distgraph.resources.mesh_communication import MeshCommunication

Ints = NDArray[np.intp]
Lengths = NDArray[np.int64]
MOST_AXES = 3
"""On a mesh with more axes of more than one rank, pairs of layouts are priced one by one, on request."""


@dataclass(frozen=True, eq=False)
class _SpecIndex:
    """The step graph of one class of shapes, with the index of every layout in it; caches its answers."""

    graph: StepGraph
    index_of: dict[ShardSpec, int]
    cache: dict[Specs, Ints | None] = field(default_factory=dict)

    def indices(self, specs: Specs) -> Ints | None:
        """Indices of layouts; None if the graph has not all, such as one with a partial maximum."""
        try:
            return self.cache[specs]
        except KeyError:
            indices = [self.index_of.get(spec, -1) for spec in specs]
            self.cache[specs] = None if -1 in indices else np.array(indices, dtype=np.intp)
            return self.cache[specs]


@dataclass(frozen=True, slots=True)
class _RankClass:
    """Ranks of a mesh with equal costs: one of the ranks, and one device of every kind among them."""

    rank: int
    devices: tuple[int, ...]


@lru_cache(maxsize=1024)
def _with_ranks_from_zero(axes: tuple[str, ...], shape: tuple[int, ...]) -> ProcessMesh:
    """The mesh with ranks from 0 on; it represents all meshes that differ from it only in their ranks."""
    return ProcessMesh.grid(**dict(zip(axes, shape, strict=True)))


class CostModel:
    """Seconds of ops and of changes of layout on a cluster; by default rank i is on device i.

    Example:
        >>> from distgraph.resources import load_cluster
        >>> model = CostModel(load_cluster("dgx_a100_pod"))
        >>> mesh, parse = ProcessMesh.grid(dp=4, tp=8), ShardSpec.parse
        >>> tensor = (4096, 4096), "f32", mesh
        >>> in_machine = model.change_seconds_of(*tensor, parse("[_, tp]"), parse("[_, _]"))
        >>> in_machine < model.change_seconds_of(*tensor, parse("[_, dp]"), parse("[_, _]"))
        True
    """

    def __init__(self, cluster: Cluster, devices: Sequence[int] | None = None) -> None:
        self.cluster = cluster
        self.communication = MeshCommunication(cluster, devices)
        self.price = self.communication.price
        self.compute = ComputeCost(cluster)
        self._indices: dict[object, _SpecIndex] = {}
        self._matrices: dict[object, Floats] = {}
        self._op_seconds: dict[object, Floats] = {}
        self._streaming_seconds: dict[object, Floats] = {}
        self._work_seconds: dict[object, float] = {}
        self._rank_classes: dict[ProcessMesh, tuple[_RankClass, ...]] = {}

    # changes of layout

    def change_seconds_of(
        self, shape: tuple[int, ...], dtype: str, mesh: ProcessMesh, source: ShardSpec, target: ShardSpec
    ) -> float:
        """Seconds of one change of layout of a tensor on one mesh."""
        return float(self.change_seconds(shape, dtype, mesh, (source,), (target,))[0, 0])

    def change_seconds(
        self, shape: tuple[int, ...], dtype: str, mesh: ProcessMesh, sources: Specs, targets: Specs
    ) -> Floats:
        """Seconds [sources, targets] of changes of layout of one tensor."""
        if sum(size > 1 for size in mesh.shape) <= MOST_AXES:
            index = self._spec_index(shape, mesh)
            rows, columns = index.indices(sources), index.indices(targets)
            if rows is not None and columns is not None:
                nbytes = math.prod(shape) * itemsize(dtype)
                return self._matrix(index.graph, nbytes, mesh)[rows[:, None], columns]
        size = itemsize(dtype)
        seconds = [redistribute_cost(shape, size, mesh, s, t, self.price) for s in sources for t in targets]
        return np.array(seconds, dtype=np.float64).reshape(len(sources), len(targets))

    def _spec_index(self, shape: tuple[int, ...], mesh: ProcessMesh) -> _SpecIndex:
        """The step graph of a shape, and the index of every layout of the shape in it."""
        key = (representatives(shape, mesh), mesh.axes, mesh.shape)
        if key not in self._indices:
            order = sorted(range(len(shape)), key=lambda dim: key[0][dim])
            sizes = tuple(key[0][dim] for dim in order)
            graph = step_graph(sizes, _with_ranks_from_zero(mesh.axes, mesh.shape))
            position = [order.index(dim) for dim in range(len(shape))]
            self._indices[key] = _SpecIndex(
                graph,
                {
                    ShardSpec(tuple(state.dims[i] for i in position), state.partial): index
                    for index, state in enumerate(graph.states)
                },
            )
        return self._indices[key]

    def _matrix(self, graph: StepGraph, nbytes: int, mesh: ProcessMesh) -> Floats:
        """Least seconds [states, states] of the changes of layout of a tensor of `nbytes` bytes."""
        key = (id(graph), nbytes, mesh)
        if key not in self._matrices:

            def of_step(kind: str, axes: tuple[str, ...], sent: Floats) -> Floats:
                return self.communication.prices(kind, mesh, axes, sent) if axes else np.zeros_like(sent)

            self._matrices[key] = graph.seconds(np.array([nbytes], dtype=np.float64), of_step)[0]
        return self._matrices[key]

    # ops

    def ops_seconds(self, op: Op, mesh: ProcessMesh, strategies: Strategies, *, adds: bool = False) -> Floats:
        """Seconds [strategies] of an op; `adds`: the op adds its result to a buffer."""
        shapes = tuple((v.shape, v.dtype) for v in (*op.operands, *op.results))
        attrs = freeze({k: v for k, v in op.attrs.items() if k != "salt"})
        key = (op.kind, shapes, attrs, strategies, mesh, adds)
        if key not in self._op_seconds:
            seconds = self._compute_seconds(op, mesh, strategies, adds)
            sliding = rule_of(op).sliding
            for option, (axes, _) in enumerate(strategies.options if sliding else ()):
                if any(index in sliding for index, _ in axes):
                    seconds[option] += self._halo_seconds(op, strategies.layout(mesh, option))
            self._op_seconds[key] = seconds
        return self._op_seconds[key]

    def streaming_seconds(self, value: Value, specs: Specs, mesh: ProcessMesh, passes: int) -> Floats:
        """Seconds [layouts] to read or write the block of a value `passes` times."""
        key = (value.shape, value.dtype, specs, mesh, passes)
        if key not in self._streaming_seconds:
            seconds = np.zeros(len(specs))
            for ranks in self._classes_of(mesh):
                blocks = (
                    even_blocks(value.shape, parts_of(specs, mesh))
                    if not mesh.weights
                    else blocks_of_rank(value.shape, specs, mesh, ranks.rank)
                )
                sizes = passes * block_bytes(blocks, itemsize(value.dtype))
                works = [Work("memory", nbytes=size, dtype=value.dtype) for size in sizes]
                seconds = np.maximum(seconds, [self._seconds_of(ranks, work) for work in works])
            self._streaming_seconds[key] = seconds
        return self._streaming_seconds[key]

    def nbytes(self, value: Value, specs: Specs, mesh: ProcessMesh) -> Floats:
        """Bytes [layouts] of a value on a mesh with weights, scaled to the device with the least memory."""
        least = min(self.cluster.devices[ranks.devices[0]].memory for ranks in self._classes_of(mesh))
        nbytes = np.zeros(len(specs))
        for ranks in self._classes_of(mesh):
            scale = least / self.cluster.devices[ranks.devices[0]].memory
            blocks = blocks_of_rank(value.shape, specs, mesh, ranks.rank)
            nbytes = np.maximum(nbytes, scale * block_bytes(blocks, itemsize(value.dtype)))
        return nbytes

    def _compute_seconds(self, op: Op, mesh: ProcessMesh, strategies: Strategies, adds: bool) -> Floats:
        """Seconds [strategies] of the computation without halos, on the slowest rank."""
        values = (*op.operands, *op.results)
        if not mesh.weights:
            parts = strategies.parts(mesh)
            blocks = [even_blocks(value.shape, part) for value, part in zip(values, parts, strict=True)]
            return self._seconds_with_blocks(self._classes_of(mesh)[0], op, mesh, strategies, blocks, adds)
        specs = (*strategies.operand_specs, *strategies.result_specs)
        slowest = np.zeros(len(strategies.options))
        for ranks in self._classes_of(mesh):
            blocks = [
                blocks_of_rank(value.shape, layouts, mesh, ranks.rank)
                for value, layouts in zip(values, specs, strict=True)
            ]
            seconds = self._seconds_with_blocks(ranks, op, mesh, strategies, blocks, adds)
            slowest = np.maximum(slowest, seconds)
        return slowest

    def _seconds_with_blocks(
        self,
        ranks: _RankClass,
        op: Op,
        mesh: ProcessMesh,
        strategies: Strategies,
        blocks: Sequence[Lengths],
        adds: bool,
    ) -> Floats:
        """Seconds [strategies] with blocks of given lengths; equal blocks are computed once."""
        if lookup(op.kind).cost == "memory" and not rule_of(op).sliding:
            return self._memory_bound_seconds(ranks, op, blocks, adds)
        joined = (
            np.concatenate(blocks, axis=1) if blocks else np.zeros((len(strategies.options), 0), np.int64)
        )
        unique, first, position = np.unique(joined, axis=0, return_index=True, return_inverse=True)
        seconds = np.empty(len(unique))
        for number, option in enumerate(first):
            local = [tuple(int(n) for n in block[option]) for block in blocks]
            seconds[number] = self._strategy_seconds(ranks, op, mesh, local, strategies, int(option), adds)
        return seconds[position.ravel()]

    def _memory_bound_seconds(
        self, ranks: _RankClass, op: Op, blocks: Sequence[Lengths], adds: bool
    ) -> Floats:
        """Seconds [strategies] of an op that reads its operands and writes its results once (`op_work`)."""
        values, total = (*op.operands, *op.results), np.zeros(len(blocks[0]))
        for position, (value, lengths) in enumerate(zip(values, blocks, strict=True)):
            read_and_written = adds and position >= len(op.operands)
            total += (1 + read_and_written) * block_bytes(lengths, itemsize(value.dtype))
        sizes, inverse = np.unique(total, return_inverse=True)
        kind = "memory" if all(math.prod(v.shape) for v in op.results) else "launch"
        works = [Work(kind, 0.0, float(size), values[0].dtype, op=op.kind) for size in sizes]
        return np.array([self._seconds_of(ranks, work) for work in works])[inverse.ravel()]

    def _strategy_seconds(
        self,
        ranks: _RankClass,
        op: Op,
        mesh: ProcessMesh,
        local: Sequence[tuple[int, ...]],
        strategies: Strategies,
        option: int,
        adds: bool,
    ) -> float:
        """Seconds of one strategy with blocks of `local` shapes."""
        attrs, count = op.attrs, len(op.operands)
        if lookup(op.kind).cost == "matmul" and lookup(op.kind).localize is not None:
            attrs = local_attrs(op.with_layout(strategies.layout(mesh, option)), ranks.rank)
        if rule_of(op).sliding:
            windows = self._window_shapes(op, strategies.layout(mesh, option), ranks.rank)
            local = [*windows, *local[count:]]
        local_op = replace(
            op,
            operands=tuple(replace(v, shape=s) for v, s in zip(op.operands, local[:count], strict=True)),
            results=tuple(replace(v, shape=s) for v, s in zip(op.results, local[count:], strict=True)),
            attrs=attrs,
            layout=None,
        )
        return self._seconds_of(ranks, work_of(local_op, [v.nbytes for v in local_op.operands], adds))

    @staticmethod
    def _window_shapes(op: Op, layout: OpLayout, rank: int) -> list[tuple[int, ...]]:
        """The shape that a rank reads of every operand, including the halo from its neighbours."""
        shapes = []
        for position, value in enumerate(op.operands):
            spec, windows = operand_layout(op, position, layout), operand_windows(op, position, layout)
            bounds = window_bounds(value.shape, layout.mesh, spec, windows, rank)
            shapes.append(tuple(stop - start for start, stop in bounds))
        return shapes

    def _seconds_of(self, ranks: _RankClass, work: Work) -> float:
        """Seconds of a work on the slowest device of a class of ranks."""
        key = (ranks.devices, work)
        if key not in self._work_seconds:
            self._work_seconds[key] = max(
                self.compute.time(device, *work.amounts) for device in ranks.devices
            )
        return self._work_seconds[key]

    def _classes_of(self, mesh: ProcessMesh) -> tuple[_RankClass, ...]:
        """One class for all ranks of a mesh without weights; else one for each weight and kind of device."""
        if mesh not in self._rank_classes:
            kinds: dict[object, dict[object, tuple[int, int]]] = {}
            for rank in mesh.members:
                device = self.cluster.devices[self.communication.device(rank)]
                coordinates = zip(mesh.axes, mesh.coordinates(rank), strict=True)
                weights = tuple(mesh.weights[axis][i] for axis, i in coordinates if axis in mesh.weights)
                kind = device.type, device.model, device.origin, device.memory
                key = (weights, kind) if weights else ()
                kinds.setdefault(key, {}).setdefault(kind, (rank, device.index))
            self._rank_classes[mesh] = tuple(
                _RankClass(
                    next(rank for rank, _ in kind.values()), tuple(number for _, number in kind.values())
                )
                for kind in kinds.values()
            )
        return self._rank_classes[mesh]

    def _halo_seconds(self, op: Op, layout: OpLayout) -> float:
        """Seconds to fetch the halos: elements of other ranks' blocks that an op reads."""
        total = 0.0
        for position, value in enumerate(op.operands):
            windows = operand_windows(op, position, layout)
            if windows:
                stored = DistAttr(layout.mesh, operand_layout(op, position, layout))
                size = itemsize(value.dtype)
                total += window_cost(value.shape, size, stored, stored, windows, self.price)
        return total
