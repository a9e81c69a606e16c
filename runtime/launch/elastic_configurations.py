"""What an elastic job runs on the ranks that there are: a given plan, another mesh, or a search."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from distgraph.errors import RuntimeFault
from distgraph.plan.placement import PlacedRanks
from distgraph.runtime.job.job_files import PLAN_VARIABLE, STRATEGY_VARIABLE

GROW: Final = "grow"
"""File by which the launcher asks the ranks to stop after their next checkpoint, because more can be used."""
STOPPED: Final = "stopped"
"""File by which rank 0 says that the ranks have stopped for that reason."""
_PROGRAM: Final = "program.json"


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A plan of the command line: path of its file, number of its ranks, and where they run."""

    path: str
    ranks: int
    placement: tuple[PlacedRanks, ...] = ()


@dataclass(frozen=True, slots=True)
class ScriptProgram:
    """What the script trains, as its first `fit` has found it.

    Attributes:
        mesh: axes and sizes of the mesh of its strategy; empty where it has none, or not of the first ranks.
        batch_axis: axes of this mesh that split the batch.
        samples: of a micro-batch, which these axes split.
        searches: its strategy searches a plan for the cluster of the engine.
        shared: fields of its strategy that need several ranks which share the batch -> text of their values
            where one rank has the whole batch.
    """

    mesh: Mapping[str, int]
    batch_axis: tuple[str, ...]
    samples: int
    searches: bool
    shared: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it to the folder of an elastic job, unless an earlier start of the job has."""
        if not (folder / _PROGRAM).exists():
            draft = folder / f"{_PROGRAM}.draft"
            draft.write_text(json.dumps(asdict(self)))
            draft.replace(folder / _PROGRAM)

    @classmethod
    def read(cls, folder: Path) -> ScriptProgram | None:
        """What a start of the job has written; None where the script has not come to `fit`."""
        if not (folder / _PROGRAM).exists():
            return None
        content = json.loads((folder / _PROGRAM).read_text())
        return cls(**content | {"batch_axis": tuple(content["batch_axis"])})


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a start of an elastic job runs.

    Attributes:
        ranks: number of ranks.
        text: what the ranks run, for messages.
        variables: environment variables that make them run it.
        placement: where the plan has placed the ranks.
    """

    ranks: int
    text: str
    variables: Mapping[str, str] = field(default_factory=dict)
    placement: tuple[PlacedRanks, ...] = ()


def choose(
    available: int,
    plans: Sequence[GivenPlan],
    program: ScriptProgram | None,
    fields: str = "",
    seconds: float = 60.0,
) -> Configuration:
    """The configuration for a number of ranks.

    Args:
        available: ranks that there are.
        plans: given plans; the largest that fits is taken, of equal ones the first.
        program: of the script; None where it is unknown.
        fields: fields of the strategy that the user has given, as `DISTGRAPH_STRATEGY` holds them.
        seconds: limit of a search.

    Raises:
        RuntimeFault: nothing fits; says what was looked for.
    """
    if available < 1:
        raise RuntimeFault("elastic: no rank is left; start the job again with fit(resume=True)")
    fitting = [plan for plan in plans if plan.ranks <= available]
    if fitting:
        plan = max(fitting, key=lambda each: each.ranks)
        variables = {PLAN_VARIABLE: str(Path(plan.path).resolve())}
        return Configuration(plan.ranks, f"plan {plan.path}", variables, plan.placement)
    if plans:
        smallest = min(plan.ranks for plan in plans)
        raise RuntimeFault(
            f"elastic: {_ranks(available)} left but the smallest plan of --plan needs {smallest}; give a "
            f"plan for {available} or fewer"
        )
    if program is None:
        raise RuntimeFault(
            "elastic: the job has lost ranks before its script has called fit, so it is not known what it "
            "trains; elastic jobs train by engine.fit, or give plans by --plan"
        )
    if program.mesh and program.batch_axis:
        return _resized(available, program, fields)
    if program.searches:
        text = _with_fields(fields, {"devices": str(available), "seconds": f"{seconds:g}"})
        return Configuration(available, f"a plan searched for {available} devices", {STRATEGY_VARIABLE: text})
    raise RuntimeFault(
        f"elastic: {_ranks(available)} left but the script's strategy has neither a mesh with a batch_axis "
        f"nor a mode that searches; give smaller plans by --plan, or Strategy(mesh=..., batch_axis=...)"
    )


def _resized(available: int, program: ScriptProgram, fields: str) -> Configuration:
    """The mesh of the script with as many positions along its first batch axis as fit."""
    axis = program.batch_axis[0]
    others = math.prod(size for name, size in program.mesh.items() if name != axis)
    split = math.prod(program.mesh[name] for name in program.batch_axis if name != axis)
    size = min(available // others, program.samples // split)
    if size < 1:
        mesh = ", ".join(f"{name}={size}" for name, size in program.mesh.items())
        raise RuntimeFault(
            f"elastic: {_ranks(available)} left but one position of axis {axis} of the script's mesh "
            f"({mesh}) takes {others}; give plans for fewer ranks by --plan"
        )
    mesh = ",".join(f"{name}:{size if name == axis else length}" for name, length in program.mesh.items())
    without = program.shared if size * split == 1 else {}
    text = f"mesh {mesh}{', without ' + ' and '.join(without) if without else ''}"
    variables = {STRATEGY_VARIABLE: _with_fields(fields, {"mesh": mesh, **without})}
    return Configuration(size * others, text, variables)


def _with_fields(fields: str, given: Mapping[str, str]) -> str:
    """A text of strategy fields with other values for some."""
    remaining = [part for part in fields.split() if part.partition("=")[0] not in given]
    return " ".join([*remaining, *(f"{name}={value}" for name, value in given.items())])


def _ranks(number: int) -> str:
    return f"{number} rank{'s are' if number > 1 else ' is'}"
