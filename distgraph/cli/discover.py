"""`distgraph discover`: writes a resource file of this machine, or of several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distgraph.cli.script_options import HOSTFILE, HOSTS, given_hosts
from distgraph.errors import ResourceError
from distgraph.resources import describe, load_cluster
from distgraph.runtime.job.job_files import ranks_of_job
from distgraph.runtime.launch.hosts import Host, merged
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.launch.launch_hosts import launch_on_hosts
from distgraph.runtime.profile import discovery
from distgraph.serialization.atomic_files import check_writable

_RANKS_OF_HOST = 2  # that measure the link inside a host


def discover(
    output: Annotated[str, typer.Option("-o", "--output", help="Resource file to write.")],
    hosts: Annotated[str, HOSTS] = "",
    hostfile: Annotated[str, HOSTFILE] = "",
) -> None:
    """Write a resource file: cores, memory and GPUs of the hosts, and measured links inside and between them.

    Without --hosts and --hostfile the hosts are those of the batch system, else this machine. Under mpiexec
    they are those of its ranks.
    """
    path = Path(output).resolve()
    check_writable(path, ResourceError)
    if ranks_of_job() > 1:
        discovery.discover_rank(path)
        return
    argv = [discovery.__file__, str(path)]
    listed = [
        Host(host.name, min(host.slots, _RANKS_OF_HOST))
        for host in merged(given_hosts("discover", hosts, hostfile))
    ]
    count = sum(host.slots for host in listed)
    code = launch_on_hosts(count, argv, listed) if listed else launch(_RANKS_OF_HOST, argv)
    if code:
        raise typer.Exit(code)
    typer.echo(describe(load_cluster(path)))
