"""The best pipelines by estimate, one for each micro-batch count that is tried.

*In:* layout costs. *Out:* candidates: the best pipeline for a count, those on one kind of device, those whose
stages have one size. *Invariant:* nothing is forecast here; what is solved for one count is used for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from distgraph.engine.search_driver.candidate import Candidate
from distgraph.engine.search_driver.layout_costs import SERIAL_SECONDS, LayoutCosts
from distgraph.engine.search_driver.layout_variants import Variant, VariantKind
from distgraph.engine.search_driver.search_space import (
    FEW_COUNTS,
    Shape,
    adjacent_counts,
    devices_for,
    micro_batch_counts,
    submeshes_of,
)
from distgraph.engine.search_driver.stage_search import (
    VariantTable,
    best_pipeline,
    fastest_table,
    nearest_to_machine,
    of_equal_shapes,
    of_pool,
    of_size,
    shapes_for,
    single_shape_seconds,
    undominated,
    variant_table,
    with_limits,
)
from distgraph.errors import GraphError, InfeasibleError
from distgraph.passes.search.inter_op.stages import Stages
from distgraph.passes.search.inter_op.submesh_placement import SubMesh
from distgraph.passes.search.intra_op.memory_limit import MemoryLimit, limited_nodes
from distgraph.plan.pipeline_schedules import schedule_policy

SLOWER = 1.15
"""A pipeline whose estimate is this much above the best is neither looked for nor forecast."""
_RESOLVED = 2
"""How often a pipeline with layouts of another count is searched again with layouts of its own."""
_ROUNDING = 1e-9  # relative: sums in another order


def best_count(pipelines: Mapping[int, Candidate]) -> int:
    """The micro-batch count of the best pipeline by estimate."""
    return min(pipelines, key=lambda count: pipelines[count].estimate)


def best_estimate(pipelines: Mapping[int, Candidate]) -> float:
    """Seconds of the best pipeline by estimate; infinite without any."""
    return min((pipeline.estimate for pipeline in pipelines.values()), default=math.inf)


@dataclass(eq=False)
class PipelineSearch:
    """Pipelines by their estimates.

    Attributes:
        best: micro-batch count -> the best pipeline, where one fits by its estimate.
        by_pool: name -> the best pipelines on one kind of device alone, where there are several.
        tables: micro-batch count -> costs of stages.
        shape_seconds: seconds of a step, were all stages of one sub-mesh and shape; the least of all counts.
    """

    layout_costs: LayoutCosts
    best: dict[int, Candidate] = field(default_factory=dict)
    by_pool: dict[str, list[Candidate]] = field(default_factory=dict)
    tables: dict[int, VariantTable] = field(default_factory=dict)
    shape_seconds: dict[tuple[SubMesh, Shape], float] = field(default_factory=dict)
    _first_estimate: float = math.inf
    _first_shapes: frozenset[tuple[SubMesh, Shape]] = frozenset()
    _divides: dict[int, bool] = field(default_factory=dict)
    _first_count: int = 0
    _objectives: dict[tuple[str, bool], float] = field(default_factory=dict)

    @property
    def submeshes(self) -> tuple[SubMesh, ...]:
        """Those that a stage may have; the whole cluster is the last."""
        return submeshes_of(self.layout_costs.pools)

    def is_batch(self, micro_batches: int) -> bool:
        """Whether the model takes the samples of one micro-batch, with the same layers as another number."""
        if micro_batches not in self._divides:
            try:
                self.layout_costs.layered_graph(micro_batches)
                self._divides[micro_batches] = True
            except GraphError:
                self._divides[micro_batches] = False
        return self._divides[micro_batches]

    @property
    def counts(self) -> tuple[int, ...]:
        """Micro-batch counts to try, falling."""
        every = micro_batch_counts(self.layout_costs.request.size)
        return self.layout_costs.constraints.among("micro_batches", every)

    def adjacent_counts(self, count: int) -> list[int]:
        """The next micro-batch counts above and below one, also those between the counts that are tried."""
        if self.layout_costs.constraints.micro_batches is not None:
            return []
        return [n for n in adjacent_counts(self.layout_costs.request.size, count) if self.is_batch(n)]

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules to try."""
        return self.layout_costs.schedules

    def try_count(self, micro_batches: int) -> None:
        """Add the best pipeline for a micro-batch count, if any fits."""
        if self.is_batch(micro_batches) and self._may_fit(micro_batches):
            pipeline = self.best_for(micro_batches)
            if pipeline is not None:
                self.best[micro_batches] = pipeline

    def best_for(
        self,
        micro_batches: int,
        slack: float = 1.0,
        schedules: Iterable[str] | None = None,
        tighter: Candidate | None = None,
    ) -> Candidate | None:
        """The best pipeline, its layouts solved for its micro-batch count; None where none fits.

        None, too, where the time limit was reached before all shapes were solved but there is a pipeline
        already: with more time other pipelines would be looked at, and no plan must get worse by that.

        Args:
            micro_batches: in a step.
            slack: share of a device's memory that a stage may need by the estimate.
            schedules: by name; all that are searched by default.
            tighter: a pipeline that does not fit: layouts of its shapes are solved for within the slack, too.
        """
        schedules = self.schedules if schedules is None else schedules
        resolved = 0
        if not self.best and slack == 1.0 and self._excludes_shapes:
            self._note_first_pipeline(micro_batches, tuple(schedules))
        while True:
            excluded = self.excluded_shapes()
            table = variant_table(self.layout_costs, micro_batches, self.submeshes, excluded=excluded)
            if tighter is not None and not self.layout_costs.expired():
                table = with_limits(self.layout_costs, table, tighter, slack)
            if not table.complete and self.best:
                return None
            self._note_shape_seconds(table)
            table = undominated(table)
            best = self._best_of(table, slack, schedules)
            carried_over = set() if best is None else self._carried_over(table, best[0])
            if not carried_over or resolved == _RESOLVED or self.layout_costs.expired():
                break
            resolved += 1
            for submesh, shape in carried_over:
                self.layout_costs.solve_separately(micro_batches, submesh, shape)
        if slack == 1.0:
            self.tables[micro_batches] = table
            self._try_pools(table, schedules)
        return None if best is None else best[0]

    def under(self, schedule: str, most: int) -> Iterator[Candidate]:
        """The best pipelines of several stages under another schedule, for the micro-batch counts with the
        best estimates, at most `most`."""
        ranked = sorted(self.best, key=lambda count: self.best[count].estimate)
        for count in [count for count in ranked if count in self.tables][:most]:
            best = self._best_of(self.tables[count], 1.0, (schedule,))
            if best is not None and len(best[0].stages) > 1:
                yield best[0]

    def _carried_over(self, table: VariantTable, pipeline: Candidate) -> set[tuple[SubMesh, Shape]]:
        """Sub-meshes and shapes of a pipeline whose layouts are those of another micro-batch count."""
        chosen = {
            (self.layout_costs.submesh(stage.devices), stage.shape, stage.memory_multiplier)
            for stage in pipeline.stages
        }
        return {
            (submesh, v.shape)
            for submesh, variants in zip(table.submeshes, table.variants, strict=True)
            for v in variants
            if not v.solved and (submesh, v.shape, v.memory_multiplier) in chosen
        }

    def of_single_sizes(self, pipeline: Candidate) -> Iterator[Candidate]:
        """The best pipeline whose stages all have one size, for each size in a pipeline that mixes them.

        What is transferred between stages of two sizes, and where machines end, only a forecast knows: by the
        estimate a mixture may be ahead that is not.
        """
        sizes = {len(stage.devices) for stage in pipeline.stages}
        if len(sizes) == 1 or len(self.layout_costs.pools) > 1:
            return
        for size in sorted(sizes):
            table = of_size(self.tables[pipeline.micro_batches], size)
            best = None
            if not self.layout_costs.expired():
                best = self._best_of(table, 1.0, self.schedules)
            if best is not None:
                yield best[0]

    def excluded_shapes(self) -> frozenset[tuple[SubMesh, Shape]]:
        """Shapes that are slower by themselves than the best pipeline; none where all counts are tried.

        Before there is one, those that are much slower than a first pipeline (`_note_first_pipeline`).

        Of the shapes of the best pipeline itself one always stays: their mean, weighted by devices, is not
        above its seconds.
        """
        if not self._excludes_shapes:
            return frozenset()
        least = min(best_estimate(self.best) * (1 + _ROUNDING), self._first_estimate * SLOWER)
        slower = {shape for shape, seconds in self.shape_seconds.items() if seconds > least}
        return frozenset(slower if self.best else slower - self._first_shapes)

    @property
    def _excludes_shapes(self) -> bool:
        return len(self.counts) > FEW_COUNTS

    def _note_first_pipeline(self, micro_batches: int, schedules: Sequence[str]) -> None:
        """Note a first pipeline, whose stages have one size, and the seconds of every shape.

        Shapes that are slower are excluded, before layouts with less memory are solved for them. Sizes are
        tried from that of a machine on, until one of them gives a pipeline.
        """
        if len(self.layout_costs.pools) > 1 or self.layout_costs.expired():
            return
        self._note_shape_seconds(fastest_table(self.layout_costs, micro_batches, self.submeshes))
        for submesh in nearest_to_machine(self.layout_costs, self.submeshes):
            table = variant_table(self.layout_costs, micro_batches, (submesh,))
            best = self._best_of(undominated(table), 1.0, schedules) if table.submeshes else None
            if best is not None and best[0].estimate < self._first_estimate:
                self._first_estimate = best[0].estimate
                self._first_shapes = frozenset((submesh, stage.shape) for stage in best[0].stages)
            if best is not None or self.layout_costs.expired():
                return

    def _note_shape_seconds(self, table: VariantTable) -> None:
        for key, seconds in single_shape_seconds(self.layout_costs, table).items():
            self.shape_seconds[key] = min(seconds, self.shape_seconds.get(key, math.inf))

    def _may_fit(self, micro_batches: int) -> bool:
        """Whether there may be a pipeline; once the first count with one is known, by what that one needs."""
        if not self.best:
            self._first_count = micro_batches
            return may_fit(self.layout_costs, micro_batches, self.submeshes[-1])
        larger = self._first_count // micro_batches
        return larger < 2 or may_fit(self.layout_costs, self._first_count, self.submeshes[-1], larger)

    def _try_pools(self, table: VariantTable, schedules: Iterable[str]) -> None:
        """Add the best pipeline on each kind of device alone, where there are several kinds."""
        pools = self.layout_costs.pools
        for number, pool in enumerate(pools if len(pools) > 1 else ()):
            part = of_pool(table, number)
            best = self._best_of(part, 1.0, schedules) if part.submeshes else None
            if best is not None:
                name = f"{pool.size} x {pool.name} alone"
                self.by_pool.setdefault(name, []).append(replace(best[0], origin=name))

    def _best_of(
        self, table: VariantTable, slack: float, schedules: Iterable[str]
    ) -> tuple[Candidate, Stages] | None:
        """The pipeline of a table with the best estimate, of the best ones by dynamic programming; where its
        stages differ in size, also of those with stages of one size. None where none is good enough.

        The dynamic programme does not know where machines end, nor what passes between stages of two sizes.
        """
        schedules = tuple(schedules)
        pipelines = list(self._pipelines_of(table, slack, schedules, 0.0))
        best = min(pipelines, key=_estimate, default=None)
        if best is None:
            return None
        sizes = {len(stage.devices) for stage in best[0].stages}
        for size in sorted(sizes) if len(sizes) > 1 and len(self.layout_costs.pools) == 1 else ():
            pipelines += self._pipelines_of(of_size(table, size), slack, schedules, best[0].estimate)
        return min(pipelines, key=_estimate)

    def _pipelines_of(
        self, table: VariantTable, slack: float, schedules: Sequence[str], seconds: float
    ) -> Iterator[tuple[Candidate, Stages]]:
        """The best pipelines by dynamic programming under each schedule, with transfers in the period of a
        stage and hidden; those are left out that are much slower than `seconds` and all before."""
        costs = self.layout_costs
        several = len(costs.cluster.machines) > 1
        parts = of_equal_shapes(table) if costs.constraints.uniform else (table,)
        problems = [
            (part, schedule, hidden)
            for part, schedule, hidden in product(parts, schedules, (False, True))
            if hidden == several or schedule_policy(schedule).waits_for_transfers
        ]  # else transfers are hidden either way, and priced between machines where there are some

        def best(problem: tuple[VariantTable, str, bool]) -> tuple[Candidate, Stages] | None:
            part, schedule, hidden = problem
            below = SLOWER * max(self._objectives.get((schedule, hidden), math.inf), seconds)
            try:
                return best_pipeline(costs, part, slack=slack, schedule=schedule, hidden=hidden, below=below)
            except InfeasibleError:
                return None

        pipelines = costs.solving.parallel_map(best, problems, costs.processes, serial_seconds=SERIAL_SECONDS)
        for (_, schedule, hidden), pipeline in zip(problems, pipelines, strict=True):
            if pipeline is not None:
                least = self._objectives.get((schedule, hidden), math.inf)
                self._objectives[schedule, hidden] = min(least, pipeline[1].seconds)
                yield pipeline


def _estimate(pipeline: tuple[Candidate, Stages]) -> float:
    return pipeline[0].estimate


def may_fit(layout_costs: LayoutCosts, micro_batches: int, whole: SubMesh, larger: int = 1) -> bool:
    """Whether one stage on a whole pool could hold all layers with one micro-batch in flight.

    A pipeline needs no less: of p equal stages a device holds the layers of one, for p micro-batches, on
    1 / p of the devices. Always true where there are several pools.

    Args:
        layout_costs: of the program.
        micro_batches: in a step.
        whole: the pool.
        larger: factor on the samples of a micro-batch; what depends on them is taken to grow with it.
    """
    if len(layout_costs.pools) > 1:
        return True
    memory, restriction = layout_costs.memory(whole), layout_costs.restriction

    def fits(variant: Variant) -> bool:
        for profile in (variant.profile, variant.recompute):
            once = profile.nbytes(1)
            grows = once - float(profile.fixed.sum())
            if once + (larger - 1) * grows <= memory:
                return True
        return False

    (fastest,) = fastest_table(layout_costs, micro_batches, (whole,)).variants
    if any(map(fits, fastest)):
        return True
    shapes = shapes_for(layout_costs, micro_batches, whole)
    if larger > 1:  # few layouts have room for that: most shapes need not be solved
        shapes = tuple(
            s for s in shapes if _least_bytes(layout_costs, micro_batches, whole, s, larger) <= memory
        )
    kinds: tuple[VariantKind, ...] = ("multipliers", "within memory")
    for some in (shapes[:1], shapes[1:]):  # the first one mostly fits
        pairs = [(whole, shape) for shape in some]
        layout_costs.prepare_variants(micro_batches, pairs, restriction, kinds[: 1 if larger > 1 else None])
        for _, shape in pairs:
            layouts = micro_batches, whole, shape, restriction
            variants = layout_costs.variants(*layouts)
            if larger == 1 or layout_costs.has_variants(*layouts, "within memory"):  # for one micro-batch
                variants += layout_costs.variants_within_memory(*layouts)
            if any(map(fits, variants)):
                return True
    return False


def _least_bytes(
    layout_costs: LayoutCosts, micro_batches: int, submesh: SubMesh, shape: Shape, larger: int
) -> float:
    """A lower bound on the bytes that a device holds in any layouts, all layers recomputed or none."""
    devices = devices_for(layout_costs.pools, submesh)
    limit = MemoryLimit(layout_costs.memory(submesh), live=larger)

    def bounds() -> Iterator[float]:
        for recompute in ((), layout_costs.all_layers(micro_batches)):
            layered = layout_costs.layered_graph(micro_batches, recompute)
            formulation = layout_costs.formulation(layered, devices, shape)
            yield limited_nodes(formulation, formulation.problem, limit).least_peak()[1]

    return min(bounds())
