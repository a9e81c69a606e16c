"""Robust least squares with unknowns that are not negative.

Every fit minimises a sum of Huber losses of relative errors, x >= 0:

    minimise   sum_i huber((a_i . x - t_i) / s_i)

so that a disturbed run has little weight, and errors are relative: to the measured times, s_i = t_i, or to
the fit of the previous iteration, s_i = a_i . x.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import numpy as np

from distgraph.errors import ResourceError

Vector = np.ndarray
TURNS: Final = 8
"""Iterations of a fit in which the errors, or some of the unknowns, depend on the iteration before."""
_HUBER: Final = 0.1  # relative error from which a measurement counts as disturbed
_SPREAD: Final = 0.5  # the same where places differ, after the mean over rounds


def robust(
    rows: Vector,
    seconds: Vector,
    prior: Vector | None = None,
    like: Vector | None = None,
    far: float = _HUBER,
) -> Vector:
    """Robust least squares: x >= 0 that minimises the Huber loss of the relative errors of rows @ x.

    Args:
        rows: [measurements, unknowns].
        seconds: [measurements]; positive without `like`.
        prior: [unknowns], nan where there is none; decides only what the measurements leave open.
        like: [measurements], positive: what errors are relative to; the seconds themselves by default.
        far: relative error from which a measurement counts less.

    Raises:
        ResourceError: no measurement, or the solver found no solution.
    """
    if not len(rows):
        raise ResourceError("fit: there is no measurement; give the profile more seconds")
    cp: Any = import_module("cvxpy")  # a second of start-up time: only for those who fit
    unit = seconds if like is None else like
    relative = rows / unit[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    x = cp.Variable(rows.shape[1], nonneg=True)
    loss = cp.sum(cp.huber(relative / scale @ x - seconds / unit, far)) / len(rows)
    if prior is not None:
        stated = np.flatnonzero(np.isfinite(prior) & (prior > 0))
        if stated.size:
            loss += 1e-5 * cp.sum_squares(x[stated] / (prior[stated] * scale[stated]) - 1)
    problem = cp.Problem(cp.Minimize(loss))
    problem.solve(solver=cp.CLARABEL)
    if x.value is None:
        raise ResourceError(f"fit: the solver ended with {problem.status}; measure again")
    solution: Vector = np.maximum(np.asarray(x.value), 0.0) / scale
    return solution


def expected(rows: Vector, seconds: Vector, start: float | Vector = 0.0) -> Vector:
    """x >= 0 such that start + rows @ x is near the mean of the seconds with equal rows."""
    like, x = seconds, np.zeros(rows.shape[1])
    for _ in range(TURNS):
        x = robust(rows, seconds - start, like=like, far=_SPREAD)
        before, like = like, np.maximum(start + rows @ x, 1e-9)
        if np.allclose(before, like, rtol=1e-3):
            break
    return x


def mean_error(predicted: Vector, seconds: Vector, like: Vector | None = None) -> float:
    """Mean of |predicted - measured| / like, which are the measured seconds by default; 0 without any."""
    unit = seconds if like is None else like
    return float(np.mean(np.abs(predicted - seconds) / unit)) if len(seconds) else 0.0
