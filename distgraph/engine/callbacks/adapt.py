"""Adapt: measures the ranks of a running job, and proposes a better plan when a machine has become slower.

Rank 0 decides everything and shares what it has decided, so that all ranks take part in the same collectives.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distgraph.engine.adaptive.measured_speeds import (
    RecordedSteps,
    changed_devices,
    computing_seconds,
    measured_slowdowns,
    speeds_in_words,
)
from distgraph.engine.adaptive.slowed_cluster import slowed_cluster
from distgraph.engine.callbacks.callback import Callback, Logs
from distgraph.engine.callbacks.callback_checks import check_place
from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.errors.arguments import Count, Positive, Rate, Size, checked_arguments
from distgraph.plan.plan import Plan
from distgraph.runtime.job.adaptations import Adaptation
from distgraph.runtime.job.job_files import ranks_of_job
from distgraph.serialization.atomic_files import check_writable

if TYPE_CHECKING:
    from distgraph.engine import Engine
    from distgraph.engine.adaptive.better_plan import PlannedJob
    from distgraph.engine.executable import Compiled
    from distgraph.runtime.execute.process_group import World

_TICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan that is better for the speeds that were measured.

    Attributes:
        plan: to run.
        before, after: seconds of a step of the present plan and of this one, by forecasts with these speeds.
        step: after which it was found.
        slowdowns: number of a device -> how many times as long it takes as the resource file says.
        text: what has changed, such as "rank 1 (machine b1) runs at 0.50 of the described speed, planned at
            1.00".
    """

    plan: Plan
    before: float
    after: float
    step: int
    slowdowns: Mapping[int, float]
    text: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What rank 0 has decided after a measurement.

    Attributes:
        slowdowns: for which plans were compared last.
        changes: devices that differ from the plan, in words.
        note: what is printed; "" where nothing has changed.
        plan: text of the better plan; "" where there is none.
        before, after: as of `Proposal`.
        error: that all ranks raise.
    """

    slowdowns: Mapping[int, float] = field(default_factory=dict)
    changes: str = ""
    note: str = ""
    plan: str = ""
    before: float = 0.0
    after: float = 0.0
    error: DistGraphError | None = None


@checked_arguments(RuntimeFault)
class Adapt(Callback):
    """Proposes a better plan when a machine becomes slower than planned, or as fast as before.

    Every `every` steps it records some steps, and compares the seconds that each rank computes, without
    waits for communication, with the forecast of the plan. Only ratios between ranks count. If the speed of a
    device differs from the one that the plan was made for by more than `margin`, relative to the other
    devices, it searches for a plan with uneven shares, with other places of the ranks, or, where the plan was
    searched, for another plan. One that gains is written to `path`, printed and stored in `proposal`; under
    `distgraph run --elastic` the job starts again with it, at the same step (docs/running/adaptive.md).

    Needs an engine with a cluster. All ranks wait while rank 0 searches.

    Args:
        margin: relative difference of speeds that counts, such as 0.25.
        every: steps between two measurements, and before the first.
        steps: steps of a measurement; the median counts.
        seconds: limit of a search, after which nothing new is tried.
        gain: part of the seconds of a step that a plan must save by forecast.
        restarts: how often an elastic job may start again for this in all, besides the starts that --restarts
            limits; 0 to propose only.
        cooldown: steps after such a start before the next measurement; 5 times `every` by default.
        path: of the file of the last proposal. It is deleted when the proposal holds no longer.

    Attributes:
        proposal: the last proposal; None where there is none, or it holds no longer.

    Raises:
        RuntimeFault: an argument makes no sense.
    """

    def __init__(
        self,
        margin: Positive = 0.25,
        every: Count = 100,
        steps: Count = 5,
        seconds: Positive = 30.0,
        gain: Rate = 0.05,
        restarts: Size = 3,
        cooldown: Size | None = None,
        path: str | Path = "adapted-plan.json",
    ) -> None:
        check_place("Adapt", path)
        self.margin, self.every, self.steps, self.seconds = margin, every, steps, seconds
        self.gain, self.restarts = gain, restarts
        self.path = self.writes = Path(path)
        self.cooldown = 5 * every if cooldown is None else cooldown
        self.proposal: Proposal | None = None
        self.clock: Callable[[], float] = time.monotonic
        self._state = Adaptation()
        self._compared: Mapping[int, float] = {}  # slowdowns for which plans were compared last
        self._records: RecordedSteps | None = None
        self._next = 0  # step after which the next measurement begins
        self._last_epoch, self._epoch, self._epoch_end, self._batches = 0, 0, 0, 0
        self._alone = False  # whether it was said that there is one rank

    # Events
    # ------------------------------------------------------------------------------------------------

    def on_train_begin(self, engine: Engine, last_epoch: int) -> None:
        """See `Callback`. Raises RuntimeFault where there is no cluster, the file cannot be written, or hosts
        of an elastic job share no folder."""
        if engine.cluster is None:
            raise RuntimeFault(
                "Adapt: the engine has no cluster, so there is no forecast to compare with; give it one with "
                "Engine(cluster=...) or distgraph run --cluster"
            )
        if engine.is_chief:
            check_writable(self.path, RuntimeFault)
        elastic = engine._elastic
        self._state, self.proposal, self._records = Adaptation(), None, None
        if elastic is not None and elastic.folder is not None:
            elastic.check_shared()
            self._state = elastic.adaptation
        self._compared = self._state.slowdowns
        self._last_epoch = last_epoch
        self._next = engine.step + self.every
        if self._state.number:
            self._next = max(self._next, self._state.step + self.cooldown)
        if self._state.given_up:
            self._delete_file(engine)

    def on_epoch_begin(self, engine: Engine, epoch: int, batches: int) -> None:
        self._epoch, self._epoch_end = epoch, engine.step + batches
        self._batches = max(self._batches, batches)

    def on_batch_end(self, engine: Engine, step: int, logs: Logs) -> None:
        if self._records is not None and self._records.complete:
            self._decide(engine)
        elif self._records is None and engine.step >= self._next:
            self._records = RecordedSteps(_program(engine).build.task_graph, self.steps)
            engine._recordings[self] = self._records

    def on_train_end(self, engine: Engine) -> None:
        engine._recordings.pop(self, None)

    # Decisions
    # ------------------------------------------------------------------------------------------------

    def _decide(self, engine: Engine) -> None:
        """Decide on rank 0, and do on all ranks what it has decided. Collective."""
        records, self._records = self._records, None
        assert records is not None
        engine._recordings.pop(self, None)
        self._next = engine.step + self.every
        outcome = on_rank_0(engine._session.ranks(), partial(self._outcome, engine, records), self.clock)
        if outcome.error is not None:
            raise outcome.error
        self._compared = outcome.slowdowns
        note = outcome.note
        if outcome.plan:
            plan, sizes = Plan.parse(outcome.plan), (outcome.before, outcome.after)
            self.proposal = Proposal(plan, *sizes, engine.step, outcome.slowdowns, outcome.changes)
            note = f"{note}; {self._apply(engine, outcome, plan)}"
        elif outcome.changes or note:
            self._withdraw(engine)
        if note and engine.is_chief:
            sys.stderr.write(f"distgraph: after step {engine.step} {note}\n")

    def _outcome(self, engine: Engine, records: RecordedSteps, tick: Callable[[], None]) -> _Outcome:
        """On rank 0: measure, compare, and search where the speeds have changed."""
        try:
            return self._compared_outcome(engine, records, tick)
        except DistGraphError as error:
            return _Outcome(error=error)

    def _compared_outcome(self, engine: Engine, records: RecordedSteps, tick: Callable[[], None]) -> _Outcome:
        compiled, cluster, planned = _program(engine), engine.cluster, self._state.slowdowns
        assert cluster is not None
        assert compiled.mapping is not None  # there is a cluster
        devices = compiled.mapping.devices
        now = self._measured(compiled, cluster, devices, records)
        if now is None or not changed_devices(now, self._compared, self.margin):
            alone, self._alone = now is None and not self._alone, self._alone or now is None
            note = "Adapt has nothing to compare, because one rank computes" if alone else ""
            return _Outcome(self._compared, note=note)
        changed = changed_devices(now, planned, self.margin)
        steps = f"{records.left_out} step{'s' * (records.left_out != 1)}"
        left_out = f" ({steps} of other batch sizes left out)" if records.left_out else ""
        if not changed:
            return _Outcome(now, note=f"all ranks run at the planned speeds again{left_out}")
        words = speeds_in_words(now, planned, changed, devices, cluster)
        return self._searched(engine, compiled, now, words, left_out, tick)

    def _measured(
        self, compiled: Compiled, cluster: Any, devices: tuple[int, ...], records: RecordedSteps
    ) -> dict[int, float] | None:
        """Slowdowns by device; None where fewer than two ranks compute."""
        from distgraph.runtime.forecast.rank_seconds import rank_seconds  # noqa: PLC0415 (loads the forecast)

        planned = self._state.slowdowns
        measured = computing_seconds(records.steps)
        if len(measured) < 2:
            return None
        forecast = rank_seconds(compiled.build, slowed_cluster(cluster, planned), devices)
        return measured_slowdowns(measured, forecast, devices, planned, cluster, self.margin)

    def _searched(
        self,
        engine: Engine,
        compiled: Compiled,
        now: Mapping[int, float],
        changes: str,
        left_out: str,
        tick: Callable[[], None],
    ) -> _Outcome:
        """Search for a better plan, and write it to the file."""
        from distgraph.engine.adaptive.better_plan import (  # noqa: PLC0415 (loads the search)
            find_better_plan,
            meshes_in_words,
            seconds_in_words,
        )

        job = planned_job(engine, compiled)
        better = find_better_plan(job, slowed_cluster(job.cluster, now), self.seconds, tick, self.clock)
        before, after, ended = better.before, better.after, f"; {better.ended}" if better.ended else ""
        seconds, tried = seconds_in_words(before, after), f"{better.tried} plan{'s' * (better.tried != 1)}"
        if better.plan is None or after > (1 - self.gain) * before:
            reasons = "".join(f"; {note}" for note in better.notes[:3])
            saved = f"saves {self.gain:.0%} of a step by forecast ({seconds})"
            note = f"{changes}{left_out}; none of {tried} {saved}{reasons}{ended}"
            return _Outcome(now, changes, note, before=before, after=after)
        better.plan.save(self.path)
        best = f"{meshes_in_words(better.plan)}, the best of {tried}, takes {seconds} a step by forecast"
        note = f"{changes}{left_out}; {best}, and is in {self.path}{ended}"
        return _Outcome(now, changes, note, better.plan.text(), before, after)

    # Consequences
    # ------------------------------------------------------------------------------------------------

    def _apply(self, engine: Engine, outcome: _Outcome, plan: Plan) -> str:
        """Have an elastic job start again with the plan. Returns what is done, in words."""
        self._state = replace(self._state, file=(str(self.path.absolute()), plan.digest))
        refusal, elastic = self._refusal(engine), engine._elastic
        if refusal or elastic is None:
            self._keep(engine)
            return refusal
        elastic.request_start(
            Adaptation(
                number=self._state.number + 1,
                most=self.restarts,
                step=engine.step,
                ranks=ranks_of_job(),
                slowdowns=outcome.slowdowns,
                plan=outcome.plan,
                text=outcome.changes,
                file=self._state.file,
            )
        )
        return "the job starts again with it"

    def _refusal(self, engine: Engine) -> str:
        """Why the job does not start again with a plan, and what to do; "" where it does."""
        elastic, left = engine._elastic, self._steps_left(engine)
        if elastic is None or elastic.folder is None:
            return f"distgraph run --elastic would apply it, distgraph run --plan {self.path} runs it"
        if elastic.number:
            return "it is not applied, because only the first fit of a script starts again for that"
        if elastic.compiled_before:
            return "it is not applied, because the engine has compiled a program before fit"
        if self._state.number >= self.restarts:
            return f"it is not applied, because all {self.restarts} starts for that are used"
        if left < self.every:
            return f"it is not applied, because training ends in {left} steps"
        return ""

    def _steps_left(self, engine: Engine) -> int:
        """Steps until the end of training, for epochs as long as the longest so far."""
        return self._epoch_end - engine.step + (self._last_epoch - self._epoch - 1) * self._batches

    def _withdraw(self, engine: Engine) -> None:
        """Drop a proposal that holds no longer, and its file."""
        if self.proposal is not None:
            self.proposal = None
            self._delete_file(engine)
            self._keep(engine)

    def _keep(self, engine: Engine) -> None:
        """Leave the state to later starts of an elastic job."""
        elastic = engine._elastic
        if not engine.is_chief or elastic is None or elastic.folder is None or elastic.number:
            return
        try:
            self._state.write(elastic.folder)
        except OSError as error:
            sys.stderr.write(
                f"distgraph: later starts of the job do not learn of a proposal of Adapt: {error}\n"
            )

    def _delete_file(self, engine: Engine) -> None:
        """Delete the file of the last proposal, unless another plan has been written there since."""
        (name, digest), self._state = self._state.file, replace(self._state, file=("", ""))
        if not engine.is_chief or not name or not Path(name).exists():
            return
        try:
            if Plan.load(name).digest == digest:
                Path(name).unlink()
        except (DistGraphError, OSError) as error:
            sys.stderr.write(f"distgraph: the file of a plan that Adapt proposed is left as it is: {error}\n")


def on_rank_0(
    world: World,
    decide: Callable[[Callable[[], None]], _Outcome],
    clock: Callable[[], float] = time.monotonic,
) -> _Outcome:
    """What rank 0 decides, on every process. Collective.

    Args:
        world: the ranks.
        decide: called on rank 0, with a function that it calls now and then. The others learn by it that rank
            0 goes on, so that a long search is not taken for a rank that has stopped.
        clock: by which time is measured.
    """
    if not world.is_chief:
        while True:
            outcome: _Outcome | None = world.share(None, 0)
            if outcome is not None:
                return outcome
    last = clock()

    def tick() -> None:
        nonlocal last
        if clock() - last >= _TICK_SECONDS:
            last = clock()
            world.share(None, 0)

    shared: _Outcome = world.share(decide(tick), 0)
    return shared


def _program(engine: Engine) -> Compiled:
    """The training program of an engine; of several the one for the largest batches."""
    programs = [each for each in engine._session.programs.values() if each.mode == "train"]
    return max(programs, key=lambda each: each.request.size)


def planned_job(engine: Engine, compiled: Compiled) -> PlannedJob:
    """What an engine runs, with a device for every rank."""
    from distgraph.engine.adaptive.better_plan import PlannedJob  # noqa: PLC0415 (loads the search)
    from distgraph.engine.compile.plan_extract import extract_plan  # noqa: PLC0415

    cluster, mapping = engine.cluster, compiled.mapping
    assert cluster is not None
    assert mapping is not None
    plan = extract_plan(compiled.request, compiled.build, mapping, cluster)
    stages = tuple(
        replace(stage, devices=tuple(mapping.devices[rank] for rank in stage.mesh.members))
        for stage in plan.stages
    )
    plan = replace(plan, cluster=cluster.name, stages=stages)
    return PlannedJob(compiled.request, engine._given, plan, mapping.devices, cluster)
