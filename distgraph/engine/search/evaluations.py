"""What a search has forecast: the best program so far, the baselines, all others by their figures.

*In:* proposals. *Out:* their forecasts, each made once and several at the same time. *Invariant:* only the
best program itself is kept; of others what leads back to them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from distgraph.engine.search.candidate import Proposal
from distgraph.engine.search.evaluation import Judged, judge, light
from distgraph.engine.search.layout_costs import Oracle
from distgraph.resources.units import format_bytes

_QUICK = 0.2  # seconds of a forecast that needs no process of its own


@dataclass(eq=False)
class Book:
    """Forecasts.

    Args:
        oracle: of the program.

    Attributes:
        best: the best program that fits so far.
        baselines: name -> seconds of a step, or why there is none.
        forecasts: everything that was forecast.
    """

    oracle: Oracle
    best: Judged | None = None
    baselines: dict[str, float | str] = field(default_factory=dict)
    forecasts: list[Judged] = field(default_factory=list)
    _took: float = 0.0
    _foreseen: dict[tuple[object, ...], Judged] = field(default_factory=dict)

    @property
    def together(self) -> int:
        """Processes that forecast programs: one as long as these are ready before a process is copied."""
        return self.oracle.processes if self._took > _QUICK else 1

    def enter(self, found: Judged, eligible: bool = True) -> Judged:
        """Keep a program if it is the best so far; note it among the baselines where it is one.

        Args:
            found: it.
            eligible: whether it may be the answer.
        """
        self.forecasts.append(found)
        if found.origin != "search":
            self.note(found.origin, found)
        if eligible and found.fits and self.is_better(found):
            if self.best is not None:
                self.best.forget()
            self.best = found
        else:
            found.forget()
        return found

    def is_better(self, found: Judged) -> bool:
        """Whether it takes less than the best so far."""
        return self.best is None or found.seconds < self.best.seconds

    def note(self, name: str, found: Judged) -> None:
        """Keep the best program of a name."""
        known = self.baselines.get(name, "")
        if found.fits:
            self.baselines[name] = found.seconds if isinstance(known, str) else min(known, found.seconds)
        elif isinstance(known, str):
            self.baselines[name] = f"out of memory by {format_bytes(found.missing)}"

    def look(self, proposal: Proposal) -> Judged:
        """The forecast of a proposal."""
        known = self._foreseen.pop(_key(proposal), None)
        if known is None:
            begin = time.monotonic()
            known = judge(proposal, self.oracle)
            self._took = time.monotonic() - begin
        return known

    def look_at(self, proposals: Sequence[Proposal]) -> list[Judged]:
        """Forecasts of several proposals at the same time; of the first the program is at hand."""

        def looked(proposal: Proposal) -> Judged:
            found = judge(proposal, self.oracle)
            return found if proposal is proposals[0] else light(found)

        return self.oracle.together(looked, proposals, self.together, packed=light)

    def foresee(self, proposals: Sequence[Proposal]) -> None:
        """Forecast what will probably be asked for, at the same time; nothing where there is one process."""
        wanted = [proposal for proposal in proposals if _key(proposal) not in self._foreseen]
        if len(wanted) < 2 or self.together < 2:
            return
        for proposal in wanted:
            self.oracle.traced(proposal.micro_batches)
        for found in self.look_at(wanted):
            assert found.proposal is not None
            self._foreseen[_key(found.proposal)] = found


def _key(proposal: Proposal) -> tuple[object, ...]:
    """What makes two forecasts the same."""
    return proposal.origin, *proposal.decisions
