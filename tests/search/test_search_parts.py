"""Parts of the search by themselves: uniform rows, neighbours of a row, pools, borders, restrictions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.programs.searched import CHAIN, PROGRAMS, SECONDS, mixed, slow, two_by_two

from distgraph.engine.search import layout_costs as oracles
from distgraph.engine.search.baselines import best_uniform, uniform_rows
from distgraph.engine.search.candidate import Proposal, StageChoice, laid_out_as, realize
from distgraph.engine.search.decisions import with_problems
from distgraph.engine.search.evaluation import judge
from distgraph.engine.search.given_meshes import recursively
from distgraph.engine.search.layout_costs import Oracle
from distgraph.engine.search.local_search_moves import neighbours
from distgraph.engine.search.micro_batch_search import best_count, climb
from distgraph.engine.search.restrictions import Restriction
from distgraph.engine.search.search_space import (
    Shape,
    counts_beside,
    micro_batch_counts,
    pools_of,
    submeshes_of,
)
from distgraph.engine.search.searcher import Searcher
from distgraph.engine.search.stage_search import best_row, front, undominated
from distgraph.passes.search.intra_op.chosen_layouts import Profile
from distgraph.passes.search.intra_op.solution_cache import VARIABLE
from distgraph.passes.search.solver.problem import Problem, Solution

ONE, TWO = Shape((("dp", 1),)), Shape((("dp", 2),))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """Of the perceptron on two machines of two devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(tmp_path_factory.mktemp("solved")))
        cluster = two_by_two()
        yield Oracle(PROGRAMS["mlp"].training(), cluster, pools_of(cluster))


@pytest.mark.parametrize("restriction", ["uniform", "zero1", "zero3", "none"])
def test_the_best_uniform_row_is_the_best_of_all(oracle: Oracle, restriction: Restriction) -> None:
    every = [row for count in (1, 2) for row in uniform_rows(oracle, count, restriction)]
    best = best_uniform(oracle, [1, 2], restriction)
    assert best is not None
    assert best.estimate == min(row.estimate for row in every)
    shapes = {(str(row.stages[0].shape), len(row.stages)) for row in every}
    assert shapes == {
        ("dp=4", 1),
        ("dp=2 x tp=2", 1),
        ("dp=2", 2),
        ("tp=2", 2),
    }  # three layers: not four stages


def test_uniform_rows_split_what_they_say(oracle: Oracle) -> None:
    """dp splits inputs by the batch; parameters only with zero3, states from zero1 on."""
    split: dict[str, set[str]] = {}
    for restriction in ("uniform", "zero1", "zero3"):
        row = next(r for r in uniform_rows(oracle, 1, restriction) if str(r.stages[0].shape) == "dp=4")
        graph = realize(row, oracle).completed
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


def row(*stages: StageChoice, micro_batches: int = 2) -> Proposal:
    return Proposal("search", micro_batches, "1f1b", stages, (), "none", 0.0)


def borders(proposal: Proposal) -> list[tuple[int, tuple[int, ...]]]:
    return [(stage.stop, stage.devices) for stage in proposal.stages]


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2)])
def test_equal_programs_of_two_restrictions_are_told(
    oracle: Oracle, recompute: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where layers are computed again, whose layouts are those of the first time."""

    def row(shape: str, restriction: Restriction) -> Proposal:
        rows = uniform_rows(oracle, 1, restriction)
        return replace(next(r for r in rows if str(r.stages[0].shape) == shape), recompute=recompute)

    for shape, equal in (("tp=2", True), ("dp=4", False)):  # ZeRO splits over dp
        bare, sharded = row(shape, "uniform"), row(shape, "zero3")
        graphs = [realize(each, oracle).completed for each in (bare, sharded)]
        assert (graphs[0].attrs == graphs[1].attrs) == equal
        assert (laid_out_as(bare, oracle) == laid_out_as(sharded, oracle)) == equal
    monkeypatch.setattr(oracle, "_learned", type(oracle._learned)({}, {}, {}))
    bare, sharded = (replace(bare, restriction=each) for each in ("uniform", "zero3"))
    assert laid_out_as(bare, oracle) != laid_out_as(sharded, oracle)  # nothing is solved yet


def test_neighbours_of_a_row() -> None:
    given = row(StageChoice(0, 2, (0, 1), TWO), StageChoice(2, 3, (2,), ONE), StageChoice(3, 6, (3,), ONE))
    *moved, scheduled = neighbours(given)
    assert scheduled == replace(given, schedule="gpipe")
    assert [borders(found) for found in moved] == [
        [(1, (0, 1)), (3, (2,)), (6, (3,))],
        [(2, (0, 1)), (4, (2,)), (6, (3,))],
        [(1, (2,)), (3, (0, 1)), (6, (3,))],
        [(2, (0, 1)), (5, (3,)), (6, (2,))],
        [(3, (3,)), (4, (2,)), (6, (0, 1))],
    ]
    for found in neighbours(given):
        assert [stage.first for stage in found.stages] == [0, *(stage.stop for stage in found.stages[:-1])]


def test_neighbours_by_micro_batches() -> None:
    one = row(StageChoice(0, 3, (0,), ONE), micro_batches=2)
    assert [found.micro_batches for found in neighbours(one, (1, 2, 8, 4))] == [1, 4, 8]
    assert list(neighbours(one)) == []
    priced = row(StageChoice(0, 3, (0,), ONE, memory_price=1.0))
    cheaper = list(neighbours(priced, (1, 2)))
    assert [[stage.memory_price for stage in found.stages] for found in cheaper] == [[0.25], [0.5]]
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
    oracle = Oracle(CHAIN.training(), cluster, pools_of(cluster))
    once = front(oracle, 2, submeshes_of(oracle.pools))
    every = replace(once, variants=tuple((*row, *row) for row in once.variants))
    few = undominated(every)
    assert few.submeshes == every.submeshes
    assert sum(map(len, few.variants)) < sum(map(len, every.variants))
    for left, all_ in zip(few.variants, every.variants, strict=True):
        costs = [np.concatenate([_stacked(v.profile), _stacked(v.recompute)]) for v in left]
        for variant in all_:
            own = np.concatenate([_stacked(variant.profile), _stacked(variant.recompute)])
            assert any((other <= own * (1 + 1e-8)).all() for other in costs)
        assert not any((a <= b).all() for a in costs for b in costs if a is not b)
    assert best_row(oracle, few)[0].estimate == best_row(oracle, every)[0].estimate


def _stacked(profile: Profile) -> np.ndarray:
    p = profile
    return np.array([p.forward + p.backward, p.border, p.step, p.fixed, p.activations, p.temporary])


def test_bytes_across_borders_of_a_chain() -> None:
    """Behind each linear layer its output and the gradient of that: rows x 24 doubles each."""
    cluster = two_by_two()
    traced = Oracle(CHAIN.training(), cluster, pools_of(cluster)).traced(2)
    assert len(traced.layers) == 5
    np.testing.assert_array_equal(traced.crossing, 2 * 8 * (CHAIN.batch // 2) * 24)


def test_a_solution_far_from_its_bound_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("one", (np.array([1.0, 2.0]),))
    asked: list[float] = []

    def solve(given: Problem, *, seconds: float, gap: float) -> Solution:
        asked.append(seconds)
        objective = 2.0 if len(asked) == 1 else 1.0
        return Solution((int(objective) - 1,), objective, 1.0, (objective - 1.0) / objective, "feasible")

    monkeypatch.setattr(oracles, "solve_cached", solve)
    assert oracles.solved(problem).objective == 1.0
    assert asked == [oracles.SOLVE_SECONDS, 5 * oracles.SOLVE_SECONDS]
    assert oracles.solved(problem).choice == (0,)
    assert len(asked) == 3  # this one was not far


def test_shapes_of_the_best_row_are_not_left_out() -> None:
    """With many numbers of micro-batches; of one stage, its shape by itself takes as long as the row."""
    program = replace(PROGRAMS["mlp"], batch=1024)
    assert len(micro_batch_counts(program.batch)) > 8
    searcher = Searcher(program.training(), two_by_two(), "auto", 600.0)
    for _ in searcher.run():
        pass
    row = min(searcher._rows.values(), key=lambda row: row.estimate)
    taken = {(len(stage.devices), stage.shape) for stage in row.stages}
    assert not taken & {(sum(submesh.sizes), shape) for submesh, shape in searcher._poor()}
    key, other = list(searcher._ideal)[:2]
    searcher._ideal[key], searcher._ideal[other] = row.estimate * (1 + 1e-12), row.estimate * 1.01
    assert other in searcher._poor()
    assert key not in searcher._poor()


def test_a_mixture_ahead_by_its_estimate_alone_is_not_the_answer() -> None:
    """Stages of one size are forecast beside the rows that mix sizes; here one of them is faster."""
    program = replace(PROGRAMS["conv"], batch=8)
    searcher = Searcher(program.training(), cluster_of(slow(2, 2, 2)), "auto", SECONDS)
    for _ in searcher.run():
        pass
    assert searcher.best is not None
    mixtures = [row for row in searcher._rows.values() if len(_sizes(row)) > 1]
    behind = 0
    for row in mixtures:
        for even in searcher._even(row):
            assert len(_sizes(even)) == 1
            assert _sizes(even) <= _sizes(row)
            assert even.estimate >= row.estimate * (1 - 1e-9)
            made, mixed_ = judge(even, searcher.oracle), judge(row, searcher.oracle)
            assert not made.fits or made.seconds >= searcher.best.seconds
            behind += made.fits and made.seconds < mixed_.seconds
    assert behind


def _sizes(row: Proposal) -> set[int]:
    return {len(stage.devices) for stage in row.stages}


@pytest.mark.parametrize("size", [1, 7, 96, 1536])
def test_counts_beside_are_the_next_divisors(size: int) -> None:
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    for count in divisors:
        above = [n for n in divisors if n > count][:1]
        below = [n for n in divisors if n < count][-1:]
        assert counts_beside(size, count) == (*above, *below)


def test_a_number_of_micro_batches_between_those_that_are_climbed() -> None:
    """Of a batch of 96 first 6 and 3 are tried; where memory holds a fourth of it at a time, 4 is best."""
    program = replace(PROGRAMS["mlp"], batch=96)
    roomy = cluster_of(slow(1))
    oracle = Oracle(program.training(), roomy, pools_of(roomy))
    stage = StageChoice(0, len(oracle.traced(1).layers), (0,), Shape((("dp", 1),)))
    made = {m: judge(Proposal("one", m, "1f1b", (stage,), (), "none", 0.0), oracle) for m in (3, 4, 6)}
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
    rows: dict[int, Proposal] = {}
    asked = []
    for count in climb(counts, 1, rows, lambda: False):
        asked.append(count)
        if count >= 16:
            estimate = abs(math.log2(count / 256)) + 1
            rows[count] = Proposal("search", count, "1f1b", (), (), "none", estimate)
    assert asked == [4, 8, 16, 32, 128, 256, 512]
    assert best_count(rows) == 256


@pytest.mark.parametrize(("devices", "axes"), [(8, 3), (16, 4)])
def test_a_problem_of_what_double_recursion_found_is_made_on_three_axes_at_most(
    devices: int, axes: int
) -> None:
    cluster = cluster_of(slow(devices))
    oracle = Oracle(PROGRAMS["mlp"].training(), cluster, pools_of(cluster))
    found = recursively(oracle, 1)
    assert len(found.completed.meshes[0].axes) == axes
    again = with_problems(found, oracle)
    if axes > 3:
        assert again is found
    else:
        ((formulation, choice),) = again.solved.values()
        assert formulation.problem.feasible(choice)
        assert again.seconds <= found.seconds
