"""The state of a search: its problem, its costs, its pipelines, its evaluations.

*In:* a program, a cluster, limits. *Out:* the state that the phases of `run_search.run_search` read and
extend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.search_driver.candidate import broken_constraint, constraint_broken_by
from distgraph.engine.search_driver.evaluations import (
    FORK_SECONDS,
    Evaluation,
    Evaluations,
    Evaluator,
    Forecaster,
)
from distgraph.engine.search_driver.explain.runners_up import Explainer
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.pipeline_search import PipelineSearch
from distgraph.engine.search_driver.search_space import pools_of, with_memory
from distgraph.plan.constraints import FREE, SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster
from distgraph.resources.runtimes.runtime_model import RuntimeModel

FORECASTS = 4
"""Pipelines of one kind that are forecast, at most: a forecast builds the whole program."""

SECONDS_PER_OP = 3e-4
"""To trace, complete, build and forecast a program, for each op of its serial graph: measured for a Llama of
32 layers on 64 devices (2.1 CPU seconds for 6,760 ops)."""


@dataclass(frozen=True, slots=True)
class Event:
    """A phase of a search that begins, or a program that was evaluated."""

    phase: str
    evaluation: Evaluation | None = None


def _expired(stopped: Callable[[], bool], clock: Callable[[], float], end: float) -> bool:
    return stopped() or clock() >= end


@dataclass(eq=False)
class SearchState:
    """The state of one search.

    Args:
        request: the program.
        cluster: where it is to run.
        mode: "auto", "recursive" or "sharding_propagation".
        seconds: the time limit, after which nothing new is begun.
        stopped: whether to begin nothing new before the time limit.
        clock: by which time is measured.
        processes: that work at the same time; the answer does not depend on how many there are.
        evaluator: of candidates; forecasts by default.
        runtime: what is to execute the plan; None for distgraph.
        constraints: which every program keeps that is the answer or a baseline.
        start: the plan from which the search starts; None to start from nothing.

    Attributes:
        layout_costs: what layers cost on the meshes of the search space.
        evaluations: all programs that were evaluated, and the best of them.
        pipelines: the best pipelines by estimate.
        explainer: the choices of the best program and their runners-up.
        evaluated: decisions of the pipelines that were evaluated for their estimates.
        zero_evaluated: whether data parallelism with ZeRO was evaluated.
        bound: seconds of a step that no plan goes below; None where that is not known.
        expired: whether the time limit is reached; it holds no reference to the state, so that all is freed
            with the state at once.
    """

    request: CompileRequest
    cluster: Cluster
    mode: str
    seconds: float
    stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    processes: int = 1
    evaluator: Evaluator | None = None
    runtime: RuntimeModel | None = None
    constraints: SearchConstraints = FREE
    start: Plan | None = None
    bound: float | None = None
    evaluated: set[object] = field(default_factory=set)
    zero_evaluated: bool = False
    layout_costs: LayoutCosts = field(init=False)
    evaluations: Evaluations = field(init=False)
    pipelines: PipelineSearch = field(init=False)
    explainer: Explainer = field(init=False)
    expired: Callable[[], bool] = field(init=False)

    def __post_init__(self) -> None:
        self.expired = partial(_expired, self.stopped, self.clock, self.clock() + self.seconds)
        if self.runtime is not None:
            self.constraints = self.constraints.under(self.runtime.name, self.runtime.executes)
        if self.mode != "auto" and self.micro_batches > 1:
            self.constraints = replace(self.constraints, micro_batches=self.micro_batches)
        self.cluster = with_memory(self.cluster, self.constraints)
        pools, limits = pools_of(self.cluster, self.constraints.devices), (self.expired, self.processes)
        self.layout_costs = LayoutCosts(
            self.request, self.cluster, pools, *limits, self.runtime, self.constraints
        )
        self.evaluations = Evaluations(self.evaluator or Forecaster(self.layout_costs))
        self.pipelines = PipelineSearch(self.layout_costs)
        self.explainer = Explainer(self.layout_costs, self.evaluations, self.expired)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of modes that do not search their number."""
        return self.constraints.micro_batches or self.request.micro_batches

    @property
    def best(self) -> Evaluation | None:
        """The best program so far that fits."""
        return self.evaluations.best

    def rehearse(self, phase: Callable[[], Iterator[Event]]) -> bool:
        """Run a phase in the background, so that its evaluations are known when it runs here. Returns whether
        it does; not where there is one process, no time is left for anything else, or evaluations take less
        than forking another process."""
        evaluations, ops = self.evaluations, len(self.layout_costs.reference_graph.graph.ops)
        if evaluations.evaluator.processes < 2 or self.expired() or ops * SECONDS_PER_OP < FORK_SECONDS:
            return False
        evaluations.rehearse(phase, self.layout_costs)
        return True

    def record(self, evaluation: Evaluation, eligible: bool = True, broken: str | None = None) -> Event:
        """Enter a program among the evaluations; `eligible` tells whether it may be the answer. One that does
        not keep the constraints is left out; `broken` is the first of these where the caller knows it."""
        if broken is None:
            broken = self.broken_by(evaluation)
        if broken:
            self.evaluations.leave_out(evaluation.origin, broken)
            evaluation.release()
            return Event(f"left out {evaluation.origin}: {broken} is given")
        self.evaluations.add(evaluation, eligible)
        return Event(f"forecast of {evaluation.origin}", evaluation)

    def broken_by(self, evaluation: Evaluation) -> str:
        """The constraint that a program does not keep; "" where it keeps all."""
        if not self.constraints.given():
            return ""
        if evaluation.program is not None or evaluation.candidate is None:
            return constraint_broken_by(evaluation.built(self.layout_costs), self.layout_costs)
        return broken_constraint(evaluation.candidate, self.layout_costs, evaluation.split)

    def single_stage_breaks(self) -> str:
        """The constraint that no program of one stage keeps; "" where there is none."""
        count = self.constraints.stage_count
        name = "stages" if self.constraints.borders is None else "borders"
        return "" if count in (None, 1) else f"{name}={self.constraints.given()[name]}"
