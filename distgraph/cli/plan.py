"""`distgraph plan`: searches the best plan for a script on a cluster."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from distgraph.cli.script_options import (
    BORDERS,
    DEVICES,
    HOSTFILE,
    HOSTS,
    LAYERS,
    MEMORY,
    MICRO_BATCHES,
    PRECISION,
    RECOMPUTE,
    RUNTIME,
    SCHEDULE,
    STAGES,
    START,
    STRATEGY,
    TARGET,
    UNIFORM,
    ZERO,
    given_hosts,
    numbers_of_layers,
    recomputed_layers,
    strategy_text,
)
from distgraph.engine.commands.measure_plans import measured_best
from distgraph.engine.commands.overrides import giving
from distgraph.engine.commands.plan_search import SearchOptions
from distgraph.engine.commands.script_plans import plan_script
from distgraph.errors import GraphError
from distgraph.plan.constraints import SEARCHED, SearchConstraints
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import MODES
from distgraph.resources.runtimes.load_runtime import load_runtime
from distgraph.runtime.launch.hosts import Host
from distgraph.serialization.atomic_files import check_writable


def plan(
    script: Annotated[str, typer.Argument(help="Python script that trains with an Engine.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments; all those after --.")] = None,
    cluster: Annotated[str, TARGET] = "",
    runtime: Annotated[str, RUNTIME] = "",
    output: Annotated[str, typer.Option("-o", "--output", help="Write the plan to this file.")] = "",
    mode: Annotated[str, typer.Option("--mode", help=f"One of {', '.join(MODES)}.")] = "auto",
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Time limit of the search; 60 by default.")
    ] = None,
    micro_batches: Annotated[int | None, MICRO_BATCHES] = None,
    schedule: Annotated[str | None, SCHEDULE] = None,
    stages: Annotated[int | None, STAGES] = None,
    borders: Annotated[str, BORDERS] = "",
    layers: Annotated[int | None, LAYERS] = None,
    recompute: Annotated[str, RECOMPUTE] = "",
    zero: Annotated[int | None, ZERO] = None,
    uniform: Annotated[bool, UNIFORM] = False,
    memory: Annotated[str | None, MEMORY] = None,
    devices: Annotated[int | None, DEVICES] = None,
    precision: Annotated[str, PRECISION] = "",
    strategy: Annotated[list[str] | None, STRATEGY] = None,
    start: Annotated[str, START] = "",
    measure: Annotated[
        int, typer.Option("--measure", help="Run N of the best plans for some steps; keep the fastest.")
    ] = 0,
    hosts: Annotated[str, HOSTS] = "",
    hostfile: Annotated[str, HOSTFILE] = "",
    about: Annotated[
        str, typer.Option("--explain", help="A tensor, layer or decision to explain, with its runner-up.")
    ] = "",
    other: Annotated[str, typer.Option("--compare", help="Another plan file to compare with.")] = "",
) -> None:
    """Search the best plan for a script on a described cluster; Ctrl-C ends it with the best so far."""
    compared = Plan.load(other) if other else None
    constraints = SearchConstraints(
        micro_batches=micro_batches,
        schedule=schedule,
        stages=stages,
        borders=numbers_of_layers("--borders", borders),
        layers=layers,
        recompute=recomputed_layers(recompute),
        zero=zero,
        uniform=uniform,
        memory=memory,
        devices=devices,
    )
    given = " ".join(strategy or ())
    if any(field.startswith("mode=") for field in given.split()):
        raise GraphError(
            f"plan: --strategy is {given!r} but the mode of a plan is given by --mode, which is {mode}; "
            f"give it there"
        )
    if seconds is not None and mode in set(MODES).difference(SEARCHED) and not constraints.chooses:
        raise GraphError(
            f"plan: --seconds is {seconds:g} but mode {mode!r} searches nothing; leave it out, or use another"
        )
    options = SearchOptions(
        mode=mode,
        seconds=60.0 if seconds is None else seconds,
        runtime=load_runtime(runtime) if runtime else None,
        constraints=constraints,
        start=Plan.load(start) if start else None,
    )
    listed = _measuring_hosts(measure, hosts, hostfile)
    if output:
        check_writable(output, GraphError)
    with (
        Console(stderr=True).status("tracing") as status,
        giving(None, strategy=strategy_text(precision, strategy)),
    ):
        if measure:
            run = partial(measured_best, argv=[script, *(args or ())], hosts=listed, watch=status.update)
            options = replace(options, measure=run, finalists=measure)
        options = replace(options, watch=lambda progress: status.update(str(progress)))
        best = plan_script(script, args or (), cluster or None, options)
    if output:
        best.save(output)
    typer.echo(best)
    if about:
        typer.echo(best.explain(about))
    if compared is not None:
        typer.echo(best.compare(compared))


def _measuring_hosts(measure: int, hosts: str, hostfile: str) -> tuple[Host, ...]:
    """The hosts on which plans are measured. Raises GraphError: nothing is measured, or a negative number."""
    if measure < 0:
        raise GraphError(f"plan: --measure is {measure} but must be a number of plans from 1 up")
    if (hosts or hostfile) and not measure:
        raise GraphError("plan: hosts are given but nothing is measured on them; add --measure 3")
    return given_hosts("plan", hosts, hostfile) if measure else ()
