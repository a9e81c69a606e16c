"""What all forecasts of one program share, whatever the numbers of the cluster and of the runtime.

*In:* a `Build`. *Out:* classes of equal ranks; of each class one program, with its storage plan and memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distgraph.passes.partition import RankProgram
from distgraph.resources.runtimes.runtime_model import Memory
from distgraph.runtime.forecast.memory_forecast import RankMemory
from distgraph.runtime.forecast.rank_equivalence import RankClass, RankClasses, uneven_meshes
from distgraph.runtime.forecast.stream_model import Streams
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.memory_plan import StoragePlan, planned


@dataclass(frozen=True, slots=True)
class Representative:
    """The representative of an equivalence class of ranks. It has workspaces (by task) if kernels do."""

    rank_class: RankClass
    program: RankProgram
    plan: StoragePlan
    streams: Streams
    workspace: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class TimedRank:
    """A rank whose tasks are timed, with the program and the streams of its representative.

    Attributes:
        rank: in the job.
        program, streams: of the representative; the streams with the rank's own messages.
        task_names: of the rank's tasks -> those of the representative.
        values_here: names of the representative's values -> those of the rank.
    """

    rank: int
    program: RankProgram
    streams: Streams
    task_names: Mapping[str, str]
    values_here: Mapping[str, str]


class ProgramStructure:
    """What the forecasts of a program have in common: equal ranks, their programs and plans, their memory."""

    def __init__(self, build: Build) -> None:
        self.build = build
        self.rank_classes = RankClasses(build.parts)
        self.uneven = uneven_meshes(build)
        self.plans: dict[int, tuple[RankProgram, StoragePlan]] = {}
        self.memory: dict[tuple[int, int, Memory], RankMemory] = {}

    def plan(self, rank: int) -> tuple[RankProgram, StoragePlan]:
        """The program of a rank and its storage."""
        if rank not in self.plans:
            program = self.build.program(rank)
            self.plans[rank] = program, planned(program)
        return self.plans[rank]
