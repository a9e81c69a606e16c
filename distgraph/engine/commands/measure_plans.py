"""Measured finalists: the best plans of a search run for some steps each, and the fastest is kept.

`measured_best` starts the script on MPI ranks once for each plan, as `distgraph run --plan` does. On every
rank this file runs the script up to some training steps and takes the times between them.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from distgraph.engine.commands.overrides import strategy_environment
from distgraph.engine.commands.script_runner import ScriptHook, run_script
from distgraph.errors import RuntimeFault
from distgraph.plan.plan import Plan
from distgraph.plan.plan_components import MeasuredPlan
from distgraph.runtime.job.job_files import PLAN_VARIABLE
from distgraph.runtime.launch.hosts import Host
from distgraph.runtime.launch.launch import launch
from distgraph.runtime.launch.launch_hosts import launch_on_hosts
from distgraph.runtime.launch.mpi_rank import current_transport

STEPS: Final = 8
"""Training steps that are measured, after those that warm up."""
_WARM_UP: Final = 2


def measured_best(
    plans: Sequence[tuple[str, Plan]],
    argv: Sequence[str],
    hosts: Sequence[Host] = (),
    watch: Callable[[str], None] | None = None,
) -> Plan:
    """Run plans for some steps each on MPI ranks.

    Args:
        plans: in words, and as plans with a forecast.
        argv: script and its arguments.
        hosts: on which the ranks run; this machine where there are none.
        watch: called with the name of the plan that is measured.

    Returns:
        The fastest plan, with the measured seconds and the forecasts of all in `search.measured`.

    Raises:
        RuntimeFault: no plan ran.
    """
    measured: list[tuple[float, MeasuredPlan, Plan]] = []
    for number, (words, plan) in enumerate(plans, 1):
        if watch is not None:
            watch(f"measuring plan {number} of {len(plans)}")
        assert plan.forecast is not None
        seconds = measured_seconds(plan, argv, hosts)
        entry = MeasuredPlan(plan=words, forecast=plan.forecast.seconds, seconds=seconds)
        measured.append((float("inf") if seconds is None else seconds, entry, plan))
    measured.sort(key=lambda each: each[0])
    if measured[0][1].seconds is None:
        raise RuntimeFault(
            f"plan --measure: none of {len(plans)} plans ran; see the errors above, or leave --measure out"
        )
    best = measured[0][2]
    return replace(best, search=replace(best.search, measured=tuple(entry for _, entry, _ in measured)))


def measured_seconds(plan: Plan, argv: Sequence[str], hosts: Sequence[Host] = ()) -> float | None:
    """Median seconds of a step of the slowest rank; None where the job failed. Errors go to standard error.

    Without hosts the ranks run on this machine.
    """
    with (
        tempfile.TemporaryDirectory(prefix="distgraph-measure-") as folder,
        Path(os.devnull).open("w") as out,
    ):
        path, result = Path(folder) / "plan.json", Path(folder) / "seconds.json"
        plan.save(path)
        env = {**os.environ, **strategy_environment(), PLAN_VARIABLE: str(path)}
        ranks, command = max(plan.ranks) + 1, [__file__, str(result), *argv]
        if hosts:
            code = launch_on_hosts(ranks, command, hosts, placement=plan.placement, env=env, stdout=out)
        else:
            code = launch(ranks, command, env=env, stdout=out)
        if code or not result.exists():
            return None
        seconds: float = json.loads(result.read_text())
        return seconds


@dataclass(slots=True)
class _StepClock:
    """Takes the time before every step; the result are the seconds between them, without the first steps."""

    times: list[float] = field(default_factory=list)

    def __call__(self) -> list[float] | None:
        self.times.append(time.perf_counter())
        if len(self.times) <= _WARM_UP + STEPS:
            return None
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)][_WARM_UP:]


def measure_rank(result: Path, argv: Sequence[str]) -> None:
    """Run a script up to its last measured step; rank 0 writes the seconds to a file."""
    transport = current_transport()
    hook = ScriptHook(before_step=_StepClock())
    seconds = run_script(argv[0], argv[1:], hook, "plan --measure", f"it trains fewer than {STEPS} steps")
    everyone = [seconds] if transport is None else transport.gather_objects(seconds, 0)
    if everyone is not None:
        slowest = [max(column) for column in zip(*everyone, strict=True)]
        result.write_text(json.dumps(statistics.median(slowest)))


if __name__ == "__main__":
    measure_rank(Path(sys.argv[1]), sys.argv[2:])
