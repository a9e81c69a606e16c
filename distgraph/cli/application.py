"""The command line application: all commands, and the errors that they report."""

from __future__ import annotations

from typing import Annotated

import typer

from distgraph import __version__
from distgraph.cli.calibrate import calibrate
from distgraph.cli.check import check
from distgraph.cli.checkpoint import app as checkpoint_app
from distgraph.cli.cluster import cluster
from distgraph.cli.discover import discover
from distgraph.cli.export import export
from distgraph.cli.forecast import forecast
from distgraph.cli.inspect import inspect
from distgraph.cli.plan import plan
from distgraph.cli.profile import profile
from distgraph.cli.run import run
from distgraph.cli.script_options import ARGUMENTS_OF_SCRIPT
from distgraph.cli.tune import tune
from distgraph.errors import DistGraphError

app = typer.Typer(
    name="distgraph",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_UNKNOWN_TO_SCRIPT = {"ignore_unknown_options": True}
app.command(context_settings=ARGUMENTS_OF_SCRIPT)(run)
app.command(context_settings=ARGUMENTS_OF_SCRIPT)(check)
app.command(context_settings=_UNKNOWN_TO_SCRIPT)(plan)
app.command()(export)
app.command(context_settings=_UNKNOWN_TO_SCRIPT)(forecast)
app.command()(inspect)
app.command()(discover)
app.command()(profile)
app.command()(calibrate)
app.command()(cluster)
app.command()(tune)
app.add_typer(checkpoint_app)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"distgraph {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Make serial programs distributed: run, check, plan, forecast, discover, profile, calibrate, tune."""


def main() -> None:
    """Entry point; a `DistGraphError` is printed as one message, with exit code 1."""
    try:
        app()
    except DistGraphError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
