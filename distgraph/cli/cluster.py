"""`distgraph cluster`: checks and describes a resource file."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph.resources import describe, load_cluster, shipped_clusters, summarize


def cluster(
    name: Annotated[str, typer.Argument(help="Shipped name, resource file, or Paddle's cluster JSON.")] = "",
    listed: Annotated[
        bool, typer.Option("--list", help="One line for each shipped cluster: what it prices, and origins.")
    ] = False,
) -> None:
    """Check a resource file and print the cluster; without a name list the shipped clusters."""
    if name:
        typer.echo(summarize(load_cluster(name)) if listed else describe(load_cluster(name)))
        return
    for shipped in shipped_clusters():
        typer.echo(summarize(load_cluster(shipped)))
