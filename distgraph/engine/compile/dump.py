"""DISTGRAPH_DUMP=dir: the text of every stage, the source of every rank's program and the schedule, for
reading."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from distgraph.errors import RuntimeFault
from distgraph.ir.graph import Graph
from distgraph.runtime.execute.process_group import is_chief
from distgraph.serialization.atomic_files import write_atomically

_NUMBERS = itertools.count(1)


def dump_directory() -> Path | None:
    """Where to write, or None."""
    given = os.environ.get("DISTGRAPH_DUMP")
    return Path(given) if given else None


def dump_stage(mode: str, stage: str, graph: Graph) -> None:
    """Write the text of a graph, numbered in the order in which stages were reached. Rank 0 does it for
    all."""
    if dump_directory() is not None and is_chief():
        write(f"{mode}.{stage}.dg", graph)


def write(name: str, content: Any) -> None:
    """Write `NNN.name` where a directory is asked for. Raises RuntimeFault: that cannot be."""
    directory = dump_directory()
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise RuntimeFault(
            f"DISTGRAPH_DUMP={directory}: cannot be made: {error}; give another folder"
        ) from None
    path = directory / f"{next(_NUMBERS):03d}.{name}"
    write_atomically(path, f"{content}\n", RuntimeFault, durable=False)
