"""Calibration: numbers of a resource file and a runtime model from measured steps, with held-out errors.

*In:* measured runs, a cluster, a runtime. *Out:* a `Calibration`.

The fit minimises the robust sum of `robust_fit` over log(forecast / measured) of all runs. It is made on
`Responses`, which are taken anew at the values of each round, so that the last residuals are those of the
product's forecast. Runs are judged by a fit that has not seen their group: every fold holds out whole groups,
because two runs of one model on the same devices share their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import ResourceError
from distgraph.plan.forecast_errors import ForecastErrors
from distgraph.resources import Cluster
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.forecast.forecast_error_shares import errors_of
from distgraph.runtime.profile.calibration.error_model import coverage, fit_errors, memory_error
from distgraph.runtime.profile.calibration.fitted_numbers import applied, numbers
from distgraph.runtime.profile.calibration.robust_fit import Fit, fit, group_folds, splits
from distgraph.runtime.profile.calibration.step_responses import MeasuredRun, Responses, responses

Array = NDArray[np.float64]
LEAST_GROUPS: Final = 3
"""Fewer groups of runs say nothing about runs of another group."""
_DETERMINED: Final = 0.005
"""A number is fitted if at least this share of the seconds of some run is proportional to it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted numbers and their errors.

    Attributes:
        runs: that were measured.
        fit: values and relative standard errors by name, of numbers on which a run depends.
        starts: values before the fit, by name.
        forecast: seconds of every run with the fitted numbers.
        held_out: seconds of every run by a fit that has not seen its group.
        before: mean of |forecast / measured - 1| with the numbers of the files.
        errors: by kind.
        cluster, runtime: with the fitted numbers.
    """

    runs: tuple[MeasuredRun, ...]
    fit: Fit
    starts: Mapping[str, float]
    forecast: Array
    held_out: Array
    before: float
    errors: ForecastErrors
    cluster: Cluster
    runtime: RuntimeModel

    @property
    def measured(self) -> Array:
        """Seconds of every run."""
        return np.array([run.seconds for run in self.runs])

    @property
    def held_out_error(self) -> float:
        """Mean of |held out / measured - 1|."""
        return float(np.mean(np.abs(self.held_out / self.measured - 1.0)))

    def __str__(self) -> str:
        groups = len({run.group for run in self.runs})
        errors = (self.before, self.fit.deviation, self.held_out_error)
        lines = [
            f"{len(self.runs)} runs in {groups} groups",
            "mean error: {:.1%} before, {:.1%} fitted, {:.1%} held out by groups".format(*errors),
            f"{'number':<52}{'before':>12}{'fitted':>12}{'within':>9}",
        ]
        for name, value in self.fit.values.items():
            numbers = f"{self.starts[name]:>12.4g}{value:>12.4g}{self.fit.errors[name]:>9.0%}"
            lines.append(f"{name:<52}{numbers}")
        return "\n".join([*lines, str(self.errors)])


def calibrate(
    runs: Sequence[MeasuredRun],
    cluster: Cluster,
    runtime: RuntimeModel,
    *,
    rounds: int = 2,
    workers: int = 1,
    watch: Callable[[str], None] | None = None,
) -> Calibration:
    """Fit the numbers of a cluster and a runtime to measured steps.

    Args:
        runs: measured steps, of three groups or more.
        cluster, runtime: as their files state them.
        rounds: number of times the fit is made, each time with the forecasts at the values found before.
        workers: processes.
        watch: gets a line of text after each round.

    Raises:
        ResourceError: too few groups, a time that is not positive, or a program that the cluster cannot be
            priced for.
    """
    runs = tuple(runs)
    groups = [run.group for run in runs]
    if len(set(groups)) < LEAST_GROUPS:
        raise ResourceError(
            f"calibration: {len(runs)} runs in {len(set(groups))} groups, but errors are judged on groups "
            f"that were held out; give runs of {LEAST_GROUPS} models or numbers of devices at least"
        )
    measured = np.array([run.seconds for run in runs])
    all_numbers = numbers(cluster, runtime)
    starts = {number.parameter.name: number.parameter.start for number in all_numbers}
    model = responses(runs, cluster, runtime, all_numbers, starts, workers=workers)
    before = float(np.mean(np.abs(model.seconds / measured - 1.0)))
    model = model.only(_determined(model))
    fitted = fit([each.parameter for each in model.numbers], model.at, measured)
    for number in range(1, rounds):
        _report(watch, number, rounds, fitted)
        model = responses(runs, cluster, runtime, model.numbers, {**starts, **fitted.values}, workers=workers)
        fitted = fit([each.parameter for each in model.numbers], model.at, measured)
    _report(watch, rounds, rounds, fitted)
    base = {**starts, **fitted.values}
    last = responses(runs, cluster, runtime, (), base, workers=workers)
    held_out = last.seconds / model.at(base) * _held_out(model, measured, groups)
    prior = errors_of(cluster, range(len(cluster.devices)), runtime)
    return Calibration(
        runs,
        replace(fitted, deviation=float(np.mean(np.abs(last.seconds / measured - 1.0)))),
        starts,
        last.seconds,
        held_out,
        before,
        _errors(runs, last, held_out, prior, runtime),
        *applied(cluster, runtime, fitted.values),
    )


def _report(watch: Callable[[str], None] | None, number: int, rounds: int, fitted: Fit) -> None:
    if watch is not None:
        watch(f"round {number} of {rounds}: mean error {fitted.deviation:.1%}")


def _determined(model: Responses) -> list[str]:
    """The names of the numbers on which some run depends."""
    effects = np.max(np.abs(model.parts) / model.seconds[:, None], axis=0)
    names = [number.parameter.name for number in model.numbers]
    return [name for name, effect in zip(names, effects, strict=True) if effect >= _DETERMINED]


def _held_out(model: Responses, measured: Array, groups: Sequence[str]) -> Array:
    """Seconds of every run by a fit to the groups of the other folds."""
    result = np.empty(len(measured))
    parameters = [number.parameter for number in model.numbers]
    for fold, others in splits(len(measured), group_folds(groups)):
        result[fold] = model.at(fit(parameters, model.at, measured, others).values)[fold]
    return result


def _errors(
    runs: Sequence[MeasuredRun],
    last: Responses,
    held_out: Array,
    before: ForecastErrors,
    runtime: RuntimeModel,
) -> ForecastErrors:
    groups = [run.group for run in runs]
    residuals = np.log(np.array([run.seconds for run in runs]) / held_out)
    fitted = fit_errors(residuals, last.shares, groups, before)
    weighed = [number for number, run in enumerate(runs) if run.memory is not None]
    memory = before.memory
    if weighed:
        memory = memory_error(
            last.memory[weighed], np.array([runs[number].memory for number in weighed], float)
        )
    mean = float(np.mean(np.abs(np.exp(-residuals) - 1.0)))
    return replace(
        fitted,
        memory=float(f"{memory:.4g}"),
        runtime=runtime.name,
        runs=len(runs),
        coverage=float(f"{coverage(residuals, last.shares, groups, before):.4g}"),
        about=f"{len(runs)} measured steps in {len(set(groups))} groups, each held out of the fit that "
        f"judged it: mean error {mean:.1%} (distgraph calibrate)",
    )
