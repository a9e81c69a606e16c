"""`distgraph forecast`: forecasts seconds and memory of a step before anything runs."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.cli.script_options import PLAN, PRECISION, RUNTIME, STRATEGY, TARGET, strategy_text
from distgraph.engine.commands.overrides import giving
from distgraph.engine.commands.script_plans import forecast_script
from distgraph.engine.compile.program_forecast import check_outputs
from distgraph.errors import RuntimeFault
from distgraph.plan.plan import Plan
from distgraph.serialization.atomic_files import check_writable


def forecast(
    script: Annotated[str, typer.Argument(help="Python script that trains with an Engine.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments; all those after --.")] = None,
    cluster: Annotated[str, TARGET] = "",
    runtime: Annotated[str, RUNTIME] = "",
    plan: Annotated[str, PLAN] = "",
    precision: Annotated[str, PRECISION] = "",
    strategy: Annotated[list[str] | None, STRATEGY] = None,
    html: Annotated[str, typer.Option("--html", help="Write a report as one offline HTML page.")] = "",
    trace: Annotated[str, typer.Option("--trace", help="Write a Chrome trace, for ui.perfetto.dev.")] = "",
    measured: Annotated[
        str,
        typer.Option(
            "--measured",
            help="Timeline file of callbacks.Timeline, to compare with; also in the report and the trace.",
        ),
    ] = "",
) -> None:
    """Forecast seconds and memory of a training step on a described cluster; nothing is trained."""
    timeline = check_outputs(html or None, measured or None)
    if trace:
        check_writable(trace, RuntimeFault)
    with giving(Plan.load(plan) if plan else None, strategy=strategy_text(precision, strategy)):
        result = forecast_script(script, args or (), cluster or None, runtime or None)
    typer.echo(result)
    if timeline is not None:
        typer.echo(result.compared_with(timeline))
    result.write(html or None, trace or None, timeline)
