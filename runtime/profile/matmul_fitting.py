"""The rate of contractions by their shape, from measured seconds.

*In:* contractions of one dtype with their seconds.
*Out:* `MatmulFit`.

The seconds are linear in the factor of each length, 1 + (half / size) ** exponent, while the other two
lengths and the exponent are fixed. So the lengths are fitted in turns, for each of some exponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from distgraph.runtime.forecast.op_cost import Work
from distgraph.runtime.profile.robust_fitting import TURNS, Vector, mean_error, robust

_EXPONENTS: Final = (1.0, 1.25, 1.5, 1.75, 2.0)


@dataclass(frozen=True, slots=True)
class MatmulFit:
    """Numbers of the contractions of one dtype.

    Attributes:
        rate: FLOP/s of large matrices.
        half, exponent: of `MatmulRate`.
        copied: seconds of an element that is copied; None where none was.
        launches: seconds to start an op, by its kind.
        error: mean relative error.
    """

    rate: float
    half: tuple[float, float, float]
    exponent: float
    copied: float | None
    launches: Mapping[str, float]
    error: float


def fit_matmul(samples: Sequence[tuple[Work, float]], per_byte: float) -> MatmulFit:
    """Numbers of contractions, by the exponent that suits the larger half of them best.

    Small contractions take little of a step, and a large one is extrapolated from those with the most FLOPs.

    Args:
        samples: contractions of one dtype.
        per_byte: seconds of moving a byte; contractions that it decides say nothing of the rate.
    """
    seconds = np.array([measured for _, measured in samples])
    flops, nbytes = np.array([(work.flops, work.nbytes) for work, _ in samples]).T
    moving = per_byte * nbytes
    large = flops >= np.median(flops)
    bound = moving < 0.9 * seconds
    bound |= not bound.any()
    fits = [_fit_matmul(samples, moving, bound, exponent) for exponent in _EXPONENTS]
    return min(fits, key=lambda fit: mean_error(fit[1][large], seconds[large]))[0]


def _fit_matmul(
    samples: Sequence[tuple[Work, float]], moving: Vector, bound: Vector, exponent: float
) -> tuple[MatmulFit, Vector]:
    """Numbers with a given exponent, one length at a time with the others fixed, and the fitted seconds.

    Args:
        samples: contractions of one dtype.
        moving: seconds of their bytes.
        bound: of which the rate decides.
        exponent: of `MatmulRate`.
    """
    seconds = np.array([measured for _, measured in samples])
    ops = list(dict.fromkeys(work.op for work, _ in samples))
    starting = np.array([[*(float(work.op == op) for op in ops), work.copied] for work, _ in samples])
    flops = np.array([work.flops for work, _ in samples])
    sizes = np.array([work.dims[1:] for work, _ in samples], float) ** exponent
    half, per_flop, starts, like = np.zeros(3), 1.0, np.zeros(len(ops) + 1), None
    for _ in range(TURNS):
        for axis in range(3):
            others = [other for other in range(3) if other != axis]
            shared = flops * np.prod(1 + half[others] / sizes[:, others], axis=1)
            rows = np.column_stack([shared, shared / sizes[:, axis], starting])[bound]
            solution = robust(rows, seconds[bound], like=like)
            like = np.maximum(rows @ solution, 1e-9)
            per_flop, starts = max(float(solution[0]), 1e-18), solution[2:]
            half[axis] = min(float(solution[1]) / per_flop, 1e4**exponent)
    model = starting @ starts + np.maximum(flops * per_flop * np.prod(1 + half / sizes, axis=1), moving)
    first, second, third = (float(length) for length in half ** (1 / exponent))
    launches = dict(zip(ops, map(float, starts), strict=False))
    copied = float(starts[-1]) if starting[bound, -1].any() else None
    error = mean_error(model, seconds)
    return MatmulFit(1 / per_flop, (first, second, third), exponent, copied, launches, error), model
