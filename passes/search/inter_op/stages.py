"""The stage search: the layers, devices and config of every pipeline stage, for the shortest training step.

*In:* costs of every interval of layers on every sub-mesh under every config, devices in pools of equal
machines, the number of micro-batches, a schedule, seconds of transfers between stages. *Out:* stages with
their devices, the seconds of a step, and a lower bound. *Invariant:* the stages cover the layers in order,
their devices are distinct, and every stage fits into memory with the micro-batches that the schedule keeps in
flight on it.

With t_i the seconds of stage i for one micro-batch, x_i those of the transfer after it, s_i its seconds once
a step, y_i those for which the transfer occupies its most occupied link, m micro-batches, and `fill` (1 for
GPipe and 1F1B),

    minimise  fill (sum_i t_i + sum_i x_i) + max(max_i (m - fill) t_i + s_i, max_i (m - fill) y_i).

Without x and s this is equation 2 of Alpa (Zheng et al., OSDI 2022). As there, the maximum is enumerated: for
a limit U on it, a dynamic programme (`stage_dp`) gives the least sum f(U), with a pipeline whose maximum is u
<= U, so that f is constant from u to U. f never increases with U: if the maximum is in [a, b), the objective
is at least fill f(b) + a. A priority queue holds such intervals by their bound. The interval with the least
bound is solved just below its upper end and in its middle, and splits into two; the search ends when no bound
is below the incumbent. This prunes more than the paper's early pruning, which stops at m U >= incumbent.

Stages may use different pools in any order, which covers clusters with several kinds of machines. Stages
whose sizes do not divide one another may not fit into machines although their sum does. If the best pipeline
cannot be placed on devices, the best pipeline whose sizes divide one another is returned; the bound remains
that of the former.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from distgraph.errors import InfeasibleError
from distgraph.ir.float_arrays import Floats
from distgraph.passes.search.inter_op.schedule_costs import makespan
from distgraph.passes.search.inter_op.stage_candidates import ConfigCosts, StageCandidates
from distgraph.passes.search.inter_op.stage_costs import IncreasedCosts, IntervalCosts
from distgraph.passes.search.inter_op.stage_dp import Devices, StageAssignment, StageTable
from distgraph.passes.search.inter_op.submesh_placement import Pool, SubMesh, chains, place
from distgraph.plan.pipeline_schedules import SchedulePolicy

_EQUAL = 1e-12  # relative difference below which two times count as equal


@dataclass(frozen=True, slots=True)
class StageProblem:
    """The possible stages and their costs.

    Attributes:
        costs: costs of every interval of layers.
        pools: the devices.
        submeshes: the sub-meshes that a stage may use, in the order of `costs`.
        micro_batches: m.
        schedule: the schedule, which gives micro-batches in flight and the makespan.
        transfer: [layers - 1, sub-mesh before, sub-mesh after] seconds of one micro-batch, forward and
            backward, between a stage that ends with a layer and the next stage; None if they cost nothing.
        occupied: the same shape; seconds for which one link is occupied by both, the largest of all links:
            half of `transfer` where links are full duplex. None for `transfer`.
        whole: whether every device must be used, as in Alpa.
        most: the largest number of stages; None for any number.
        exact: whether a pipeline has exactly `most` stages.
    """

    costs: IntervalCosts
    pools: tuple[Pool, ...]
    submeshes: tuple[SubMesh, ...]
    micro_batches: int
    schedule: SchedulePolicy
    transfer: Floats | None = None
    whole: bool = True
    most: int | None = None
    exact: bool = False
    occupied: Floats | None = None

    def __post_init__(self) -> None:
        layers, submeshes, _ = self.costs.shape
        if submeshes != len(self.submeshes):
            raise InfeasibleError(
                f"costs of stages are for {submeshes} sub-meshes but {len(self.submeshes)} are given"
            )
        if any(len(s.sizes) != len(self.pools) for s in self.submeshes):
            raise InfeasibleError(f"sub-meshes must give their devices in each of {len(self.pools)} pools")
        shape = (layers - 1, submeshes, submeshes)
        for each in (self.transfer, self.occupied):
            if each is not None and each.shape != shape:
                raise InfeasibleError(f"transfers have shape {each.shape} but must have {shape}")
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
        first, stop: its first layer, and the first layer after it.
        submesh, config: indices in the problem.
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
        bound: lower bound of the seconds of any pipeline; equal to `seconds` unless the best pipeline could
            not be placed.
        limits: number of limits on the slowest stage for which the dynamic programme was solved.
    """

    stages: tuple[Stage, ...]
    seconds: float
    bound: float
    limits: int


def find_stages(problem: StageProblem, *, below: float = np.inf) -> Stages:
    """The best pipeline.

    Args:
        problem: the costs of stages, the devices, the schedule.
        below: seconds; only pipelines that take less are searched for, which saves time.

    Raises:
        InfeasibleError: no pipeline fits, or none takes less than `below`.
    """
    best = _best_placed(problem, below)
    if best is None:
        raise InfeasibleError(_nothing_fits(problem) if below == np.inf else _none_below(problem, below))
    return best


def _best_placed(problem: StageProblem, below: float = np.inf) -> Stages | None:
    """The best pipeline if it can be placed on devices, else the best whose sizes divide one another."""
    best = _Search(problem, below).run()
    if best is None or best[0] is not None:
        return None if best is None else best[0]
    _, bound = best
    pipelines = []
    for allowed in _dividing_sizes(problem):
        costs = IncreasedCosts(problem.costs, np.where(allowed, 0.0, np.inf))
        pipeline = _Search(replace(problem, costs=costs), below).run()
        if pipeline is not None and pipeline[0] is not None:
            pipelines.append(pipeline[0])
    if not pipelines:
        return None
    return replace(min(pipelines, key=lambda pipeline: pipeline.seconds), bound=bound)


def _dividing_sizes(problem: StageProblem) -> Iterator[NDArray[np.bool_]]:
    """Masks of the sub-meshes to allow, so that in every pool the allowed sizes divide one another."""
    by_pool = [chains({s.sizes[p] for s in problem.submeshes} - {0}) for p in range(len(problem.pools))]
    for chosen in product(*by_pool):
        yield np.array(
            [
                all(size == 0 or size in chain for size, chain in zip(s.sizes, chosen, strict=True))
                for s in problem.submeshes
            ]
        )


class _Search:
    """The search over limits on the slowest stage: intervals of limits are bisected by their lower bound."""

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
        """The best pipeline (None if it cannot be placed) and its seconds; None if no pipeline fits."""
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
            # at the upper end of the interval and above no pipeline is better
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
        """The stages that fit at a position from the end, computed from those at a later position."""
        in_flight, costs = self.problem.in_flight(position), self.problem.costs
        if in_flight not in self.candidates:
            fewer = max((n for n in self.candidates if n < in_flight), default=None)
            self.candidates[in_flight] = (
                StageCandidates.of(costs, in_flight, self.rounds)
                if fewer is None
                else self.candidates[fewer].followed_by(position - 1).fitting(costs, in_flight, self.rounds)
            )
        return self.candidates[in_flight]

    def least_limit(self) -> float:
        """Lower bound of the seconds of the slowest stage in any pipeline: every layer is in some stage."""
        least = self.fitting(1).maxima().min(axis=2)
        # least[k, i] -> minimum over all intervals with first <= k and last >= i
        containing = np.minimum.accumulate(np.minimum.accumulate(least, axis=0)[:, ::-1], axis=1)[:, ::-1]
        return float(np.diagonal(containing).max())

    def solve(self, limit: float, least: float) -> tuple[float, float] | None:
        """f(limit) and the maximum of its pipeline, which may become the incumbent.

        Returns:
            None if no pipeline with a maximum between `least` and `limit` is better than the incumbent.
        """
        assert self.devices is not None
        self.limits += 1
        limit = min(limit, self.incumbent * (1 - _EQUAL))
        self.candidates = {in_flight: c.below(self.incumbent) for in_flight, c in self.candidates.items()}
        borders = self.problem.transfer
        if borders is not None:
            occupied = borders if self.problem.occupied is None else self.problem.occupied
            borders = np.where(self.rounds * occupied <= limit, borders, np.inf)
        table = StageTable(self.layers, self.devices, borders)
        seconds: dict[int, Floats] = {}

        def times(position: int) -> Floats:
            in_flight = self.problem.in_flight(position)
            if in_flight not in seconds:
                seconds[in_flight] = self.fitting(position).within(limit)
            return seconds[in_flight]

        most, exact = self.problem.stages, self.problem.exact
        if exact and most != self.problem.most:
            return None
        shortest = None if exact else table.shortest(times, self.budget(least))
        if shortest is not None:
            self.offer(shortest[1], limit)
        if exact or (shortest is not None and not self.is_exact(shortest[1], limit)):
            shortest = table.counted(times, most, self.budget(least), exact)
        if shortest is None:
            return None
        self.offer(shortest[1], limit)
        return shortest[0], self.maximum(shortest[1], limit)

    def maximum(self, assignment: StageAssignment, limit: float) -> float:
        """Seconds of the slowest stage or transfer, with the fastest configs under a limit."""
        chosen = zip(self.configs(assignment, limit), range(len(assignment)), strict=True)
        stages = [float(self.costs_at(assignment, i).slowest[config]) for config, i in chosen]
        return max([*stages, *(self.rounds * y for y in self.occupied(assignment))])

    def transfers(self, assignment: StageAssignment) -> list[float]:
        """Seconds of the transfers between the stages."""
        return _at_borders(self.problem.transfer, assignment)

    def occupied(self, assignment: StageAssignment) -> list[float]:
        """Seconds for which the transfers between the stages occupy their most occupied links."""
        occupied = self.problem.occupied
        return _at_borders(self.problem.transfer if occupied is None else occupied, assignment)

    def budget(self, least: float) -> float:
        """Sum above which no pipeline is better than the incumbent."""
        return (self.incumbent - least) / self.fill

    def offer(self, assignment: StageAssignment, limit: float) -> None:
        """Make an assignment the incumbent if it has few enough stages and is better."""
        if len(assignment) > self.problem.stages:
            return
        configs = self.configs(assignment, limit)
        seconds = self.makespan(assignment, configs)
        if seconds < self.incumbent:
            self.incumbent, self.best = seconds, (assignment, configs)

    def costs_at(self, assignment: StageAssignment, number: int, later: int | None = None) -> ConfigCosts:
        """Costs of the configs of a stage that `later` stages follow; by default those of the assignment."""
        later = len(assignment) - number - 1 if later is None else later
        in_flight = self.problem.in_flight(later + 1)
        key = (*assignment[number], in_flight)
        if key not in self.config_costs:
            self.config_costs[key] = ConfigCosts.of(
                self.problem.costs, assignment[number], in_flight, self.rounds
            )
        return self.config_costs[key]

    def is_exact(self, assignment: StageAssignment, limit: float) -> bool:
        """Whether every stage costs the same at its position as it would as the last stage."""
        if len(assignment) > self.problem.stages:
            return False
        return all(
            self.costs_at(assignment, i).within(limit).min()
            == self.costs_at(assignment, i, 0).within(limit).min()
            for i in range(len(assignment) - 1, -1, -1)
        )

    def configs(self, assignment: StageAssignment, limit: float) -> list[int]:
        """Fastest config of every stage."""
        return [int(self.costs_at(assignment, i).within(limit).argmin()) for i in range(len(assignment))]

    def makespan(self, assignment: StageAssignment, configs: Sequence[int]) -> float:
        """Seconds of a step."""
        stages = [self.stage(assignment, i, config, ()) for i, config in enumerate(configs)]
        seconds, step = [s.seconds for s in stages], [s.step for s in stages]
        policy, micro_batches = self.problem.schedule, self.problem.micro_batches
        return makespan(
            policy,
            seconds,
            [0.0] * len(assignment),
            micro_batches,
            self.transfers(assignment),
            step,
            self.occupied(assignment),
        )

    def stage(self, assignment: StageAssignment, number: int, config: int, devices: tuple[int, ...]) -> Stage:
        """One stage of an assignment."""
        (first, stop, submesh), costs = assignment[number], self.costs_at(assignment, number)
        in_flight = self.problem.in_flight(len(assignment) - number)
        recomputed = self.problem.costs.recomputed(first, stop - 1, submesh, config, in_flight)
        seconds, step = float(costs.seconds[config]), float(costs.step[config])
        return Stage(first, stop, submesh, config, devices, seconds, step, in_flight, recomputed)

    def placed(self, assignment: StageAssignment, configs: Sequence[int]) -> tuple[Stage, ...] | None:
        """The stages with their devices; None if they cannot be placed."""
        devices = place(self.problem.pools, [self.problem.submeshes[n] for _, _, n in assignment])
        if devices is None:
            return None
        return tuple(
            self.stage(assignment, i, c, d) for i, (c, d) in enumerate(zip(configs, devices, strict=True))
        )


def _at_borders(seconds: Floats | None, assignment: StageAssignment) -> list[float]:
    """Seconds [layers - 1, sub-mesh before, sub-mesh after] of the transfers between the stages."""
    if seconds is None:
        return []
    return [float(seconds[a[1] - 1, a[2], b[2]]) for a, b in pairwise(assignment)]


def _none_below(problem: StageProblem, below: float) -> str:
    return (
        f"{problem.costs.shape[0]} layers with {problem.micro_batches} micro-batches: no pipeline that "
        f"fits takes less than {below:.6g} s; allow more seconds, or another number of micro-batches"
    )


def _nothing_fits(problem: StageProblem) -> str:
    """The message of the error: why no pipeline exists, and what would change that."""
    layers = problem.costs.shape[0]
    devices = sum(pool.size for pool in problem.pools)
    subject = f"{layers} layers on {devices} devices with {problem.micro_batches} micro-batches"
    in_flight = problem.in_flight(1)
    fits = np.isfinite(StageCandidates.of(problem.costs, in_flight, 1.0).within(np.inf))
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
