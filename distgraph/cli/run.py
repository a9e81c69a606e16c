"""`distgraph run`: runs a script on N MPI ranks of this machine, or of several hosts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import distgraph
from distgraph.cli.script_options import (
    CLUSTER,
    HOSTFILE,
    HOSTS,
    PLAN,
    PRECISION,
    STRATEGY,
    given_hosts,
    refuse_option_of_script,
    split_options,
    strategy_text,
)
from distgraph.errors import GraphError
from distgraph.runtime.job.job_files import CLUSTER_VARIABLE, PLAN_VARIABLE, STRATEGY_VARIABLE
from distgraph.runtime.launch.launch import launch

LAUNCHER = typer.Option("--launcher", help="What starts ranks on several hosts: mpiexec or srun.")


def run(
    script: Annotated[str, typer.Argument(help="Python script.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", help="Number of ranks; by default that of the plan, else 1.")
    ] = None,
    plan: Annotated[str, PLAN] = "",
    cluster: Annotated[str, CLUSTER] = "",
    precision: Annotated[str, PRECISION] = "",
    strategy: Annotated[str, STRATEGY] = "",
    hosts: Annotated[str, HOSTS] = "",
    hostfile: Annotated[str, HOSTFILE] = "",
    launcher: Annotated[str, LAUNCHER] = "mpiexec",
) -> None:
    """Run a script on N MPI ranks of this machine, or of the hosts that are named.

    Without --hosts and --hostfile the hosts are those that Slurm, PBS, Open MPI or the MPI operator of
    Kubernetes have set in the environment, else this machine. With --plan every rank runs on the machine and
    device that the plan has chosen; the hosts are checked before a rank starts.
    """
    if ranks is None:
        refuse_option_of_script("run", "-n", script, args)
    named = {"--plan": plan, "--cluster": cluster, "--hosts": hosts, "--hostfile": hostfile}
    named |= {"--precision": precision, "--strategy": strategy}
    (plan, cluster, hosts, hostfile, precision, strategy), left = split_options(named, args)
    needed, env, made = 1, dict(os.environ), None
    if cluster:
        distgraph.load_cluster(cluster)  # reports an error in the file once, instead of on every rank
        env[CLUSTER_VARIABLE] = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
    if fields := strategy_text(precision, strategy):
        env[STRATEGY_VARIABLE] = fields
    if plan:
        made = distgraph.Plan.load(plan)
        needed, env[PLAN_VARIABLE] = max(made.ranks) + 1, str(Path(plan).resolve())
        if ranks is not None and ranks < needed:
            raise GraphError(f"run: plan {plan} needs {needed} ranks but -n is {ranks}; leave out -n")
    count, listed = needed if ranks is None else ranks, given_hosts("run", hosts, hostfile)
    if not listed:
        raise typer.Exit(launch(count, [script, *left], env=env))
    from distgraph.runtime.launch.launch_hosts import launch_on_hosts  # noqa: PLC0415 (only for several hosts)

    placement = () if made is None else made.placement
    code = launch_on_hosts(
        count,
        [script, *left],
        listed,
        placement=placement,
        plan=f"plan {plan}",
        launcher=launcher,
        env=env,
    )
    raise typer.Exit(code)
