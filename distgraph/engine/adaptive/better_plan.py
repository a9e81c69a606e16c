"""The search for a better plan of a running job, on a cluster with measured speeds.

*In:* the program and plan of a job, a cluster with the speeds that were measured, seconds.
*Out:* the best plan by forecast: other shares, other places of ranks, or, where the plan was searched,
another plan altogether.
*Invariant:* what the user has decided stays: a plan that comes from annotations gets other shares and places
only. Every rank keeps its device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from distgraph.engine.adaptive.neighbour_plans import (
    exchange_plans,
    on_present_devices,
    refined_shares,
    share_plans,
)
from distgraph.engine.commands.plan_search import SearchOptions, options_of, search
from distgraph.engine.compile.compile import check_cluster
from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.compile.plan_apply import apply_plan, devices_of, layouts_of, with_plan_settings
from distgraph.engine.compile.plan_extract import estimate
from distgraph.engine.compile.rank_placement import placement_of
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.engine.compile.training_spec import TrainingSpec
from distgraph.errors import DistGraphError
from distgraph.plan.constraints import SEARCHED
from distgraph.plan.plan import Plan
from distgraph.resources import Cluster
from distgraph.resources.mesh_communication import MeshCommunication
from distgraph.resources.units import format_si
from distgraph.runtime.forecast.forecast import Forecast, forecast, out_of_memory
from distgraph.runtime.program.build import reshard_program


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """What a job runs, and what may change.

    Attributes:
        request: to compile the training program that runs.
        given: its training specification before a plan decided anything.
        plan: that runs, with a device for every rank.
        devices: device of every rank.
        cluster: as its resource file describes it.
    """

    request: CompileRequest
    given: TrainingSpec
    plan: Plan
    devices: tuple[int, ...]
    cluster: Cluster

    @property
    def searched(self) -> bool:
        """Whether the plan is the answer of a search, so that another one may be searched."""
        return self.given.strategy.mode in SEARCHED or self.plan.search.mode in SEARCHED


@dataclass(frozen=True, slots=True)
class BetterPlan:
    """The best plan, and the forecasts of a step with the measured speeds, in seconds.

    Attributes:
        plan: the best plan; None where none takes less than the present one.
        before, after: seconds of a step of the present plan and of the best one.
        tried: number of plans that were forecast.
        notes: what could not be tried, and why.
        ended: why the search has ended early; "" where it has not.
    """

    plan: Plan | None
    before: float
    after: float
    tried: int
    notes: tuple[str, ...] = ()
    ended: str = ""


@dataclass(slots=True)
class _Comparison:
    """The best plan so far."""

    job: PlannedJob
    slowed: Cluster
    best: Plan
    seconds: float
    tried: int = 0
    notes: dict[str, None] = field(default_factory=dict)
    ended: str = ""

    def consider(self, plan: Plan) -> bool:
        """Forecast a plan; True if it is the best so far."""
        self.tried += 1
        try:
            forecasted = forecast_plan(self.job, plan, self.slowed)
        except DistGraphError as error:
            self.notes.setdefault(f"{plan.search.settings.get('adapted', 'a plan')}: {error}")
            return False
        if out_of_memory(forecasted, self.slowed) or forecasted.step_seconds >= self.seconds:
            return False
        self.best, self.seconds = replace(plan, forecast=estimate(plan, forecasted)), forecasted.step_seconds
        return True


def find_better_plan(
    job: PlannedJob,
    slowed: Cluster,
    seconds: float,
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> BetterPlan:
    """Search a better plan.

    Args:
        job: what runs.
        slowed: the cluster of the job with the measured speeds.
        seconds: time limit, after which nothing new is tried.
        tick: called between any two attempts.
        clock: by which time is measured.

    Raises:
        DistGraphError: the present plan cannot be forecast.
    """
    end = clock() + seconds
    before = forecast_plan(job, job.plan, slowed).step_seconds
    comparison = _Comparison(job, slowed, job.plan, before)
    rounds = _rounds(comparison, slowed)
    for _ in rounds:
        tick()
        if clock() >= end:
            comparison.ended = f"the limit of {seconds:g} s was reached"
            break
    if job.searched and clock() < end:
        _search(comparison, end - clock(), tick)
    best = comparison.best if comparison.best is not job.plan else None
    if best is not None:
        listed = [job.devices[rank] for rank in range(max(best.ranks) + 1)]
        best = replace(best, placement=placement_of(job.cluster, listed))
    notes, ended = tuple(comparison.notes), comparison.ended
    return BetterPlan(best, before, comparison.seconds, comparison.tried, notes, ended)


def _rounds(comparison: _Comparison, slowed: Cluster) -> Iterator[None]:
    """Forecast other shares, then small changes of the best and places that ranks exchange, as long as that
    gains; yields after each."""
    job = comparison.job
    slowdowns = _relative(job, slowed)
    for plan in share_plans(job.plan, slowdowns):
        comparison.consider(plan)
        yield
    improved = True
    while improved:
        improved = False
        best = comparison.best
        for plan in (*refined_shares(best, slowdowns), *exchange_plans(best, slowdowns)):
            improved = comparison.consider(plan) or improved
            yield


def _relative(job: PlannedJob, slowed: Cluster) -> dict[int, float]:
    """Rank -> seconds that its device takes for the work of one second of the fastest device of the job."""
    rates = {rank: _rate(slowed, device) for rank, device in enumerate(job.devices)}
    fastest = max(rates.values())
    return {rank: fastest / rate for rank, rate in rates.items()}


def _rate(cluster: Cluster, number: int) -> float:
    """FLOP/s of a device in the first dtype that all devices state, else its memory bandwidth."""
    stated = [{*device.peak, *device.measured} for device in cluster.devices]
    common = sorted(set.intersection(*stated), key=lambda dtype: (dtype != "f32", dtype))
    if common:
        return cluster.flops(number, common[0])
    return cluster.devices[number].memory_bandwidth or 1.0


def forecast_plan(job: PlannedJob, plan: Plan, cluster: Cluster) -> Forecast:
    """The forecast of a step of the program under a plan.

    Raises:
        DistGraphError: the plan does not fit the program, or a cost needs a number that is not stated.
    """
    spec = with_plan_settings(job.given, plan)
    request = replace(job.request, training_spec=spec, plan=plan, layouts=layouts_of(plan))
    _, completed = apply_plan(request, plan)
    check_cluster(completed.meshes, cluster)
    devices = devices_of(plan, cluster)
    assert devices is not None  # the plan has devices of this cluster
    program = reshard_program(completed, plan.micro_batches, strategy_pipeline(spec.strategy))
    build = program.build(spec.strategy.start.schedule, MeshCommunication(cluster, devices).price)
    return forecast(build, cluster, devices)


def _search(comparison: _Comparison, seconds: float, tick: Callable[[], None]) -> None:
    """Search from the best plan so far, on as many devices as the job has."""
    job = comparison.job
    if sorted(job.devices) != list(range(len(job.devices))):
        comparison.ended = (
            "nothing else is searched, because the ranks are not on the first devices of the cluster"
        )
        return
    strategy = job.given.strategy
    options = options_of(strategy) if strategy.mode in SEARCHED else SearchOptions()
    options = replace(
        options,
        seconds=seconds,
        start=comparison.best,
        watch=lambda progress: tick(),
        constraints=replace(options.constraints, devices=len(job.devices)),
    )
    request = replace(job.request, training_spec=job.given, plan=None, layouts={})
    try:
        plan = search(request, comparison.slowed, options)
        plan = on_present_devices(plan, job.devices)
    except DistGraphError as error:
        comparison.notes.setdefault(f"search: {error}")
        return
    comparison.consider(plan)


def seconds_in_words(before: float, after: float) -> str:
    """Seconds of a step before and after a change, such as "20 ms instead of 30 ms"."""
    return f"{format_si(after, 's')} instead of {format_si(before, 's')}"


def meshes_in_words(plan: Plan) -> str:
    """The meshes of a plan, such as "mesh(dp=2:1)"."""
    return ", ".join(dict.fromkeys(str(stage.mesh) for stage in plan.stages))
