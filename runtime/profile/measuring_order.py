"""In which order a profile measures, and which items it leaves for later.

*In:* the items of a profile, its time limit, and what was measured so far.
*Out:* whether there is time for an item now.
*Invariant:* in the time that the first round of computation leaves, the first measurements of messages cover
a range of sizes, from few to all of them, before anything is refined by a second round. Every series of
messages, which differ in their size alone, has an equal share of the time that is left when the first
message is measured. A size that would take more than half of the share, or does not fit into what is left of
it, is left out for now. Forecasts extrapolate from the largest size that was measured, so the range counts
more than the number of rounds; and a delay lengthens a long message by a smaller part, so that one round of
it says as much as several of a short one. After its first measurement, an item that takes a larger part of
the time limit than `_LONG` waits for `FEWEST_ROUNDS` of the others, as do sizes that were left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from distgraph.runtime.profile.collective_probes import Pattern
from distgraph.runtime.profile.resource_writer import FEWEST_ROUNDS

_LONG: Final = 0.01
"""Part of the time limit from which an item is long."""
_MOST_OF_SHARE: Final = 0.5
"""Part of the share of a series that one size may take."""
_START_BYTES: Final = 2**16  # of messages up to which starting them decides how long they take
_RUNS, _RUNS_BESIDE = 2, 3  # messages, or equally long products, in one measurement of a long message

BySize = dict[int, float]


@dataclass(slots=True)
class MeasuringOrder:
    """What measurements take, and which of them come now.

    Attributes:
        limit: seconds of the whole profile.
        patterns: name -> pattern of the items that are messages.
        durations: name -> seconds that the item took last.
        measured: names of all items that were measured, in this run or before.
    """

    limit: float
    patterns: dict[str, Pattern]
    durations: dict[str, float] = field(default_factory=dict)
    measured: set[str] = field(default_factory=set)
    _share: float | None = None  # seconds for the first measurements of a series
    _spans: dict[object, BySize] = field(default_factory=dict)  # series -> durations, of this run
    _seconds: dict[object, BySize] = field(default_factory=dict)  # kind and groups -> seconds of a message

    def note(self, name: str, duration: float | None, seconds: float | None) -> None:
        """An item was measured.

        Args:
            name: of the item.
            duration: seconds that measuring it took; None if that was in an earlier run.
            seconds: of a message, what was measured; None of all else.
        """
        self.measured.add(name)
        if duration is not None:
            self.durations[name] = duration
        pattern = self.patterns.get(name)
        if pattern is None:
            return
        if duration is not None:
            self._spans.setdefault(_series(pattern), {})[pattern.nbytes] = duration
        if seconds is not None and not pattern.overlapped:
            self._seconds.setdefault((pattern.kind, pattern.groups), {})[pattern.nbytes] = seconds

    def has_time(self, name: str, round_: int, left: float) -> bool:
        """Whether there is time for an item now.

        Args:
            name: of the item.
            round_: number of the round, from 0.
            left: seconds until the time limit.
        """
        expected, pattern = self.expected_seconds(name), self.patterns.get(name)
        if left <= 1.2 * expected:
            return False
        if round_ >= FEWEST_ROUNDS:
            return True
        if name in self.measured:
            return expected <= _LONG * self.limit
        return pattern is None or self._fits(pattern, expected, left)

    def _fits(self, pattern: Pattern, expected: float, left: float) -> bool:
        """Whether the share of a series suffices for its first measurement of a size."""
        if self._share is None:
            self._share = left / len({_series(each) for each in self.patterns.values()})
        spent = sum(self._spans.get(_series(pattern), {}).values())
        return expected <= min(_MOST_OF_SHARE * self._share, self._share - spent)

    def expected_seconds(self, name: str) -> float:
        """Seconds that an item took last; of a message that was not measured, from those of a smaller one.

        Nothing if there is none, so that the smallest size of every series is measured in any case.
        """
        pattern = self.patterns.get(name)
        if name in self.durations or pattern is None:
            return self.durations.get(name, 0.0)
        _, duration = _nearest(self._spans.get(_series(pattern), {}), pattern.nbytes)
        size, seconds = _nearest(self._seconds.get((pattern.kind, pattern.groups), {}), pattern.nbytes)
        growth = max(1.0, pattern.nbytes / max(size, _START_BYTES))
        runs = _RUNS_BESIDE if pattern.overlapped else _RUNS
        return max(duration, growth * runs * seconds)


def _series(pattern: Pattern) -> object:
    """Equal for patterns that differ in their size alone."""
    return pattern.kind, pattern.groups, pattern.work, pattern.overlapped


def _nearest(by_size: Mapping[int, float], nbytes: int) -> tuple[int, float]:
    """The largest size below a given one, and what belongs to it; zeros without any."""
    size = max((size for size in by_size if size < nbytes), default=0)
    return size, by_size.get(size, 0.0)
