"""Baselines: the programs that every answer of a search is compared with.

*In:* the state of a search. *Out:* evaluations of plain data parallelism, of one device, of uniform
pipelines, of double recursion and of sharding propagation; each may be the answer. *Invariant:* a baseline
that does not exist is entered with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from distgraph.engine.search_driver.baselines.data_parallel_zero import (
    evaluate_data_parallel_zero,
    groups_of_devices,
)
from distgraph.engine.search_driver.candidate import (
    Candidate,
    StageChoice,
    broken_constraint,
    build_candidate,
    candidate_of_plan,
    layout_identity,
    may_have_rings,
    program_of_plan,
    split_by_data_axes,
    with_rings,
)
from distgraph.engine.search_driver.evaluations import Evaluation, evaluation_of, without_program
from distgraph.engine.search_driver.fixed_mesh_search import (
    annotated_meshes,
    context_parallel,
    data_parallel,
    double_recursion,
    mesh2d_programs,
    mesh2d_where_it_gains,
    sharding_propagation,
)
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.pipeline_search import best_count
from distgraph.engine.search_driver.search_space import Shape
from distgraph.engine.search_driver.search_state import FORECASTS, Event, SearchState
from distgraph.engine.search_driver.stage_search import pipeline_estimate
from distgraph.engine.search_driver.uniform_pipelines import (
    best_uniform,
    costs_of_equal_devices,
    pipelines_of,
)
from distgraph.errors import DistGraphError, ShardingError
from distgraph.ir.matmul_algorithm import ATTENTION
from distgraph.passes.matmul_algorithms import MATMUL_ALGORITHMS
from distgraph.passes.matmul_algorithms.product_seconds import ALGORITHMS
from distgraph.passes.search.intra_op.restrictions import RESTRICTION_NAMES, Restriction, zero_of

_UNIFORM: tuple[Restriction, ...] = ("uniform", "zero1", "zero3", "none")
_MOST_SHAPES = 3
"""Shapes of the mesh of mode mesh2d whose programs are forecast, the best ones by the tuner's estimate; in
mode auto only those whose products alone take less than the best step so far."""
_MOST_RING_STEPS = 1_024
"""Forward ops of attention times ranks of a ring, up to which a program of rings is built although another
one fits: each step is ops of its own, and takes some 12 ms to build and forecast for all ranks."""
_NEEDED_SPLIT = {2: 1, 3: 3}
"""Level of ZeRO -> what layouts have to split for it to have an effect: states, or parameters."""
_MOST_ZERO_OPS = 4_000
"""Ops of a serial graph up to which pipelines that do not fit are forecast with levels of ZeRO, too."""
_MOST_AXES = 4
"""Axes of a program of double recursion, at most: between layouts on more, changes of layout take minutes to
find (see `recursive`)."""


def evaluate_start(state: SearchState) -> Iterator[Event]:
    """The plan that the search starts from, if any, and the plan of its stages with layouts of the search.

    The search takes over the layers of the plan. Local search goes on from its stages; no answer is behind
    the plan itself, if that fits and keeps the constraints.

    Raises:
        GraphError, ResourceError, ShardingError: the plan does not fit the program or the cluster.
    """
    plan = state.start
    if plan is None:
        return
    layers = state.constraints.layers
    if layers not in (None, len(plan.layers)):
        raise ShardingError(
            f"layers of the search is {layers} but the plan to start from has {len(plan.layers)}; leave "
            f"one of them out"
        )
    yield Event("the plan to start from")
    state.layout_costs.firsts = [layer.first for layer in plan.layers]
    yield state.record(evaluation_of(program_of_plan(plan, state.layout_costs)))
    candidate = candidate_of_plan(plan, state.layout_costs)
    annotated = annotated_meshes(state.layout_costs.reference_graph.graph, state.layout_costs)
    if candidate is None or annotated or state.expired() or broken_constraint(candidate, state.layout_costs):
        return
    if {state.layout_costs.submesh(stage.devices) for stage in candidate.stages} <= set(
        state.pipelines.submeshes
    ):
        estimate = pipeline_estimate(state.layout_costs, candidate).seconds
        yield state.record(state.evaluations.evaluate(replace(candidate, estimate=estimate)))


def evaluate_data_parallel(state: SearchState, eligible: bool, hopeless: bool = False) -> Iterator[Event]:
    """Plain data parallelism on all devices, and on those of each kind where there are several.

    Args:
        state: of the search.
        eligible: whether it may be the answer; not where annotations say otherwise.
        hopeless: build it also where parameters and states alone are too large.
    """
    if not hopeless:
        yield Event("data parallel")
    broken = state.single_stage_breaks()
    for name, devices in groups_of_devices(state).items():
        if broken:
            state.evaluations.leave_out(name, broken)
            continue
        program = data_parallel(state.layout_costs, devices, name, hopeless=hopeless)
        if isinstance(program, str):
            state.evaluations.baselines[name] = program
        else:
            yield state.record(evaluation_of(program), eligible)


def evaluate_zero(state: SearchState) -> Iterator[Event]:
    """Levels of ZeRO: data parallelism with each that may gain, and those of the best pipelines.

    Of a large program only the best pipeline is forecast with other levels, unless there is no program that
    fits: each takes seconds to build.
    """
    layout_costs, most = state.layout_costs, state.constraints.zero
    large = state.best is not None and len(layout_costs.reference_graph.graph.ops) > _MOST_ZERO_OPS
    levels = range(2, (3 if most is None else most) + 1)
    fitting = [e for e in state.evaluations.all if e.fits and e.eligible and e.candidate is not None]
    best = min(fitting, key=lambda e: e.seconds, default=None)
    unfit = [e for e in state.evaluations.all if e.candidate and not e.fits and e.seconds < _seconds(state)]
    yield from evaluate_data_parallel_zero(state)
    starts = [] if large else sorted(unfit, key=lambda e: e.memory_ratio)[:FORECASTS]
    for evaluation in [best, *starts] if best is not None else starts:
        if evaluation.candidate is None or state.expired():
            continue
        split = evaluation.split
        if split is None:
            split = split_by_data_axes(evaluation.completed(layout_costs))
        candidate = replace(evaluation.candidate, origin="search")
        candidates = [replace(candidate, zero=n) for n in levels if split >= _NEEDED_SPLIT[n]]
        state.evaluations.prefetch(candidates)
        for each in candidates:
            yield state.record(state.evaluations.evaluate(each))


def evaluate_context_parallel(state: SearchState) -> Iterator[Event]:
    """Sequences split over as few ranks as leave each a sample, and over all, with attention by rings.

    Nothing is tried where the program has no attention or the runtime has no rings. Where a program fits
    already, long rings are left out for the longest that is soon built.
    """
    layout_costs, devices = state.layout_costs, len(state.layout_costs.devices)
    graph = layout_costs.reference_graph.graph
    attention = sum(op.kind in ATTENTION for op in graph.ops)
    if state.single_stage_breaks() or layout_costs.named_axes or not attention:
        return
    if len(layout_costs.pools) > 1 or not layout_costs.capabilities.matmul_algorithms:
        return
    samples = state.request.size // state.constraints.start.micro_batches
    divisors = [n for n in range(2, devices + 1) if devices % n == 0]
    fewest = next((n for n in divisors if devices // n <= samples), None)
    short = [n for n in divisors if attention * n <= _MOST_RING_STEPS]
    for ranks in dict.fromkeys(n for n in (fewest, devices, *short[-1:]) if n is not None and n > 1):
        if state.expired():
            return
        name = f"context parallel: dp={devices // ranks} x sp={ranks}"
        if state.best is not None and ranks not in short:
            steps = f"{attention} x {ranks} steps of rings are more than {_MOST_RING_STEPS}"
            state.evaluations.baselines[name] = f"left out: {steps}, and another program fits"
            continue
        yield Event(name)
        program = context_parallel(layout_costs, ranks, name)
        if isinstance(program, str):
            state.evaluations.baselines[name] = program
        else:
            yield state.record(evaluation_of(program))


def evaluate_rings(state: SearchState) -> Iterator[Event]:
    """The best program, and faster ones that do not fit, with rings in place of gathered keys and values."""
    layout_costs = state.layout_costs
    if not layout_costs.capabilities.matmul_algorithms or state.expired():
        return
    graph = layout_costs.reference_graph.graph
    if not {op.kind for op in graph.ops} & set(ATTENTION):
        return
    unfit = [e for e in state.evaluations.all if e.candidate and not e.fits and e.seconds < _seconds(state)]
    best = [] if state.best is None else [state.best]
    for evaluation in [*best, *sorted(unfit, key=lambda e: e.memory_ratio)[:FORECASTS]]:
        best_one = evaluation is state.best  # which is built for its plan in any case
        completed = (
            evaluation.built(layout_costs).completed if best_one else evaluation.completed(layout_costs)
        )
        if may_have_rings(completed):
            program = with_rings(evaluation.built(layout_costs), layout_costs)
            if evaluation is not state.best:
                evaluation.release()
            yield Event("attention by rings")
            yield state.record(evaluation_of(replace(program, origin="search"), other_layouts=True))
        if state.expired():
            return


def _seconds(state: SearchState) -> float:
    """Of the best program so far; infinite where there is none."""
    return math.inf if state.best is None else state.best.seconds


def evaluate_single_devices(state: SearchState) -> Iterator[Event]:
    """One device of each kind, as long as parameters and states fit: nothing else is as fast to try."""
    if state.single_stage_breaks() or state.layout_costs.named_axes:
        return
    layered = state.layout_costs.reference_graph
    recompute = state.constraints.recomputed(len(layered.layers)) or ()
    nbytes = sum(op.result.nbytes for op in layered.graph.sources("param", "state"))
    for pool in state.layout_costs.pools:
        device = pool.machines[0][0]
        if nbytes <= state.cluster.devices[device].memory and not state.expired():
            stage = StageChoice(0, len(layered.layers), (device,), Shape((("dp", 1),)))
            yield Event("one device")
            free = Candidate("search", (stage,), state.layout_costs.restriction, math.inf)
            start = state.constraints.start
            candidate = replace(
                free, micro_batches=start.micro_batches, schedule=start.schedule, recompute=recompute
            )
            yield state.record(state.evaluations.evaluator.evaluate(candidate))


def evaluate_sharding_propagation(state: SearchState) -> Iterator[Event]:
    """Sharding propagation from the annotations, with the micro-batches of the strategy."""
    yield Event("sharding propagation")
    yield state.record(evaluation_of(sharding_propagation(state.layout_costs, state.micro_batches)))


def evaluate_mesh2d(state: SearchState) -> Iterator[Event]:
    """Two-dimensional tensor parallelism by every algorithm, in the shapes with the best estimates.

    Raises:
        ShardingError: the annotations do not fit, or no algorithm fits a mesh.
    """
    reasons: list[DistGraphError] = []
    if state.runtime is not None and not state.runtime.executes.matmul_algorithms:
        raise ShardingError(
            f"mode mesh2d searches distributed algorithms of matrix products, which runtime "
            f'{state.runtime.name} does not execute; search in mode "auto", or take another runtime'
        )
    for algorithm in (name for name in MATMUL_ALGORITHMS if name in ALGORITHMS):
        yield Event(f"mesh2d, {algorithm}")
        try:
            programs = mesh2d_programs(state.layout_costs, state.micro_batches, algorithm, _MOST_SHAPES)
            for _, build in programs:
                yield state.record(evaluation_of(build()))
        except DistGraphError as error:
            reasons.append(error)
    if len(reasons) == len([name for name in MATMUL_ALGORITHMS if name in ALGORITHMS]):
        raise reasons[0]


def evaluate_mesh2d_where_it_gains(state: SearchState) -> Iterator[Event]:
    """Two-dimensional tensor parallelism in mode auto, where the tuner's model says that it may be fastest.

    It is tried with one micro-batch, and where that needs too much memory with those of the best program.
    """
    best, executes = state.best, state.layout_costs.capabilities
    counts = [1] if best is None else [1, int(best.choices["micro_batches"])]
    for micro_batches in dict.fromkeys(state.constraints.among("micro_batches", counts)):
        limit, fits = math.inf if best is None else best.seconds, False
        if state.single_stage_breaks() or state.layout_costs.named_axes or not executes.matmul_algorithms:
            return
        for build in mesh2d_where_it_gains(state.layout_costs, micro_batches, limit, _MOST_SHAPES):
            if state.expired():
                return
            yield Event("mesh2d, meshslice")
            evaluation = evaluation_of(build())
            fits |= evaluation.fits
            yield state.record(evaluation)
        if fits:
            return


def evaluate_double_recursion(state: SearchState) -> Iterator[Event]:
    """Double recursion over all devices, with the micro-batches of the strategy."""
    yield Event("double recursion")
    yield state.record(evaluation_of(double_recursion(state.layout_costs, state.micro_batches)))


def evaluate_uniform_and_recursive(state: SearchState) -> Iterator[Event]:
    """The best uniform pipeline of every kind, by estimate, and double recursion, while there is time.

    The number of micro-batches is that of the best pipeline by estimate. On devices of several kinds all get
    equal shares, in layouts for the slowest kind, and the numbers next to that one are tried, too. If a
    uniform pipeline is then the best program, local search gets a start with its stages.
    """
    yield Event("uniform grid")
    best = state.pipelines.best
    micro_batches = best_count(best) if best else state.constraints.start.micro_batches
    allowed, pipelines = _allowed_restrictions(state), list[_UniformPipelines]()
    costs = costs_of_equal_devices(state.layout_costs, micro_batches)
    if isinstance(costs, str):
        state.evaluations.baselines |= {RESTRICTION_NAMES[each]: costs for each in allowed}
    elif costs is state.layout_costs:
        pipelines = _best_uniform(state, costs, [micro_batches], allowed)
    else:
        counts = [micro_batches, *state.pipelines.adjacent_counts(micro_batches)]
        pipelines = _best_uniform(state, costs, counts, allowed)
    if state.expired():
        return
    yield Event("double recursion")
    jobs: list[Callable[[], Evaluation | str]] = [partial(_double_recursion, state)]  # in this process
    jobs += [each.evaluate for each in pipelines]
    processes = state.evaluations.processes
    recursive, *uniform = state.layout_costs.solving.parallel_map(lambda job: job(), jobs, processes)
    for evaluation, equal in zip(uniform, pipelines, strict=True):
        assert isinstance(evaluation, Evaluation)
        yield from equal.record(evaluation)
    if costs is not state.layout_costs and state.best is not None and not state.expired():
        for equal in (each for each in pipelines if state.best.origin in each.origins):
            yield state.record(_evaluate_stages_of(state, equal.pipelines[0]))
    if isinstance(recursive, str):
        state.evaluations.baselines["double recursion"] = recursive
    else:
        yield state.record(recursive)


@dataclass(frozen=True)
class _UniformPipelines:
    """Uniform pipelines that come to the same program under several restrictions.

    Attributes:
        state: of the search.
        costs: of equal devices, for which their layouts are solved.
        pipelines: one for each restriction.
    """

    state: SearchState
    costs: LayoutCosts
    pipelines: tuple[Candidate, ...]

    @property
    def origins(self) -> set[str]:
        """Names of the pipelines, one for each restriction."""
        return {pipeline.origin for pipeline in self.pipelines}

    def evaluate(self) -> Evaluation:
        """The evaluation of the program on the cluster, without the program."""
        if self.costs is self.state.layout_costs:
            return without_program(self.state.evaluations.evaluator.evaluate(self.pipelines[0]))
        program = build_candidate(self.pipelines[0], self.costs, self.state.layout_costs)
        return without_program(evaluation_of(program))

    def record(self, evaluation: Evaluation) -> Iterator[Event]:
        """Enter the evaluation under the name of each restriction."""
        for pipeline in self.pipelines:
            named = replace(evaluation, origin=pipeline.origin)
            if self.costs is self.state.layout_costs:
                yield self.state.record(replace(named, candidate=pipeline))
                continue
            named.choices = {**named.choices, "stages": "; ".join(map(str, pipeline.stages))}
            named.rebuild = partial(build_candidate, pipeline, self.costs)
            yield self.state.record(named, broken=broken_constraint(pipeline, self.costs, evaluation.split))


def _evaluate_stages_of(state: SearchState, pipeline: Candidate) -> Evaluation:
    """The evaluation of a uniform pipeline's stages in layouts for the devices as they are.

    Local search goes on from it, which cannot go on from layouts for equal devices.
    """
    candidate = replace(pipeline, origin="search")
    estimate = pipeline_estimate(state.layout_costs, candidate).seconds
    return state.evaluations.evaluate(replace(candidate, estimate=estimate))


def _best_uniform(
    state: SearchState, costs: LayoutCosts, counts: Sequence[int], allowed: Sequence[Restriction]
) -> list[_UniformPipelines]:
    """The best uniform pipeline under each restriction; where there is none, the reason is noted."""
    excluded = state.pipelines.excluded_shapes() if costs is state.layout_costs else ()

    def best(restriction: Restriction) -> Candidate | None:
        return best_uniform(costs, counts, restriction, excluded)

    if costs is not state.layout_costs:  # else the search for pipelines has solved these
        for count in counts:
            if state.expired():
                return []
            shapes = dict.fromkeys((each.submesh, each.free) for each in pipelines_of(costs, count))
            costs.prepare_variants(count, list(shapes), "none", ("fastest",))
    pipelines = costs.solving.parallel_map(best, allowed, state.evaluations.processes)
    if state.expired():
        return []
    given = f", with {state.constraints}" if state.constraints.given() else ""
    same: dict[object, list[Candidate]] = {}
    for restriction, pipeline in zip(allowed, pipelines, strict=True):
        if pipeline is None:
            reason = f"out of memory by the estimate{given}"
            state.evaluations.baselines[RESTRICTION_NAMES[restriction]] = reason
        else:
            same.setdefault(layout_identity(pipeline, costs), []).append(pipeline)
    return [_UniformPipelines(state, costs, tuple(equal)) for equal in same.values()]


def _allowed_restrictions(state: SearchState) -> list[Restriction]:
    """The restrictions of uniform pipelines, without those that split more than a constraint allows."""
    zero, allowed = state.constraints.zero, []
    for restriction in _UNIFORM:
        if zero is None or zero_of(restriction) <= zero:
            allowed.append(restriction)
        else:
            state.evaluations.leave_out(RESTRICTION_NAMES[restriction], f"zero={zero}")
    return allowed


def _double_recursion(state: SearchState) -> Evaluation | str:
    """Double recursion for the micro-batches of the best program, or why there is none: no fault here."""
    broken = state.single_stage_breaks()
    if broken:
        return f"left out: {broken} is given"
    if state.layout_costs.named_axes:
        return f"left out: annotations name the axes {', '.join(state.layout_costs.named_axes)}"
    start = state.constraints.start.micro_batches
    micro_batches = start if state.best is None else int(state.best.choices["micro_batches"])
    try:
        return evaluation_of(double_recursion(state.layout_costs, micro_batches, _MOST_AXES))
    except DistGraphError as error:
        return f"there is none: {error}"
