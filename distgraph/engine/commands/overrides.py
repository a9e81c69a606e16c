"""Plan, cluster and strategy of an engine: from its caller, or from the command that runs the script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from distgraph.engine.compile.plan_apply import warn_overruled
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.plan.strategy_text import with_fields
from distgraph.resources import Cluster, load_cluster
from distgraph.runtime.job.job_files import CLUSTER_VARIABLE, PLAN_VARIABLE, STRATEGY_VARIABLE

_GIVEN: ContextVar[Plan | None] = ContextVar("distgraph_plan", default=None)
_CLUSTER: ContextVar[Cluster | None] = ContextVar("distgraph_cluster", default=None)
_STRATEGY: ContextVar[str] = ContextVar("distgraph_strategy", default="")


def plan_for(training_spec: TrainingSpec, default: Plan | str | Path | None) -> Plan | None:
    """The plan of an engine: that of the command, where the engine trains, before its own.

    Warns about a setting of the strategy that the plan decides otherwise, unless the command
    gives the plan alone.

    Raises:
        GraphError: as `Plan.load`.
    """
    plan = None
    if training_spec.optimizer is not None:
        path = os.environ.get(PLAN_VARIABLE)
        plan = _GIVEN.get() or (Plan.load(path) if path else None)
    if plan is not None and not _strategy_text():  # the command takes the place of what the script says
        return plan
    plan = plan or (Plan.load(default) if isinstance(default, (str, Path)) else default)
    if plan is not None:
        warn_overruled(training_spec.strategy, plan)
    return plan


def cluster_given(default: Cluster | str | Path | None) -> Cluster | None:
    """The cluster of an engine: that of the command before its own.

    Raises:
        ResourceError: as `load_cluster`.
    """
    given = _CLUSTER.get() or os.environ.get(CLUSTER_VARIABLE) or default
    return load_cluster(given) if isinstance(given, (str, Path)) else given


def strategy_given(default: Strategy) -> Strategy:
    """The strategy of an engine, with the fields that the command gives in place of its own.

    Raises:
        ShardingError: a field is malformed, or contradicts another.
    """
    return with_fields(default, _strategy_text())


def _strategy_text() -> str:
    """The fields of the strategy that the command gives."""
    return _STRATEGY.get() or os.environ.get(STRATEGY_VARIABLE, "")


def strategy_environment() -> dict[str, str]:
    """Variables by which processes that are started have the strategy fields of this command."""
    return {STRATEGY_VARIABLE: _STRATEGY.get()} if _STRATEGY.get() else {}


@contextmanager
def giving(plan: Plan | None, cluster: Cluster | None = None, strategy: str = "") -> Iterator[None]:
    """Inside, engines that train have this plan, engines this cluster, and strategies these fields
    (`strategy_fields`); None and "" change nothing."""
    plans, clusters = _GIVEN.set(plan or _GIVEN.get()), _CLUSTER.set(cluster or _CLUSTER.get())
    strategies = _STRATEGY.set(strategy or _STRATEGY.get())
    try:
        yield
    finally:
        _STRATEGY.reset(strategies)
        _CLUSTER.reset(clusters)
        _GIVEN.reset(plans)
