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
    take_repeated,
)
from distgraph.errors import GraphError
from distgraph.runtime.job.job_files import CLUSTER_VARIABLE, PLAN_VARIABLE, STRATEGY_VARIABLE
from distgraph.runtime.launch.hosts import Host
from distgraph.runtime.launch.launch import launch

ELASTIC = typer.Option("--elastic", help="Go on with the ranks that are left when some are lost.")
RESTARTS = typer.Option("--restarts", help="With --elastic: most starts after losses; 3 by default.")
SEARCH_SECONDS = typer.Option(
    "--search-seconds", help="With --elastic: limit of a search for the ranks that are left; 60 by default."
)
LAUNCHER = typer.Option("--launcher", help="What starts ranks on several hosts: mpiexec (default) or srun.")


def run(
    script: Annotated[str, typer.Argument(help="Python script.")],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    ranks: Annotated[
        int | None, typer.Option("-n", help="Number of ranks; by default that of the plan, else 1.")
    ] = None,
    plan: Annotated[list[str] | None, PLAN] = None,
    cluster: Annotated[str, CLUSTER] = "",
    precision: Annotated[str, PRECISION] = "",
    strategy: Annotated[list[str] | None, STRATEGY] = None,
    hosts: Annotated[str, HOSTS] = "",
    hostfile: Annotated[str, HOSTFILE] = "",
    launcher: Annotated[str | None, LAUNCHER] = None,
    elastic: Annotated[bool, ELASTIC] = False,
    restarts: Annotated[int | None, RESTARTS] = None,
    search_seconds: Annotated[float | None, SEARCH_SECONDS] = None,
) -> None:
    """Run a script on N MPI ranks of this machine, or of the hosts that are named.

    Without --hosts and --hostfile the hosts are those that Slurm, PBS, Open MPI or the MPI operator of
    Kubernetes have set in the environment, else this machine. With --plan every rank runs on the machine and
    device that the plan has chosen; the hosts are checked before a rank starts.

    With --elastic the job goes on with the ranks that are left when some are lost, and with ranks that are
    added to the hostfile (docs/running/elastic.md); --plan may be given several times then.
    """
    if ranks is None:
        refuse_option_of_script("run", "-n", script, args)
    named = {"--cluster": cluster, "--hosts": hosts, "--hostfile": hostfile, "--precision": precision}
    behind, args = take_repeated("--plan", args)
    plans = [*(plan or []), *behind]
    behind, args = take_repeated("--strategy", args)
    (cluster, hosts, hostfile, precision), left = split_options(named, args)
    env = dict(os.environ)
    if cluster:
        distgraph.load_cluster(cluster)  # reports an error in the file once, instead of on every rank
        env[CLUSTER_VARIABLE] = str(Path(cluster).resolve()) if Path(cluster).is_file() else cluster
    if fields := strategy_text(precision, [*(strategy or ()), *behind]):
        env[STRATEGY_VARIABLE] = fields
    argv = [script, *left]
    listed = given_hosts("run", hosts, hostfile)
    if launcher is not None and not listed:
        raise GraphError(
            f"run: --launcher is {launcher} but no hosts are given; leave it out, or give --hosts"
        )
    launcher = launcher or "mpiexec"
    if elastic:
        options = (3 if restarts is None else restarts, 60.0 if search_seconds is None else search_seconds)
        raise typer.Exit(_run_elastic(argv, ranks, plans, listed, hostfile, (*options, launcher), env))
    if restarts is not None or search_seconds is not None:
        name = "--restarts" if restarts is not None else "--search-seconds"
        raise GraphError(f"run: {name} is given without --elastic; leave it out, or add --elastic")
    if len(plans) > 1:
        raise GraphError(f"run: plans {plans[0]} and {plans[1]} are for one job; give one, or --elastic")
    count, made = 1 if ranks is None else ranks, None
    if plans:
        made, count = _load_plan(plans[0], ranks)
        env[PLAN_VARIABLE] = str(Path(plans[0]).resolve())
    if not listed:
        raise typer.Exit(launch(count, argv, env=env))
    from distgraph.runtime.launch.launch_hosts import launch_on_hosts  # noqa: PLC0415 (only for several hosts)

    placement = () if made is None else made.placement
    plan_name = f"plan {plans[0]}" if plans else "the plan"
    raise typer.Exit(
        launch_on_hosts(count, argv, listed, placement=placement, plan=plan_name, launcher=launcher, env=env)
    )


def _load_plan(path: str, ranks: int | None) -> tuple[distgraph.Plan, int]:
    """The plan of a job, and its number of ranks. Raises GraphError: the plan needs more than `ranks`."""
    made = distgraph.Plan.load(path)
    needed = max(made.ranks) + 1
    if ranks is not None and ranks < needed:
        raise GraphError(f"run: plan {path} needs {needed} ranks but -n is {ranks}; leave out -n")
    return made, needed if ranks is None else ranks


def _run_elastic(
    argv: list[str],
    ranks: int | None,
    plans: list[str],
    hosts: tuple[Host, ...],
    hostfile: str,
    options: tuple[int, float, str],
    env: dict[str, str],
) -> int:
    """Run an elastic job. Returns its exit code.

    Args:
        argv: script and arguments.
        ranks: most ranks that are used; None for those of the largest plan, or all slots.
        plans: paths of plans.
        hosts: host list; empty for this machine.
        hostfile: path of the host list, if it was read from a file.
        options: restarts, seconds of a search, and what starts ranks on several hosts.
        env: environment of the ranks.
    """
    from distgraph.runtime.launch.elastic import ElasticOptions, launch_elastic  # noqa: PLC0415 (only here)
    from distgraph.runtime.launch.elastic_capacity import Capacity  # noqa: PLC0415
    from distgraph.runtime.launch.elastic_configurations import GivenPlan  # noqa: PLC0415

    restarts, seconds, launcher = options
    if restarts < 0 or not seconds > 0:
        raise GraphError(
            f"run: --restarts is {restarts} and --search-seconds is {seconds:g} but they must be a number "
            "from 0 up and a positive number of seconds"
        )
    loaded = [(path, distgraph.Plan.load(path)) for path in plans]
    given = tuple(GivenPlan(path, max(plan.ranks) + 1, plan.placement) for path, plan in loaded)
    largest = max((plan.ranks for plan in given), default=0)
    count = ranks or largest or sum(host.slots for host in hosts) or 1
    if given and count < min(plan.ranks for plan in given):
        raise GraphError(f"run: -n is {count} but every plan needs more ranks; leave out -n")
    return launch_elastic(
        argv, Capacity(hosts, count, hostfile), ElasticOptions(given, restarts, seconds, launcher), env=env
    )
