"""`distgraph run`: runs a script on N MPI ranks of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from distgraph.cli.script_options import (
    CLUSTER,
    PLAN,
    refuse_option_of_script,
    split_options,
)
from distgraph.engine.commands.overrides import CLUSTER_VARIABLE, VARIABLE
from distgraph.errors import GraphError
from distgraph.plan.plan import Plan
from distgraph.resources import load_cluster
from distgraph.runtime.launch.launch import launch


def run(
    script: Annotated[str, typer.Argument(help="Python script.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", help="Number of ranks; by default that of the plan, else 1.")
    ] = None,
    plan: Annotated[str, PLAN] = "",
    cluster: Annotated[str, CLUSTER] = "",
) -> None:
    """Run a script on N MPI ranks of this machine."""
    if ranks is None:
        refuse_option_of_script("run", "-n", script, args)
    (plan, cluster), left = split_options({"--plan": plan, "--cluster": cluster}, args)
    needed, env = 1, dict(os.environ)
    if cluster:
        load_cluster(cluster)  # an error in the file is reported once, here, instead of by every rank
        env[CLUSTER_VARIABLE] = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
    if plan:
        needed, env[VARIABLE] = max(Plan.load(plan).ranks) + 1, str(Path(plan).resolve())
        if ranks is not None and ranks < needed:
            raise GraphError(f"run: plan {plan} needs {needed} ranks but -n is {ranks}; leave out -n")
    raise typer.Exit(launch(needed if ranks is None else ranks, [script, *left], env=env))
