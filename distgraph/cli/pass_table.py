"""The table of `distgraph inspect --list-passes`."""

from __future__ import annotations

import io

from rich import box
from rich.console import Console
from rich.table import Table

from distgraph.passes.pass_pipeline import PIPELINE
from distgraph.passes.pass_registry import PASSES, STAGES, Pass

_WIDTH = 150


def pass_table() -> str:
    """A table of all registered passes, ordered by the stage that they require."""
    table = Table(box=box.ASCII)
    for heading in ("pass", "requires", "produces", "pipeline", "order", "what it does"):
        table.add_column(heading)
    for each in sorted(PASSES.values(), key=_order):
        place = str(PIPELINE.index(each.name) + 1) if each.name in PIPELINE else ""
        table.add_row(each.name, each.requires, each.stage, place, _needs(each), each.summary)
    text = io.StringIO()
    Console(file=text, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def _order(each: Pass) -> tuple[int, int, int]:
    """Sort key: stages, and within a stage the passes of the pipeline first."""
    place = PIPELINE.index(each.name) if each.name in PIPELINE else len(PIPELINE)
    return STAGES.index(each.requires), STAGES.index(each.stage), place


def _needs(each: Pass) -> str:
    needs = [f"after {name}" for name in each.after] + [f"not with {name}" for name in each.excludes]
    return ", ".join(needs)
