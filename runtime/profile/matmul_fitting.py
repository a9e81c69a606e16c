"""The rate of contractions by their shape, from measured seconds.

*In:* contractions of one dtype with their seconds.
*Out:* `MatmulFit`.

The seconds of a FLOP are the product of a factor for each length, 1 + (half / size) ** exponent, with an
exponent of 1 for sizes below the half (see `ComputeCost`). They are linear in half ** exponent while the
other two lengths, the exponent and the set of sizes below the half are fixed. So the lengths are fitted in
turns, for each of some exponents. The seconds of the bytes are added: a CPU copies operands in the order in
which it multiplies them (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008,
section 4), and a product of few rows, which reads a matrix that is in no near cache, takes the time of both.
A step is the sum of all products, so a longer one counts more, see `_WEIGHT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from distgraph.runtime.forecast.op_cost import Work
from distgraph.runtime.profile.robust_fitting import TURNS, Vector, mean_error, robust

_EXPONENTS: Final = (1.0, 1.25, 1.5, 1.75, 2.0)
_GAIN: Final = 0.03
"""Least part by which an exponent above 1 makes the error smaller: less may be noise."""
_WEIGHT: Final = 0.25
"""Exponent of the seconds of a product by which its relative error counts: with 0 the sum of measured
products was fitted 4 to 7 % too short, with 0.5 small products of known cost came out up to half too long."""
_SETTLED: Final = 0.01  # relative change of the lengths in a turn after which there is no further one


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """Numbers of the contractions of one dtype.

    Attributes:
        rate: FLOP/s of large matrices.
        half, exponent: of `MatmulRate`.
        copied: seconds of an element that is copied; None where none was.
        moved: seconds of a byte of the operands and the result.
        launches: seconds to start an op, by its kind.
        error: mean relative error.
    """

    rate: float
    half: tuple[float, float, float]
    exponent: float
    copied: float | None
    moved: float
    launches: Mapping[str, float]
    error: float


def fit_matmul(samples: Sequence[tuple[Work, float]]) -> MatmulFit:
    """Numbers of contractions, by the exponent that suits those best of which all lengths are long.

    These are the tenth of them with the longest shortest length: a product of a program may be larger than
    any that is measured, and is extrapolated from them.

    Args:
        samples: contractions of one dtype.
    """
    seconds = np.array([measured for _, measured in samples])
    shortest = np.array([min(work.dims[1:]) for work, _ in samples])
    large = shortest >= np.quantile(shortest, 0.9)
    fits = [_fit_matmul(samples, exponent) for exponent in _EXPONENTS]
    errors = [mean_error(model[large], seconds[large]) for _, model in fits]
    best = int(np.argmin(errors))
    return fits[best if errors[best] < (1 - _GAIN) * errors[0] else 0][0]


def _fit_matmul(samples: Sequence[tuple[Work, float]], exponent: float) -> tuple[MatmulFit, Vector]:
    """Numbers with a given exponent, one length at a time with the others fixed, and the fitted seconds."""
    seconds = np.array([measured for _, measured in samples])
    ops = list(dict.fromkeys(work.op for work, _ in samples))
    starting = np.array(
        [[*(float(work.op == op) for op in ops), work.copied, work.nbytes] for work, _ in samples]
    )
    flops = np.array([work.flops for work, _ in samples])
    sizes = np.array([work.dims[1:] for work, _ in samples], float)
    half, per_flop, starts, like = np.zeros(3), 1.0, np.zeros(len(ops) + 2), None
    for _ in range(TURNS):
        before = half.copy()
        for axis in range(3):
            factors = _factors(sizes, half, exponent)
            shared = flops * np.delete(factors, axis, axis=1).prod(axis=1)
            # the part of a factor above 1 is this times half ** exponent
            below = np.maximum(half, 1e-9) ** (1 - exponent) / sizes
            scale = np.where(sizes > half, sizes**-exponent, below)[:, axis]
            rows = np.column_stack([shared, shared * scale, starting])
            unit = seconds if like is None else like
            weights = (unit / np.median(unit)) ** _WEIGHT
            solution = robust(rows * weights[:, None], seconds * weights, like=unit)
            like = np.maximum(rows @ solution, 1e-9)
            per_flop, starts = max(float(solution[0]), 1e-18), solution[2:]
            half[axis] = min(max(float(solution[1]) / per_flop, 0.0) ** (1 / exponent), 1e4)
        if np.allclose(half, before, rtol=_SETTLED):
            break
    computing = flops * per_flop * _factors(sizes, half, exponent).prod(axis=1)
    model = starting @ starts + computing
    first, second, third = map(float, half)
    launches = dict(zip(ops, map(float, starts), strict=False))
    copied = float(starts[-2]) if starting[:, -2].any() else None
    error, moved = mean_error(model, seconds), float(starts[-1])
    return MatmulFit(1 / per_flop, (first, second, third), exponent, copied, moved, launches, error), model


def _factors(sizes: Vector, half: Vector, exponent: float) -> Vector:
    """How many times as long as at the rate of large matrices a FLOP takes because of each length."""
    ratios = half / sizes
    factors: Vector = 1 + np.where(ratios < 1, ratios**exponent, ratios)
    return factors
