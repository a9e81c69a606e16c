"""Moving layouts: fewer bytes or none saved, annotations kept, the same every time, the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support.programs.partitioned import assert_same, run_partitioned, run_serial
from support.programs.random_programs import MESHES, PIPELINES, Program, programs
from support.programs.seeded_programs import CUBE, seeded_program

from distgraph.array_api.trace import trace
from distgraph.errors import ShardingError
from distgraph.ir.collective_registry import Space, is_collective
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.ir.step_phases import multiplicity
from distgraph.passes import choose_completion as completion_module
from distgraph.passes.analysis.redistribution_cost import move_cost
from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import Refined, _Refiner, refine, refined
from distgraph.passes.redistribution import cross_mesh, planner
from distgraph.passes.redistribution.cost_lower_bound import received
from distgraph.passes.redistribution.planner import (
    Price,
    latency_price,
    price_bound,
    redistribute,
    redistribute_cost,
    step_price,
    wire_price,
)
from distgraph.plan.strategy import Strategy
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.annotations import shard_tensor

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


def modelled(graph: Graph, price: Price = wire_price) -> float:
    """The cost that the pass lowers."""
    return sum(_Refiner(graph, multiplicity(graph), price).costs)


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
            assert value.name not in after.live_out or not after.attrs[value.name].spec.partial


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


@pytest.mark.parametrize("seed", [14])
def test_the_search_ends_with_its_budget(seed: int) -> None:
    """Three axes and ops of three indices: without a budget the search compares layouts for minutes."""
    before = complete(seeded_program(seed))
    # an op in all orders of its ranks, and one comparison: the changes of layout of the values around it
    one_op = 320 + 30_000
    found = [refined(before, latency_price, budget) for budget in (1, 20_000, 20_000)]
    assert [each.work < budget + one_op for each, budget in zip(found, (1, 20_000, 20_000), strict=True)]
    assert found[1].work >= 20_000
    assert found[1].cost <= found[0].cost <= modelled(before, latency_price)
    assert found[1] == found[2]


def test_all_policies_share_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[float] = []

    def counted(graph: Graph, price: Price, budget: float) -> Refined:
        found = refined(graph, price, budget)
        works.append(found.work)
        return found

    monkeypatch.setattr(completion_module, "refined", counted)
    completion_module.choose_completion(seeded_program(1), CUBE, price=latency_price, budget=1500)
    assert len(works) == 3  # its annotations compete, so that it is completed under every policy
    assert sum(works) < 1500 + 3 * (320 + 30_000)


@pytest.mark.parametrize(("rows", "columns", "gathered"), [(12, 40, "a"), (60, 40, "b")])
def test_of_equal_claims_the_cheaper_one_is_granted(rows: int, columns: int, gathered: str) -> None:
    """Both operands of a product claim one axis; the default completion gathers the smaller operand, first
    or last."""
    mesh = ProcessMesh.grid(x=4)

    def product(a: Any, b: Any) -> Any:
        return shard_tensor(a, mesh, ["x", None]) @ shard_tensor(b, mesh, [None, "x"])

    serial = trace(product, ((rows, 20), "f32"), ((20, columns), "f32"), names=["a", "b"])
    graph = completion_module.choose_completion(serial, search=False)
    assert any(lost.reason == "taken" for lost in graph.lost)
    (gather,) = (op for op in build(graph).lowered.ops if is_collective(op))
    assert (gather.kind, gather.operands[0].name) == ("comm.all_gather", gathered)


def test_work_counts_what_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps between layouts and tiles of transfers, whether or not the process knew their prices before."""
    examined = [0]

    def counted(space: Any, spec: ShardSpec) -> Iterator[Any]:
        for step in plain_steps(space, spec):
            examined[0] += 1
            yield step

    before = complete(seeded_program(14))  # its ops may run in other orders of the ranks
    for cached in (cross_mesh._choose, planner.priced, planner._cost_of_class):
        cached.cache_clear()
    plain_steps = Space.steps
    monkeypatch.setattr(Space, "steps", counted)
    first = refined(before, latency_price, 20_000)
    assert examined[0] > 2000
    assert first.work >= examined[0]
    steps = examined[0]
    assert refined(before, latency_price, 20_000).work == first.work
    assert examined[0] == steps


def unbounded(kind: str, sent: float, group_size: int, mesh: ProcessMesh, axes: tuple[str, ...]) -> float:
    """As `latency_price`, which is known to count bytes; of any other price no bound is known."""
    return latency_price(kind, sent, group_size, mesh, axes)


def test_layouts_are_what_a_search_without_bounds_finds() -> None:
    """Bounds only leave out what is worse: with none, every layout is priced and the result is the same."""
    for seed in (8, 11):
        before = complete(seeded_program(seed, ProcessMesh.grid(x=2, y=2), most=45))
        quick = refined(before, latency_price, 1e9)
        full = refined(before, unbounded, 1e9)
        assert quick.graph.attrs == full.graph.attrs
        assert quick.cost == pytest.approx(full.cost, rel=1e-12)
        assert quick.work < full.work


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"refine": "always", "refine_budget": 0},
            "refine_budget of Strategy is 0 but must be",
        ),
        ({"refine_budget": 5}, "but refine is 'conflicts'"),
    ],
)
def test_budgets_that_make_no_sense(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ShardingError, match=told):
        Strategy(**arguments)


def changes(rng: np.random.Generator) -> Iterator[tuple[tuple[int, ...], ProcessMesh, ShardSpec, ShardSpec]]:
    """Random changes of layout, even and uneven, with pending sums."""
    meshes = (CUBE, ProcessMesh.grid(x=2, y=3), ProcessMesh.grid(x=2, y=2).weighted(x=(3, 1)))
    while True:
        mesh = meshes[int(rng.integers(len(meshes)))]
        shape = tuple(int(n) for n in rng.choice((2, 3, 4, 6, 8, 12), int(rng.integers(1, 4))))
        yield shape, mesh, drawn(rng, shape, mesh), drawn(rng, shape, mesh)


def drawn(rng: np.random.Generator, shape: tuple[int, ...], mesh: ProcessMesh) -> ShardSpec:
    dims: list[list[str]] = [[] for _ in shape]
    partial = []
    for axis in rng.permutation(mesh.axes):
        place = int(rng.integers(len(shape) + 2))
        if place < len(shape):
            dims[place].append(str(axis))
        elif place == len(shape):
            partial.append((str(axis), "sum"))
    return ShardSpec(tuple(map(tuple, dims)), tuple(partial))


@pytest.mark.parametrize("price", [wire_price, latency_price])
def test_bounds_and_representatives_agree_with_the_cheapest_steps(price: Price) -> None:
    for shape, mesh, source, target in islice(changes(np.random.default_rng(3)), 150):
        steps = redistribute(shape, 4, mesh, source, target, price)
        cost = sum(step_price(step, shape, 4, mesh, price) for step in steps)
        assert redistribute_cost(shape, 4, mesh, source, target, price) == pytest.approx(cost, rel=1e-12)
        for moved in (mesh, mesh.reordered(mesh.axes, tuple(reversed(range(mesh.size))))):
            ends = DistAttr(mesh, source), DistAttr(moved, target)
            least = price_bound(price, 4 * received(shape, *ends))
            assert least <= move_cost(shape, 4, *ends, price)
