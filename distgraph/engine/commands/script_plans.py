"""The first program of a script: its forecast, or a plan for it, in place of running it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from distgraph.engine.commands.script_runner import ScriptHook, run_script
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.program_forecast import ProgramForecast, cluster_for, forecast_training
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster, load_cluster
from distgraph.resources.runtimes.load_runtime import load_runtime

if TYPE_CHECKING:
    from distgraph.engine.commands.plan_search import SearchOptions


def forecast_script(
    path: str | Path, argv: Sequence[str] = (), cluster: str | None = None, runtime: str | None = None
) -> ProgramForecast:
    """Run a script up to its first program, and forecast that in place of running it.

    Args:
        path: of the script.
        argv: its arguments.
        cluster: resource file or name of a shipped one; that of the script's engine by default.
        runtime: what executes it: the name of a runtime model or the path of its file; distgraph by default.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a training step.
        ResourceError: there is no cluster, it is too small, or does not state a number that a cost
            needs; there is no such runtime.
    """
    given = None if cluster is None else load_cluster(cluster)
    executes = None if runtime is None else load_runtime(runtime)

    def forecast(request: CompileRequest, engine_cluster: Cluster | None) -> ProgramForecast:
        target = cluster_for(given, engine_cluster, "distgraph forecast --cluster")
        if request.training_spec.strategy.searches:  # most programs search nothing
            from distgraph.engine.commands.plan_search import with_searched_plan  # noqa: PLC0415

            request = with_searched_plan(request, target)
        return forecast_training(request, target, runtime=executes)

    return run_script(path, argv, ScriptHook(forecast), "forecast", "there is nothing to forecast")


def plan_script(
    path: str | Path,
    argv: Sequence[str] = (),
    cluster: str | None = None,
    options: SearchOptions | None = None,
) -> Plan:
    """Run a script up to its first program, and search a plan for it; arguments as `forecast_script`.

    Raises:
        GraphError: there is no such file, or the script ends, exits or raises without a training step.
        ResourceError: there is no cluster, or it does not state a number that a cost needs.
        InfeasibleError: no plan fits the cluster.
    """
    from distgraph.engine.commands import plan_search  # noqa: PLC0415 (a forecast loads no search)

    given = None if cluster is None else load_cluster(cluster)

    def plan(request: CompileRequest, engine_cluster: Cluster | None) -> Plan:
        target = cluster_for(given, engine_cluster, "distgraph plan --cluster")
        settings = options or plan_search.SearchOptions()
        constrained = plan_search.with_constraints_of(request.training_spec.strategy, settings)
        return plan_search.search(request, target, constrained)

    return run_script(path, argv, ScriptHook(plan), "plan", "there is nothing to plan")
