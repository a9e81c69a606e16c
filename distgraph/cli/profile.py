"""`distgraph profile`: measures devices and links and writes a resource file."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.engine.host_overhead import overheads
from distgraph.runtime.profile.profiler import Request
from distgraph.runtime.profile.profiler import profile as run_profile


def profile(
    output: Annotated[str, typer.Option("-o", "--output", help="Resource file to write.")],
    ranks: Annotated[int, typer.Option("-n", min=1, help="Number of ranks, one for each device.")] = 1,
    source: Annotated[
        str, typer.Option("--cluster", help="Resource file to measure; default: this machine.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Time limit of the measurement.")] = 120.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start again, without earlier measurements.")
    ] = False,
) -> None:
    """Measure this machine, or those of an MPI job, and write a resource file with the errors of the fits."""
    raise typer.Exit(run_profile(Request(output, source, ranks, seconds, fresh=fresh), overheads))
