"""Seconds of measured steps as a function of the numbers, from forecasts of the product.

*In:* programs, a cluster, a runtime, values of the numbers. *Out:* `Responses`: the forecast at these
values, and of every number the seconds that are proportional to it.
*Invariant:* seconds are those of `runtime.forecast`, exactly so at the base. Away from it

    seconds(values) = forecast(base) + sum over numbers of part * growth(value, base)

with growth = base / value - 1 for a rate and value / base - 1 for a time. This is exact as long as the same
tasks and roofs decide; a calibration computes it again at the values that it has found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distgraph.plan.forecast_errors import KINDS
from distgraph.resources import Cluster
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.forecast.forecast import forecasts
from distgraph.runtime.profile.calibration.fitted_numbers import Number, applied
from distgraph.runtime.program.build import Build

Array = NDArray[np.float64]
_STEP: Final = 1.25
"""Factor by which a number is made worse to see what depends on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A step that was measured.

    Attributes:
        name: of the run, for messages and tables, such as its line in a file.
        program: compiles it; called once for each round of a fit.
        seconds: measured of a step.
        group: runs of one group are held out together: those of one model and number of devices.
        memory: measured bytes of the fullest device; None if nobody measured.
    """

    name: str
    program: Callable[[], Build]
    seconds: float
    group: str
    memory: float | None = None


@dataclass(frozen=True, slots=True)
class Responses:
    """What the seconds of some runs depend on, near some values.

    Attributes:
        numbers: all that are fitted.
        base: values by name, at which the forecasts were made.
        seconds: forecast at the base [runs].
        parts: seconds that are proportional to each number [runs, numbers].
        shares: of the kinds of errors in each step [runs, kinds].
        memory: forecast bytes of the fullest device [runs].
    """

    numbers: tuple[Number, ...]
    base: Mapping[str, float]
    seconds: Array
    parts: Array
    shares: Array
    memory: Array

    def at(self, values: Mapping[str, float]) -> Array:
        """Seconds of every run with other values."""
        growth = [n.growth(values[n.parameter.name], self.base[n.parameter.name]) for n in self.numbers]
        seconds: Array = self.seconds + self.parts @ np.array(growth)
        return np.maximum(seconds, 1e-3 * self.seconds)

    def only(self, names: Iterable[str]) -> Responses:
        """The same of some of the numbers."""
        chosen = set(names)
        columns = [column for column, number in enumerate(self.numbers) if number.parameter.name in chosen]
        numbers = tuple(self.numbers[column] for column in columns)
        return Responses(numbers, self.base, self.seconds, self.parts[:, columns], self.shares, self.memory)


def responses(
    runs: Sequence[MeasuredRun],
    cluster: Cluster,
    runtime: RuntimeModel,
    numbers: Sequence[Number],
    base: Mapping[str, float],
    *,
    workers: int = 1,
) -> Responses:
    """Forecast every run at some values, and with each number changed.

    Raises:
        ResourceError: a program needs more devices than the cluster has, or a number that it does not state.
    """
    global _work  # noqa: PLW0603 - what forked workers read; a program cannot be pickled
    _work = runs, cluster, runtime, tuple(numbers), dict(base)
    indices = range(len(runs))
    if workers > 1 and len(runs) > 1:
        with get_context("fork").Pool(workers) as pool:
            rows = pool.map(_response, indices, chunksize=1)
    else:
        rows = [_response(index) for index in indices]
    seconds, parts, shares, memory = (np.array(column, float) for column in zip(*rows, strict=True))
    return Responses(tuple(numbers), dict(base), seconds, parts, shares, memory)


_work: tuple[Sequence[MeasuredRun], Cluster, RuntimeModel, tuple[Number, ...], dict[str, float]]


def _response(index: int) -> tuple[float, list[float], list[float], float]:
    runs, cluster, runtime, numbers, base = _work
    program = runs[index].program()
    dtypes = {value.dtype for op in program.lowered.ops for value in op.results}
    alone = len(program.ranks) == 1
    relevant = [_may_matter(number.parameter.name, dtypes, alone) for number in numbers]
    changed = []
    for number in itertools.compress(numbers, relevant):
        name = number.parameter.name
        changed.append({**base, name: base[name] / _STEP if number.faster else base[name] * _STEP})
    cases = (applied(cluster, runtime, values) for values in (base, *changed))
    first, *others = forecasts(program, cases)
    slower = iter((other.step_seconds - first.step_seconds) / (_STEP - 1.0) for other in others)
    parts = [next(slower) if used else 0.0 for used in relevant]
    return first.step_seconds, parts, [first.shares.get(kind, 0.0) for kind in KINDS], first.peak_memory


def _may_matter(name: str, dtypes: set[str], alone: bool) -> bool:
    """Whether a program may depend on a number: products of other dtypes and links of one rank do not."""
    if ".matmul." in name:
        return name.split(".matmul.")[1].split(".")[0] in dtypes
    return not (alone and (name == "launch" or name.startswith(("links.", "messages."))))
