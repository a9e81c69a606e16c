"""Decisions about a whole program, besides its stages and layouts: each is declared once, here.

A new decision is a field of `Decisions`. The candidates of a search and plans have the same fields, and what
tells candidates apart, explains a choice, compares plans and sets the strategy of an engine goes over them.
What remains to be written is where the decision has its effect, which values a search tries, and its form in
a plan file (`PlanFile`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from distgraph.ir.range_notation import spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What is decided about a whole program.

    Attributes:
        micro_batches: parts into which the batch is cut.
        schedule: name of a pipeline schedule (see `pipeline_schedules.py`).
        recompute: numbers of layers that are recomputed in the backward part.
        zero: level of ZeRO (docs/parallelism/data_parallel.md): 1 states are split over the ranks that share
            the batch, 2 gradients are reduced into parts as they are computed, 3 parameters are gathered
            for each use. 0 where layouts alone say what is split, and gradients and parameters are sent
            once a step.
    """

    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: tuple[int, ...] = ()
    zero: int = 0

    def decided(self) -> dict[str, Any]:
        """Decision -> what was decided, also of a class that adds fields of its own."""
        return {field.name: getattr(self, field.name) for field in fields(Decisions)}

    def choices(self, layers: int) -> dict[str, str]:
        """The decisions as texts, about a program of `layers` layers: numbers of layers are counted."""
        return {
            name: f"{len(value)} of {layers} layers" if isinstance(value, tuple) else str(value)
            for name, value in self.decided().items()
        }

    def texts(self) -> dict[str, str]:
        """The decisions as texts that tell any two apart."""
        return {
            name: spans(value) or "none" if isinstance(value, tuple) else str(value)
            for name, value in self.decided().items()
        }
