"""DISTGRAPH_DUMP=dir: writes the graph of every stage, the source of rank programs, and the schedule."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from distgraph.errors import RuntimeFault
from distgraph.ir.graph import Graph
from distgraph.passes.pass_pipeline import PassRun, Watch
from distgraph.runtime.execute.process_group import is_chief
from distgraph.serialization.atomic_files import write_atomically

_NUMBERS = itertools.count(1)


def dump_directory() -> Path | None:
    """The folder of DISTGRAPH_DUMP; None if it is not set."""
    setting = os.environ.get("DISTGRAPH_DUMP")
    return Path(setting) if setting else None


def dump_stage(mode: str, stage: str, graph: Graph) -> None:
    """Write the text of a graph to a file with the next number; only rank 0 does."""
    if dump_directory() is not None and is_chief():
        write(f"{mode}.{stage}.dg", graph)


def dump_pass(mode: str) -> Watch:
    """A watch that writes the graph after each pass that changed it, named by stage if new, else by pass."""

    def watch(run: PassRun) -> None:
        new_stage = run.ran.requires != run.ran.stage
        if isinstance(run.after, Graph) and (new_stage or run.after is not run.before):
            dump_stage(mode, run.ran.stage if new_stage else run.name, run.after)

    return watch


def write(name: str, content: Any) -> None:
    """Write the file `NNN.name` if DISTGRAPH_DUMP is set. Raises RuntimeFault if it cannot be written."""
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
