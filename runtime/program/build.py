"""From a completed graph to tasks, schedule and rank programs: the passes behind completion, in order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from distgraph.ir.graph import Graph
from distgraph.passes.lower import lower
from distgraph.passes.partition import RankProgram, partition
from distgraph.passes.redistribution.planner import Price, wire_price
from distgraph.passes.reshard import reshard
from distgraph.passes.split_tasks import Parts, phases
from distgraph.runtime.schedule.schedule import Schedule, schedule
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph


@dataclass(frozen=True)
class Build:
    """A compiled program, for all ranks.

    Attributes:
        completed: every value and op has a layout.
        lowered: every change of layout is a collective.
        parts: tasks and edges.
        policy: name of the schedule.
    """

    completed: Graph
    lowered: Graph
    parts: Parts
    policy: str

    @cached_property
    def task_graph(self) -> TaskGraph:
        """The tasks as the scheduler sees them."""
        tasks = tuple(Task(p.name, p.kind, p.stage, p.mesh.members, p.per_micro) for p in self.parts.tasks)
        edges = tuple(Edge(source, target) for source, target in self.parts.edges)
        return TaskGraph(tasks, edges, self.lowered.micro_batches)

    @cached_property
    def schedule(self) -> Schedule:
        """Order of the tasks on every rank, found by running the actors under the simulated clock."""
        return schedule(self.task_graph, self.policy)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of every mesh, ascending."""
        return tuple(sorted({rank for mesh in self.lowered.meshes for rank in mesh.members}))

    def program(self, rank: int) -> RankProgram:
        """What one rank runs."""
        return partition(self.parts, rank)


def build(
    completed: Graph, *, micro_batches: int = 1, policy: str = "1f1b", price: Price = wire_price
) -> Build:
    """Run reshard, lower and phases on a completed graph.

    Args:
        completed: graph of one micro-batch.
        micro_batches: how often it runs in a step.
        policy: name of the schedule.
        price: cost of a collective, for the choice between sequences of them.
    """
    completed = replace(completed, micro_batches=micro_batches)
    lowered = lower(reshard(completed), price)
    return Build(completed, lowered, phases(lowered), policy)
