"""A deliberately simple search of plans, to which the product's search is compared.

    uniform pipelines: stages x shape x micro-batches x schedule x restriction, sorted by a coarse estimate
    from the best of them: random-restart local search, the first better neighbour by the product's forecast

*In:* a program, a cluster, CPU seconds, a seed. *Out:* the best plan, and how many programs were forecast.
*Invariant:* of the product's search it uses the layouts of one stage and the forecast; the pipelines, the
estimate and the moves are its own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from distgraph.engine.compile.compile_request import CompileRequest
from distgraph.engine.search_driver.candidate import Candidate, StageChoice, build_candidate
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.search_space import Shape, pools_of
from distgraph.errors import DistGraphError
from distgraph.passes.search.inter_op.submesh_placement import SubMesh, place
from distgraph.passes.search.intra_op.restrictions import Restriction
from distgraph.plan.pipeline_schedules import searched_schedules
from distgraph.resources import Cluster

_RESTRICTIONS: tuple[Restriction, ...] = ("none", "uniform", "zero1", "zero3")
_SCHEDULES = searched_schedules()
_WIDEST = 8
_STARTS = 16
_TOO_LARGE = 1e6
"""Seconds a plan that does not fit counts with, times its use of memory: local search leads out of there."""


@dataclass(eq=False)
class Rival:
    """The state of one search.

    Args:
        request, cluster: the problem.
        seconds: CPU seconds of this process.
        seed: of the random choices.

    Attributes:
        best, best_seconds: the fastest plan that fits.
        forecasts: programs built so far.
    """

    request: CompileRequest
    cluster: Cluster
    seconds: float
    seed: int = 0
    best: Candidate | None = None
    best_seconds: float = math.inf
    forecasts: int = 0
    _known: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.end = time.process_time() + self.seconds
        self.random = random.Random(self.seed)
        self.layout_costs = LayoutCosts(self.request, self.cluster, pools_of(self.cluster), self.expired)
        self.layers = len(self.layout_costs.layered_graph(1).layers)
        self.counts = [n for n in range(1, self.request.size + 1) if self.request.size % n == 0]

    def expired(self) -> bool:
        """Whether the CPU seconds are spent."""
        return time.process_time() >= self.end

    def run(self) -> None:
        """Search until the time is up, or until no start is left."""
        starts = self._starts()
        for start in starts[:2]:
            self.evaluate(start)
        rest = starts[:_STARTS]
        while rest and not self.expired():
            position = min(len(rest) - 1, int(self.random.expovariate(0.5)))
            self._descend(rest.pop(position))
            if not rest and not self.expired() and len(starts) > _STARTS:
                rest = self.random.sample(starts, min(len(starts), _STARTS))

    def evaluate(self, candidate: Candidate) -> float:
        """Seconds of a step; a large number where memory does not suffice, infinite where it cannot be."""
        if candidate.decisions not in self._known:
            self._known[candidate.decisions] = self._forecast(candidate)
        return self._known[candidate.decisions]

    def _forecast(self, candidate: Candidate) -> float:
        try:
            program = build_candidate(candidate, self.layout_costs)
        except DistGraphError:
            return math.inf
        self.forecasts += 1
        if not program.fits:
            return _TOO_LARGE * max(shortage.needed / shortage.available for shortage in program.shortages)
        if program.seconds < self.best_seconds:
            self.best, self.best_seconds = candidate, program.seconds
        return program.seconds

    def _descend(self, current: Candidate) -> None:
        seconds = self.evaluate(current)
        neighbours = self._shuffled(current)
        while neighbours and not self.expired():
            candidate = neighbours.pop()
            if candidate.decisions in self._known:
                continue
            after = self.evaluate(candidate)
            if after < seconds:
                current, seconds, neighbours = candidate, after, self._shuffled(candidate)

    def _shuffled(self, candidate: Candidate) -> list[Candidate]:
        neighbours = [replace(each, estimate=math.inf) for each in self._moves(candidate)]
        self.random.shuffle(neighbours)
        return neighbours

    def _starts(self) -> list[Candidate]:
        """Uniform pipelines, best estimate first."""
        starts: list[Candidate] = []
        devices = tuple(device for pool in self.layout_costs.pools for row in pool.machines for device in row)
        counts = [n for n in self.counts if n & (n - 1) == 0 or n == self.counts[-1]]
        for parts, count, restriction in product(range(1, self.layers + 1), counts, _RESTRICTIONS):
            if len(devices) % parts or self.expired():
                continue
            size = len(devices) // parts
            groups = [devices[k * size : (k + 1) * size] for k in range(parts)]
            borders = [round(self.layers * k / parts) for k in range(parts + 1)]
            for shape in self._shapes(groups[0]):
                stages = tuple(
                    StageChoice(first, stop, group, shape)
                    for (first, stop), group in zip(pairwise(borders), groups, strict=True)
                )
                base = Candidate("rival", stages, restriction, math.inf, micro_batches=count)
                starts += self._with_estimates(base)
        return sorted(starts, key=lambda start: start.estimate)

    def _with_estimates(self, base: Candidate) -> Iterator[Candidate]:
        """A pipeline under each schedule, and once more with everything recomputed, if they exist."""
        times, steps = [], []
        try:
            for stage in base.stages:
                submesh = self._submesh(stage.devices)
                if submesh is None:
                    return
                variant = self.layout_costs.fastest(
                    base.micro_batches, submesh, stage.shape, base.restriction
                )
                costs = variant.profile
                part = slice(stage.first, stage.stop)
                times.append(float((costs.forward + costs.backward)[part].sum()))
                steps.append(float(costs.step[part].sum()))
        except DistGraphError:
            return
        seconds = sum(times) + (base.micro_batches - 1) * max(times) + max(steps)
        for schedule in _SCHEDULES if len(times) > 1 else _SCHEDULES[:1]:
            yield replace(base, schedule=schedule, estimate=seconds)
            everything = tuple(range(self.layers))
            yield replace(base, schedule=schedule, estimate=seconds * 4 / 3, recompute=everything)

    def _submesh(self, devices: tuple[int, ...]) -> SubMesh | None:
        """The number of devices of every pool; None where a stage of these sizes cannot be placed."""
        numbers = self.layout_costs.pool_numbers
        sizes = (sum(numbers[d] == n for d in devices) for n in range(len(self.layout_costs.pools)))
        submesh = SubMesh(tuple(sizes))
        return submesh if place(self.layout_costs.pools, [submesh]) is not None else None

    def _shapes(self, devices: tuple[int, ...]) -> list[Shape]:
        """dp x tp meshes of some devices."""
        size = len(devices)
        inner = [n for n in range(2, min(_WIDEST, size - 1) + 1) if size % n == 0]
        return [Shape((("dp", size),)), *(Shape((("dp", size // n), ("tp", n))) for n in inner)]

    def _moves(self, candidate: Candidate) -> Iterator[Candidate]:
        """Candidates that differ in one decision."""
        position = self.counts.index(candidate.micro_batches)
        for count in self.counts[max(0, position - 1) : position] + self.counts[position + 1 : position + 2]:
            yield replace(candidate, micro_batches=count)
        for schedule in _SCHEDULES if len(candidate.stages) > 1 else ():
            yield replace(candidate, schedule=schedule)
        for restriction in _RESTRICTIONS:
            yield replace(candidate, restriction=restriction)
        for recompute in ((), tuple(range(self.layers))):
            yield replace(candidate, recompute=recompute)
        for stages in self._stage_moves(candidate.stages):
            if all(self._submesh(stage.devices) is not None for stage in stages):
                yield replace(candidate, stages=stages)

    def _stage_moves(self, stages: tuple[StageChoice, ...]) -> Iterator[tuple[StageChoice, ...]]:
        for number, stage in enumerate(stages):
            rest = stages[:number], stages[number + 1 :]
            for shape in self._shapes(stage.devices):
                if shape != stage.shape:
                    yield *rest[0], replace(stage, shape=shape), *rest[1]
            half, middle = len(stage.devices) // 2, (stage.first + stage.stop) // 2
            if half * 2 == len(stage.devices) and stage.first < middle < stage.stop:
                for shape in self._shapes(stage.devices[:half]):
                    front = StageChoice(stage.first, middle, stage.devices[:half], shape)
                    back = StageChoice(middle, stage.stop, stage.devices[half:], shape)
                    yield *rest[0], front, back, *rest[1]
        for number in range(1, len(stages)):
            before, behind = stages[number - 1], stages[number]
            outside = stages[: number - 1], stages[number + 1 :]
            for border in (before.stop - 1, before.stop + 1):
                if before.first < border < behind.stop:
                    yield (
                        *outside[0],
                        replace(before, stop=border),
                        replace(behind, first=border),
                        *outside[1],
                    )
            devices = (*before.devices, *behind.devices)
            for shape in self._shapes(devices):
                yield *outside[0], StageChoice(before.first, behind.stop, devices, shape), *outside[1]
