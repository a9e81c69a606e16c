"""Builds a program: the passes after completion, from a completed graph to tasks, schedule, rank programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from distgraph.ir.graph import Graph
from distgraph.passes.partition import RankProgram, receives
from distgraph.passes.pass_pipeline import Pipeline, Watch, pipeline, run_passes
from distgraph.passes.pass_registry import PASSES, PassContext
from distgraph.passes.redistribution.planner import Price, wire_price
from distgraph.passes.serial.loops.restore import restore
from distgraph.passes.split_tasks import Parts
from distgraph.passes.task_splitting.recomputation_tasks import recomputation_tasks
from distgraph.plan.pipeline_schedules import schedule_policy
from distgraph.runtime.program.actor_limits import actor_limits
from distgraph.runtime.schedule.actor_group import ActorPlan, actor_plan
from distgraph.runtime.schedule.task import Edge, Task, TaskGraph
from distgraph.runtime.schedule.task_order import Schedule, schedule

_SPLIT = "split_backward"


@dataclass(frozen=True)
class Build:
    """A compiled program, for all ranks.

    Attributes:
        completed: every value and op has a layout; after the pipeline's passes on completed graphs.
        lowered: every change of layout is a collective.
        parts: tasks and edges.
        policy: name of the schedule.
        pipeline: its passes; those on rank programs run for a rank when `program` is called.
        planned: the completed graph before the pipeline's passes on completed graphs, which a plan
            describes; None if there are no such passes.
        device_types: rank -> type of device that its meshes need; ranks without such needs are left out.
    """

    completed: Graph
    lowered: Graph
    parts: Parts
    policy: str
    pipeline: Pipeline = field(default_factory=pipeline, repr=False)
    planned: Graph | None = field(default=None, repr=False)
    device_types: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def task_graph(self) -> TaskGraph:
        """The tasks as the scheduler sees them."""
        again = recomputation_tasks(self.parts)
        tasks = tuple(
            Task(p.name, p.kind, p.stage, p.mesh.members, p.per_micro, p.label, p.whole, p.name in again)
            for p in self.parts.tasks
        )
        edges = tuple(Edge(source, target) for source, target in self.parts.edges)
        return TaskGraph(tasks, edges, self.lowered.micro_batches)

    @cached_property
    def schedule(self) -> Schedule:
        """Order of the tasks on every rank, recorded from the actors under the simulated clock."""
        return schedule(self.task_graph, self.policy)

    @cached_property
    def actor_plan(self) -> ActorPlan:
        """What the actors of all ranks share, for the executor "actors".

        Raises:
            ShardingError: two meshes have some of their ranks in common but not all.
        """
        graph, policy = self.task_graph, schedule_policy(self.policy)
        limits = actor_limits(graph, policy, self.schedule)
        plan = actor_plan(graph, policy, limits)
        seen = {
            edge
            for name, edge in self.parts.transfers.items()
            if edge[1] in plan.group_of
            and receives(self.lowered, self.lowered.producers[name], min(plan.ranks_of(edge[1])))
        }
        crossing = ((edge.source, edge.target) for edge in graph.edges if plan.crossing(edge))
        return replace(plan, unseen=frozenset(crossing) - seen)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Every rank of every mesh, ascending."""
        return tuple(sorted({rank for mesh in self.lowered.meshes for rank in mesh.members}))

    def program(self, rank: int) -> RankProgram:
        """The program of one rank."""
        passes = self.pipeline.reaching("rank")
        program: RankProgram = run_passes(self.parts, passes, PassContext(rank=rank), verified=False)
        return program


@dataclass(frozen=True)
class ReshardedProgram:
    """A program whose changes of layout are explicit, before ranks have devices and changes have costs.

    Attributes:
        planned: the completed graph that it was made from.
        completed: the graph after the pipeline's passes on completed graphs.
        resharded: the graph in which every change of layout is a `reshard` op.
        pipeline: the passes.
    """

    planned: Graph
    completed: Graph
    resharded: Graph
    pipeline: Pipeline

    def lower(self, price: Price = wire_price, watch: Watch | None = None) -> Graph:
        """The graph whose changes of layout are the cheapest collectives."""
        lowered: Graph = run_passes(
            self.resharded, self.pipeline.reaching("lowered"), PassContext(price=price), watch, verified=False
        )
        return lowered

    def build(self, policy: str, price: Price = wire_price, watch: Watch | None = None) -> Build:
        """The compiled program; see `build`."""
        lowered = self.lower(price, watch)
        passes = self.pipeline.reaching("tasks")
        if schedule_policy(policy).splits_backward and PASSES[_SPLIT] not in passes:
            passes = (*passes, PASSES[_SPLIT])
        parts: Parts = run_passes(lowered, passes, watch=watch, verified=False)
        planned = self.planned if self.pipeline.within("completed") else None
        return Build(self.completed, lowered, parts, policy, self.pipeline, planned)


def reshard_program(
    completed: Graph, micro_batches: int, passes: Pipeline, watch: Watch | None = None
) -> ReshardedProgram:
    """Run the passes on completed graphs, and those that make changes of layout explicit."""
    planned = replace(restore(completed), micro_batches=micro_batches)
    completed = run_passes(planned, passes.within("completed"), watch=watch, verified=False)
    resharded: Graph = run_passes(completed, passes.reaching("resharded"), watch=watch, verified=False)
    return ReshardedProgram(planned, completed, resharded, passes)


def build(
    completed: Graph,
    *,
    micro_batches: int = 1,
    policy: str = "1f1b",
    price: Price = wire_price,
    passes: Pipeline | None = None,
) -> Build:
    """Run the passes after completion.

    Args:
        completed: graph of one micro-batch.
        micro_batches: number of micro-batches in a step.
        policy: name of the schedule.
        price: cost of a collective, for the choice between sequences of them.
        passes: by default `PIPELINE`.
    """
    return reshard_program(completed, micro_batches, passes or pipeline()).build(policy, price)
