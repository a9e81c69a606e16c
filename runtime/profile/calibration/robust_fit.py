"""Parameters of a model of costs from measured seconds: robust, bounded, checked on rows that were not used.

*In:* measured seconds, a function from values of the parameters to forecast seconds, what is known of the
parameters beforehand. *Out:* a `Fit`: values, and how well each is known.

The fit minimises, over the logarithms of the parameters,

    sum over rows of rho(log(forecast / measured) / scale)
    + sum over parameters of (log(value / start) / log(spread)) ** 2

with rho(x) = 2 (sqrt(1 + x ** 2) - 1), quadratic for small deviations and linear for large ones, so that a
run in which something else went wrong does not bend the rest. The second sum keeps a parameter of which the
rows say nothing (the width of a matrix where all have one width) at what the data sheet says instead of at
a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import ResourceError

Array = NDArray[np.float64]
Rows = NDArray[np.intp]
Forecast = Callable[[Mapping[str, float]], Array]
"""Values by name -> forecast seconds of all rows."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One number to find.

    Attributes:
        name: of the number.
        start: the best guess beforehand, positive.
        low, high: bounds.
        spread: how far off the guess may be, as a ratio: 2 for "within a factor of two, most likely".
    """

    name: str
    start: float
    low: float
    high: float
    spread: float = 2.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Values and their relative standard errors by name; deviation: mean |forecast / measured - 1|."""

    values: Mapping[str, float]
    errors: Mapping[str, float]
    deviation: float


def deviations(forecast: Array, measured: Array) -> Array:
    """|forecast / measured - 1| of every row."""
    return np.abs(forecast / measured - 1.0)


def fit(
    parameters: Sequence[Parameter],
    forecast: Forecast,
    measured: Array,
    rows: Rows | None = None,
    *,
    scale: float = 0.1,
) -> Fit:
    """Find the parameters.

    Args:
        parameters: what to find.
        forecast: seconds of all rows under some values; called some hundred times.
        measured: seconds of all rows, positive.
        rows: indices of those to use; all by default.
        scale: relative deviation from which on a row counts less than quadratically.

    Raises:
        ResourceError: no rows, a measured time that is not positive, or a start outside its bounds.

    Example:
        >>> size = np.array([1.0, 2.0, 4.0, 8.0])
        >>> found = fit([Parameter("rate", 1.0, 1e-3, 1e3, 100.0)], lambda v: size / v["rate"], size / 5)
        >>> round(found.values["rate"], 1)
        5.0
    """
    chosen = np.arange(len(measured)) if rows is None else np.asarray(rows, int)
    _check(parameters, measured[chosen])
    start, low, high, spread = (
        np.log([getattr(p, field) for p in parameters]) for field in ("start", "low", "high", "spread")
    )
    target = np.log(measured[chosen])

    def values(point: Array) -> dict[str, float]:
        return {p.name: float(v) for p, v in zip(parameters, np.exp(point), strict=True)}

    def residuals(point: Array) -> Array:
        rest = (np.log(forecast(values(point))[chosen]) - target) / scale
        size = np.abs(rest)
        # rho is the square of what least_squares squares, so that the prior stays quadratic.
        robust = np.sign(rest) * np.sqrt(2.0 * (np.sqrt(1.0 + size**2) - 1.0))
        return np.concatenate([robust, (point - start) / spread])

    optimize = import_module("scipy.optimize")  # slow to load, and few commands fit numbers
    solved = optimize.least_squares(
        residuals, start, bounds=(low, high), x_scale="jac", diff_step=[1e-4], max_nfev=200
    )
    slopes: Array = np.asarray(solved.jac, float)
    variances = np.sum(np.linalg.pinv(slopes) ** 2, axis=1)  # the diagonal of (slopes.T @ slopes)^-1
    freedom = max(1, len(chosen) - len(parameters))
    noise = float(np.sum(residuals(solved.x)[: len(chosen)] ** 2)) / freedom
    spreads = np.sqrt(variances * max(noise, 1e-12))
    fitted = values(solved.x)
    error = float(np.mean(deviations(forecast(fitted)[chosen], measured[chosen])))
    return Fit(fitted, {p.name: float(s) for p, s in zip(parameters, spreads, strict=True)}, error)


def _check(parameters: Sequence[Parameter], measured: Array) -> None:
    if not len(measured):
        raise ResourceError("calibration got no rows; give it measured times")
    if not np.all(measured > 0):
        raise ResourceError(f"calibration: times are positive, got {float(measured.min())} s; drop such rows")
    for p in parameters:
        if not 0 < p.low <= p.start <= p.high or p.spread <= 1:
            raise ResourceError(
                f"parameter {p.name}: starts at {p.start} within {p.low} to {p.high}, spread {p.spread}; "
                "bounds are positive and hold the start, the spread is above 1"
            )


def by_group(keys: Sequence[Hashable]) -> list[Rows]:
    """Row numbers of each fold, one fold for each key."""
    groups: dict[Hashable, list[int]] = {}
    for row, key in enumerate(keys):
        groups.setdefault(key, []).append(row)
    return [np.array(rows) for rows in groups.values()]


def group_folds(keys: Sequence[Hashable], folds: int = 10) -> list[Rows]:
    """Row numbers of each fold; all rows with one key are in one fold."""
    groups = by_group(keys)
    return [np.sort(np.concatenate(groups[first::folds])) for first in range(min(folds, len(groups)))]


def splits(count: int, folds: Sequence[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """(rows of a fold, all other rows) for each fold."""
    for fold in folds:
        yield fold, np.setdiff1d(np.arange(count), fold)
