"""`distgraph calibrate`: fits a resource file and a runtime model to measured training steps."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.engine.commands.measured_runs import read_runs
from distgraph.resources import load_cluster
from distgraph.resources.runtimes.load_runtime import default_runtime, load_runtime
from distgraph.runtime.profile.calibration.calibrate import calibrate as fit_runs
from distgraph.runtime.profile.calibration.calibrated_files import write_calibrated


def calibrate(
    runs: Annotated[
        str, typer.Argument(help="CSV file of measured steps, see docs/planning/calibration.md.")
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Resource file to write.")],
    cluster: Annotated[
        str, typer.Option("--cluster", help="Resource file or shipped name on which they were measured.")
    ],
    runtime: Annotated[
        str, typer.Option("--runtime", help="What executed them, such as megatron; default: distgraph.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, max=10, help="Times that the fit is made anew.")] = 2,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that forecast.")] = 1,
) -> None:
    """Fit the numbers of a cluster and a runtime to measured steps; write them with their held-out errors."""
    hardware = load_cluster(cluster)
    model = load_runtime(runtime) if runtime else default_runtime(hardware.devices[0].type)
    measured = read_runs(runs, hardware)
    calibration = fit_runs(measured, hardware, model, rounds=rounds, workers=workers, watch=typer.echo)
    typer.echo(str(calibration))
    for path in write_calibrated(output, cluster, runtime or model.name, calibration):
        typer.echo(f"wrote {path}")
