"""Parts of the search: uniform pipelines, neighbours of a pipeline, pools, borders, restrictions, fronts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.programs.searched import CHAIN, PROGRAMS, SECONDS, mixed, slow, two_by_two

from benchmarks.support.all_uniform_pipelines import uniform_pipelines
from distgraph.engine.search_driver import fixed_mesh_search
from distgraph.engine.search_driver import pipeline_search as pipeline_search_module
from distgraph.engine.search_driver.candidate import Candidate, StageChoice, build_candidate, layout_identity
from distgraph.engine.search_driver.evaluations import Evaluation, evaluate, front
from distgraph.engine.search_driver.explain.decisions import with_problems
from distgraph.engine.search_driver.fixed_mesh_search import double_recursion
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.layout_variants import SolvingProcesses
from distgraph.engine.search_driver.local_search import local_search_moves
from distgraph.engine.search_driver.micro_batch_search import best_count, counts_to_try
from distgraph.engine.search_driver.pipeline_search import PipelineSearch, _least_bytes, may_fit
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_space import (
    Shape,
    adjacent_counts,
    micro_batch_counts,
    pools_of,
    submeshes_of,
)
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.engine.search_driver.stage_search import (
    best_pipeline,
    fastest_table,
    shapes_for,
    undominated,
    variant_table,
)
from distgraph.engine.search_driver.uniform_pipelines import best_uniform
from distgraph.passes.search.inter_op.submesh_placement import SubMesh
from distgraph.passes.search.intra_op import solve_layouts
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.restrictions import Restriction
from distgraph.passes.search.intra_op.solution_cache import VARIABLE
from distgraph.passes.search.solver.problem import Problem, Solution

ONE, TWO = Shape((("dp", 1),)), Shape((("dp", 2),))


@pytest.fixture(scope="module")
def layout_costs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LayoutCosts]:
    """Of the perceptron on two machines of two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("solved")))
        cluster = two_by_two()
        yield LayoutCosts(PROGRAMS["mlp"].compile_request(), cluster, pools_of(cluster))


@pytest.mark.parametrize("restriction", ["uniform", "zero1", "zero3", "none"])
def test_the_best_uniform_row_is_the_best_of_all(layout_costs: LayoutCosts, restriction: Restriction) -> None:
    every = [pipeline for count in (1, 2) for pipeline in uniform_pipelines(layout_costs, count, restriction)]
    best = best_uniform(layout_costs, [1, 2], restriction)
    assert best is not None
    assert best.estimate == min(pipeline.estimate for pipeline in every)
    shapes = {(str(pipeline.stages[0].shape), len(pipeline.stages)) for pipeline in every}
    assert shapes == {
        ("dp=4", 1),
        ("dp=2 x tp=2", 1),
        ("dp=2", 2),
        ("tp=2", 2),
    }  # three layers: not four stages


def test_uniform_rows_split_what_they_say(layout_costs: LayoutCosts) -> None:
    """dp splits inputs by the batch; parameters only with zero3, states from zero1 on."""
    split: dict[str, set[str]] = {}
    for restriction in ("uniform", "zero1", "zero3"):
        pipeline = next(
            r for r in uniform_pipelines(layout_costs, 1, restriction) if str(r.stages[0].shape) == "dp=4"
        )
        graph = build_candidate(pipeline, layout_costs).completed
        kinds = ("input", "param", "state")
        split[restriction] = {
            op.kind
            for op in graph.sources(*kinds)
            if any("dp" in dim for dim in graph.attrs[op.result.name].spec.dims)
        }
        (x,) = (op for op in graph.sources("input") if op.attrs["name"] == "x")
        assert graph.attrs[x.result.name].spec.dims == (("dp",), ())
    assert split["uniform"] == {"input"}
    assert split["zero1"] <= {"input", "state"}
    assert "param" in split["zero3"]


def pipeline(*stages: StageChoice, micro_batches: int = 2) -> Candidate:
    return Candidate("search", stages, "none", 0.0, micro_batches=micro_batches)


def borders(candidate: Candidate) -> list[tuple[int, tuple[int, ...]]]:
    return [(stage.stop, stage.devices) for stage in candidate.stages]


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2)])
def test_equal_programs_of_two_restrictions_are_told(
    layout_costs: LayoutCosts, recompute: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where layers are computed again, whose layouts are those of the first time."""

    def pipeline(shape: str, restriction: Restriction) -> Candidate:
        pipelines = uniform_pipelines(layout_costs, 1, restriction)
        return replace(next(r for r in pipelines if str(r.stages[0].shape) == shape), recompute=recompute)

    for shape, equal in (("tp=2", True), ("dp=4", False)):  # ZeRO splits over dp
        bare, sharded = pipeline(shape, "uniform"), pipeline(shape, "zero3")
        graphs = [build_candidate(each, layout_costs).completed for each in (bare, sharded)]
        assert (graphs[0].attrs == graphs[1].attrs) == equal
        assert (layout_identity(bare, layout_costs) == layout_identity(sharded, layout_costs)) == equal
    monkeypatch.setattr(layout_costs, "solving", SolvingProcesses())
    bare, sharded = (replace(bare, restriction=each) for each in ("uniform", "zero3"))
    assert layout_identity(bare, layout_costs) != layout_identity(
        sharded, layout_costs
    )  # nothing is solved yet


def test_neighbours_of_a_row() -> None:
    given = pipeline(
        StageChoice(0, 2, (0, 1), TWO), StageChoice(2, 3, (2,), ONE), StageChoice(3, 6, (3,), ONE)
    )
    *moved, scheduled, eager = local_search_moves(given)
    assert scheduled == replace(given, schedule="gpipe")
    assert eager == replace(given, schedule="eager-1f1b")
    assert [borders(found) for found in moved] == [
        [(1, (0, 1)), (3, (2,)), (6, (3,))],
        [(2, (0, 1)), (4, (2,)), (6, (3,))],
        [(1, (2,)), (3, (0, 1)), (6, (3,))],
        [(2, (0, 1)), (5, (3,)), (6, (2,))],
        [(3, (3,)), (4, (2,)), (6, (0, 1))],
    ]
    for found in local_search_moves(given):
        assert [stage.first for stage in found.stages] == [0, *(stage.stop for stage in found.stages[:-1])]


def test_neighbours_by_micro_batches() -> None:
    one = pipeline(StageChoice(0, 3, (0,), ONE), micro_batches=2)
    assert [found.micro_batches for found in local_search_moves(one, (1, 2, 8, 4))] == [1, 4, 8]
    assert list(local_search_moves(one)) == []
    priced = pipeline(StageChoice(0, 3, (0,), ONE, memory_multiplier=1.0))
    cheaper = list(local_search_moves(priced, (1, 2)))
    assert [[stage.memory_multiplier for stage in found.stages] for found in cheaper] == [[0.25], [0.5]]
    assert {found.micro_batches for found in cheaper} == {priced.micro_batches}


def test_pools_and_what_stages_may_take_of_them() -> None:
    cluster = cluster_of(mixed(0.5, 4, 2))
    pools = pools_of(cluster)
    assert [(pool.name, pool.machines) for pool in pools] == [("G", ((0, 1, 2, 3),)), ("H", ((4, 5),))]
    taken = [(1, 0), (2, 0), (4, 0), (0, 1), (0, 2), (4, 2)]
    assert [submesh.sizes for submesh in submeshes_of(pools)] == taken
    assert micro_batch_counts(7) == (7, 1)
    assert micro_batch_counts(96) == (96, 48, 24, 12, 6, 3, 1)


def test_a_front_without_what_another_variant_beats() -> None:
    """Whatever is chosen from all of them can be chosen from those that stay, as fast and as small."""
    cluster = two_by_two()
    layout_costs = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster))
    once = variant_table(layout_costs, 2, submeshes_of(layout_costs.pools))
    every = replace(once, variants=tuple((*pipeline, *pipeline) for pipeline in once.variants))
    few = undominated(every)
    assert few.submeshes == every.submeshes
    assert sum(map(len, few.variants)) < sum(map(len, every.variants))
    for left, all_ in zip(few.variants, every.variants, strict=True):
        costs = [np.concatenate([_stacked(v.profile), _stacked(v.recompute)]) for v in left]
        for variant in all_:
            own = np.concatenate([_stacked(variant.profile), _stacked(variant.recompute)])
            assert any((other <= own * (1 + 1e-8)).all() for other in costs)
        assert not any((a <= b).all() for a in costs for b in costs if a is not b)
    assert best_pipeline(layout_costs, few)[0].estimate == best_pipeline(layout_costs, every)[0].estimate


def _stacked(profile: Profile) -> np.ndarray:
    p = profile
    return np.array([p.forward + p.backward, p.border, p.step, p.fixed, p.activations, p.temporary])


def test_bytes_across_borders_of_a_chain() -> None:
    """Behind each linear layer its output and the gradient of that: pipelines x 24 doubles each."""
    cluster = two_by_two()
    layered = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster)).layered_graph(2)
    assert len(layered.layers) == 5
    np.testing.assert_array_equal(layered.crossing, 2 * 8 * (CHAIN.batch // 2) * 24)


def test_a_solution_far_from_its_bound_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("one", (np.array([1.0, 2.0]),))
    asked: list[float] = []
    starts: list[object] = []

    def solve(given: Problem, *, seconds: float, gap: float, start: object = None, **_: bool) -> Solution:
        asked.append(seconds)
        starts.append(start)
        objective = 2.0 if len(asked) == 1 else 1.0
        return Solution((int(objective) - 1,), objective, 1.0, (objective - 1.0) / objective, "feasible")

    monkeypatch.setattr(solve_layouts, "solve_cached", solve)
    assert solve_layouts.solve_problem(problem).objective == 1.0
    assert asked == [solve_layouts.SOLVE_SECONDS, 5 * solve_layouts.SOLVE_SECONDS]
    assert starts == [None, (1,)]
    assert solve_layouts.solve_problem(problem).choice == (0,)
    assert len(asked) == 3  # this one was not far


def test_shapes_of_the_best_row_are_not_left_out() -> None:
    """With many numbers of micro-batches; of one stage, its shape by itself takes as long as the pipeline."""
    program = replace(PROGRAMS["mlp"], batch=1024)
    assert len(micro_batch_counts(program.batch)) > 8
    state = SearchState(program.compile_request(), two_by_two(), "auto", 600.0)
    for _ in run_search(state):
        pass
    pipeline = min(state.pipelines.best.values(), key=lambda pipeline: pipeline.estimate)
    taken = {(len(stage.devices), stage.shape) for stage in pipeline.stages}
    assert not taken & {(sum(submesh.sizes), shape) for submesh, shape in state.pipelines.excluded_shapes()}
    key, other = list(state.pipelines.shape_seconds)[:2]
    state.pipelines.shape_seconds[key], state.pipelines.shape_seconds[other] = (
        pipeline.estimate * (1 + 1e-12),
        pipeline.estimate * 1.01,
    )
    assert other in state.pipelines.excluded_shapes()
    assert key not in state.pipelines.excluded_shapes()


def test_slower_shapes_get_no_layouts_with_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many numbers of micro-batches: a first pipeline excludes them; the best pipeline is the same."""
    program = replace(PROGRAMS["mlp"], batch=64)
    cluster = two_by_two(memory="200 KiB", cable="20 MB/s")

    def best(most: int) -> tuple[float, PipelineSearch, set[tuple[SubMesh, Shape]]]:
        monkeypatch.setattr(pipeline_search_module, "FEW_COUNTS", most)
        pipelines = PipelineSearch(LayoutCosts(program.compile_request(), cluster, pools_of(cluster)))
        candidate = pipelines.best_for(4)
        assert candidate is not None
        costs = pipelines.layout_costs
        pairs = {(s, shape) for s in pipelines.submeshes for shape in shapes_for(costs, 4, s)}
        return (
            candidate.estimate,
            pipelines,
            {p for p in pairs if costs.has_variants(4, *p, "none", "multipliers")},
        )

    seconds, pipelines, solved = best(0)
    excluded = pipelines.excluded_shapes()
    assert excluded
    assert not solved & excluded
    everything, others, all_solved = best(1000)
    assert not others.excluded_shapes()
    assert solved | excluded == all_solved
    assert seconds == everything
    assert seconds <= pipelines._first_estimate


@pytest.mark.parametrize("memory", ["75.6 KiB", "1 MiB"])
def test_the_fastest_variant_is_the_first_of_all(memory: str) -> None:
    """The others are the same whether it was asked for before, and it counts as costs that are known."""

    def variants(fastest: bool) -> list[object]:
        cluster = two_by_two(memory=memory)
        costs = LayoutCosts(PROGRAMS["gpt"].compile_request(), cluster, pools_of(cluster))
        layouts = 1, submeshes_of(costs.pools)[-1], Shape((("dp", 2), ("tp", 2))), "none"
        if fastest:
            first = costs.fastest(*layouts)
            assert costs.has_variants(*layouts)
            assert not costs.has_variants(*layouts, "multipliers")
            assert costs.variants(*layouts)[0].estimate == first.estimate
        every = (*costs.variants(*layouts), *costs.variants_within_memory(*layouts))
        return [(v.estimate, v.memory_multiplier, v.solved, v.memory_limit) for v in every]

    assert variants(fastest=True) == variants(fastest=False)


def test_the_fastest_variants_keep_the_time_limit() -> None:
    expired = False
    cluster = two_by_two()
    costs = LayoutCosts(PROGRAMS["mlp"].compile_request(), cluster, pools_of(cluster), lambda: expired)
    few = fastest_table(costs, 2, submeshes_of(costs.pools)[:1])
    assert few.complete
    expired = True
    table = fastest_table(costs, 2, submeshes_of(costs.pools))
    assert not table.complete
    assert [len(variants) for variants in table.variants].count(0) >= 1
    assert costs.variants_within_memory(2, table.submeshes[-1], TWO, "none") == ()
    assert not costs.has_variants(2, table.submeshes[-1], TWO, "none", "within memory")


@pytest.mark.parametrize("count", [1, 2])
def test_what_cannot_fit_is_not_solved(layout_costs: LayoutCosts, count: int) -> None:
    """Larger micro-batches take more than any layouts leave; the bound is below what each variant holds."""
    whole = submeshes_of(layout_costs.pools)[-1]
    for shape in shapes_for(layout_costs, count, whole):
        for restriction in ("none", "uniform"):
            for variant in layout_costs.variants(count, whole, shape, restriction):
                for larger in (1, 3):
                    least = _least_bytes(layout_costs, count, whole, shape, larger)
                    assert (
                        0
                        < least
                        <= min(
                            larger * p.nbytes(1) - (larger - 1) * p.fixed.sum()
                            for p in (variant.profile, variant.recompute)
                        )
                    )
    assert may_fit(layout_costs, count, whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayoutCosts, "variants", None)  # a call would fail
        assert not may_fit(layout_costs, count, whole, larger=10**9)


def test_rings_are_not_built_where_parameters_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_mesh_search, "build_program", None)  # a call would fail
    cluster = two_by_two(memory="60 KiB")
    costs = LayoutCosts(PROGRAMS["gpt"].compile_request(), cluster, pools_of(cluster))
    reason = fixed_mesh_search.context_parallel(costs, 4, "rings")
    assert isinstance(reason, str)
    assert reason.startswith("out of memory by at least ")
    assert reason.endswith(": every device would hold all parameters and states")


def test_stages_of_one_size_are_looked_for_beside_those_that_mix_sizes() -> None:
    """Beside stages of two and of four devices stands a pipeline of either size; none is ahead."""
    program = replace(PROGRAMS["conv"], batch=8)
    state = SearchState(program.compile_request(), cluster_of(slow(2, 2, 2)), "auto", SECONDS)
    for _ in run_search(state):
        pass
    assert state.best is not None
    found = 0
    for count in state.pipelines.best:
        layers = len(state.layout_costs.layered_graph(count).layers)
        mixture = pipeline(
            StageChoice(0, 1, (0, 1), TWO),
            StageChoice(1, layers, (2, 3, 4, 5), Shape((("dp", 4),))),
            micro_batches=count,
        )
        for single in state.pipelines.of_single_sizes(mixture):
            found += 1
            assert len(_sizes(single)) == 1
            assert _sizes(single) <= _sizes(mixture)
            made = evaluate(single, state.layout_costs)
            assert not made.fits or made.seconds >= state.best.seconds
    assert found


def _sizes(pipeline: Candidate) -> set[int]:
    return {len(stage.devices) for stage in pipeline.stages}


@pytest.mark.parametrize("size", [1, 7, 96, 1536])
def test_counts_beside_are_the_next_divisors(size: int) -> None:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for count in divisors:
        above = [n for n in divisors if n > count][:1]
        below = [n for n in divisors if n < count][-1:]
        assert adjacent_counts(size, count) == (*above, *below)


def test_a_number_of_micro_batches_between_those_that_are_climbed() -> None:
    """Of a batch of 96 first 6 and 3 are tried; where memory holds a fourth of it at a time, 4 is best."""
    program = replace(PROGRAMS["mlp"], batch=96)
    roomy = cluster_of(slow(1))
    layout_costs = LayoutCosts(program.compile_request(), roomy, pools_of(roomy))
    stage = StageChoice(0, len(layout_costs.layered_graph(1).layers), (0,), Shape((("dp", 1),)))
    made = {
        m: evaluate(Candidate("one", (stage,), "none", 0.0, micro_batches=m), layout_costs) for m in (3, 4, 6)
    }
    peaks = {m: found.program.forecast.peak_memory for m, found in made.items() if found.program}
    assert peaks[3] > peaks[4] > peaks[6]
    assert made[6].seconds > made[4].seconds
    assert 4 not in micro_batch_counts(96)
    plan = program.search(cluster_of(slow(1, memory=f"{(peaks[3] + peaks[4]) / 2 / 1024} KiB")))
    assert plan.micro_batches == 4


# Nothing fits before 16; estimates fall to 256 and rise again. From the start at 4 the next that fits is 16,
# and strides of 1, 2 lead past 128 to the best, with what lies beside it.
def test_the_climb_goes_on_from_the_first_number_that_fits() -> None:
    counts = tuple(2**power for power in range(9, -1, -1))
    pipelines: dict[int, Candidate] = {}
    asked = []
    for count in counts_to_try(counts, 1, pipelines, lambda: False):
        asked.append(count)
        if count >= 16:
            estimate = abs(math.log2(count / 256)) + 1
            pipelines[count] = Candidate("search", (), "none", estimate, micro_batches=count)
    assert asked == [4, 8, 16, 32, 128, 256, 512]
    assert best_count(pipelines) == 256


@pytest.mark.parametrize(("devices", "axes"), [(8, 3), (16, 4)])
def test_a_problem_of_what_double_recursion_found_is_made_on_three_axes_at_most(
    devices: int, axes: int
) -> None:
    cluster = cluster_of(slow(devices))
    layout_costs = LayoutCosts(PROGRAMS["mlp"].compile_request(), cluster, pools_of(cluster))
    found = double_recursion(layout_costs, 1)
    assert len(found.completed.meshes[0].axes) == axes
    again = with_problems(found, layout_costs)
    if axes > 3:
        assert again is found
    else:
        ((formulation, choice),) = again.solved.values()
        assert formulation.problem.feasible(choice)
        assert again.seconds <= found.seconds


def test_one_process_solves_shapes_in_their_order_until_the_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first shape in any case."""
    solved: list[int] = []
    cluster = two_by_two()
    costs = LayoutCosts(CHAIN.compile_request(), cluster, pools_of(cluster), expired=lambda: len(solved) > 1)
    solve_variants = LayoutCosts._solve_variants
    monkeypatch.setattr(
        LayoutCosts,
        "_solve_variants",
        lambda self, key: (solved.append(key[1].size), solve_variants(self, key))[1],
    )
    one, two, grid = Shape((("dp", 1),)), Shape((("dp", 2),)), Shape((("dp", 2), ("tp", 2)))
    pairs = [(SubMesh((1,)), one), (SubMesh((2,)), two), (SubMesh((4,)), grid)]
    costs.prepare_variants(1, pairs, "none", ("fastest",))
    assert solved == [pair[0].size for pair in pairs[:2]]


def test_the_front_of_many_keeps_its_ends() -> None:
    choices = {"micro_batches": "1", "schedule": "1f1b", "recompute": "0 of 5 layers", "stages": "x on dp=1"}
    evaluations = [
        Evaluation("search", None, 1.0 + n, 1.0, 0.0, 1, choices, None, memory=100 - n, devices=30 - n)
        for n in range(20)
    ]
    unfit = replace(evaluations[0], seconds=0.5, missing_bytes=1.0)
    ineligible = replace(evaluations[0], seconds=0.5, eligible=False)
    found = front([*evaluations, unfit, ineligible])
    assert len(found) <= 10
    assert [plan.seconds for plan in found[:3]] == [1.0, 2.0, 3.0]
    assert found[-1].devices == 11
    assert front([*evaluations[:2], replace(evaluations[0], seconds=1.0, memory=200)]) == found[:2]
    assert found[0].plan == "1 micro-batch, 1 stage on dp=1"
