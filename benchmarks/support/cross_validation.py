"""Forecasts of rows by fits to other rows, and what choosing by a forecast costs."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from distgraph.errors import ResourceError
from distgraph.runtime.profile.calibration.robust_fit import (
    Array,
    Fit,
    Forecast,
    Parameter,
    Rows,
    by_group,
    fit,
    splits,
)


def by_rows(count: int, folds: int, seed: int = 0) -> list[Rows]:
    """Row numbers of each fold, shuffled; sizes differ by one at most."""
    order = np.random.default_rng(seed).permutation(count)
    return [np.sort(order[at::folds]) for at in range(min(folds, count))]


def cross_validate(
    parameters: Sequence[Parameter],
    forecast: Forecast,
    measured: Array,
    folds: Sequence[Rows],
    *,
    scale: float = 0.1,
) -> Array:
    """Seconds of every row as forecast by a fit to the rows outside its fold.

    Raises:
        ResourceError: a row is in no fold or in two, or there is one fold only.
    """
    count = len(measured)
    if len(folds) < 2 or sorted(int(row) for fold in folds for row in fold) != list(range(count)):
        raise ResourceError(
            f"cross-validation: {len(folds)} folds of {sum(map(len, folds))} rows for {count}; every row "
            "lies in one fold of two or more"
        )
    result = np.empty(count)
    for fold, found in fits(parameters, forecast, measured, folds, scale=scale):
        result[fold] = forecast(found.values)[fold]
    return result


def fits(
    parameters: Sequence[Parameter],
    forecast: Forecast,
    measured: Array,
    folds: Sequence[Rows],
    *,
    scale: float = 0.1,
) -> Iterator[tuple[Rows, Fit]]:
    """(rows of a fold, the fit to all other rows) for each fold."""
    for fold, outside in splits(len(measured), folds):
        yield fold, fit(parameters, forecast, measured, outside, scale=scale)


def regret(forecast: Array, measured: Array, groups: Sequence[Hashable]) -> Array:
    """Of each group of two and more rows: how much slower the row forecast best is than the fastest."""
    choices = [rows for rows in by_group(groups) if len(rows) > 1]
    chosen = [measured[rows[np.argmin(forecast[rows])]] for rows in choices]
    return np.array([first / measured[rows].min() - 1.0 for first, rows in zip(chosen, choices, strict=True)])
