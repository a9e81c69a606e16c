"""The command line application: all commands, and the errors that they report."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from distgraph import __version__
from distgraph.errors import DistGraphError

_COMMANDS: Final = (
    "run", "check", "plan", "export", "forecast", "inspect", "discover", "profile", "calibrate", "cluster",
    "tune", "checkpoint",
)  # fmt: skip
_MODULES: Final = {name: f"distgraph.cli.{name}" for name in _COMMANDS}
"""Name of a command -> the module of a function of this name, or of a Typer application `app`."""
_OPTIONS_OF_SCRIPT: Final = {"ignore_unknown_options": True}
_SETTINGS: Final = {  # options after the script of `run` and `check` belong to the script
    "run": {"allow_interspersed_args": False},
    "check": {"allow_interspersed_args": False},
    "plan": _OPTIONS_OF_SCRIPT,
    "forecast": _OPTIONS_OF_SCRIPT,
}
"""Name of a command -> settings of its Typer context."""


class _Commands(TyperGroup):
    """A group that imports the module of a command when the command is asked for.

    All modules together take over a second to import, most of which a single command does not need.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands, in the order of the help text."""
        return list(_MODULES)

    def get_command(self, ctx: Any, name: str) -> Any:
        """The command of this name; None for an unknown one, whose error suggests a similar name."""
        if name not in _MODULES:
            self.commands = {each: self.get_command(ctx, each) for each in _MODULES}
            return None
        module = import_module(_MODULES[name])
        if hasattr(module, "app"):
            return get_command(module.app)
        single = typer.Typer(add_completion=False)
        single.command(name, context_settings=_SETTINGS.get(name))(getattr(module, name))
        return get_command(single)


app = typer.Typer(
    name="distgraph",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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


def load_command(arguments: Sequence[str]) -> None:
    """Import the module of the command that is called, so that this is not done while the command runs."""
    name = next((each for each in arguments if not each.startswith("-")), "")
    if name in _MODULES:
        import_module(_MODULES[name])


def main() -> None:
    """Entry point; a `DistGraphError` is printed as one message, with exit code 1."""
    try:
        app()
    except DistGraphError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None
