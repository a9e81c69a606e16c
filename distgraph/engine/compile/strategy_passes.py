"""The passes of a strategy: the pipeline of `Strategy(passes=..., refine=...)`, and completion."""

from __future__ import annotations

from distgraph.engine.compile.zero import complete_split
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.pass_pipeline import Pipeline, pipeline, run_passes
from distgraph.passes.pass_registry import PassContext
from distgraph.passes.redistribution.planner import latency_price
from distgraph.plan.strategy import Strategy


def strategy_pipeline(strategy: Strategy) -> Pipeline:
    """The passes of a compilation under a strategy. Raises ShardingError if its `passes` do not fit."""
    first = ("choose_completion=complete",) if strategy.refine == "never" else ()
    zero = ("shard_gradients", "gather_parameters")[: max(0, strategy.split - 1)]
    precision = () if strategy.mixed is None else ("mixed_precision",)
    narrow = () if strategy.gradient_precision is None else ("narrow_gradients",)
    return pipeline((*first, *precision, *zero, *narrow, *strategy.passes))


def complete_with(strategy: Strategy, serial: Graph) -> Graph:
    """Complete a serial graph with the completion pass of the strategy's pipeline, and its errors."""
    context = PassContext(
        mesh=strategy.mesh or ProcessMesh.grid(serial=1),
        layout_price=latency_price,
        search_layouts=strategy.refine == "always",
        search_budget=strategy.refine_budget,
    )
    passes = strategy_pipeline(strategy).into("completed")

    def complete(graph: Graph) -> Graph:
        completed: Graph = run_passes(graph, passes, context, verified=False)
        return completed

    return complete_split(strategy, serial, complete) if strategy.split else complete(serial)
