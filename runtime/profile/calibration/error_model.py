"""Errors of forecasts by kind, from runs that were held out of the fit that judged them.

*In:* log(measured / forecast) of held-out runs, the shares of their steps, their groups. *Out:* standard
deviations by kind (`plan.forecast_errors`), and how many measured steps their intervals hold.

The residual of run i in a group is modelled as sum over kinds of share[i, kind] * e[kind] + own[i], where the
runs of a group have one e[kind]. The deviations maximise the likelihood of all groups, with a weak normal
distribution of their logarithms around the deviations that the origins of the numbers give, so that a kind of
which no run says anything keeps them. All are then scaled so that the interval of 80 % holds 80 % of the
residuals: real errors have longer tails than normal ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distgraph.plan.forecast_errors import CONFIDENCE, KINDS, WIDTH, ForecastErrors, of_kinds
from distgraph.runtime.profile.calibration.robust_fit import group_folds, splits

Array = NDArray[np.float64]
_LEAST: Final = 0.005
"""Smallest deviation: forecasts of two plans are never said to differ for less."""
_TRUST: Final = np.log(3.0)
"""Standard deviation of the logarithm of a deviation before any run is seen."""


def fit_errors(
    residuals: Array, shares: Array, groups: Sequence[str], before: ForecastErrors
) -> ForecastErrors:
    """Deviations by kind.

    Args:
        residuals: log(measured / forecast) [runs], of runs that were held out.
        shares: of `KINDS` in each step [runs, kinds].
        groups: of each run.
        before: the deviations without any run.
    """
    start = np.log([max(_LEAST, getattr(before, name)) for name in (*KINDS, "own")])
    # One run far off must not decide a deviation: it counts as far as three typical ones.
    limit = 3.0 * float(np.median(np.abs(residuals))) / 0.6745
    clipped = np.clip(residuals, -limit, limit) if limit else residuals
    rows, real = _padded(groups)
    observed, parts = np.where(real, clipped[rows], 0.0), np.where(real[..., None], shares[rows], 0.0)

    def loss(point: Array) -> float:
        variances = np.exp(2.0 * point)
        independent = np.where(real, variances[-1], 1.0)  # a row that only fills a group counts nothing
        covariance = (parts * variances[:-1]) @ parts.transpose(0, 2, 1) + independent[..., None] * np.eye(
            len(real.T)
        )
        distances = np.sum(observed * np.linalg.solve(covariance, observed[..., None])[..., 0])
        prior = np.sum(((point - start) / _TRUST) ** 2)
        return float(prior + np.sum(np.linalg.slogdet(covariance)[1]) + distances)

    bounds = [(np.log(_LEAST), np.log(2.0))] * len(start)
    optimize = import_module("scipy.optimize")  # slow to load
    point = optimize.minimize(loss, start, method="L-BFGS-B", bounds=bounds).x
    deviations = np.exp(point)
    spread = np.sqrt((shares**2) @ deviations[:-1] ** 2 + deviations[-1] ** 2)
    scale = _conformal(np.abs(residuals) / spread) / WIDTH
    scaled = [float(f"{min(2.0, scale * each):.4g}") for each in deviations]
    return of_kinds(dict(zip(KINDS, scaled[:-1], strict=True)), scaled[-1])


def _padded(groups: Sequence[str]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Numbers of the runs of each group [groups, largest size], and which of them are no padding."""
    names = np.array(groups)
    blocks = [np.flatnonzero(names == group) for group in dict.fromkeys(groups)]
    rows = np.zeros((len(blocks), max(map(len, blocks))), np.intp)
    real = np.zeros(rows.shape, bool)
    for number, block in enumerate(blocks):
        rows[number, : len(block)], real[number, : len(block)] = block, True
    return rows, real


def _conformal(ratios: Array) -> float:
    """The value that the next ratio exceeds with a probability of 20 %, if it is like these."""
    rank = min(len(ratios) - 1, int(np.ceil((len(ratios) + 1) * CONFIDENCE)) - 1)
    return float(np.sort(ratios)[rank])


def coverage(residuals: Array, shares: Array, groups: Sequence[str], before: ForecastErrors) -> float:
    """Share of the runs inside intervals of 80 % that were made from the other groups only."""
    inside = 0
    for held_out, others in splits(len(residuals), group_folds(groups)):
        errors = fit_errors(residuals[others], shares[others], [groups[index] for index in others], before)
        for row in held_out:
            deviation = errors.step(dict(zip(KINDS, shares[row], strict=True)))
            inside += bool(abs(residuals[row]) <= WIDTH * deviation)
    return inside / len(residuals)


def memory_error(forecast: Array, measured: Array) -> float:
    """Standard deviation of log(measured / forecast bytes), from the interval that holds 80 % of the runs."""
    return _conformal(np.abs(np.log(measured / forecast))) / WIDTH
