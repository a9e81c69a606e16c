"""What an MPI process is in its job; `runtime/launch/process_placement.py` decides it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What a process is in its job.

    Attributes:
        rank: its logical rank.
        share: number of its device among the equal devices of its machine, and their number; None where no
            plan says.
        device_type: planned type of its device; empty where no plan says.
        notes: what the user is to know about the placement, for rank 0 to print.
    """

    rank: int
    share: tuple[int, int] | None = None
    device_type: str = ""
    notes: tuple[str, ...] = ()
