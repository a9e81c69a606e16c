"""Options of commands that run a script: which are the command's, and which are the script's."""

from __future__ import annotations

import re
from collections.abc import Mapping

import typer

from distgraph.errors import GraphError

PLAN = typer.Option("--plan", help="Plan file, see distgraph plan; also behind the script.")
CLUSTER = typer.Option(
    "--cluster", help="Resource file or shipped name that prices changes of layout; also behind the script."
)
ARGUMENTS_OF_SCRIPT = {"allow_interspersed_args": False}
"""Typer settings of commands where options after the script belong to the script."""


def refuse_option_of_script(command: str, option: str, script: str, args: list[str] | None) -> None:
    """Refuse an option of the command that stands behind the script, where options belong to the script.

    Raises:
        GraphError: the option is among the script's arguments, as `-n 2`, `-n2` or `-n=2`, and no `--` says
            that it is meant for the script.
    """
    words, _ = _split_at_dashes(args)
    for position, word in enumerate(words):
        if not re.fullmatch(rf"{option}(=.*|\d+)?", word):
            continue
        written = " ".join(words[position : position + 1 + (word == option)])
        raise GraphError(
            f"{command}: {written} stands behind {script}, where options are the script's; write distgraph "
            f"{command} {written} {script}, or, if it is the script's, distgraph {command} {script} -- "
            f"{written}"
        )


def split_options(values: Mapping[str, str], args: list[str] | None) -> tuple[list[str], list[str]]:
    """Take options of the command out of the arguments behind a script.

    Args:
        values: option -> its value where it stood before the script, else "".
        args: the arguments behind the script. What follows `--` belongs to the script alone.

    Returns:
        The values of the options in the same order, and the arguments that are left for the script.
    """
    words, rest = _split_at_dashes(args)
    final = dict(values)
    for option in values:
        for position, word in enumerate(words):
            if word.startswith(f"{option}="):
                final[option], words[position : position + 1] = word.removeprefix(f"{option}="), []
                break
            if word == option and position + 1 < len(words):
                final[option], words[position : position + 2] = words[position + 1], []
                break
    return list(final.values()), [*words, *rest]


def _split_at_dashes(args: list[str] | None) -> tuple[list[str], list[str]]:
    """The arguments before and after the first `--`, which is part of neither."""
    words = list(args or ())
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]
