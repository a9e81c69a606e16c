"""Errors of a forecast by kind, the interval that follows from them, and the comparison of two forecasts.

The logarithm of measured / forecast seconds of a step is modelled as

    sum over kinds of share * e[kind] + own

with independent normal e[kind] and own. A share is the part of the step that goes to a kind. All forecasts of
one program on one cluster have the same e[kind], because they use the same numbers, so a shared error cancels
where two plans have equal shares. The error `own` belongs to one plan alone and never cancels.

Example:
    >>> errors = ForecastErrors(computation=0.1, between=0.3, own=0.02)
    >>> fast = Uncertain(1.0, {"computation": 0.9, "between": 0.1}, errors)
    >>> print(fast.interval)
    883.2 ms to 1.132 s
    >>> slow = Uncertain(1.08, {"computation": 0.9, "between": 0.1}, errors)
    >>> slow.interval.low < fast.interval.high, fast.equals(slow)
    (True, False)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

from distgraph.serialization.fields import Limits, documented

KINDS: Final = ("computation", "inside", "between", "host")
"""What the seconds of a step go to: computation, communication inside a machine and between machines, waiting
for the host."""
CONFIDENCE: Final = 0.8
"""Probability that an interval holds the measured value."""
WIDTH: Final = 1.2815515655446004
"""Half the width of the interval of a normal distribution with this probability, in standard deviations."""
Deviation = Annotated[float, Limits(ge=0, le=10, strict=True)]
Text = Annotated[str, Limits(min_length=1, max_length=400)]


@documented(complete=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastErrors:
    """Standard deviations of the logarithm of measured / forecast, so 0.1 is about 10 %.

    Attributes:
        computation, inside, between, host: of the seconds of each kind (see `KINDS`), with the same sign in
            all forecasts on this cluster.
        own: of a step, different for each plan.
        memory: of bytes.
        runtime: name of the runtime of the runs that were measured; "" if there were none.
        runs: number of measured runs, each held out of the fit that judged it.
        coverage: share of them inside an interval of 80 % made from the other groups of runs.
        about: where the numbers come from.
    """

    computation: Deviation = 0.0
    inside: Deviation = 0.0
    between: Deviation = 0.0
    host: Deviation = 0.0
    own: Deviation = 0.0
    memory: Deviation = 0.0
    runtime: str = ""
    runs: Annotated[int, Limits(ge=0, le=10**6, strict=True)] = 0
    coverage: Annotated[float, Limits(ge=0, le=1, strict=True)] | None = None
    about: Text | None = None

    def step(self, shares: Mapping[str, float]) -> float:
        """Standard deviation of a step with these shares."""
        return math.hypot(self.own, *self._terms(shares))

    def difference(self, first: Mapping[str, float], second: Mapping[str, float]) -> float:
        """Standard deviation of the logarithm of the ratio of two steps."""
        apart = {kind: first.get(kind, 0.0) - second.get(kind, 0.0) for kind in KINDS}
        return math.hypot(self.own, self.own, *self._terms(apart))

    def __str__(self) -> str:
        kinds = [f"{kind} {getattr(self, kind):.1%}" for kind in (*KINDS, "own", "memory")]
        runs = "" if not self.runs else f"; {self.runs} held-out runs of {self.runtime}"
        coverage = "" if self.coverage is None else f", of which intervals held {self.coverage:.0%}"
        return f"errors {', '.join(kinds)}{runs}{coverage}"

    def _terms(self, shares: Mapping[str, float]) -> list[float]:
        return [share * float(getattr(self, kind)) for kind, share in shares.items()]


def of_kinds(kinds: Mapping[str, float], independent: float) -> ForecastErrors:
    """Errors from the deviation of every kind, and that of one plan alone."""
    computation, inside, between, host = (kinds[kind] for kind in KINDS)
    return ForecastErrors(computation=computation, inside=inside, between=between, host=host, own=independent)


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds or bytes between which a measured value lies with a probability of 80 %. Print it."""

    low: float
    high: float

    @classmethod
    def around(cls, value: float, deviation: float) -> Interval:
        """The interval of a value with a relative standard deviation."""
        factor = math.exp(WIDTH * deviation)
        return cls(value / factor, value * factor)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{in_seconds(self.low)} to {in_seconds(self.high)}"


@dataclass(frozen=True, slots=True)
class Uncertain:
    """Forecast seconds of a step, what they go to, and the errors of both.

    Attributes:
        seconds: of a step.
        shares: kind -> part of the step.
        errors: by kind.
    """

    seconds: float
    shares: Mapping[str, float] = field(default_factory=dict)
    errors: ForecastErrors = field(default_factory=ForecastErrors)

    @property
    def interval(self) -> Interval:
        """Seconds that hold 80 % of measured steps."""
        return Interval.around(self.seconds, self.errors.step(self.shares))

    def equals(self, other: Uncertain) -> bool:
        """Whether the forecast cannot tell which of two plans is faster: their ratio may be 1.

        What both forecasts share, which have the same errors, cancels. Forecasts with other errors, for
        another cluster or runtime, share nothing.
        """
        if not self.seconds or not other.seconds:
            return self.seconds == other.seconds
        deviation = math.hypot(self.errors.step(self.shares), other.errors.step(other.shares))
        if self.errors == other.errors:
            deviation = self.errors.difference(self.shares, other.shares)
        return abs(math.log(self.seconds / other.seconds)) <= WIDTH * deviation


EQUAL: Final = "equal within the forecast"
"""What is said of two plans that a forecast cannot tell apart (`Uncertain.equals`)."""


def in_seconds(seconds: float) -> str:
    """Seconds or milliseconds with four digits."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
