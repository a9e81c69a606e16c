"""`distgraph check`: compares the partitioned program with the serial one, value by value."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.cli.script_options import (
    CLUSTER,
    PLAN,
    PRECISION,
    STRATEGY,
    refuse_option_of_script,
    split_options,
    strategy_text,
    take_repeated,
)
from distgraph.engine.commands.inspection import check_script
from distgraph.engine.commands.overrides import giving
from distgraph.plan.plan import Plan
from distgraph.resources import load_cluster


def check(
    script: Annotated[str, typer.Argument(help="Python script that trains with an Engine.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    samples: Annotated[
        int, typer.Option(min=0, help="Maximum number of samples; 0: a whole micro-batch.")
    ] = 0,
    plan: Annotated[str, PLAN] = "",
    cluster: Annotated[str, CLUSTER] = "",
    precision: Annotated[str, PRECISION] = "",
    strategy: Annotated[list[str] | None, STRATEGY] = None,
) -> None:
    """Compare the partitioned with the serial program of a script on the first batch, value by value."""
    if not samples:
        refuse_option_of_script("check", "--samples", script, args)
    behind, args = take_repeated("--strategy", args)
    named = {"--plan": plan, "--cluster": cluster, "--precision": precision}
    (plan, cluster, precision), left = split_options(named, args)
    fields = strategy_text(precision, [*(strategy or ()), *behind])
    with giving(Plan.load(plan) if plan else None, load_cluster(cluster) if cluster else None, fields):
        report = check_script(script, left, samples)
    typer.echo(report)
    raise typer.Exit(0 if report.ok else 1)
