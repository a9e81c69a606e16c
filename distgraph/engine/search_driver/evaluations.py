"""Evaluations of candidates: the forecast of each, the best of them, and the baselines.

*In:* candidates, and an evaluator of them. *Out:* an `Evaluation` of each, made once, several at the same
time. *Invariant:* only the best program itself is kept. Of every other one its figures are, with the
candidate from which it can be built again: building is deterministic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from distgraph.engine.search_driver.candidate import (
    BuiltCandidate,
    Candidate,
    build_candidate,
    completed_graph,
    split_by_data_axes,
)
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.errors import DistGraphError
from distgraph.ir.graph import Graph
from distgraph.plan.plan_components import FrontPlan
from distgraph.resources.units import format_bytes

FORK_SECONDS = 0.1
"""A forecast that takes less is not worth a process of its own: forking one takes a fifth of that."""

Missing = TypeVar("Missing", None, str)


@dataclass(eq=False, slots=True)
class Evaluation:
    """The forecast of a program.

    Attributes:
        origin: where the program comes from, as of `BuiltCandidate`.
        candidate: what the program was built from; None where it does not follow from a candidate.
        seconds: of a step.
        memory_ratio: bytes that the fullest device needs over those that it has; 1 where the program fits.
        missing_bytes: that the fullest device needs besides; 0 where the program fits.
        ops: of the program, once lowered.
        choices: what was decided for the whole program, as texts.
        program: the program itself, where it is at hand.
        memory: peak bytes of the fullest device.
        devices: that the program uses.
        eligible: whether it may be the answer.
        shares: what its step goes to, see `Forecast.shares`.
        split: what the data axes split, see `split_by_data_axes`; None where that was not looked at.
        rebuild: builds the program once more where it does not follow from a candidate; None where that is
            not possible, so that the program is kept.
    """

    origin: str
    candidate: Candidate | None
    seconds: float
    memory_ratio: float
    missing_bytes: float
    ops: int
    choices: Mapping[str, str]
    program: BuiltCandidate | None
    memory: int = 0
    devices: int = 0
    eligible: bool = True
    shares: Mapping[str, float] = field(default_factory=dict)
    split: int | None = None
    rebuild: Callable[[LayoutCosts], BuiltCandidate | str] | None = None

    @property
    def fits(self) -> bool:
        """Whether every device has the memory."""
        return not self.missing_bytes

    def built(self, layout_costs: LayoutCosts) -> BuiltCandidate:
        """The program; built once more where it is not at hand."""
        if self.program is None and self.rebuild is not None:
            program = self.rebuild(layout_costs)
            assert not isinstance(program, str), program
            self.program = program
        if self.program is None:
            assert self.candidate is not None
            self.program = build_candidate(self.candidate, layout_costs)
        return self.program

    def completed(self, layout_costs: LayoutCosts) -> Graph:
        """The completed graph of the program, which is not built for that where there is a candidate."""
        if self.program is None and self.candidate is not None and self.rebuild is None:
            return completed_graph(self.candidate, layout_costs)
        return self.built(layout_costs).completed

    def release(self) -> None:
        """Free the program where it can be built again."""
        if self.candidate is not None or self.rebuild is not None:
            self.program = None


def evaluation_of(program: BuiltCandidate, *, other_layouts: bool = False) -> Evaluation:
    """The evaluation of a program, with the program.

    Args:
        program: on the cluster.
        other_layouts: whether its layouts are not those of its candidate, so that the program must be kept.
    """
    shortages = program.shortages
    return Evaluation(
        program.origin,
        None if other_layouts else program.candidate,
        program.seconds,
        max((s.needed / s.available for s in shortages), default=1.0),
        max((s.missing for s in shortages), default=0.0),
        len(program.build.lowered.ops),
        {
            **program.decisions.choices(len(program.layered.layers)),
            "stages": _stages(program),
            "products": _products(program),
        },
        program,
        math.ceil(program.forecast.peak_memory),
        len(program.build.ranks),
        shares=program.forecast.shares,
        split=split_by_data_axes(program.completed),
    )


def evaluate(candidate: Candidate, layout_costs: LayoutCosts) -> Evaluation:
    """Build a candidate and forecast it."""
    return evaluation_of(build_candidate(candidate, layout_costs))


def without_program(evaluation: Evaluation) -> Evaluation:
    """The same figures without the program, as one process sends them to another."""
    return replace(evaluation, program=None)


def without_program_if_any(evaluation: Missing | Evaluation) -> Missing | Evaluation:
    """`without_program` of an evaluation, if there is one."""
    return without_program(evaluation) if isinstance(evaluation, Evaluation) else evaluation


_NO_LESS = 1.001, 1.01
"""Factors of seconds and bytes within which a plan is no better than another in them."""
_MOST_ON_FRONT = 10


def front(evaluations: Sequence[Evaluation]) -> tuple[FrontPlan, ...]:
    """The programs that fit and that no other beats in seconds, memory and devices; the fastest first.

    Of many the fastest stay, those with the least memory and the fewest devices among them.
    """
    plans: list[FrontPlan] = []
    for each in sorted(evaluations, key=lambda e: (e.seconds, e.memory, e.devices)):
        if each.fits and each.eligible and not any(_beats(other, each) for other in plans):
            plan = in_words(each.choices)
            plans.append(FrontPlan(plan=plan, seconds=each.seconds, memory=each.memory, devices=each.devices))
    if len(plans) <= _MOST_ON_FRONT:
        return tuple(plans)
    ends = [min(plans, key=lambda p: (p.memory, p.seconds)), min(plans, key=lambda p: (p.devices, p.seconds))]
    chosen = [*plans[: _MOST_ON_FRONT - len(ends)], *ends]
    return tuple(plan for plan in plans if plan in chosen)


def _beats(plan: FrontPlan, other: Evaluation) -> bool:
    seconds, memory = _NO_LESS
    return (
        plan.seconds <= seconds * other.seconds
        and plan.memory <= memory * other.memory
        and plan.devices <= other.devices
    )


def in_words(choices: Mapping[str, str]) -> str:
    """What a program decides, in short."""
    shapes = [stage.partition(" on ")[2] for stage in choices["stages"].split("; ")]
    several, unequal = len(shapes) > 1, list(dict.fromkeys(shapes))
    count = choices["micro_batches"]
    parts = [f"{count} micro-batch{'es' * (count != '1')}"]
    if several:
        parts.append(choices["schedule"])
    parts.append(f"{len(shapes)} stage{'s' * several} on {' and '.join(unequal[:3])}")
    if not choices["recompute"].startswith("0 "):
        parts.append(f"{choices['recompute']} recomputed")
    return ", ".join(parts)


def _products(program: BuiltCandidate) -> str:
    """Distributed algorithms of matrix products."""
    names = sorted({algorithm.name for algorithm in program.completed.algorithms.values()})
    return f"by {', '.join(names)}" if names else "by collectives where completion puts them"


def _stages(program: BuiltCandidate) -> str:
    if program.candidate is None:
        meshes = dict.fromkeys(program.completed.meshes)  # algorithms reorder ranks later
        shapes = [" x ".join(f"{axis}={mesh.axis_size(axis)}" for axis in mesh.axes) for mesh in meshes]
        if program.plan is not None:
            stages = zip(program.plan.stages, shapes, strict=True)
            return "; ".join(f"layers {stage.first}-{stage.last - 1} on {shape}" for stage, shape in stages)
        return f"layers 0-{len(program.layered.layers) - 1} on {', '.join(shapes)}"
    return "; ".join(map(str, program.candidate.stages))


class Evaluator(Protocol):
    """Evaluates candidates: what a search compares them by."""

    @property
    def processes(self) -> int:
        """Processes that may evaluate at the same time."""

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """The evaluation of one candidate."""

    def evaluate_all(self, candidates: Sequence[Candidate], processes: int) -> list[Evaluation | None]:
        """Evaluations of several candidates, in as many processes; None where `evaluate` raises an error."""


@dataclass(frozen=True, eq=False)
class Forecaster:
    """Evaluates candidates by building them and forecasting the program on the cluster."""

    layout_costs: LayoutCosts

    @property
    def processes(self) -> int:
        """Those of the layout costs."""
        return self.layout_costs.processes

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """Build a candidate and forecast it."""
        return evaluate(candidate, self.layout_costs)

    def evaluate_all(self, candidates: Sequence[Candidate], processes: int) -> list[Evaluation | None]:
        """Forecasts of several candidates; the program of the first is at hand. None where building a program
        raises an error, which `evaluate` raises again.

        Of the others those come first that have most tasks to simulate, so that no process waits long for the
        last one.
        """
        for candidate in candidates:
            self.layout_costs.layered_graph(candidate.micro_batches)  # before processes are forked

        def work(candidate: Candidate) -> float:
            return math.inf if candidate is candidates[0] else candidate.micro_batches * len(candidate.stages)

        most_work_first = sorted(candidates, key=work, reverse=True)

        def forecast(candidate: Candidate) -> Evaluation | None:
            try:
                evaluation = self.evaluate(candidate)
            except DistGraphError:
                return None
            return evaluation if candidate is candidates[0] else without_program(evaluation)

        pack: Callable[[Evaluation | None], Evaluation | None] = without_program_if_any
        solving = self.layout_costs.solving
        made = solving.parallel_map(forecast, most_work_first, processes, pack=pack)
        evaluations = {id(candidate): each for candidate, each in zip(most_work_first, made, strict=True)}
        return [evaluations[id(candidate)] for candidate in candidates]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What a phase of the search evaluated in the background, and the seconds of the longest evaluation."""

    made: Mapping[object, Evaluation | str]
    most_seconds: float


@dataclass(eq=False)
class Evaluations:
    """All that a search has evaluated.

    Attributes:
        best: the fastest program so far that fits and may be the answer.
        baselines: name -> seconds of a step, or why there is none.
        baseline_shares: name -> what the step goes to, of those with seconds.
        all: in the order in which they were made.
        left_out: origin -> the constraint that a program does not keep.
    """

    evaluator: Evaluator
    best: Evaluation | None = None
    baselines: dict[str, float | str] = field(default_factory=dict)
    baseline_shares: dict[str, Mapping[str, float]] = field(default_factory=dict)
    all: list[Evaluation] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    _most_seconds: float = 0.0
    _prefetched: dict[object, Evaluation | str] = field(default_factory=dict)
    _made: dict[object, Evaluation | str] | None = None
    _rehearsed: Callable[[], Rehearsed | None] | None = None

    @property
    def processes(self) -> int:
        """Processes that evaluate at the same time: one while an evaluation takes less than forking."""
        return self.evaluator.processes if self._most_seconds > FORK_SECONDS else 1

    @property
    def estimate_error(self) -> float | None:
        """Mean relative difference between estimates of pipelines and their forecasts; None without any."""
        pairs = [(e.seconds, e.candidate.estimate) for e in self.all if e.candidate is not None]
        errors = [abs(estimate / seconds - 1) for seconds, estimate in pairs if math.isfinite(estimate)]
        return sum(errors) / len(errors) if errors else None

    def add(self, evaluation: Evaluation, eligible: bool = True) -> Evaluation:
        """Enter a program: as the best if it is `eligible`, and as a baseline unless the search made it."""
        evaluation.eligible = eligible
        self.all.append(evaluation)
        if evaluation.origin != "search":
            self.add_baseline(evaluation.origin, evaluation)
        faster = self.best is None or evaluation.seconds < self.best.seconds
        if eligible and evaluation.fits and faster:
            if self.best is not None:
                self.best.release()
            self.best = evaluation
        else:
            evaluation.release()
        return evaluation

    def leave_out(self, origin: str, constraint: str) -> None:
        """Enter a program that does not keep a constraint: among the baselines, unless the search made it."""
        self.left_out[origin] = constraint
        if origin != "search":
            self.baselines[origin] = f"left out: {constraint} is given"

    def add_baseline(self, name: str, evaluation: Evaluation) -> None:
        """Enter a program among the baselines; of several of one name the fastest counts."""
        before = self.baselines.get(name, "")
        if evaluation.fits:
            seconds = evaluation.seconds
            if isinstance(before, str) or seconds < before:
                self.baselines[name], self.baseline_shares[name] = seconds, evaluation.shares
        elif isinstance(before, str):
            self.baselines[name] = f"out of memory by {format_bytes(evaluation.missing_bytes)}"

    def evaluate(self, candidate: Candidate) -> Evaluation:
        """The evaluation of a candidate; one that was prefetched is handed out once."""
        evaluation = self.once(_key(candidate), lambda: self._evaluated(candidate))
        assert isinstance(evaluation, Evaluation)
        return replace(evaluation, candidate=candidate)  # the estimate may be another one

    def _evaluated(self, candidate: Candidate) -> Evaluation:
        begin = time.monotonic()
        evaluation = self.evaluator.evaluate(candidate)
        self._most_seconds = max(self._most_seconds, time.monotonic() - begin)
        return evaluation

    def once(self, key: object, make: Callable[[], Evaluation | str]) -> Evaluation | str:
        """What `make` returns, an evaluation or why there is none; what was prefetched is handed out once."""
        if key not in self._prefetched and self._rehearsed is not None:
            rehearsed, self._rehearsed = self._rehearsed(), None
            if rehearsed is not None:
                self._prefetched |= rehearsed.made
                self._most_seconds = max(self._most_seconds, rehearsed.most_seconds)
        made = self._prefetched.pop(key, None)
        if made is None:
            made = make()
            if self._made is not None:
                self._made[key] = made
        return made

    def rehearse(self, phase: Callable[[], Iterator[object]], layout_costs: LayoutCosts) -> None:
        """Run a phase of the search in the background: what it evaluates is prefetched. Whoever evaluates
        something else waits for that, too."""

        def run() -> Rehearsed:
            layout_costs.processes = 1  # of the worker process, which starts no others
            made = self._made = {}
            for _ in phase():
                pass
            packed = {key: without_program_if_any(each) for key, each in made.items()}
            return Rehearsed(packed, self._most_seconds)

        self._rehearsed = layout_costs.solving.in_background(run)

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Evaluate at the same time what will probably be needed; nothing where there is one process."""
        missing = [candidate for candidate in candidates if _key(candidate) not in self._prefetched]
        if len(missing) < 2 or self.processes < 2:
            return
        evaluations = self.evaluator.evaluate_all(missing, self.processes)
        for candidate, evaluation in zip(missing, evaluations, strict=True):
            if evaluation is not None:
                self._prefetched[_key(candidate)] = evaluation


def _key(candidate: Candidate) -> tuple[object, ...]:
    """What makes two evaluations the same."""
    return candidate.origin, *candidate.decisions
