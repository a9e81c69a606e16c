"""Options of commands that run a script: separates options of the command from those of the script."""

from __future__ import annotations

import re
from collections.abc import Mapping

import typer

from distgraph.errors import GraphError

PLAN = typer.Option("--plan", help="Plan file, see distgraph plan; may follow the script.")
CLUSTER = typer.Option(
    "--cluster", help="Resource file or shipped name, for the costs of collectives; may follow the script."
)
RUNTIME = typer.Option(
    "--runtime", help="What executes the program, such as megatron (docs/runtimes.md); default: distgraph."
)
ARGUMENTS_OF_SCRIPT = {"allow_interspersed_args": False}
"""Typer settings of commands where options after the script belong to the script."""


def refuse_option_of_script(command: str, option: str, script: str, args: list[str] | None) -> None:
    """Refuse an option of the command that follows the script, where options belong to the script.

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
            f"{command}: {written} follows {script}, where options belong to the script; write distgraph "
            f"{command} {written} {script}, or, for an option of the script, distgraph {command} {script} -- "
            f"{written}"
        )


def split_options(values: Mapping[str, str], args: list[str] | None) -> tuple[list[str], list[str]]:
    """Separate options of the command from the arguments after a script.

    Args:
        values: option -> its value if it was given before the script, else "".
        args: the arguments after the script. Arguments after `--` belong to the script.

    Returns:
        The values of the options in the same order, and the arguments of the script.
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
