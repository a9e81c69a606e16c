"""The runners-up of parameters and layers are forecast; one that is faster is taken.

*In:* the best program of a search. *Out:* `Decision`s of its parameters and layers, programs that are faster.
*Invariant:* the decisions are those of the program that is the best in the end.

First the largest parameters, then layers, then choices for the whole program; when another choice is taken,
all begins anew from the program with it. Programs of many ops are few, so that explaining takes a small part
of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from distgraph.engine.search_driver.candidate import BuiltCandidate, constraint_broken_by, plan_of
from distgraph.engine.search_driver.evaluations import (
    Evaluation,
    Evaluations,
    evaluation_of,
    without_program,
    without_program_if_any,
)
from distgraph.engine.search_driver.explain.decisions import (
    ParameterStorage,
    RunnerUp,
    parameter_storages,
    runner_up,
    with_problems,
    with_reasons,
    with_runner_up,
)
from distgraph.engine.search_driver.explain.layer_decisions import (
    Change,
    Changed,
    changed,
    changes,
    layer_decisions,
    profiles_of,
    with_change,
)
from distgraph.engine.search_driver.explain.whole_program import (
    OtherChoice,
    border_decision,
    decision_with,
    other_choices,
    with_choice,
)
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.plan.plan import Decision, Plan

_MOST_PARAMETERS, _MOST_PARAMETER_OPS = 12, 15_000
"""Parameters whose runners-up are forecast, and ops of the programs, together, that are built for them."""
_MOST_CHANGES, _MOST_CHANGE_OPS = 8, 6_000
"""Changes of layers that are forecast, and ops of the programs, together, that are built for them."""
_MOST_CHOICE_OPS = 15_000
"""Ops of the programs, together, that are built for other choices of the whole program."""


@dataclass(eq=False)
class Explainer:
    """Runners-up of the best program.

    Args:
        layout_costs, evaluations: of the search.
        expired: whether nothing new is to be begun.
    """

    layout_costs: LayoutCosts
    evaluations: Evaluations
    expired: Callable[[], bool]
    _stored: dict[str, Decision] = field(default_factory=dict)
    _layers: dict[str, Decision] = field(default_factory=dict)
    _whole: dict[str, Decision] = field(default_factory=dict)
    _ops: int = 0
    _ops_of_choices: int = 0
    _ops_of_layers: int = 0
    _planned: tuple[BuiltCandidate, Plan] | None = None

    @property
    def decisions(self) -> dict[str, Decision]:
        """The decisions of the best program so far."""
        return {**self._whole, **with_reasons(self._stored), **self._layers}

    def run(self) -> Iterator[str | Evaluation]:
        """Each runner-up that is looked at, in words, and each program that is faster than the best."""
        if self.evaluations.best is None:
            return
        given = self.evaluations.best.built(self.layout_costs)
        if self.expired():
            self._decide_without_forecasts(given)
            return
        best = with_problems(given, self.layout_costs)
        if best is not given:
            self.evaluations.best = evaluation_of(best, other_layouts=True)
        while best.solved:
            best = yield from self._of_parameters(best)
            other = yield from self._of_layers(best)
            if other is None:
                other = yield from self._of_decisions(best)
            if other is None:
                return
            best = other
            self._forget()
            yield evaluation_of(best, other_layouts=True)

    def _decide_without_forecasts(self, best: BuiltCandidate) -> None:
        """Choices and their costs, without a forecast of anything else."""
        if best.solved:
            self._stored = {storage.name: storage.decision for storage in parameter_storages(best)}
            self._layers = layer_decisions(best, profiles_of(best), {})

    def _forget(self) -> None:
        """Drop the decisions: another program is the best from here on."""
        self._stored.clear()
        self._layers.clear()
        self._whole.clear()
        self._planned = None

    def _of_parameters(self, best: BuiltCandidate) -> Generator[str | Evaluation, None, BuiltCandidate]:
        """Other layouts of the largest parameters; the best program after those that were taken."""
        seen: set[str] = set()
        prefetched: dict[str, RunnerUp] = {}
        while True:
            storages = parameter_storages(best)
            self._stored = {
                storage.name: self._stored.get(storage.name, storage.decision) for storage in storages
            }
            rest = [
                storage for storage in storages if storage.option is not None and storage.name not in seen
            ]
            if (
                not rest
                or len(seen) >= _MOST_PARAMETERS
                or self._ops >= _MOST_PARAMETER_OPS
                or self.expired()
            ):
                return best
            storage = rest[0]
            yield f"another layout of {storage.name}"
            if storage.name not in prefetched:
                prefetched = self._runners_up(best, rest)
            seen.add(storage.name)
            other = prefetched[storage.name]
            self._ops += other.ops
            faster, note = None, storage.decision.note
            if other.fits and other.seconds < best.seconds:
                faster = other.program or with_runner_up(best, storage, self.layout_costs)
                if broken := self._broken(faster):
                    faster, note = None, f"{note}; the runner-up does not keep {broken}, which is given"
            if faster is not None:
                seen.clear()
                prefetched.clear()
                best = faster
                self._forget()
                yield evaluation_of(best, other_layouts=True)
                continue
            note = note if other.fits else f"{note}; the runner-up does not fit memory"
            self._stored[storage.name] = replace(
                storage.decision, runner_up_seconds=other.seconds, note=note, instead=other.instead
            )

    def _runners_up(self, best: BuiltCandidate, storages: Sequence[ParameterStorage]) -> dict[str, RunnerUp]:
        """Forecasts of the next runners-up, as many as processes work together."""
        processes, solving = self.evaluations.processes, self.layout_costs.solving
        first = storages[:processes]

        def forecast(storage: ParameterStorage) -> RunnerUp:
            other = runner_up(best, storage, self.layout_costs)
            return other if storage is first[0] else other.without_program()

        others = solving.parallel_map(forecast, first, processes, pack=RunnerUp.without_program)
        return {storage.name: other for storage, other in zip(first, others, strict=True)}

    def _of_decisions(self, best: BuiltCandidate) -> Generator[str | Evaluation, None, BuiltCandidate | None]:
        """Other choices for the whole program; one that is faster, if any."""
        chosen = evaluation_of(best).choices
        others: dict[str, list[Evaluation]] = {}
        waiting = list(other_choices(best, self.layout_costs))
        while waiting and not self.expired() and self._ops_of_choices < _MOST_CHOICE_OPS:
            few, waiting = waiting[: self.evaluations.processes], waiting[self.evaluations.processes :]
            for choice, evaluation in zip(few, self._with_choices(best, few), strict=True):
                if self._ops_of_choices >= _MOST_CHOICE_OPS:
                    break
                yield f"another choice of {choice.name}"
                if evaluation is None:
                    continue
                self._ops_of_choices += evaluation.ops
                if evaluation.fits and evaluation.seconds < best.seconds:
                    other = evaluation.program or with_choice(best, choice, self.layout_costs)
                    if other is not None and not self._broken(other):
                        return other
                others.setdefault(choice.name, []).append(without_program(evaluation))
        self._whole = {name: decision_with(name, chosen, several) for name, several in others.items()}
        return None

    def _with_choices(self, best: BuiltCandidate, choices: Sequence[OtherChoice]) -> list[Evaluation | None]:
        """Forecasts of other choices, made at the same time; the program of the first is at hand."""

        def forecast(choice: OtherChoice) -> Evaluation | None:
            other = with_choice(best, choice, self.layout_costs)
            evaluation = None if other is None else evaluation_of(other)
            return evaluation if choice is choices[0] else without_program_if_any(evaluation)

        return self.layout_costs.solving.parallel_map(
            forecast, choices, self.evaluations.processes, pack=without_program_if_any
        )

    def _of_layers(self, best: BuiltCandidate) -> Generator[str | Evaluation, None, BuiltCandidate | None]:
        """Other choices for layers, first those that the search found nearest; one that is faster, if any."""
        forecasts: dict[Change, RunnerUp] = {}
        profiles, stages = profiles_of(best), self.layout_costs.constraints.stages
        given = "" if stages is None else f"given: stages={stages}; "
        self._layers = layer_decisions(best, profiles, forecasts)
        waiting = self._in_order([each for each in changes(best) if self._is_allowed(best, each)])
        waiting = waiting[:_MOST_CHANGES]
        while waiting and self._ops_of_layers < _MOST_CHANGE_OPS and not self.expired():
            yield f"another choice of layers: {waiting[0].text}"
            few = waiting[: self._at_once(best)]
            waiting = waiting[len(few) :]
            for change, other in zip(few, self._changed(best, few), strict=True):
                if other is None or self._ops_of_layers >= _MOST_CHANGE_OPS:
                    continue
                self._ops_of_layers += other.ops
                if other.fits and other.seconds < best.seconds:
                    return other.program or with_change(best, change, self.layout_costs)
                forecasts[change] = other.without_program()
            self._layers = layer_decisions(best, profiles, forecasts)
            self._whole |= border_decision(best, forecasts, given)
        return None

    def _broken(self, program: BuiltCandidate) -> str:
        """The constraint that a program does not keep; "" where it keeps all."""
        constrained = bool(self.layout_costs.constraints.given())
        return constraint_broken_by(program, self.layout_costs) if constrained else ""

    def _is_allowed(self, best: BuiltCandidate, change: Change) -> bool:
        """Whether constraints leave a change of layers to the search."""
        given = self.layout_costs.constraints
        moved = change.candidate is not None and change.recompute == best.layered.recompute
        return given.borders is None if moved else given.recompute is None

    def _at_once(self, best: BuiltCandidate) -> int:
        """Changes to forecast at the same time; one process writes the plan meanwhile."""
        left = math.ceil((_MOST_CHANGE_OPS - self._ops_of_layers) / len(best.build.lowered.ops))
        free = self.evaluations.processes - (self._planned is None or self._planned[0] is not best)
        return max(1, min(left, free))

    def _in_order(self, several: Sequence[Change]) -> list[Change]:
        """Changes by the forecast of the search, where it evaluated their candidates; the others last."""
        evaluated = ((each.candidate, each.seconds) for each in self.evaluations.all if each.fits)
        by_decisions = {c.decisions: seconds for c, seconds in evaluated if c is not None}

        def seconds(change: Change) -> float:
            if change.candidate is None:
                return math.inf
            return by_decisions.get(change.candidate.decisions, math.inf)

        return sorted(several, key=seconds)

    def _changed(self, best: BuiltCandidate, few: Sequence[Change]) -> list[RunnerUp | None]:
        """Forecasts of changes, and the plan of the best, at the same time."""

        def forecast(change: Change | None) -> Plan | Changed | None:
            return self.plan_of(best) if change is None else changed(best, change, self.layout_costs)

        _, *programs = self.layout_costs.solving.parallel_map(
            forecast, [None, *few], self.evaluations.processes, pack=_without_program
        )
        plan = self.plan_of(best)
        return [other.compared(plan) if isinstance(other, Changed) else None for other in programs]

    def plan_of(self, best: BuiltCandidate) -> Plan:
        """The plan of the best program, written once."""
        if self._planned is None or self._planned[0] is not best:
            self._planned = best, plan_of(best, self.layout_costs)
        return self._planned[1]


def _without_program(result: Plan | Changed | None) -> Plan | Changed | None:
    return result.without_program() if isinstance(result, Changed) else result
