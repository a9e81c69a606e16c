"""The runners-up of parameters and layers are forecast; one that is faster is taken.

*In:* the best program of a search. *Out:* `Decision`s of its parameters and layers, programs that are faster.
*Invariant:* what is told belongs to the program that is the best in the end.

First the largest parameters, then layers; when another choice is taken, all begins anew from the program
with it. Programs of many ops are few, so that explaining takes a small part of the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace

from distgraph.engine.search.candidate import Realized, plan_of
from distgraph.engine.search.decisions import (
    RunnerUp,
    Storage,
    runner_up,
    storages,
    told,
    with_problems,
    with_runner_up,
)
from distgraph.engine.search.evaluation import Judged, judged
from distgraph.engine.search.evaluations import Book
from distgraph.engine.search.layer_decisions import (
    Change,
    Changed,
    changed,
    changes,
    layer_decisions,
    profiles_of,
    with_change,
)
from distgraph.engine.search.layout_costs import Oracle
from distgraph.plan.plan import Decision, Plan

_EXPLAINED = 12  # parameters whose runners-up are forecast
_TOLD = 15_000  # ops of the programs, together, that are built for them
_CHANGED = 8  # changes of layers that are forecast
_TOLD_OF_LAYERS = 6_000  # the same for these


@dataclass(eq=False)
class Explainer:
    """Runners-up of the best program.

    Args:
        oracle, book: of the search.
        expired: whether nothing new is to be begun.
    """

    oracle: Oracle
    book: Book
    expired: Callable[[], bool]
    _stored: dict[str, Decision] = field(default_factory=dict)
    _layers: dict[str, Decision] = field(default_factory=dict)
    _ops: int = 0
    _ops_of_layers: int = 0
    _planned: tuple[Realized, Plan] | None = None

    @property
    def decisions(self) -> dict[str, Decision]:
        """Of the best program, so far."""
        return {**told(self._stored), **self._layers}

    def run(self) -> Iterator[str | Judged]:
        """What is looked at, in words, and programs that are faster than the best."""
        if self.book.best is None:
            return
        given = self.book.best.again(self.oracle)
        if self.expired():
            self._costs(given)
            return
        best = with_problems(given, self.oracle)
        if best is not given:
            self.book.best = judged(best, rechosen=True)
        while best.solved:
            best = yield from self._of_parameters(best)
            other = yield from self._of_layers(best)
            if other is None:
                return
            best = other
            self._forget()
            yield judged(best, rechosen=True)

    def _costs(self, best: Realized) -> None:
        """What was chosen and what it costs, without a forecast of anything else."""
        if best.solved:
            self._stored = {row.name: row.decision for row in storages(best)}
            self._layers = layer_decisions(best, profiles_of(best), {})

    def _forget(self) -> None:
        """Another program is the best from here on."""
        self._stored.clear()
        self._layers.clear()
        self._planned = None

    def _of_parameters(self, best: Realized) -> Generator[str | Judged, None, Realized]:
        """Other layouts of the largest parameters; the best program after those that were taken."""
        looked: set[str] = set()
        ahead: dict[str, RunnerUp] = {}
        while True:
            rows = storages(best)
            self._stored = {row.name: self._stored.get(row.name, row.decision) for row in rows}
            rest = [row for row in rows if row.option is not None and row.name not in looked]
            if not rest or len(looked) >= _EXPLAINED or self._ops >= _TOLD or self.expired():
                return best
            row = rest[0]
            yield f"another layout of {row.name}"
            if row.name not in ahead:
                ahead = self._runners_up(best, rest)
            looked.add(row.name)
            other = ahead[row.name]
            self._ops += other.ops
            if other.fits and other.seconds < best.seconds:
                looked.clear()
                ahead.clear()
                best = other.program or with_runner_up(best, row, self.oracle)
                self._forget()
                yield judged(best, rechosen=True)
                continue
            note = (
                row.decision.note if other.fits else f"{row.decision.note}; the runner-up does not fit memory"
            )
            self._stored[row.name] = replace(
                row.decision, runner_up_seconds=other.seconds, note=note, instead=other.instead
            )

    def _runners_up(self, best: Realized, rows: Sequence[Storage]) -> dict[str, RunnerUp]:
        """Forecasts of the next runners-up, as many as processes work together."""
        few = rows[: self.book.together]

        def of(row: Storage) -> RunnerUp:
            found = runner_up(best, row, self.oracle)
            return found if row is few[0] else found.light()

        found = self.oracle.together(of, few, self.book.together, packed=RunnerUp.light)
        return {row.name: other for row, other in zip(few, found, strict=True)}

    def _of_layers(self, best: Realized) -> Generator[str | Judged, None, Realized | None]:
        """Other choices for layers, first those that the search found nearest; one that is faster, if any."""
        known: dict[Change, RunnerUp] = {}
        profiles = profiles_of(best)
        self._layers = layer_decisions(best, profiles, known)
        waiting = self._in_order(changes(best))[:_CHANGED]
        while waiting and self._ops_of_layers < _TOLD_OF_LAYERS and not self.expired():
            yield f"another choice of layers: {waiting[0].text}"
            few = waiting[: self._at_once(best)]
            waiting = waiting[len(few) :]
            for change, other in zip(few, self._changed(best, few), strict=True):
                if other is None or self._ops_of_layers >= _TOLD_OF_LAYERS:
                    continue
                self._ops_of_layers += other.ops
                if other.fits and other.seconds < best.seconds:
                    return other.program or with_change(best, change, self.oracle)
                known[change] = other.light()
            self._layers = layer_decisions(best, profiles, known)
        return None

    def _at_once(self, best: Realized) -> int:
        """Changes to forecast at the same time: there may be no more, and one process writes the plan."""
        left = math.ceil((_TOLD_OF_LAYERS - self._ops_of_layers) / len(best.build.lowered.ops))
        free = self.book.together - (self._planned is None or self._planned[0] is not best)
        return max(1, min(left, free))

    def _in_order(self, found: Sequence[Change]) -> list[Change]:
        """By the forecast of the search, of those rows that it looked at."""
        rows = ((each.proposal, each.seconds) for each in self.book.forecasts if each.fits)
        known = {row.decisions: seconds for row, seconds in rows if row is not None}

        def seconds(change: Change) -> float:
            return math.inf if change.proposal is None else known.get(change.proposal.decisions, math.inf)

        return sorted(found, key=seconds)

    def _changed(self, best: Realized, few: Sequence[Change]) -> list[RunnerUp | None]:
        """Forecasts of changes, and the plan of the best, at the same time."""

        def of(change: Change | None) -> Plan | Changed | None:
            return self.plan_of(best) if change is None else changed(best, change, self.oracle)

        _, *found = self.oracle.together(of, [None, *few], self.book.together, packed=_light)
        plan = self.plan_of(best)
        return [other.compared(plan) if isinstance(other, Changed) else None for other in found]

    def plan_of(self, best: Realized) -> Plan:
        """The plan of the best program, written once."""
        if self._planned is None or self._planned[0] is not best:
            self._planned = best, plan_of(best, self.oracle)
        return self._planned[1]


def _light(found: Plan | Changed | None) -> Plan | Changed | None:
    return found.light() if isinstance(found, Changed) else found
