"""The search of everything: layouts, stages, sub-meshes, micro-batches, schedule, recomputation, ZeRO.

*In:* a program and a cluster. *Out:* programs with their forecasts, the best of them. *Invariant:* plain
data parallelism and the best uniform dp x tp x pp rows, without and with ZeRO, are forecast too, so that
the answer is never behind them.

    for a number of micro-batches:
        costs by layer on every sub-mesh and shape      one intra-operator problem each (`Oracle`)
        best row of stages by the dynamic programme     an estimate
    the rows with the best estimates are built and forecast; the best forecast that fits memory wins

Numbers of micro-batches are climbed in growing strides (`climb`). The first row that fits is forecast at
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
from functools import partial
from itertools import islice

from distgraph.engine.compile.compile_request import Training
from distgraph.engine.search.baselines import best_uniform
from distgraph.engine.search.candidate import (
    Proposal,
    Realized,
    StageChoice,
    laid_out_as,
)
from distgraph.engine.search.decisions import decisions
from distgraph.engine.search.evaluation import Judged, judge, judged, light
from distgraph.engine.search.evaluations import Book
from distgraph.engine.search.given_meshes import (
    annotated_meshes,
    as_annotated,
    data_parallel,
    fronts,
    on_annotated,
    propagated,
    recursively,
)
from distgraph.engine.search.infeasibility import leanest, nothing_fits
from distgraph.engine.search.layout_costs import Oracle
from distgraph.engine.search.local_search_moves import neighbours, of_one_count
from distgraph.engine.search.lower_bound import least_seconds
from distgraph.engine.search.micro_batch_search import FEW, best_count, climb, least
from distgraph.engine.search.restrictions import SAID, Restriction
from distgraph.engine.search.runners_up import Explainer
from distgraph.engine.search.search_space import (
    Shape,
    counts_beside,
    micro_batch_counts,
    pools_of,
    submeshes_of,
)
from distgraph.engine.search.stage_search import (
    Front,
    alone,
    best_row,
    front,
    may_fit,
    of_size,
    undominated,
    within,
)
from distgraph.errors import DistGraphError, GraphError, InfeasibleError
from distgraph.passes.search.inter_op.stages import Stages
from distgraph.passes.search.inter_op.submesh_placement import SubMesh
from distgraph.plan.plan import Found, Plan
from distgraph.plan.schedule_policies import searched_schedules
from distgraph.resources import Cluster

_FORECASTS = 4  # rows of the search that are forecast, at most
_WORSE = 1.15  # an estimate that is this much above the best forecast is not forecast any more
_SETTLED = 2  # times that a row whose layouts are carried over is searched again with layouts of its own
_RETRIES = 2  # rows that do not fit are searched again with less memory
_ROUNDING = 1e-9  # relative: sums in another order
_TIGHTER = 4  # each so often, as long as it is the same row
_MOST_AXES = 4  # of a program of double recursion
_LOOKED_AT = 12_000  # ops of the programs, together, that are built to see what lies beside a row
_UNIFORM: tuple[Restriction, ...] = ("uniform", "zero1", "zero3", "none")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the search found or began: a phase, or a program with its forecast."""

    phase: str
    found: Judged | None = None


def _expired(stopped: Callable[[], bool], clock: Callable[[], float], end: float) -> bool:
    return stopped() or clock() >= end


@dataclass(eq=False)
class Searcher:
    """One search.

    Args:
        training: the program.
        cluster: where it is to run.
        mode: "auto", "recursive" or "sharding_propagation".
        seconds: after which nothing new is begun.
        stopped: asked besides.
        clock: by which it is measured.
        processes: that work at the same time; the answer does not depend on how many there are.

    Attributes:
        oracle, book, explainer: what is known of costs, of whole programs, and of choices in the best one.
        bound: seconds of a step that no plan goes below; None where nothing is known.
        expired: whether time is up; does not know the searcher, so that all is freed with it at once.
    """

    training: Training
    cluster: Cluster
    mode: str
    seconds: float
    stopped: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.monotonic
    processes: int = 1
    bound: float | None = None
    expired: Callable[[], bool] = field(init=False)
    _rows: dict[int, Proposal] = field(default_factory=dict)
    _ideal: dict[tuple[SubMesh, Shape], float] = field(default_factory=dict)
    _pools: dict[str, list[Proposal]] = field(default_factory=dict)
    _fronts: dict[int, Front] = field(default_factory=dict)
    _batches: dict[int, bool] = field(default_factory=dict)
    _first: int = 0

    def __post_init__(self) -> None:
        self.expired = partial(_expired, self.stopped, self.clock, self.clock() + self.seconds)
        pools = pools_of(self.cluster)
        self.oracle = Oracle(self.training, self.cluster, pools, self.expired, self.processes)
        self.book = Book(self.oracle)
        self.explainer = Explainer(self.oracle, self.book, self.expired)

    @property
    def best(self) -> Judged | None:
        """The best program that fits so far."""
        return self.book.best

    @property
    def forecasts(self) -> Sequence[Judged]:
        """Everything that was forecast."""
        return self.book.forecasts

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
            yield from self._others()
        yield from self._explained()
        if self.best is None and self.mode == "auto" and not annotated and not self.expired():
            yield from self._nearest()
        if not self.forecasts:  # the error tells how much is missing
            yield from self._data_parallel(eligible=not annotated, hopeless=True)
        if self.best is None:
            seconds = self.seconds if self.expired() else None
            short = min((f for f in self.forecasts if not f.fits), key=lambda f: f.filled, default=None)
            nearest = None if short is None else short.again(self.oracle)
            raise InfeasibleError(nothing_fits(self.cluster, nearest, seconds))

    def plan(self, settings: Mapping[str, str | int | float | bool | None]) -> Plan:
        """The best so far as a plan, with what it was compared with."""
        assert self.best is not None
        status = "feasible" if not self.expired() else "out of time"
        gap = None if self.bound is None else self.best.seconds / self.bound - 1
        found = Found(mode=self.mode, status=status, bound=self.bound, gap=gap, settings=settings)
        return replace(
            self.explainer.plan_of(self.best.again(self.oracle)),
            baselines=dict(self.book.baselines),
            search=found,
            decisions={**decisions(self.best, self.forecasts), **self.explainer.decisions},
        )

    def _explained(self) -> Iterator[Event]:
        """Why the best program is as it is; what turns out faster is taken."""
        for found in self.explainer.run():
            yield Event(found) if isinstance(found, str) else self._judged(found)

    def _compared(self, name: str, make: Callable[[Oracle, int], Realized]) -> Iterator[Event]:
        """One program of another search, with the micro-batches of the strategy."""
        yield Event(name)
        yield self._judged(judged(make(self.oracle, self.training.micro_batches)))

    def _on_annotated(self) -> Iterator[Event]:
        """Layouts on the meshes that annotations name, for several numbers of micro-batches."""
        wanted = self.training.micro_batches
        counts = (wanted,) if wanted > 1 else micro_batch_counts(self.training.size)[::-1][:_FORECASTS]
        yield self._judged(judged(as_annotated(self.oracle, wanted)))
        for micro, recompute, share in fronts(self.oracle, counts):
            if share and self.best is not None:
                return  # what fits needs no dearer memory
            if self.expired() and self.best is not None:
                return
            yield Event(f"layouts on the annotated meshes, {micro} micro-batches")
            yield self._judged(judged(on_annotated(self.oracle, micro, recompute, share)))

    def _data_parallel(self, eligible: bool, hopeless: bool = False) -> Iterator[Event]:
        """Plain data parallelism on all devices, and on those of each kind where there are several.

        Args:
            eligible: whether it may be the answer; not where annotations say otherwise.
            hopeless: build it also where parameters and states alone are too large.
        """
        where = {"data parallel": tuple(range(len(self.cluster.devices)))}
        for pool in self.oracle.pools:
            if 1 < pool.size < len(self.cluster.devices):
                devices = tuple(device for machine in pool.machines for device in machine)
                where[f"data parallel, {pool.size} x {pool.name}"] = devices
        for name, devices in where.items():
            found = data_parallel(self.oracle, devices, name, hopeless=hopeless)
            if isinstance(found, str):
                self.book.baselines[name] = found
            else:
                yield self._judged(judged(found), eligible)

    def _judged(self, found: Judged, eligible: bool = True) -> Event:
        """A program that was forecast, entered into the book."""
        self.book.enter(found, eligible)
        return Event(f"forecast of {found.origin}", found)

    def _compared_with(self, row: Proposal, late: bool) -> Iterator[Event]:
        """A row among the baselines, by its forecast; a late one only where that was made before."""
        decided = ((f, f.proposal) for f in self.forecasts)
        same = next((f for f, p in decided if p is not None and p.decisions == row.decisions), None)
        if same is not None:
            self.book.note(row.origin, same)
        elif not late:
            yield self._judged(self.book.look(row))

    # the search

    def _searched(self) -> Iterator[Event]:
        yield from self._alone()
        counts = micro_batch_counts(self.training.size)
        seen: set[object] = set()
        tried: set[int] = set()
        stages = min(len(self.cluster.devices), len(self.oracle.traced(counts[-1]).layers))
        for count in climb(counts, stages, self._rows, self.expired):
            tried.add(count)
            yield from self._try(count)
            row = self._rows.get(count)
            if row is not None and self.best is None:  # so that there is an answer early
                yield from self._promising(row, seen)
        yield from self._all_promising(self._rows.values(), seen)
        if self._rows and not self.expired():
            yield from self._try_fewest(counts[-1], tried, seen)
        for alike in self._pools.values():
            for row in _foremost(alike):
                yield from self._compared_with(row, self._late(row, seen))
        yield from self._beside()

    @property
    def _least(self) -> float:
        """Seconds of the best row by estimate."""
        return least(self._rows)

    def _try_fewest(self, fewest: int, tried: set[int], seen: set[object]) -> Iterator[Event]:
        """Pipelines want many micro-batches, a single stage few: beside the best pipeline another optimum."""
        known = min(self._rows)
        pipelined = all(len(row.stages) > 1 for row in self._rows.values())
        if fewest in tried or not pipelined:
            return
        if may_fit(self.oracle, known, self._submeshes(known)[-1], larger=known // fewest):
            yield from self._try(fewest)
            yield from self._all_promising([self._rows[n] for n in self._rows if n == fewest], seen)

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
                    judge(Proposal("search", 1, "1f1b", (stage,), (), "none", math.inf), self.oracle)
                )

    def _all_promising(self, rows: Iterable[Proposal], seen: set[object]) -> Iterator[Event]:
        """Forecast the best of some rows, and of stages of one size in place of those that they mix."""
        best = _foremost(rows)
        best += _foremost(even for row in best if not self._late(row, ()) for even in self._even(row))
        self.book.foresee([row for row in best if not self._late(row, seen) and row.decisions not in seen])
        for row in best:
            yield from self._promising(row, seen)

    def _promising(self, row: Proposal, seen: set[object]) -> Iterator[Event]:
        """Forecast a row that may be better than the best, once."""
        if not self._late(row, seen) and row.decisions not in seen:
            seen.add(row.decisions)
            yield from self._forecast(row)

    def _late(self, row: Proposal, seen: Collection[object]) -> bool:
        """Whether a row comes too late; the first does not even when time is up: all was for its sake."""
        if self.best is None:
            return False
        return row.estimate > _WORSE * self.best.seconds or (self.expired() and bool(seen))

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
            if looked >= _LOOKED_AT or self.expired():
                return
            here, waiting = row, self._unseen(row, seen)
            while waiting and looked < _LOOKED_AT and not self.expired():
                self.book.foresee(waiting[: self.processes])
                proposal = waiting.pop(0)
                seen.add(proposal.decisions)
                other = self.book.look(proposal)
                looked += other.ops
                yield self._judged(other)
                if other.fits and other.seconds < here.seconds:
                    here, waiting = other, self._unseen(other, seen)

    def _unseen(self, found: Judged, seen: Collection[object]) -> list[Proposal]:
        """Neighbours of a row that were not looked at yet."""
        assert found.proposal is not None
        micro = found.proposal.micro_batches
        counts = () if of_one_count(found.proposal) else (*self._rows, *self._counts_beside(micro))
        beside = neighbours(found.proposal, tuple(dict.fromkeys(counts)), self.oracle.kinds)
        return [replace(p, origin="search") for p in beside if p.decisions not in seen]

    def _counts_beside(self, count: int) -> list[int]:
        """The next numbers of micro-batches, also those that were left out, whose samples make a batch."""
        return [other for other in counts_beside(self.training.size, count) if self._is_batch(other)]

    def _is_batch(self, micro_batches: int) -> bool:
        """Whether the samples of one micro-batch are enough for the model."""
        if micro_batches not in self._batches:
            try:
                self.oracle.traced(micro_batches)
                self._batches[micro_batches] = True
            except GraphError:
                self._batches[micro_batches] = False
        return self._batches[micro_batches]

    def _try(self, micro_batches: int) -> Iterator[Event]:
        """The best row for a number of micro-batches, if any fits."""
        yield Event(f"stages, {micro_batches} micro-batches")
        if not self._is_batch(micro_batches):
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
        self, micro_batches: int, slack: float = 1.0, schedules: Iterable[str] | None = None
    ) -> Proposal | None:
        """The best row, its layouts solved for its number of micro-batches; None where none fits.

        None, too, where time was not enough for all shapes but there is a row already: with more time, other
        rows would be looked at instead, and a plan must not get worse by that.
        """
        schedules = searched_schedules() if schedules is None else schedules
        settled = 0
        while True:
            found = front(self.oracle, micro_batches, self._submeshes(micro_batches), without=self._poor())
            if not found.whole and self._rows:
                return None
            for key, seconds in alone(self.oracle, found).items():
                self._ideal[key] = min(seconds, self._ideal.get(key, math.inf))
            found = undominated(found)
            best = self._best_row(found, slack, schedules)
            used = best[1].stages if best is not None else ()
            chosen = {(found.submeshes[s.submesh], found.variants[s.submesh][s.config]) for s in used}
            carried = {(submesh, variant.shape) for submesh, variant in chosen if not variant.solved}
            if not carried or settled == _SETTLED or self.expired():
                break
            settled += 1
            for submesh, shape in carried:
                self.oracle.settle(micro_batches, submesh, shape)
        if slack == 1.0:
            self._fronts[micro_batches] = found
            self._try_pools(found, schedules)
        return None if best is None else best[0]

    def _try_pools(self, found: Front, schedules: Iterable[str]) -> None:
        """The best row on each kind of device alone, where there are several: no plan must be behind it."""
        for number, pool in enumerate(self.oracle.pools if len(self.oracle.pools) > 1 else ()):
            own = within(found, number)
            best = self._best_row(own, 1.0, schedules) if own.submeshes else None
            if best is not None:
                name = f"{pool.size} x {pool.name} alone"
                self._pools.setdefault(name, []).append(replace(best[0], origin=name))

    def _even(self, row: Proposal) -> Iterator[Proposal]:
        """The best row of stages of one size, for each size in a row that mixes them.

        What passes between stages of two sizes, and where machines end, only a forecast knows: by the
        estimate a mixture may be ahead that is not.
        """
        sizes = {len(stage.devices) for stage in row.stages}
        if len(sizes) == 1 or len(self.oracle.pools) > 1:
            return
        for size in sorted(sizes):
            part = of_size(self._fronts[row.micro_batches], size)
            best = None if self.expired() else self._best_row(part, 1.0, searched_schedules())
            if best is not None:
                yield best[0]

    def _poor(self) -> frozenset[tuple[SubMesh, Shape]]:
        """Shapes that are slower by themselves than the best row; none where all rows are looked at.

        Of the shapes of the best row itself one stays always: their mean by devices takes no longer than it.
        """
        if len(micro_batch_counts(self.training.size)) <= FEW:
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
            made = self.book.look(proposal)
            yield self._judged(made)
            if made.fits or (self.expired() and self.best is not None):
                return
            yield Event(f"stages, {proposal.micro_batches} micro-batches, with less memory")
            again: Proposal | None = proposal
            for _ in range(_TIGHTER):  # the estimate may say of the same row that it needs less
                slack /= made.filled * 1.01
                again = self._row(proposal.micro_batches, slack, (proposal.schedule,))
                if again is None or again.decisions != proposal.decisions:
                    break
            if again is None or again.decisions == proposal.decisions:
                return
            proposal = again

    # what it is compared with

    def _others(self) -> Iterator[Event]:
        """The best uniform row of every kind, by estimate, and double recursion, where there is time."""
        yield Event("uniform grid")
        micro, poor = best_count(self._rows) if self._rows else 1, self._poor()

        def best(restriction: Restriction) -> Proposal | None:
            return best_uniform(self.oracle, [micro], restriction, poor)

        alike: dict[object, list[Proposal]] = {}
        best_rows = self.oracle.together(best, _UNIFORM, self.book.together)
        for row in best_rows:
            if row is not None:
                alike.setdefault(laid_out_as(row, self.oracle), []).append(row)
        if self.expired():
            return
        for restriction, row in zip(_UNIFORM, best_rows, strict=True):
            if row is None:
                several = len(self.oracle.pools) > 1
                why = "devices are of several kinds" if several else "out of memory by the estimate"
                self.book.baselines[SAID[restriction]] = why
        yield Event("double recursion")
        jobs = [None, *(rows[0] for rows in alike.values())]  # the first one stays in this process
        recursive, *uniform = self.oracle.together(self._other, jobs, self.book.together)
        for found, rows in zip(uniform, alike.values(), strict=True):
            assert isinstance(found, Judged)
            for row in rows:
                yield self._judged(replace(found, origin=row.origin, proposal=row))
        if isinstance(recursive, str):
            self.book.baselines["double recursion"] = recursive
        else:
            yield self._judged(recursive)

    def _other(self, row: Proposal | None) -> Judged | str:
        """The forecast of a row, or of double recursion, which may say why there is none: no fault here."""
        if row is not None:
            return light(judge(row, self.oracle))
        micro = 1 if self.best is None else int(self.best.choices["micro_batches"])
        try:
            return judged(recursively(self.oracle, micro, _MOST_AXES))
        except DistGraphError as error:
            return f"there is none: {error}"

    def _nearest(self) -> Iterator[Event]:
        """Nothing fits: the row that lacks least memory is forecast, so that the error can tell."""
        counts = micro_batch_counts(self.training.size)
        yield Event("the plan that lacks least memory")
        for micro in counts:
            if not self._is_batch(micro):
                continue
            rows = leanest(self.oracle, front(self.oracle, micro, self._submeshes(micro)))
            found = False
            for proposal in islice(rows, _FORECASTS):
                found = True
                yield self._judged(judge(proposal, self.oracle))
                if self.best is not None:
                    return
            if found:
                return


def _foremost(rows: Iterable[Proposal]) -> list[Proposal]:
    """The few best by estimate."""
    return sorted(rows, key=lambda row: row.estimate)[:_FORECASTS]
