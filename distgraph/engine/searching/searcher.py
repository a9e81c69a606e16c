"""The search of everything: layouts, stages, sub-meshes, micro-batches, schedule, recomputation, ZeRO.

*In:* a program and a cluster. *Out:* programs with their forecasts, the best of them. *Invariant:* plain
data parallelism and the best uniform dp x tp x pp rows, without and with ZeRO, are forecast too, so that
the answer is never behind them.

    for a number of micro-batches:
        costs by layer on every sub-mesh and shape      one intra-operator problem each (`Oracle`)
        best row of stages by the dynamic programme     an estimate
    the rows with the best estimates are built and forecast; the best forecast that fits memory wins

Numbers of micro-batches are climbed in growing strides (`_climb`). The first row that fits is forecast at
once, so that there is an answer early; shapes that are slower by themselves than the best row are left out
from then on. A row that does not fit memory by its forecast is searched again with that much less memory.
What lies beside the rows that were forecast (a border moved, stages exchanged, other micro-batches) is
forecast too, less of larger programs.

Source: Zheng et al., Alpa (OSDI 2022), sections 4 and 5; what is compared by forecast instead of by estimate
is ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from distgraph.engine.forecasting import plain
from distgraph.engine.searching.bound import least_seconds
from distgraph.engine.searching.decisions import (
    changes,
    decisions,
    storages,
    told,
    with_problems,
    with_runner_up,
)
from distgraph.engine.searching.fixed import (
    annotated_meshes,
    as_annotated,
    fronts,
    on_annotated,
    propagated,
    recursively,
)
from distgraph.engine.searching.neighbours import neighbours
from distgraph.engine.searching.oracle import Oracle
from distgraph.engine.searching.pipelines import (
    Front,
    alone,
    best_row,
    front,
    may_fit,
    undominated,
)
from distgraph.engine.searching.proposal import (
    Proposal,
    Realized,
    StageChoice,
    plan_of,
    program,
    realize,
)
from distgraph.engine.searching.restrict import Restriction
from distgraph.engine.searching.shortage import leanest, nothing_fits
from distgraph.engine.searching.space import Shape, micro_batch_counts, pools_of, submeshes_of
from distgraph.engine.searching.uniform import best_uniform
from distgraph.engine.training import Training
from distgraph.errors import DistGraphError, GraphError, InfeasibleError
from distgraph.mesh import ProcessMesh
from distgraph.passes.complete import complete
from distgraph.passes.search.placing import SubMesh
from distgraph.passes.search.schedules import SCHEDULES
from distgraph.passes.search.stages import Stages
from distgraph.plan import Decision, Found, Plan
from distgraph.resources import Cluster
from distgraph.resources.units import format_bytes

_ROUNDS = 4  # micro-batches a stage of the longest pipeline, about which the search begins
_FEW = 8  # numbers of micro-batches that are all tried, in all shapes
_FORECASTS = 4  # rows of the search that are forecast, at most
_WORSE = 1.15  # an estimate that is this much above the best forecast is not forecast any more
_SETTLED = 2  # times that a row whose layouts are carried over is searched again with layouts of its own
_RETRIES = 2  # rows that do not fit are searched again with less memory
_ROUNDING = 1e-9  # relative: sums in another order
_TIGHTER = 4  # each so often, as long as it is the same row
_EXPLAINED = 12  # parameters whose runners-up are forecast
_LOOKED_AT = 12_000  # ops of the programs, together, that are built to see what lies beside a row
_TOLD = 25_000  # the same for runners-up
_UNIFORM: tuple[Restriction, ...] = ("uniform", "zero1", "zero3", "none")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the search found or began: a phase, or a program with its forecast."""

    phase: str
    found: Realized | None = None


@dataclass(eq=False)
class Searcher:
    """One search.

    Args:
        training: the program.
        cluster: where it is to run.
        mode: "auto", "recursive" or "sharding_propagation".
        seconds: after which nothing new is begun.
        stopped: asked besides.

    Attributes:
        best: the best program that fits so far.
        baselines: name -> seconds of a step, or why there is none.
        forecasts: everything that was forecast.
        bound: seconds of a step that no plan goes below; None where nothing is known.
    """

    training: Training
    cluster: Cluster
    mode: str
    seconds: float
    stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    best: Realized | None = None
    baselines: dict[str, float | str] = field(default_factory=dict)
    forecasts: list[Realized] = field(default_factory=list)
    bound: float | None = None
    _rows: dict[int, Proposal] = field(default_factory=dict)
    _stored: dict[str, Decision] = field(default_factory=dict)
    _ideal: dict[tuple[SubMesh, Shape], float] = field(default_factory=dict)
    _first: int = 0

    def __post_init__(self) -> None:
        self.end = self.clock() + self.seconds
        self.oracle = Oracle(self.training, self.cluster, pools_of(self.cluster), self.expired)

    def expired(self) -> bool:
        """Whether time is up."""
        return self.stopped() or self.clock() >= self.end

    def run(self) -> Iterator[Event]:
        """Everything, in order; an event for each phase and each program that is forecast.

        Raises:
            InfeasibleError: nothing fits the cluster.
            ResourceError: the cluster has fewer devices than annotations name.
            ShardingError: annotations contradict each other.
        """
        annotated = annotated_meshes(self.oracle.traced(1).graph, self.cluster)
        self.bound = least_seconds(self.oracle.traced(1).fold, self.cluster) or None
        yield Event("data parallel")
        yield from self._data_parallel(eligible=not annotated)
        if self.mode == "sharding_propagation":
            yield from self._compared("sharding propagation", propagated)
        elif self.mode == "recursive":
            yield from self._compared("double recursion", recursively)
        elif annotated:
            yield from self._on_annotated()
        elif self.best is None or not self.expired():
            yield from self._searched()
            yield from self._uniform()
            yield from self._others(annotated)
        yield from self._explained()
        if self.best is None and self.mode == "auto" and not annotated and not self.expired():
            yield from self._nearest()
        if not self.forecasts:  # the error tells how much is missing
            yield from self._data_parallel(eligible=not annotated, hopeless=True)
        if self.best is None:
            seconds = self.seconds if self.expired() else None
            raise InfeasibleError(nothing_fits(self.cluster, self.forecasts, seconds))

    def plan(self, settings: Mapping[str, str | int | float | bool | None]) -> Plan:
        """The best so far as a plan, with what it was compared with."""
        assert self.best is not None
        status = "feasible" if not self.expired() else "out of time"
        gap = None if self.bound is None else self.best.seconds / self.bound - 1
        found = Found(mode=self.mode, status=status, bound=self.bound, gap=gap, settings=settings)
        return replace(
            plan_of(self.best, self.oracle),
            baselines=dict(self.baselines),
            search=found,
            decisions={**decisions(self.best, self.forecasts), **told(self._stored)},
        )

    def _explained(self) -> Iterator[Event]:
        """Forecast the runners-up of the largest parameters; one that is faster is taken."""
        looked: set[str] = set()
        ops = 0
        if self.best is not None and not self.expired():
            self.best = with_problems(self.best, self.oracle)
        while self.best is not None and self.best.solved:
            best = self.best
            rows = storages(best)
            self._stored = {row.name: self._stored.get(row.name, row.decision) for row in rows}
            row = next((r for r in rows if r.option is not None and r.name not in looked), None)
            if row is None or len(looked) >= _EXPLAINED or ops >= _TOLD or self.expired():
                return
            looked.add(row.name)
            yield Event(f"another layout of {row.name}")
            other = with_runner_up(best, row, self.oracle)
            ops += len(other.build.lowered.ops)
            if other.fits and other.seconds < best.seconds:
                self._stored.clear()
                looked.clear()
                yield self._judged(other)
                continue
            note = (
                row.decision.note if other.fits else f"{row.decision.note}; the runner-up does not fit memory"
            )
            self._stored[row.name] = replace(
                row.decision, runner_up_seconds=other.seconds, note=note, instead=changes(best, other)
            )

    def _compared(self, name: str, make: Callable[[Oracle, int], Realized]) -> Iterator[Event]:
        """One program of another search, with the micro-batches of the strategy."""
        yield Event(name)
        yield self._judged(make(self.oracle, self.training.micro_batches))

    def _others(self, annotated: Sequence[ProcessMesh]) -> Iterator[Event]:
        """The other modes, where there is time; what they cannot do is no fault here."""
        modes = [("double recursion", recursively)]
        if annotated:
            modes.append(("sharding propagation", propagated))
        for name, make in modes:
            if self.expired():
                return
            yield Event(name)
            micro = 1 if self.best is None else self.best.traced.graph.micro_batches
            try:
                yield self._judged(make(self.oracle, micro))
            except DistGraphError as error:
                self.baselines[name] = f"there is none: {error}"

    def _on_annotated(self) -> Iterator[Event]:
        """Layouts on the meshes that annotations name, for several numbers of micro-batches."""
        wanted = self.training.micro_batches
        counts = (wanted,) if wanted > 1 else micro_batch_counts(self.training.size)[::-1][:_FORECASTS]
        yield self._judged(as_annotated(self.oracle, wanted))
        for micro, recompute, share in fronts(self.oracle, counts):
            if share and self.best is not None:
                return  # what fits needs no dearer memory
            if self.expired() and self.best is not None:
                return
            yield Event(f"layouts on the annotated meshes, {micro} micro-batches")
            yield self._judged(on_annotated(self.oracle, micro, recompute, share))

    def _data_parallel(self, eligible: bool, hopeless: bool = False) -> Iterator[Event]:
        """Plain data parallelism on all devices, from completion alone.

        Args:
            eligible: whether it may be the answer; not where annotations say otherwise.
            hopeless: build it also where parameters and states alone are too large.
        """
        ranks = len(self.cluster.devices)
        name, micro = "data parallel", 1
        if self.training.size < ranks:
            self.baselines[name] = f"the batch has {self.training.size} samples, fewer than {ranks} devices"
            return
        traced = self.oracle.traced(micro)
        held = sum(op.result.nbytes for op in traced.graph.sources("param", "state"))
        missing = held - min(device.memory for device in self.cluster.devices)
        if missing > 0 and not hopeless:
            self.baselines[name] = (
                f"out of memory by at least {format_bytes(missing)}: every device would hold all parameters "
                f"and states"
            )
            return
        mesh = ProcessMesh.grid(dp=ranks)
        try:
            completed = replace(complete(plain(traced.graph, mesh), mesh), micro_batches=micro)
            found = program(self.oracle, completed, traced, tuple(range(ranks)), "1f1b", name)
        except DistGraphError as error:
            self.baselines[name] = f"there is none: {error}"
            return
        yield self._judged(found, eligible)

    def _judged(self, found: Realized, eligible: bool = True) -> Event:
        """Keep a program if it is the best so far; note it among the baselines where it is one."""
        self.forecasts.append(found)
        if found.origin != "search":
            short = max((s.missing for s in found.shortages), default=0.0)
            what = found.seconds if found.fits else f"out of memory by {format_bytes(short)}"
            self.baselines[found.origin] = what
        if eligible and found.fits and (self.best is None or found.seconds < self.best.seconds):
            self.best = found
        return Event(f"forecast of {found.origin}", found)

    # the search

    def _searched(self) -> Iterator[Event]:
        yield from self._alone()
        counts = micro_batch_counts(self.training.size)
        seen: set[object] = set()
        tried: set[int] = set()
        for number in self._climb(counts):
            tried.add(counts[number])
            yield from self._try(counts[number])
            row = self._rows.get(counts[number])
            if row is not None and self.best is None:  # so that there is an answer early
                yield from self._promising(row, seen)
        if self._rows and not self.expired():
            yield from self._try_fewest(counts[-1], tried)
        for row in sorted(self._rows.values(), key=lambda row: row.estimate)[:_FORECASTS]:
            yield from self._promising(row, seen)
        yield from self._beside()

    def _climb(self, counts: Sequence[int]) -> Iterator[int]:
        """Positions in falling numbers of micro-batches, towards the best row.

        From four times as many as a pipeline may have stages on, with which the longest one stands still for
        a fifth of a step: to more, else to fewer, in growing strides as long as that is better; last to what
        lies beside the best. Where nothing fits there, smaller micro-batches come first. Then all others,
        where there are few: a pipeline likes many, what is no pipeline few, and both may be best of their
        kind.
        """
        stages = min(len(self.cluster.devices), len(self.oracle.traced(counts[-1]).layers))
        wanted = _ROUNDS * stages
        start = min(range(len(counts)), key=lambda i: abs(math.log(counts[i] / wanted)))
        tried = {start}
        yield start
        stride = {-1: 1, 1: 1}  # towards more, towards fewer
        while self._rows and not self.expired():
            at, least = counts.index(self._best_count), self._least
            near = [(way, at + way * size) for way in stride for size in (stride[way], 1)]
            ahead = [(way, n) for way, n in near if 0 <= n < len(counts) and n not in tried]
            if not ahead:
                break
            way, number = ahead[0]
            tried.add(number)
            yield number
            stride[way] = 2 * stride[way] if self._least < least else 1
        for number in (*range(start, -1, -1), *range(start, len(counts))):
            if (self._rows and len(counts) > _FEW) or self.expired():
                return
            if number not in tried:
                tried.add(number)
                yield number

    @property
    def _best_count(self) -> int:
        """Micro-batches of the best row by estimate."""
        return min(self._rows, key=lambda m: self._rows[m].estimate)

    @property
    def _least(self) -> float:
        """Seconds of the best row by estimate."""
        return min((row.estimate for row in self._rows.values()), default=math.inf)

    def _try_fewest(self, fewest: int, tried: set[int]) -> Iterator[Event]:
        """Pipelines want many micro-batches, a single stage few: beside the best pipeline another optimum."""
        known = min(self._rows)
        pipelined = all(len(row.stages) > 1 for row in self._rows.values())
        if fewest in tried or not pipelined:
            return
        if may_fit(self.oracle, known, self._submeshes(known)[-1], larger=known // fewest):
            yield from self._try(fewest)

    def _alone(self) -> Iterator[Event]:
        """One device of each kind, as long as parameters and states fit: nothing else is as fast to try."""
        traced = self.oracle.traced(1)
        held = sum(op.result.nbytes for op in traced.graph.sources("param", "state"))
        for pool in self.oracle.pools:
            device = pool.machines[0][0]
            if held <= self.cluster.devices[device].memory and not self.expired():
                stage = StageChoice(0, len(traced.layers), (device,), Shape((("dp", 1),)))
                yield Event("one device")
                yield self._judged(
                    realize(Proposal("search", 1, "1f1b", (stage,), (), "none", math.inf), self.oracle)
                )

    def _promising(self, row: Proposal, seen: set[object]) -> Iterator[Event]:
        """Forecast a row that may be better than the best, once."""
        first = not seen  # is forecast also when time is up: all was for its sake
        late = self.best is not None and (
            row.estimate > _WORSE * self.best.seconds or (self.expired() and not first)
        )
        if not late and row.decisions not in seen:
            seen.add(row.decisions)
            yield from self._forecast(row)

    def _beside(self) -> Iterator[Event]:
        """From each row that was forecast to the first neighbour that is faster, as long as there is one."""
        looked = 0
        seen = {found.proposal.decisions for found in self.forecasts if found.proposal is not None}
        rows = [
            found
            for found in self.forecasts
            if found.proposal is not None and math.isfinite(found.proposal.estimate) and found.fits
        ]
        for row in sorted(rows, key=lambda found: found.seconds):
            here, waiting = row, self._unseen(row, seen)
            while waiting and looked < _LOOKED_AT and not self.expired():
                proposal = waiting.pop(0)
                seen.add(proposal.decisions)
                other = realize(proposal, self.oracle)
                looked += len(other.build.lowered.ops)
                yield self._judged(other)
                if other.fits and other.seconds < here.seconds:
                    here, waiting = other, self._unseen(other, seen)

    def _unseen(self, found: Realized, seen: Collection[object]) -> list[Proposal]:
        """Neighbours of a row that were not looked at yet."""
        assert found.proposal is not None
        beside = neighbours(found.proposal, tuple(self._rows), self.oracle.kinds)
        return [proposal for proposal in beside if proposal.decisions not in seen]

    def _try(self, micro_batches: int) -> Iterator[Event]:
        """The best row for a number of micro-batches, if any fits."""
        yield Event(f"stages, {micro_batches} micro-batches")
        try:
            self.oracle.traced(micro_batches)
        except GraphError:  # so few samples are no batch of the model
            return
        if self._may_fit(micro_batches):
            row = self._row(micro_batches)
            if row is not None:
                self._rows[micro_batches] = row

    def _may_fit(self, micro_batches: int) -> bool:
        """Whether there may be a row; by the first number of micro-batches with one, once that is known."""
        whole = self._submeshes(micro_batches)[-1]
        if not self._rows:
            self._first = micro_batches
            return may_fit(self.oracle, micro_batches, whole)
        larger = self._first // micro_batches
        return larger < 2 or may_fit(self.oracle, self._first, whole, larger)

    def _row(
        self, micro_batches: int, slack: float = 1.0, schedules: Iterable[str] = tuple(SCHEDULES)
    ) -> Proposal | None:
        """The best row, its layouts solved for its number of micro-batches; None where none fits.

        None, too, where time was not enough for all shapes but there is a row already: with more time, other
        rows would be looked at instead, and a plan must not get worse by that.
        """
        row: Proposal | None = None
        for _ in range(_SETTLED + 1):
            found = front(self.oracle, micro_batches, self._submeshes(micro_batches), without=self._poor())
            if not found.whole and self._rows:
                return None
            for key, seconds in alone(self.oracle, found).items():
                self._ideal[key] = min(seconds, self._ideal.get(key, math.inf))
            found = undominated(found)
            best = self._best_row(found, slack, schedules)
            if best is None:
                return None
            row, stages = best
            used = {(found.submeshes[s.submesh], found.variants[s.submesh][s.config]) for s in stages.stages}
            carried = {(submesh, variant.shape) for submesh, variant in used if not variant.solved}
            if not carried or self.expired():
                break
            for submesh, shape in carried:
                self.oracle.settle(micro_batches, submesh, shape)
        return row

    def _poor(self) -> frozenset[tuple[SubMesh, Shape]]:
        """Shapes that are slower by themselves than the best row; none where all rows are looked at.

        Of the shapes of the best row itself one stays always: their mean by devices takes no longer than it.
        """
        if len(micro_batch_counts(self.training.size)) <= _FEW:
            return frozenset()
        least = self._least * (1 + _ROUNDING)
        return frozenset(key for key, seconds in self._ideal.items() if seconds > least)

    def _best_row(
        self, found: Front, slack: float, schedules: Iterable[str]
    ) -> tuple[Proposal, Stages] | None:
        """Under the best of some schedules."""
        best: tuple[Proposal, Stages] | None = None
        for schedule in schedules:
            below = _WORSE * self._least if best is None else best[0].estimate
            try:
                best = best_row(self.oracle, found, slack=slack, schedule=schedule, below=below)
            except InfeasibleError:
                continue
        return best

    def _submeshes(self, micro_batches: int) -> tuple[SubMesh, ...]:
        """Those that a stage may have."""
        return submeshes_of(self.oracle.pools)

    def _forecast(self, proposal: Proposal) -> Iterator[Event]:
        """Forecast a row; where it does not fit, search again with less memory."""
        slack = 1.0
        for _ in range(_RETRIES + 1):
            made = realize(proposal, self.oracle)
            yield self._judged(made)
            if made.fits or (self.expired() and self.best is not None):
                return
            yield Event(f"stages, {proposal.micro_batches} micro-batches, with less memory")
            worst = max(s.needed / s.available for s in made.shortages)
            again: Proposal | None = proposal
            for _ in range(_TIGHTER):  # the estimate may say of the same row that it needs less
                slack /= worst * 1.01
                again = self._row(proposal.micro_batches, slack, (proposal.schedule,))
                if again is None or again.decisions != proposal.decisions:
                    break
            if again is None or again.decisions == proposal.decisions:
                return
            proposal = again

    # what it is compared with

    def _uniform(self) -> Iterator[Event]:
        """The best uniform row of every kind, by estimate, forecast."""
        yield Event("uniform grid")
        micro = min(self._rows, key=lambda m: self._rows[m].estimate, default=1)
        for restriction in _UNIFORM:
            proposal = best_uniform(self.oracle, [micro], restriction, self._poor())
            if proposal is not None and not self.expired():
                yield self._judged(realize(proposal, self.oracle))

    def _nearest(self) -> Iterator[Event]:
        """Nothing fits: the row that lacks least memory is forecast, so that the error can tell."""
        counts = micro_batch_counts(self.training.size)
        yield Event("the plan that lacks least memory")
        for micro in counts:
            try:
                self.oracle.traced(micro)
            except GraphError:  # so few samples are no batch of the model
                continue
            rows = leanest(self.oracle, front(self.oracle, micro, self._submeshes(micro)))
            found = False
            for proposal in islice(rows, _FORECASTS):
                found = True
                yield self._judged(realize(proposal, self.oracle))
                if self.best is not None:
                    return
            if found:
                return
