"""PlanView: a readable summary of a compiled program: layouts, their origins, stages, collectives.

The plan as data, independent of the program, is `distgraph.plan.plan`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from distgraph.engine.compile.strategy_passes import complete_with
from distgraph.errors import GraphError
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.collective_registry import is_collective
from distgraph.ir.collectives import collective_of
from distgraph.ir.graph import Graph, Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.analysis.conflicts import Conflict, conflicts
from distgraph.passes.partition import RankProgram
from distgraph.plan.plan import Plan
from distgraph.plan.report import Comparison
from distgraph.plan.strategy import Strategy
from distgraph.resources import RankMapping
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.resources.units import format_bytes
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.storage import nbytes
from distgraph.runtime.report.tensor_table import TensorRow
from distgraph.serialization.text_table import indented_table

if TYPE_CHECKING:
    from distgraph.plan.export.result import Export

_MANY = 64  # in a program with more ranks, collectives are counted on one rank of every mesh


@dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind over the same axes, in one part of the step.

    Attributes:
        kind: all_reduce, all_gather, ..., or transfer between two meshes.
        where: axes of a mesh, or the two meshes.
        role: forward, backward or optimize.
        count: collectives in a step on one rank, the maximum over the ranks.
        nbytes: bytes that one rank sends for them in a step (ring algorithms), the maximum over the ranks.
    """

    kind: str
    where: str
    role: str
    count: int
    nbytes: float


class PlanView:
    """The layouts of a program with their origins, and the communication of a step. Print it.

    Args:
        build: the compiled program.
        title: name of the program in the text.
        mapping: device of every rank; None without a cluster.
        portable: makes the plan of the program as data.
        strategy: the strategy of the engine that compiled the program.
    """

    def __init__(
        self,
        build: Build,
        title: str = "step",
        mapping: RankMapping | None = None,
        portable: Callable[[], Plan] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        self.build = build
        self.mapping = mapping
        self.title = title
        self._portable = portable
        self._strategy = strategy or Strategy()
        self._programs: dict[int, RankProgram] = {}

    @property
    def meshes(self) -> tuple[ProcessMesh, ...]:
        """Distinct meshes in order; meshes with the same ranks form one stage of the pipeline."""
        return self.build.lowered.meshes

    @cached_property
    def tensors(self) -> tuple[TensorRow, ...]:
        """Inputs, parameters, states and outputs."""
        graph = self.build.completed
        lines = [
            self._line(graph, str(op.attrs["name"]), kind, op.result)
            for kind in ("input", "param", "state")
            for op in graph.sources(kind)
            if op.kind != "input" or op.result.shape
        ]
        outputs = (self._line(graph, label, "output", value) for label, value in graph.outputs)
        return (*lines, *outputs)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Communication of a step, most bytes first."""
        totals: dict[tuple[str, str, str], dict[int, tuple[int, float]]] = {}
        for rank in self._counted_ranks:
            program = self.build.program(rank)
            for task in program.tasks:
                for local in task.ops:
                    declared = collective_of(local.op.kind)
                    if declared is None or declared.local or local.mode == "recv":
                        continue
                    times = program.graph.micro_batches if task.per_micro and not local.tail else 1
                    key = (declared.name, self._where(local.op), local.op.role)
                    count, wire = totals.setdefault(key, {}).get(rank, (0, 0.0))
                    totals[key][rank] = count + times, wire + times * float(local.attrs.get("wire", 0.0))
        collectives = [
            Collective(*key, max(c for c, _ in ranks.values()), max(b for _, b in ranks.values()))
            for key, ranks in totals.items()
        ]
        return tuple(sorted(collectives, key=lambda c: -c.nbytes))

    @cached_property
    def bytes_per_rank(self) -> dict[int, float]:
        """Bytes that each rank sends in a step."""
        return {rank: self.build.program(rank).bytes_sent() for rank in self._counted_ranks}

    @property
    def schedule(self) -> str:
        """The grid of tasks over time, in which every task has the same length."""
        return str(self.build.schedule)

    @checked_arguments()
    def explain(self, name: str) -> str:
        """The layout of a tensor, its origin, its readers, and the collectives that start from it.

        Decisions of a search, and those about layers and stages, are explained by `portable`.

        Args:
            name: name of an input, parameter, state or output, or of a value such as "%12".

        Raises:
            GraphError: there is no such tensor.
        """
        graph, value = self.build.completed, self._find(name)
        attr, producer = graph.attrs[value.name], graph.producers[value.name]
        produced_by = f"{producer.kind} ({producer.source})" if producer.source else producer.kind
        lines = [f"%{value.name} : {value.type} {attr.spec} on {attr.mesh}", f"  made by {produced_by}"]
        lines.append(f"  decided by {attr.origin}")
        for user in graph.users[value.name]:
            source = f" ({user.source})" if user.source else ""
            lines.append(f"  read by %{user.name} {user.kind}{source} [{user.role}]")
        collectives = [
            (op, result)
            for op in self.build.lowered.ops
            for operand, result in zip(op.operands, op.results, strict=False)
            if is_collective(op) and self._origin_of(operand) == value.name
        ]
        for op, result in collectives:
            target = self.build.lowered.attrs[result.name]
            lines.append(
                f"  {op.kind.removeprefix('comm.')} over {self._where(op)} gives {target.spec} on "
                f"{target.mesh}"
            )
        return "\n".join(lines)

    def conflicts(self) -> tuple[Conflict, ...]:
        """Annotations that compete for a mesh axis, those with most bytes first.

        A conflict has both source lines, the collectives that follow from it with their bytes (and seconds,
        if there is a cluster), and the change of annotation after which a step sends least.

        Every change of annotation is tried by completing the program again, which takes a while for a large
        program.
        """
        mapping, strategy = self.mapping, self._strategy
        if strategy.refine == "always":  # a search for each change would take too long
            strategy = replace(strategy, refine="conflicts", refine_budget=None)
        return conflicts(
            self.build.completed,
            seconds=None if mapping is None else MeshCommunication(mapping.cluster, mapping.devices).price,
            plan=partial(complete_with, strategy),
        )

    @cached_property
    def portable(self) -> Plan:
        """The plan as data, for any engine that trains the same program and for export to other frameworks.

        Raises:
            GraphError: the program does not train, or is the short last batch of an epoch.
        """
        if self._portable is None:
            raise GraphError(f"plan of {self.title}: it was not compiled by an engine; use Engine.plan")
        return self._portable()

    @checked_arguments()
    def save(self, path: str | Path) -> None:
        """Write the plan as data (`portable`) to a file that `Engine(plan=path)` takes.

        Raises:
            GraphError: as `portable`, or the file cannot be written.
        """
        self.portable.save(path)

    def compare(self, other: Plan) -> Comparison:
        """The differences between `portable` and another plan. Raises GraphError, as `portable` does."""
        return self.portable.compare(other)

    @checked_arguments()
    def instead(self, name: str) -> Plan:
        """`portable` with the runner-up of a decision. Raises GraphError, also as `portable` does."""
        return self.portable.instead(name)

    @checked_arguments()
    def export(self, framework: str) -> Export:
        """The plan in the terms of "jax", "torch" or "megatron": docs/planning/export.md.

        Raises:
            GraphError: as `portable`, or the framework is unknown.
            ShardingError: the framework cannot express the plan.
        """
        return self.portable.export(framework)

    def __str__(self) -> str:
        micro = self.build.lowered.micro_batches
        ranks = len(self.build.ranks)
        head = (
            f"plan of {self.title}: {ranks} rank{'s' * (ranks > 1)}, {micro} micro-batch{'es' * (micro > 1)}"
        )
        stages = list(dict.fromkeys(mesh.rank_set for mesh in self.meshes))
        parts = [head + (f", {self.build.policy}" if len(stages) > 1 else "")]
        if len(self.meshes) > 1:
            numbered = [(f"{stages.index(mesh.rank_set)}", str(mesh)) for mesh in self.meshes]
            parts.append("stages\n" + indented_table(numbered))
        shown = [line for line in self.tensors if line.kind != "state" or self._differs_from_parameter(line)]
        parts.append(
            "tensors (bytes of the largest block)\n"
            + indented_table(_fold([self._row(line) for line in shown]))
        )
        hidden = len(self.tensors) - len(shown)
        if hidden:
            parts.append(f"  and {hidden} optimiser states, each laid out as its parameter")
        if self.collectives:
            rows = [
                (f"{c.count} x", c.kind, c.where, c.role, format_bytes(c.nbytes)) for c in self.collectives
            ]
            parts.append("collectives of a step (bytes sent by a rank)\n" + indented_table(rows))
        else:
            parts.append("no communication")
        most = max(self.bytes_per_rank.values(), default=0.0)
        if self.mapping is not None:
            parts.append(self.mapping.table().rstrip())
        parts.append(f"a rank sends at most {format_bytes(most)} in a step")
        return "\n".join(parts)

    def _row(self, line: TensorRow) -> tuple[str, ...]:
        where = (line.mesh,) if len(self.meshes) > 1 else ()
        return (line.name, line.type, line.layout, *where, format_bytes(line.nbytes), line.origin)

    def _line(self, graph: Graph, name: str, kind: str, value: Value) -> TensorRow:
        attr = graph.attrs[value.name]
        rank = attr.mesh.members[0]
        size = (
            nbytes(self._program(rank), value.name)
            if value.name in self.build.lowered.values
            else value.nbytes
        )
        return TensorRow(name, kind, value.type, str(attr.spec), str(attr.mesh), size, str(attr.origin))

    def _program(self, rank: int) -> RankProgram:
        if rank not in self._programs:
            self._programs[rank] = self.build.program(rank)
        return self._programs[rank]

    def _differs_from_parameter(self, line: TensorRow) -> bool:
        """Whether a state has another layout than the parameter that it belongs to."""
        owner, _, _ = line.name.rpartition(".")
        parameter = next((p for p in self.tensors if p.kind == "param" and p.name == owner), None)
        return parameter is None or (parameter.layout, parameter.mesh) != (line.layout, line.mesh)

    @cached_property
    def _counted_ranks(self) -> tuple[int, ...]:
        ranks = self.build.ranks
        return ranks if len(ranks) <= _MANY else tuple(dict.fromkeys(mesh.members[0] for mesh in self.meshes))

    def _where(self, op: Op) -> str:
        attrs = self.build.lowered.attrs
        source, target = attrs[op.operands[0].name].mesh, attrs[op.name].mesh
        if source != target:
            return f"{source} -> {target}"
        axes = tuple(op.attrs.get("axes", ())) or target.axes
        return "*".join(axes)

    def _origin_of(self, operand: Value) -> str:
        """Name of the value of the completed graph from which a collective of an operand starts."""
        name = operand.name
        while name not in self.build.completed.values:
            producer = self.build.lowered.producers[name]
            if not producer.operands:
                break
            name = producer.operands[0].name
        return name

    def _find(self, name: str) -> Value:
        graph = self.build.completed
        for op in graph.sources("input", "param", "state"):
            if op.attrs["name"] == name:
                return op.result
        for label, value in graph.outputs:
            if label == name:
                return value
        try:
            return graph.value(name)
        except GraphError:
            names = ", ".join(line.name for line in self.tensors)
            raise GraphError(
                f"plan has no tensor {name!r}; it has {names}, and the values of the graph; for layers, "
                "stages and other decisions use engine.plan.portable.explain"
            ) from None


def _fold(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Joins the rows of repeated layers: rows that are equal except for numbers in their names."""
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        pattern = tuple(_NUMBER.sub(".*", f"{cell}.") for cell in row)
        groups.setdefault(pattern, []).append(row)
    folded = []
    for members in groups.values():
        name = members[0][0]
        if len(members) > 1:
            last = _NUMBER.findall(members[-1][0] + ".")
            pieces = _NUMBER.split(name + ".")
            spans = map(_range, _NUMBER.findall(name + "."), last)
            name = "".join(itertools.chain(*itertools.zip_longest(pieces, spans, fillvalue="")))[:-1]
        folded.append((name, *members[0][1:]))
    return folded


_NUMBER = re.compile(r"\.\d+(?=\.)")


def _range(first: str, last: str) -> str:
    """`.0` and `.3` -> `.{0..3}`."""
    return first if first == last else f".{{{first[1:]}..{last[1:]}}}"
