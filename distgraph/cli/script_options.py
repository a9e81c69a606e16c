"""Options of commands that run a script: separates options of the command from those of the script."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

import typer

from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.range_notation import parse_spans
from distgraph.runtime.launch.hosts import Host, hosts_from_environment, parse_hosts, read_hostfile

PLAN = typer.Option("--plan", help="Plan file, see distgraph plan; may follow the script.")
CLUSTER = typer.Option(
    "--cluster", help="Resource file or shipped name, for the costs of collectives; may follow the script."
)
TARGET = typer.Option(
    "--cluster", help="Resource file or shipped name; default: that of the script's engine."
)
"""The cluster of `plan` and `forecast`, which do not run the script on it."""
RUNTIME = typer.Option(
    "--runtime",
    "--for",
    help="What executes the program, such as megatron, torch or jax (docs/planning/runtimes.md); "
    "default: distgraph.",
)
START = typer.Option("--start", help="Plan file from which the search starts; the answer is never behind it.")
MICRO_BATCHES = typer.Option("--micro-batches", help="Parts of a batch; default: searched.")
SCHEDULE = typer.Option("--schedule", help="Pipeline schedule, such as 1f1b or gpipe; default: searched.")
STAGES = typer.Option("--stages", help="Number of pipeline stages; default: searched.")
BORDERS = typer.Option("--borders", help="First layers of the stages behind the first, such as 4,8.")
LAYERS = typer.Option("--layers", help="Number of layers from which stages are made; default: the blocks.")
RECOMPUTE = typer.Option("--recompute", help="Layers to recompute: all, none, auto, or numbers like 0-3,7.")
ZERO = typer.Option(
    "--zero", help="What dp may split: 0 nothing, 1 optimiser states, 2 gradients too, 3 parameters too."
)
UNIFORM = typer.Option("--uniform", help="All stages have the same size and shape.")
MEMORY = typer.Option("--memory", help="That a plan may use of each device, such as 8GiB.")
DEVICES = typer.Option("--devices", help="Number of devices that a plan may use, the first of the cluster.")
HOSTS = typer.Option("--hosts", help="Hosts and their slots, such as a:4,b:4; may follow the script.")
HOSTFILE = typer.Option("--hostfile", help="File with a host and its slots a line; may follow the script.")
PRECISION = typer.Option("--precision", help="bf16 or fp16 to compute in 16 bits; default: the script's.")
STRATEGY = typer.Option(
    "--strategy",
    help='Fields of Strategy in place of the script\'s, such as "zero=2 mesh=dp:2,tp:2"; may be given '
    "several times.",
)


def given_hosts(command: str, text: str, path: str) -> tuple[Host, ...]:
    """The hosts of `--hosts` or `--hostfile`, or those of the environment; empty for this machine alone.

    Raises:
        RuntimeFault: both are given, or what is given is malformed.
    """
    if text and path:
        raise RuntimeFault(f"{command}: --hosts and --hostfile both name hosts; give one of them")
    if text:
        return parse_hosts(text)
    return read_hostfile(path) if path else hosts_from_environment(os.environ)


def numbers_of_layers(option: str, text: str) -> tuple[int, ...] | None:
    """Numbers of layers from an option such as "0-3,7"; None for an empty one.

    Raises:
        GraphError: the text is malformed.
    """
    try:
        return parse_spans(text) if text.strip() else None
    except ValueError as error:
        raise GraphError(
            f"{option} is {text!r} but must be numbers of layers such as 0-3,7: {error}"
        ) from None


def recomputed_layers(text: str) -> bool | str | tuple[int, ...] | None:
    """The layers that `--recompute` names; None for an empty text. Raises GraphError: it is malformed."""
    words: dict[str, bool | str] = {"all": True, "none": False, "auto": "auto"}
    return words[text] if text in words else numbers_of_layers("--recompute", text)


def strategy_text(precision: str, strategies: Sequence[str] | None) -> str:
    """The fields of `--precision` and of all `--strategy`, checked here, before the script runs.

    Raises:
        ShardingError: a field is malformed, unknown or given twice.
    """
    text = " ".join([f"precision={precision}"] * bool(precision) + list(strategies or ()))
    if not text:  # most commands give no field and need not load what follows
        return ""
    from distgraph.plan.precision import precision_of  # noqa: PLC0415
    from distgraph.plan.strategy_text import strategy_fields  # noqa: PLC0415

    precision_of(strategy_fields(text).get("precision"))
    return text


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


def take_repeated(option: str, args: list[str] | None) -> tuple[list[str], list[str]]:
    """Values of an option of the command that may be given several times after a script.

    Returns:
        The values, and the arguments without the option and its values; those from `--` on stay.
    """
    values, words = list[str](), list(args or ())
    while True:
        (value,), left = split_options({option: ""}, words[: _dashes(words)])
        if not value:
            return values, words
        values, words = [*values, value], [*left, *words[_dashes(words) :]]


def _dashes(words: list[str]) -> int:
    """Position of the first `--`; the number of words where there is none."""
    return words.index("--") if "--" in words else len(words)


def _split_at_dashes(args: list[str] | None) -> tuple[list[str], list[str]]:
    """The arguments before and after the first `--`, which is part of neither."""
    words = list(args or ())
    end = _dashes(words)
    return words[:end], words[end + 1 :]
