"""Equivalence classes of ranks, so that the forecast prices one representative of each.

Two relations are used.

*Ranks that run the same tasks* (`representative_ranks`). *In:* such ranks. *Out:* some of them, and whether
they represent the rest exactly. *Invariant:* exact only where every value is cut into blocks of one size and
no op depends on the position of its block, so that all ranks do the same work. Otherwise the corners of the
meshes represent the rest: block sizes decrease with the coordinate, and halos change monotonically with it.
Along an axis with weights, the corners of every sequence of equal weights represent the rest.

*Ranks that do the same under other names* (`RankClasses`), such as those of pipeline stages with equal
layers. *In:* the tasks of a program. *Out:* the `RankClass` of a rank. *Invariant:* ranks whose classes have
one key run the same kinds of ops in the same tasks, on blocks of the same shapes, and store and update the
same values. Names differ, and ranks differ by a constant. The costs of their messages and the order of their
tasks may differ:

    forward.s1: %8 = matmul(%7, %w1) [dp=2; 2,3]     forward.s2: %9 = matmul(%8, %w2) [dp=2; 4,5]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from distgraph.ir.collective_registry import halo_windows
from distgraph.ir.graph import SOURCES, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import freeze, local_attrs, lookup
from distgraph.passes.analysis.op_work import local_work
from distgraph.passes.split_tasks import Part, Parts
from distgraph.resources import Cluster
from distgraph.runtime.program.build import Build


@dataclass(frozen=True, slots=True)
class RankClass:
    """The part of a program that equivalent ranks run.

    Attributes:
        key: equal for equivalent ranks.
        tasks: tasks of the rank.
        names: values of the rank, in an order that corresponds between all classes with one key.
    """

    key: Hashable
    tasks: tuple[Part, ...]
    names: tuple[str, ...]


class RankClasses:
    """Equivalence classes of the ranks of one program."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._keys: dict[Hashable, int] = {}
        self._classes: dict[tuple[ProcessMesh, ...], RankClass] = {}  # of the first rank of the meshes

    def of(self, rank: int) -> RankClass:
        """The class of one rank."""
        meshes = tuple(mesh for mesh in self.parts.graph.meshes if rank in mesh)
        if meshes not in self._classes:
            form = _CanonicalForm(self.parts, rank, meshes)
            number = self._keys.setdefault(form.text(), len(self._keys))
            self._classes[meshes] = RankClass(number, form.tasks, tuple(form.values))
        rank_class = self._classes[meshes]
        key = (rank_class.key, rank - meshes[0].members[0])
        return RankClass(key, rank_class.tasks, rank_class.names)


class _CanonicalForm:
    """What a rank does, with numbers in place of names: equal for equivalent ranks."""

    def __init__(self, parts: Parts, rank: int, meshes: tuple[ProcessMesh, ...]) -> None:
        self.parts, self.rank, self.base = parts, rank, meshes[0].members[0]
        self.tasks = tuple(part for part in parts.tasks if rank in part.mesh)
        self.stage = self.tasks[0].stage if self.tasks else 0
        self.values: dict[str, int] = {}
        self.meshes: dict[ProcessMesh, int] = {}
        self.lines: list[Hashable] = []

    def text(self) -> Hashable:
        """The whole form: first the sources, including unused ones, then tasks and updates."""
        updates = self.parts.updates
        for name in self.parts.sources_of(self.rank):
            self._value(name)
        for part in self.tasks:
            head = (part.kind, part.per_micro, part.stage - self.stage, self._mesh(part.mesh), len(part.body))
            self.lines.append(head)
            self.lines += [(*self._op(op), op.name in part.tail) for op in part.body]
        updated = sorted((*updates[old], number) for old, number in self.values.items() if old in updates)
        self.lines += [(number, self.values.get(new)) for _, new, number in updated]
        return tuple(self.lines)

    def _op(self, op: Op) -> tuple[Hashable, ...]:
        layout = op.layout and (self._mesh(op.layout.mesh), op.layout.axes, op.layout.partial)
        operands = tuple(self._value(value.name) for value in op.operands)
        results = tuple(self._value(value.name) for value in op.results)
        return op.kind, op.role, freeze(op.attrs), layout, operands, results

    def _value(self, name: str) -> int:
        if name not in self.values:
            self.values[name] = len(self.values)
            graph = self.parts.graph
            value, attr, producer = graph.values[name], graph.attrs[name], graph.producers[name]
            source = producer.kind if producer.kind in SOURCES else ""
            layout = (value.shape, value.dtype, attr.spec, self._mesh(attr.mesh), halo_windows(producer))
            self.lines.append((*layout, source, self.parts.phase[name], name in graph.live_out))
        return self.values[name]

    def _mesh(self, mesh: ProcessMesh) -> int:
        if mesh not in self.meshes:
            self.meshes[mesh] = len(self.meshes)
            stage = self.parts.stage_of.get(mesh.rank_set, self.stage) - self.stage
            ranks = (mesh.ranks - self.base).tobytes()
            self.lines.append((mesh.axes, mesh.shape, tuple(mesh.weights.items()), ranks, stage))
        return self.meshes[mesh]


def uneven_meshes(build: Build) -> frozenset[ProcessMesh]:
    """Meshes whose ranks do not all do the same work."""
    graph, uneven = build.lowered, set()
    for op in graph.ops:
        for value in op.results:
            attr = graph.attrs[value.name]
            if attr.mesh not in uneven and any(
                size % attr.mesh.count(axes) or any(axis in attr.mesh.weights for axis in axes)
                for size, axes in zip(value.shape, attr.spec.dims, strict=True)
                if axes
            ):
                uneven.add(attr.mesh)
        mesh = None if op.layout is None else op.layout.mesh
        if mesh is not None and mesh not in uneven and _work_depends_on_rank(op, mesh):
            uneven.add(mesh)
    return frozenset(uneven)


def _work_depends_on_rank(op: Op, mesh: ProcessMesh) -> bool:
    """Whether an op gives the ranks of a mesh different work although their blocks have one size.

    An op whose attributes name the block of a rank, such as a step of a ring, does not if the corners of the
    mesh, which represent the others, have equal work.
    """
    if op.kind in ("comm.halo", "comm.permute"):
        return True
    declared = lookup(op.kind)
    if op.layout is None or not op.layout.axes or declared.cost != "matmul" or declared.localize is None:
        return False
    first, last = (local_attrs(op, rank) for rank in (mesh.members[0], mesh.members[-1]))
    if freeze(first) == freeze(last):
        return False
    return len({local_work(op, rank) for rank in corners(mesh)}) > 1


def representative_ranks(
    build: Build,
    ranks: tuple[int, ...],
    uneven: Collection[ProcessMesh],
    cluster: Cluster,
    devices: Sequence[int],
) -> tuple[tuple[int, ...], bool]:
    """Ranks that represent all given ones, at least one for every kind of device.

    Returns:
        The representatives, and whether they represent the others exactly.
    """
    kinds: dict[tuple[str, str], int] = {}
    for rank in ranks:
        device = cluster.devices[devices[rank]]
        kinds.setdefault((device.model, device.origin), rank)
    chosen, members = dict.fromkeys(kinds.values()), set(ranks)
    meshes = [mesh for mesh in uneven if ranks[0] in mesh]
    for mesh in meshes:
        chosen.update((rank, None) for rank in corners(mesh) if rank in members)
    return tuple(chosen), not meshes


def corners(mesh: ProcessMesh) -> tuple[int, ...]:
    """Ranks whose coordinates are on every axis the first or the last of a run of equal weights.

    Example:
        >>> corners(ProcessMesh.grid(x=2, y=3)), corners(ProcessMesh.grid(x=4).weighted(x=(2, 1, 1, 1)))
        ((0, 2, 3, 5), (0, 1, 3))
    """
    ends = [_run_ends(mesh.weights.get(axis, (1,) * size)) for axis, size in mesh.sizes.items()]
    return tuple(int(mesh.ranks[index]) for index in itertools.product(*ends))


def _run_ends(weights: Sequence[int]) -> tuple[int, ...]:
    last = len(weights) - 1
    return tuple(
        i
        for i, weight in enumerate(weights)
        if i in (0, last) or weights[i - 1] != weight or weights[i + 1] != weight
    )
