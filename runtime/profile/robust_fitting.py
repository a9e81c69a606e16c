"""Robust least squares with unknowns that are not negative.

Every fit minimises a sum of Huber losses of relative errors, x >= 0:

    minimise   sum_i huber((a_i . x - t_i) / s_i)

so that a disturbed run has little weight, and errors are relative: to the measured times, s_i = t_i, or to
the fit of the previous iteration, s_i = a_i . x.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from threading import Lock
from typing import Any, Final

import numpy as np

from distgraph.errors import ResourceError

Vector = np.ndarray
TURNS: Final = 8
"""Iterations of a fit in which the errors, or some of the unknowns, depend on the iteration before."""
_HUBER: Final = 0.1  # relative error from which a measurement counts as disturbed
_SPREAD: Final = 0.5  # the same where places differ, after the mean over rounds
_MOST_PARAMETERS: Final = 4096  # of a problem that is kept: cvxpy takes long to prepare one with many
_SOLVING: Final = Lock()  # held while the numbers of a kept problem are set and it is solved


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
    unit = seconds if like is None else like
    relative = rows / unit[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    coefficients, targets = relative / scale, seconds / unit
    stated = np.zeros(0, int) if prior is None else np.flatnonzero(np.isfinite(prior) & (prior > 0))
    with _SOLVING:
        if prior is not None and stated.size:
            x, problem = _problem(coefficients, targets, far, stated, prior[stated] * scale[stated])
        elif rows.size > _MOST_PARAMETERS:
            x, problem = _problem(coefficients, targets, far)
        else:
            parameters, x, problem = _kept_problem(*rows.shape, far)
            parameters[0].value, parameters[1].value = coefficients, targets
        problem.solve(solver="CLARABEL", warm_start=False)  # the answer depends on no earlier problem
        values, status = x.value, problem.status
    if values is None:
        raise ResourceError(f"fit: the solver ended with {status}; measure again")
    solution: Vector = np.maximum(np.asarray(values), 0.0) / scale
    return solution


def _problem(
    coefficients: Any, targets: Any, far: float, stated: Vector | None = None, prior: Vector | None = None
) -> tuple[Any, Any]:
    """The unknowns of a fit, and the problem; `prior` has the values that are stated of some of them."""
    cp: Any = import_module("cvxpy")  # a second of start-up time: only for those who fit
    x = cp.Variable(coefficients.shape[1], nonneg=True)
    loss = cp.sum(cp.huber(coefficients @ x - targets, far)) / coefficients.shape[0]
    if stated is not None and prior is not None:
        loss += 1e-5 * cp.sum_squares(x[stated] / prior - 1)
    return x, cp.Problem(cp.Minimize(loss))


@lru_cache(maxsize=16)
def _kept_problem(measurements: int, unknowns: int, far: float) -> tuple[tuple[Any, Any], Any, Any]:
    """The problem of a shape, with parameters for its numbers: cvxpy takes longer to prepare it than to solve
    it, and a profile has hundreds of problems of one shape."""
    cp: Any = import_module("cvxpy")
    parameters = cp.Parameter((measurements, unknowns)), cp.Parameter(measurements)
    return parameters, *_problem(*parameters, far)


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
