"""`distgraph profile`: a resource file from measurements."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.engine.host_overhead import overheads
from distgraph.runtime.profile.profiler import Request
from distgraph.runtime.profile.profiler import profile as run_profile


def profile(
    output: Annotated[str, typer.Option("-o", "--output", help="Resource file to write.")],
    ranks: Annotated[int, typer.Option("-n", min=1, help="How many ranks, one a device.")] = 1,
    source: Annotated[
        str, typer.Option("--cluster", help="Resource file to measure anew; without it, this machine.")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="Measure so long at most.")] = 120.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier measurements.")] = False,
) -> None:
    """Measure this machine, or those of the job, and write a resource file with the error of every fit."""
    raise typer.Exit(run_profile(Request(output, source, ranks, seconds, fresh=fresh), overheads))
