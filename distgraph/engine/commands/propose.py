"""What a command wants of the first program of a script: its forecast, or a plan for it.

The script runs up to the moment in which its engine would compile; there the engine proposes the program, and
where a command waits for one, the script is left with what the command wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distgraph.engine.commands.plan_search import SearchOptions, search, settled
from distgraph.engine.commands.script_runner import Seen, run_until_seen
from distgraph.engine.compile.compile_request import Training
from distgraph.engine.compile.program_forecast import Forecasted, cluster_for, forecast_training
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster, load_cluster


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command wants.

    Attributes:
        cluster: where the program is to run; None for the cluster of the engine.
        options: of the search for a plan; None where a forecast is wanted.
    """

    cluster: Cluster | None
    options: SearchOptions | None = None


WANTED: ContextVar[Wanted | None] = ContextVar("distgraph_wanted", default=None)
"""Set while a command runs a script."""


def propose(training: Training, own: Cluster | None) -> None:
    """Called by an engine before it compiles: does nothing unless a command waits for it."""
    wanted = WANTED.get()
    if wanted is None:
        return
    if wanted.options is not None:
        cluster = cluster_for(wanted.cluster, own, "distgraph plan --cluster")
        raise Seen(search(training, cluster, wanted.options))
    cluster = cluster_for(wanted.cluster, own, "distgraph forecast --cluster")
    raise Seen(forecast_training(settled(training, cluster), cluster))


def forecast_script(path: str | Path, argv: Sequence[str] = (), cluster: str | None = None) -> Forecasted:
    """Run a script up to its first program, and forecast that in place of running it.

    Args:
        path: of the script.
        argv: its arguments.
        cluster: resource file or name of a shipped one; that of the script's engine by default.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a training step.
        ResourceError: there is no cluster, it is too small, or lacks a number that a cost needs.
    """
    wanted = Wanted(None if cluster is None else load_cluster(cluster))
    found: Forecasted = _seen(path, argv, wanted, "forecast", "there is nothing to forecast")
    return found


def plan_script(
    path: str | Path,
    argv: Sequence[str] = (),
    cluster: str | None = None,
    options: SearchOptions | None = None,
) -> Plan:
    """Run a script up to its first program, and search a plan for it.

    Args:
        path: of the script.
        argv: its arguments.
        cluster: resource file or name of a shipped one; that of the script's engine by default.
        options: of the search.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a training step.
        ResourceError: there is no cluster, or it lacks a number that a cost needs.
        InfeasibleError: no plan fits the cluster.
    """
    wanted = Wanted(None if cluster is None else load_cluster(cluster), options or SearchOptions())
    found: Plan = _seen(path, argv, wanted, "plan", "there is nothing to plan")
    return found


def _seen(path: str | Path, argv: Sequence[str], wanted: Wanted, command: str, otherwise: str) -> Any:
    token = WANTED.set(wanted)
    try:
        return run_until_seen(path, argv, command, otherwise)
    finally:
        WANTED.reset(token)
