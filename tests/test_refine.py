"""Moving layouts: fewer bytes or none saved, annotations kept, the same every time, the same numbers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from partitioned import assert_same, run_partitioned, run_serial
from random_programs import MESHES, PIPELINES, Program, programs

from distgraph.graph import Graph
from distgraph.ops.registry import lookup
from distgraph.passes.complete import complete
from distgraph.passes.redistribute import wire_price
from distgraph.passes.refine import _Refiner, multiplicity, refine
from distgraph.runtime.build import Build, build

ONE = tuple((mesh,) for mesh in MESHES)
checked = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=max(60, settings.default.max_examples),
)


def sent(built: Build) -> float:
    """Bytes of one step, of each move those of the rank that sends most, counted on the lowered programs."""
    most: dict[str, float] = {}
    for rank in built.ranks:
        program = built.program(rank)
        for task in program.tasks:
            for local in task.ops:
                times = program.graph.micro_batches if task.per_micro and not local.tail else 1
                wire = times * float(local.attrs.get("wire", 0.0))
                most[local.op.name] = max(most.get(local.op.name, 0.0), wire)
    return sum(most.values())


def is_even(built: Build) -> bool:
    """Whether all ranks hold as much of everything."""
    graph = built.lowered
    held = ((value.shape, graph.attrs[value.name]) for op in graph.ops for value in op.results)
    return all(
        size % attr.mesh.units(axes) == 0
        for shape, attr in held
        for size, axes in zip(shape, attr.spec.dims, strict=True)
    )


def modelled(graph: Graph) -> float:
    """The cost that the pass lowers."""
    return sum(_Refiner(graph, multiplicity(graph), wire_price).costs)


def completed(program: Program) -> Graph:
    return replace(complete(program.graph), micro_batches=len(program.feeds))


@checked
@given(programs(ONE, train=True))
def test_bytes_never_rise(program: Program) -> None:
    """Of the rank that sends most in each move, as the cost has it. All ranks together may send more: where a
    block is a window, or not as large as others, some ranks have nothing to send. Where blocks are not equal,
    the cost is a bound."""
    before = completed(program)
    after = refine(before)
    assert modelled(after) <= modelled(before) + 1e-9
    built = [build(graph, micro_batches=len(program.feeds)) for graph in (before, after)]
    if all(map(is_even, built)):
        assert sent(built[1]) <= sent(built[0]) + 0.5


@checked
@given(programs(ONE + PIPELINES, train=True, steps=4))
def test_annotations_stay(program: Program) -> None:
    before = completed(program)
    after = refine(before)
    assert [op.name for op in after.ops] == [op.name for op in before.ops]
    for name, told in program.graph.attrs.items():
        assert after.attrs[name] == told
    for op in after.ops:
        assert op.layout is not None
        for value in op.results:
            assert value.name not in after.kept or not after.attrs[value.name].spec.partial


@checked
@given(programs(ONE + PIPELINES, train=True, steps=4))
def test_contractions_and_params_keep_their_parts(program: Program) -> None:
    before = completed(program)
    after = refine(before)
    for old, new in zip(before.ops, after.ops, strict=True):
        if old.kind in ("param", "state"):
            parts = [
                a.mesh.count(axis for dim in a.spec.dims for axis in dim)
                for a in (before.attrs[old.name], after.attrs[new.name])
            ]
            assert parts[1] >= parts[0], f"%{old.name} was in {parts[0]} parts and is in {parts[1]}"
        pinned = any(before.attrs[v.name].pinned for v in old.results)
        if lookup(old.kind).cost == "matmul" and not pinned:
            assert old.layout is not None
            assert new.layout is not None
            counts = [
                x.mesh.count(axis for _, axes in x.axes for axis in axes) for x in (old.layout, new.layout)
            ]
            assert counts[1] >= counts[0], f"{old} had {counts[0]} parts and has {counts[1]}"


@checked
@given(programs(ONE + PIPELINES, train=True, steps=4))
def test_same_every_time(program: Program) -> None:
    before = completed(program)
    first, second = refine(before), refine(before)
    assert first.attrs == second.attrs
    assert [op.layout for op in first.ops] == [op.layout for op in second.ops]


@checked
@given(programs(ONE, train=True))
def test_refining_twice_changes_no_numbers(program: Program) -> None:
    twice = refine(refine(completed(program)))
    expected, updates = run_serial(program.graph, program.feeds, program.params)
    found, new, _ = run_partitioned(twice, program.feeds, program.params)
    assert_same(found, expected, 1e-10)
    assert_same({k: [v] for k, v in new.items()}, {k: [v] for k, v in updates.items()}, 1e-10)
