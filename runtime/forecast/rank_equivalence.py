"""Ranks that do the same under other names, such as those of pipeline stages with equal layers.

*In:* the tasks of a program. *Out:* the `Form` of a rank's part in them.
*Invariant:* ranks whose forms have one number run the same kinds of ops in the same tasks, on blocks of the
same shapes, and hold, keep and update the same; names differ, and ranks by a constant. What their messages
cost may differ, and so may the order of their tasks.

    forward.s1: %8 = matmul(%7, %w1) [dp=2; 2,3]     forward.s2: %9 = matmul(%8, %w2) [dp=2; 4,5]     alike
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from distgraph.ir.graph import SOURCES, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import freeze
from distgraph.passes.split_tasks import Part, Parts


@dataclass(frozen=True, slots=True)
class Form:
    """What some ranks do.

    Attributes:
        number: the same where the same is done.
        tasks: of these ranks.
        names: their values, in an order that is the same for all forms of one number.
    """

    number: Hashable
    tasks: tuple[Part, ...]
    names: tuple[str, ...]


class Forms:
    """Forms of the ranks of one program.

    Args:
        parts: its tasks.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._numbers: dict[Hashable, int] = {}
        self._forms: dict[tuple[ProcessMesh, ...], Form] = {}  # of the first rank of the meshes

    def of(self, rank: int) -> Form:
        """The form of one rank."""
        meshes = tuple(mesh for mesh in self.parts.graph.meshes if rank in mesh)
        if meshes not in self._forms:
            writer = _Writer(self.parts, rank, meshes)
            number = self._numbers.setdefault(writer.text(), len(self._numbers))
            self._forms[meshes] = Form(number, writer.tasks, tuple(writer.values))
        found = self._forms[meshes]
        return Form((found.number, rank - meshes[0].members[0]), found.tasks, found.names)


class _Writer:
    """Writes down what a rank does, with numbers in place of names."""

    def __init__(self, parts: Parts, rank: int, meshes: tuple[ProcessMesh, ...]) -> None:
        self.parts, self.rank, self.base = parts, rank, meshes[0].members[0]
        self.tasks = tuple(part for part in parts.tasks if rank in part.mesh)
        self.stage = self.tasks[0].stage if self.tasks else 0
        self.values: dict[str, int] = {}
        self.meshes: dict[ProcessMesh, int] = {}
        self.lines: list[Hashable] = []

    def text(self) -> Hashable:
        """All of it; sources first, those that nobody reads as well."""
        updates = self.parts.updates
        for name in self.parts.sources_of(self.rank):
            self._value(name)
        for part in self.tasks:
            head = (part.kind, part.per_micro, part.stage - self.stage, self._mesh(part.mesh), len(part.body))
            self.lines.append(head)
            self.lines += [(*self._op(op), op.name in part.tail) for op in part.body]
        here = sorted((*updates[old], number) for old, number in self.values.items() if old in updates)
        self.lines += [(number, self.values.get(new)) for _, new, number in here]
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
            windows = producer.attrs["windows"] if producer.kind == "comm.halo" else ()
            layout = (value.shape, value.dtype, attr.spec, self._mesh(attr.mesh), windows)
            self.lines.append((*layout, source, self.parts.phase[name], name in graph.kept))
        return self.values[name]

    def _mesh(self, mesh: ProcessMesh) -> int:
        if mesh not in self.meshes:
            self.meshes[mesh] = len(self.meshes)
            stage = self.parts.at.get(mesh.rank_set, self.stage) - self.stage
            ranks = (mesh.ranks - self.base).tobytes()
            self.lines.append((mesh.axes, mesh.shape, tuple(mesh.weights.items()), ranks, stage))
        return self.meshes[mesh]
