"""Random programs under random annotations give on several ranks what they give on one, to rounding.

float64 throughout: an error above 1e-10 of the largest element is a wrong program, not rounding.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from support.programs.partitioned import assert_same, run_partitioned, run_serial
from support.programs.random_programs import LOOPED, MESHES, OVERLAPPING, PIPELINES, Program, programs

from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import refine

BOUND = 1e-10
ONE = tuple((mesh,) for mesh in MESHES)
checked = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=max(60, settings.default.max_examples),
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
    report_multiple_bugs=False,
)


def check(program: Program, refined: bool = False) -> None:
    completed = complete(program.graph, MESHES[0])
    if refined:
        completed = refine(completed)
    expected, updates = run_serial(program.graph, program.feeds, program.params)
    found, new, _ = run_partitioned(completed, program.feeds, program.params)
    assert_same(found, expected, BOUND)
    assert_same({k: [v] for k, v in new.items()}, {k: [v] for k, v in updates.items()}, BOUND)


@checked
@given(programs(ONE, train=False))
def test_forward(program: Program) -> None:
    check(program)


@checked
@given(programs(ONE, train=True))
def test_training(program: Program) -> None:
    check(program)


@checked
@given(programs(ONE, train=True))
def test_training_refined(program: Program) -> None:
    check(program, refined=True)


@checked
@given(programs(PIPELINES, train=True, steps=3))
def test_pipeline(program: Program) -> None:
    check(program)


@checked
@given(programs(PIPELINES, train=True, steps=3))
def test_pipeline_refined(program: Program) -> None:
    check(program, refined=True)


@checked
@given(programs(OVERLAPPING, train=False, steps=3))
def test_overlapping_meshes(program: Program) -> None:
    check(program)


@checked
@given(programs(OVERLAPPING, train=True, steps=3))
def test_training_on_overlapping_meshes(program: Program) -> None:
    check(program)


@checked
@given(programs(OVERLAPPING, train=True, steps=3))
def test_training_on_overlapping_meshes_refined(program: Program) -> None:
    check(program, refined=True)


@checked
@given(programs(LOOPED, train=True, steps=2))
def test_a_mesh_that_is_passed_twice(program: Program) -> None:
    check(program)
