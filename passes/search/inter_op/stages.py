"""Stages of a pipeline: which layers, on which devices, in which way, so that a training step is shortest.

*In:* costs of every run of layers on every sub-mesh under every config, devices in pools of equal machines,
the number of micro-batches, a schedule, what passes between stages. *Out:* stages with their devices, the
seconds, and a bound.
*Invariant:* the stages cover the layers in order, their devices are distinct, every stage fits into memory
with the micro-batches that the schedule keeps in flight on it.

With t_i the seconds of stage i for one micro-batch, x_i those of the border behind it, s_i what it does
once a step, m micro-batches, and `fill` (1 for GPipe and 1F1B),

    minimise  fill (sum_i t_i + sum_i x_i) + max(max_i (m - fill) t_i + s_i, max_i (m - fill) x_i).

Without borders and s this is equation 2 of Alpa (Zheng et al., OSDI 2022). As there, the maximum is
enumerated: for a limit U on it, a dynamic programme (`stage_dp`) gives the least sum f(U), with a pipeline
whose maximum is u <= U, so that f is the same from u to U. f falls with U: with a maximum in [a, b) the
objective is at least fill f(b) + a. Such intervals are kept by their bound. The one with the least is solved
just below its end and in its middle, and falls into two; the search ends when no bound is below the
incumbent. That prunes more than stopping at m U >= incumbent, the paper's early pruning.

Stages may be in different pools, and their order in the pipeline is free: mixed clusters need nothing else.
Sizes that do not divide one another need not fit into machines side by side even where their sum does. If
the best pipeline cannot be placed, the best of those whose sizes divide one another is returned, and the
bound keeps the value of the first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import InfeasibleError
from distgraph.passes.search.inter_op.schedule_costs import makespan
from distgraph.passes.search.inter_op.stage_candidates import ConfigCosts, StageCandidates
from distgraph.passes.search.inter_op.stage_costs import IntervalCosts, RestrictedCosts
from distgraph.passes.search.inter_op.stage_dp import Devices, StageAssignment, StageTable
from distgraph.passes.search.inter_op.submesh_placement import Pool, SubMesh, chains, place
from distgraph.plan.schedule_policies import SchedulePolicy

Floats = NDArray[np.float64]

_EQUAL = 1e-12  # relative difference below which two times are one


@dataclass(frozen=True, slots=True)
class StageProblem:
    """Which stages are possible, and what they cost.

    Attributes:
        costs: of every run of layers.
        pools: the devices.
        submeshes: what a stage may take of them, in the order of `costs`.
        micro_batches: m.
        schedule: what is in flight, and how a step adds up.
        transfer: seconds of one micro-batch, both ways, between a stage that ends with a layer and the next
            one, [layers - 1, sub-mesh before, sub-mesh behind]; None for none.
        whole: whether every device must be used, as in Alpa.
        most: the largest number of stages; None for any number.
    """

    costs: IntervalCosts
    pools: tuple[Pool, ...]
    submeshes: tuple[SubMesh, ...]
    micro_batches: int
    schedule: SchedulePolicy
    transfer: Floats | None = None
    whole: bool = True
    most: int | None = None

    def __post_init__(self) -> None:
        layers, submeshes, _ = self.costs.shape
        if submeshes != len(self.submeshes):
            raise InfeasibleError(
                f"costs of stages are for {submeshes} sub-meshes but {len(self.submeshes)} are given"
            )
        if any(len(s.sizes) != len(self.pools) for s in self.submeshes):
            raise InfeasibleError(f"sub-meshes must say what they take of each of {len(self.pools)} pools")
        shape = (layers - 1, submeshes, submeshes)
        if self.transfer is not None and self.transfer.shape != shape:
            raise InfeasibleError(f"transfers have shape {self.transfer.shape} but must have {shape}")
        if self.micro_batches < 1:
            raise InfeasibleError(f"{self.micro_batches} micro-batches make no step; take one or more")

    @property
    def stages(self) -> int:
        """The largest number of stages."""
        return min(self.costs.shape[0], self.most or self.costs.shape[0], sum(p.size for p in self.pools))

    def in_flight(self, position: int) -> int:
        """Micro-batches in flight on a stage; position 1 is the last stage."""
        return self.schedule.in_flight(0, position, self.micro_batches)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        first, stop: its layers.
        submesh, config: numbers of the problem.
        devices: device numbers.
        seconds: of one micro-batch, forward and backward.
        step: seconds once a step.
        in_flight: micro-batches in flight.
        recomputed: layers that are recomputed in the backward part.
    """

    first: int
    stop: int
    submesh: int
    config: int
    devices: tuple[int, ...]
    seconds: float
    step: float
    in_flight: int
    recomputed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline: its stages and its seconds.

    Attributes:
        stages: from the first to the last.
        seconds: the objective.
        bound: seconds that no pipeline goes below; `seconds` unless the best one could not be placed.
        limits: on the slowest stage, for which the dynamic programme was solved.
    """

    stages: tuple[Stage, ...]
    seconds: float
    bound: float
    limits: int


def find_stages(problem: StageProblem, *, below: float = np.inf) -> Stages:
    """The best pipeline.

    Args:
        problem: the costs of stages, the devices, the schedule.
        below: seconds; pipelines that do not take less are not looked for, which saves time.

    Raises:
        InfeasibleError: no pipeline fits, or none takes less than `below`.
    """
    best = _placed(problem, below)
    if best is None:
        raise InfeasibleError(_nothing_fits(problem) if below == np.inf else _none_below(problem, below))
    return best


def _placed(problem: StageProblem, below: float = np.inf) -> Stages | None:
    """The best pipeline that can be placed; of those whose sizes divide one another if the best cannot be."""
    best = _Search(problem, below).run()
    if best is None or best[0] is not None:
        return None if best is None else best[0]
    _, bound = best
    pipelines = []
    for allowed in _chained(problem):
        pipeline = _Search(replace(problem, costs=RestrictedCosts(problem.costs, ~allowed)), below).run()
        if pipeline is not None and pipeline[0] is not None:
            pipelines.append(pipeline[0])
    if not pipelines:
        return None
    return replace(min(pipelines, key=lambda pipeline: pipeline.seconds), bound=bound)


def _chained(problem: StageProblem) -> Iterator[NDArray[np.bool_]]:
    """The sub-meshes to allow so that sizes divide one another in every pool."""
    by_pool = [chains({s.sizes[p] for s in problem.submeshes} - {0}) for p in range(len(problem.pools))]
    for chosen in product(*by_pool):
        yield np.array(
            [
                all(size == 0 or size in chain for size, chain in zip(s.sizes, chosen, strict=True))
                for s in problem.submeshes
            ]
        )


class _Search:
    """Limits on the slowest stage, halved until none can be better."""

    def __init__(self, problem: StageProblem, below: float = np.inf) -> None:
        self.problem = problem
        self.layers = problem.costs.shape[0]
        self.fill = problem.schedule.fill
        self.rounds = problem.micro_batches - self.fill
        self.devices = Devices.of(
            tuple(p.size for p in problem.pools), tuple(s.sizes for s in problem.submeshes), problem.whole
        )
        self.candidates: dict[int, StageCandidates] = {}
        self.config_costs: dict[tuple[int, int, int, int], ConfigCosts] = {}
        self.limits = 0
        self.incumbent = below
        self.best: tuple[StageAssignment, list[int]] | None = None

    def run(self) -> tuple[Stages | None, float] | None:
        """The best pipeline (None where it cannot be placed) and its seconds; None where nothing fits."""
        if self.devices is None:
            return None
        least = self.least_limit()
        solved = self.solve(np.inf, least) if least < np.inf else None
        queue: list[
            tuple[float, float, float, float]
        ] = []  # bound, sum, and the open interval of the maximum
        if solved is not None:
            queue.append((self.fill * solved[0] + least, solved[0], least, solved[1]))
        while queue:
            bound, total, low, high = heapq.heappop(queue)
            enough = self.incumbent * (1 - _EQUAL)
            if bound >= enough:
                break
            # from the upper end on, no pipeline is better
            solved = self.solve(min(high, self.incumbent - self.fill * total) * (1 - _EQUAL), low)
            if solved is None or self.fill * solved[0] + low >= enough:
                continue
            total, high = solved
            middle = (low + high) / 2
            if not low < middle < high:
                continue
            heapq.heappush(queue, (self.fill * total + middle, total, middle, high))
            below = self.solve(middle, low)
            if below is not None:
                heapq.heappush(queue, (self.fill * below[0] + low, below[0], low, below[1]))
        if self.best is None:
            return None
        stages, seconds = self.placed(*self.best), self.incumbent
        return (None if stages is None else Stages(stages, seconds, seconds, self.limits)), seconds

    def fitting(self, position: int) -> StageCandidates:
        """Stages that fit at a position from the end, made from those of the nearest position behind."""
        in_flight, costs = self.problem.in_flight(position), self.problem.costs
        if in_flight not in self.candidates:
            fewer = max((n for n in self.candidates if n < in_flight), default=None)
            self.candidates[in_flight] = (
                StageCandidates.of(costs, in_flight, self.rounds)
                if fewer is None
                else self.candidates[fewer].ahead(position - 1).fitting(costs, in_flight, self.rounds)
            )
        return self.candidates[in_flight]

    def least_limit(self) -> float:
        """Seconds that the slowest stage of no pipeline goes below: every layer is in some stage."""
        least = self.fitting(1).maxima().min(axis=2)
        # least[k, i] -> over all runs first <= k, last >= i
        around = np.minimum.accumulate(np.minimum.accumulate(least, axis=0)[:, ::-1], axis=1)[:, ::-1]
        return float(np.diagonal(around).max())

    def solve(self, limit: float, least: float) -> tuple[float, float] | None:
        """f(limit) and the maximum of its pipeline, which may become the incumbent.

        None where no pipeline with a maximum from `least` to `limit` is better than the incumbent.
        """
        assert self.devices is not None
        self.limits += 1
        limit = min(limit, self.incumbent * (1 - _EQUAL))
        self.candidates = {in_flight: c.below(self.incumbent) for in_flight, c in self.candidates.items()}
        borders = self.problem.transfer
        if borders is not None:
            borders = np.where(self.rounds * borders <= limit, borders, np.inf)
        table = StageTable(self.layers, self.devices, borders)
        seconds: dict[int, Floats] = {}

        def times(position: int) -> Floats:
            in_flight = self.problem.in_flight(position)
            if in_flight not in seconds:
                seconds[in_flight] = self.fitting(position).within(limit)
            return seconds[in_flight]

        shortest = table.shortest(times, self.budget(least))
        if shortest is not None:
            self.offer(shortest[1], limit)
            if not self.is_exact(shortest[1], limit):
                shortest = table.counted(times, self.problem.stages, self.budget(least))
        if shortest is None:
            return None
        self.offer(shortest[1], limit)
        return shortest[0], self.maximum(shortest[1], limit)

    def maximum(self, assignment: StageAssignment, limit: float) -> float:
        """Seconds of the slowest stage or transfer, with the fastest configs under a limit."""
        chosen = zip(self.configs(assignment, limit), range(len(assignment)), strict=True)
        stages = [float(self.ways(assignment, i).slowest[config]) for config, i in chosen]
        return max([*stages, *(self.rounds * x for x in self.transfers(assignment))])

    def transfers(self, assignment: StageAssignment) -> list[float]:
        """Seconds of the transfers between the stages."""
        transfer = self.problem.transfer
        if transfer is None:
            return []
        return [float(transfer[a[1] - 1, a[2], b[2]]) for a, b in pairwise(assignment)]

    def budget(self, least: float) -> float:
        """Sum above which no pipeline is better than the incumbent."""
        return (self.incumbent - least) / self.fill

    def offer(self, assignment: StageAssignment, limit: float) -> None:
        """Make an assignment the incumbent where it fits and is better."""
        if len(assignment) > self.problem.stages:
            return
        configs = self.configs(assignment, limit)
        seconds = self.makespan(assignment, configs)
        if seconds < self.incumbent:
            self.incumbent, self.best = seconds, (assignment, configs)

    def ways(self, assignment: StageAssignment, number: int, behind: int | None = None) -> ConfigCosts:
        """Costs of the configs of a stage, with `behind` stages behind it; None for those that there are."""
        behind = len(assignment) - number - 1 if behind is None else behind
        in_flight = self.problem.in_flight(behind + 1)
        key = (*assignment[number], in_flight)
        if key not in self.config_costs:
            self.config_costs[key] = ConfigCosts.of(
                self.problem.costs, assignment[number], in_flight, self.rounds
            )
        return self.config_costs[key]

    def is_exact(self, assignment: StageAssignment, limit: float) -> bool:
        """Whether the stages cost at their positions what they would cost at the end."""
        if len(assignment) > self.problem.stages:
            return False
        return all(
            self.ways(assignment, i).within(limit).min() == self.ways(assignment, i, 0).within(limit).min()
            for i in range(len(assignment) - 1, -1, -1)
        )

    def configs(self, assignment: StageAssignment, limit: float) -> list[int]:
        """Fastest config of every stage."""
        return [int(self.ways(assignment, i).within(limit).argmin()) for i in range(len(assignment))]

    def makespan(self, assignment: StageAssignment, configs: Sequence[int]) -> float:
        """Seconds of a step."""
        placed = [self.stage(assignment, i, config, ()) for i, config in enumerate(configs)]
        seconds, step = [s.seconds for s in placed], [s.step for s in placed]
        policy, micro_batches = self.problem.schedule, self.problem.micro_batches
        return makespan(
            policy, seconds, [0.0] * len(assignment), micro_batches, self.transfers(assignment), step
        )

    def stage(self, assignment: StageAssignment, number: int, config: int, devices: tuple[int, ...]) -> Stage:
        """One stage of an assignment."""
        (first, stop, submesh), ways = assignment[number], self.ways(assignment, number)
        in_flight = self.problem.in_flight(len(assignment) - number)
        again = self.problem.costs.recomputed(first, stop - 1, submesh, config, in_flight)
        seconds, step = float(ways.seconds[config]), float(ways.step[config])
        return Stage(first, stop, submesh, config, devices, seconds, step, in_flight, again)

    def placed(self, assignment: StageAssignment, configs: Sequence[int]) -> tuple[Stage, ...] | None:
        """The stages with their devices; None where they cannot be placed."""
        devices = place(self.problem.pools, [self.problem.submeshes[n] for _, _, n in assignment])
        if devices is None:
            return None
        return tuple(
            self.stage(assignment, i, c, d) for i, (c, d) in enumerate(zip(configs, devices, strict=True))
        )


def _none_below(problem: StageProblem, below: float) -> str:
    return (
        f"{problem.costs.shape[0]} layers with {problem.micro_batches} micro-batches: no pipeline that "
        f"fits takes less than {below:.6g} s; ask for more time, or for another number of micro-batches"
    )


def _nothing_fits(problem: StageProblem) -> str:
    """Why no pipeline exists, and what would change that."""
    layers = problem.costs.shape[0]
    devices = sum(pool.size for pool in problem.pools)
    subject = f"{layers} layers on {devices} devices with {problem.micro_batches} micro-batches"
    in_flight = problem.in_flight(1)
    fits = np.isfinite(problem.costs.tabulate(in_flight).seconds)
    for layer in range(layers):
        if not fits[: layer + 1, layer:].any():
            missing = problem.costs.missing(in_flight)[layer, layer].min(axis=-1)
            submesh = int(missing.argmin())
            return (
                f"{subject}: no stage with layer {layer} fits into memory; alone on "
                f"{problem.submeshes[submesh]} with {in_flight} micro-batches in flight it needs "
                f"{missing[submesh]:,.0f} more bytes a device; take smaller micro-batches, larger "
                f"sub-meshes, recomputation or layouts that split more"
            )
    if problem.whole and _Search(replace(problem, whole=False)).run() is not None:
        return (
            f"{subject}: no pipeline uses every device, but some use fewer; allow that, or sub-meshes "
            f"of other sizes"
        )
    return (
        f"{subject}: no pipeline fits under schedule {problem.schedule.name}, which keeps up to "
        f"{problem.in_flight(problem.stages)} micro-batches in flight; take smaller micro-batches, "
        f"recomputation, or more devices"
    )
