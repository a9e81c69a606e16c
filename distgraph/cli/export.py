"""`distgraph export`: translates a plan into the terms of another framework."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.plan.export.exporters import EXPORTERS
from distgraph.plan.plan import Plan


def export(
    plan: Annotated[str, typer.Argument(help="Plan file, see distgraph plan.")],
    framework: Annotated[str, typer.Argument(help=f"One of {', '.join(EXPORTERS)}.")],
    output: Annotated[
        str, typer.Option("-o", "--output", help="Write to this file: source, or data if it ends in .json.")
    ] = "",
) -> None:
    """Translate a plan into the terms of another framework; notes on what it cannot express go to stderr."""
    exported = Plan.load(plan).export(framework)
    if output:
        exported.save(output)
    else:
        typer.echo(exported.source, nl=False)
    for note in exported.notes:
        typer.echo(f"not expressed: {note}", err=True)
