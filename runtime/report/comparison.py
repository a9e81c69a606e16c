"""A forecast and a measured step in numbers: what every kind of task took.

*In:* a forecast and a measured timeline of the same program.
*Out:* `ComparisonRow` rows, and these as text.
*Invariant:* on both sides the kinds of tasks and "waiting" add up to ranks times step: waiting is all time in
which a rank does not work, inside of tasks or between them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from distgraph.resources.units import format_si
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.forecast.forecast import Forecast
from distgraph.runtime.report.timeline_segments import TASKS, task_time
from distgraph.serialization.text_table import text_table


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One row of the comparison.

    Attributes:
        name: kind of task, "waiting" or "step".
        runs: task instances on all ranks; 0 where there is nothing to count.
        forecast, measured: seconds of a step, or seconds of tasks or waiting summed over all ranks.
    """

    name: str
    runs: int
    forecast: float
    measured: float

    @property
    def error(self) -> str:
        """Error of the forecast as text, such as "+4.0%"; empty where nothing was measured."""
        return f"{self.forecast / self.measured - 1:+.1%}" if self.measured > 0 else ""


def comparison(forecast: Forecast, measured: MeasuredTimeline) -> tuple[ComparisonRow, ...]:
    """Seconds at work by kind of task, waiting, and the step, forecast and in the median measured step."""
    step, kinds = measured.median, measured.tasks
    runs: dict[str, int] = defaultdict(int)
    measured_seconds: dict[str, float] = defaultdict(float)
    for rank in step.ranks.values():
        for run in rank.runs:
            runs[kinds[run.task]] += 1
            measured_seconds[kinds[run.task]] += run.end - run.start - rank.waited(run)
    forecast_seconds: dict[str, float] = defaultdict(float)
    for ranks in forecast.timeline.columns:
        for interval in forecast.timeline.of_rank(ranks[0]):
            seconds = interval.end - interval.start - task_time(forecast, interval).exposed
            forecast_seconds[kinds[interval.task]] += len(ranks) * seconds
    count = len(step.ranks)
    waits = (
        count * forecast.step_seconds - sum(forecast_seconds.values()),
        count * step.seconds - sum(measured_seconds.values()),
    )
    return (
        *(
            ComparisonRow(kind, runs[kind], forecast_seconds[kind], measured_seconds[kind])
            for kind in TASKS
            if runs[kind]
        ),
        ComparisonRow("waiting", 0, *waits),
        ComparisonRow("step", 0, forecast.step_seconds, step.seconds),
    )


def comparison_text(forecast: Forecast, measured: MeasuredTimeline) -> str:
    """The rows of `comparison` as a table, below a line that says which step was measured."""
    steps, number = len(measured.steps), measured.median.number
    rows = [("", "runs", "forecast", "measured", "error")]
    for row in comparison(forecast, measured):
        seconds = (format_si(row.forecast, "s"), format_si(row.measured, "s"))
        rows.append((row.name, str(row.runs or ""), *seconds, row.error))
    head = f"measured: step {number}, the median of {steps} recorded step{'s' * (steps > 1)}"
    return "\n".join([f"{head}; seconds of tasks and waiting are sums over all ranks", *text_table(rows, 1)])
