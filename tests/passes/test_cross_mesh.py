"""Transfers between meshes: values, bytes over every link, and how evenly the senders share the work."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.redistribution.simulate_steps import check_layout, every_spec, move_tiles, run_step, scatter

from distgraph.errors import ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import REDUCTIONS, DistAttr, ShardSpec
from distgraph.passes.redistribution.cross_mesh import transfer, transfer_cost
from distgraph.passes.redistribution.planner import redistribute
from distgraph.passes.redistribution.tiles import Need, assign, link_bytes, tiles_between
from distgraph.resources import load_cluster
from distgraph.resources.mesh_communication import MeshCommunication

parse = ShardSpec.parse


def value_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(3.0, 3.0 + math.prod(shape)).reshape(shape)


def run_transfer(shape, source, target, start=None, **options):
    """Plans, runs and checks a transfer of elements of one byte; returns the plan."""
    value = value_of(shape)
    plan = transfer(shape, 1, source, target, **options)
    label = f"{source} => {target}, {shape}\n{plan}"
    blocks = scatter(value, source.mesh, source.spec) if start is None else start
    for step in plan.before:
        blocks, _ = run_step(step, blocks, shape, source.mesh)
    if source.mesh != target.mesh:
        assert not plan.source.spec.partial, label
        assert not plan.landing.spec.partial, label
    check_layout(blocks, value, source.mesh, plan.source.spec, label)
    assert plan.landing.mesh == target.mesh, label
    held = {rank: plan.source.spec.bounds(shape, source.mesh, rank) for rank in source.mesh.members}
    for tile in plan.tiles:
        own = held.get(tile.target_rank)
        mine = own is not None and all(
            a <= c and d <= b for (a, b), (c, d) in zip(own, tile.bounds, strict=True)
        )
        assert mine == tile.local, f"{label}\n{tile}"
    blocks = move_tiles(
        plan.tiles, blocks, shape, source.mesh, plan.source.spec, target.mesh, plan.landing.spec
    )
    for step in plan.after:
        blocks, _ = run_step(step, blocks, shape, target.mesh)
    check_layout(blocks, value, target.mesh, target.spec, label)
    return plan


def meshes(start: int) -> list[ProcessMesh]:
    grid = ProcessMesh.grid
    return [
        grid(start, x=1),
        grid(start, x=2),
        grid(start, x=3),
        grid(start, x=4),
        grid(start, x=2, y=2),
        grid(start, y=3, x=2),
    ]


FROM = meshes(0)
TO = [
    mesh for start in (0, 1, 3, 6) for mesh in meshes(start)
]  # the same ranks, some of them, one of them, none
TO.append(ProcessMesh([[5, 0], [2, 7]], ["b", "a"]))


@pytest.mark.parametrize("shape", [(6, 8), (5, 7)], ids=str)
@pytest.mark.parametrize("source_mesh", FROM, ids=str)
def test_every_pair_of_layouts_keeps_the_value(source_mesh, shape):
    for spec in every_spec(source_mesh, 2, ("sum",)):
        source = DistAttr(source_mesh, spec)
        start = scatter(value_of(shape), source_mesh, spec)
        for mesh in TO:
            for wanted in every_spec(mesh, 2, ()):
                target = DistAttr(mesh, wanted)
                plan = run_transfer(shape, source, target, start)
                check_volume(plan, shape, source, target)


def check_volume(plan, shape, source, target) -> None:
    """What enters the target mesh from outside is what no rank of it held, once."""
    if source.mesh == target.mesh:
        assert not link_bytes(plan.tiles, 1)
        return
    entered = np.zeros(shape, dtype=int)
    for tile in plan.tiles:
        if tile.source_rank not in target.mesh:
            entered[tuple(slice(*b) for b in tile.bounds)] += 1
    assert entered.sum() <= entered.size, f"{source} => {target}\n{plan}"
    if not set(source.mesh.members) & set(target.mesh.members):
        assert (entered == 1).all(), f"{source} => {target}\n{plan}"


# --- volumes between machines of four ranks each; fractions of the bytes T of the tensor ---

H2 = ProcessMesh.grid(h=2, d=4)
CASES = {
    # source mesh, target machines, shape, source, target, {n: how many tasks of T/n}, into each target
    # machine, most that one rank sends
    "rows to rows": (H2, 2, (1024, 1024, 512), "[h, _, _]", "[h, _, _]", {2: 2}, 1 / 2, 1 / 8),
    "replicated to rows": (H2, 2, (1024, 1024, 512), "[_, _, _]", "[h, _, _]", {2: 2}, 1 / 2, 1 / 8),
    "columns to rows": (H2, 2, (1024, 1024, 512), "[_, h, _]", "[h, _, _]", {4: 4}, 1 / 2, 1 / 8),
    "8-way": (H2, 2, (1024, 1024, 512), "[_, h*d, _]", "[h*d, _, _]", {64: 64}, 1 / 2, 1 / 8),
    "inside to rows": (H2, 2, (1024, 1024, 512), "[d, _, _]", "[h, _, _]", {4: 4}, 1 / 2, 1 / 8),
    "2 to 3 machines": (H2, 3, (3072, 1024, 170), "[h, _, _]", "[h, _, _]", {3: 2, 6: 2}, 1 / 3, 1 / 8),
    "1 to 2 machines": (
        ProcessMesh.grid(d=4),
        2,
        (1024, 1024, 512),
        "[d, _, _]",
        "[_, _, _]",
        {4: 4},
        1,
        1 / 4,
    ),
    "columns to depth": (H2, 2, (1024, 1024, 512), "[_, h, _]", "[_, _, h]", {4: 4}, 1 / 2, 1 / 8),
}


def machine_of(rank: int) -> int:
    return rank // 4


def entering(plan, shape, spec: ShardSpec) -> dict[int, int]:
    """Elements that come into every machine: by tiles, and by the gathers, once a group."""
    into: dict[int, int] = defaultdict(int)
    for tile in plan.tiles:
        if machine_of(tile.source_rank) != machine_of(tile.target_rank):
            into[machine_of(tile.target_rank)] += tile.volume
    mesh = plan.landing.mesh
    for step in plan.after:
        assert step.kind == "all_gather"
        for group in mesh.groups(step.axes):
            blocks = {rank: math.prod(step.source.local_shape(shape, mesh, rank)) for rank in group}
            for machine in {machine_of(rank) for rank in group}:
                into[machine] += sum(size for rank, size in blocks.items() if machine_of(rank) != machine)
    return into


@pytest.mark.parametrize("name", CASES)
def test_volumes_between_machines(name):
    mesh, machines, shape, source, target, tasks, into, most = CASES[name]
    total = math.prod(shape)
    far = ProcessMesh.grid(mesh.size, h=machines, d=4)
    plan = transfer(shape, 4, DistAttr(mesh, parse(source)), DistAttr(far, parse(target)))
    blocks = [
        {spec.bounds(shape, m, rank) for rank in m.members}
        for m, spec in ((mesh, parse(source)), (far, parse(target)))
    ]
    overlaps = [math.prod(max(0, min(b, d) - max(a, c)) for (a, b), (c, d) in zip(*pair, strict=True))
                for pair in itertools.product(*blocks)]  # fmt: skip
    assert sorted(size for size in overlaps if size) == sorted(
        total // part for part, count in tasks.items() for _ in range(count)
    )
    assert entering(plan, shape, parse(target)) == {mesh.size // 4 + i: into * total for i in range(machines)}
    out = defaultdict(int)
    for (sender, _), sent in link_bytes(plan.tiles, 4).items():
        out[sender] += sent
    assert max(out.values()) == pytest.approx(most * 4 * total)
    by_machine = [
        sum(sent for rank, sent in out.items() if machine_of(rank) == m) for m in range(mesh.size // 4)
    ]
    assert max(by_machine) == min(by_machine) == 4 * total / len(by_machine)


# --- senders ---


def loads(tiles) -> dict[int, int]:
    out: dict[int, int] = defaultdict(int)
    for tile in tiles:
        if not tile.local:
            out[tile.source_rank] += tile.volume
    return out


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_replicas_share_the_sending(sizes, holders):
    wanted = [Need(10 + i, ((0, size),), tuple(range(holders))) for i, size in enumerate(sizes)]
    best = min(
        max(sum(size for size, rank in zip(sizes, ranks, strict=True) if rank == r) for r in range(holders))
        for ranks in itertools.product(range(holders), repeat=len(sizes))
    )
    assert max(loads(assign(wanted)).values()) <= best * 4 / 3  # Graham's bound for longest first


def test_a_piece_moves_to_the_holder_with_less_to_send():
    """Longest first alone would give rank 0 the four before the threes that only it holds."""
    wanted = [Need(10, ((0, 5),), (0, 1)), Need(11, ((5, 10),), (0, 1)), Need(12, ((10, 14),), (0,))]
    assert max(loads(assign(wanted)).values()) == 9
    wanted = [Need(10, ((0, 4),), (0, 1)), Need(11, ((4, 7),), (0,)), Need(12, ((7, 10),), (0,))]
    assert dict(loads(assign(wanted))) == {0: 6, 1: 4}


def test_the_rank_itself_sends_first():
    wanted = [Need(5, ((0, 4),), (0, 4, 5)), Need(6, ((0, 4),), (0, 4)), Need(8, ((0, 4),), (0, 4))]
    tiles = assign(wanted)
    assert [tile.source_rank for tile in tiles] == [5, 0, 4]
    assert tiles[0].local


# --- single transfers, by hand ---

R4 = ProcessMesh.grid(x=4)


def test_partly_overlapping_meshes():
    over = ProcessMesh.grid(2, y=4)
    plan = run_transfer((8, 3), DistAttr(R4, parse("[x, _]")), DistAttr(over, parse("[y, _]")))
    assert link_bytes(plan.tiles, 1) == {(0, 2): 6, (1, 3): 6, (2, 4): 6, (3, 5): 6}
    plan = run_transfer((8, 3), DistAttr(R4, parse("[_, _]")), DistAttr(over, parse("[y, _]")))
    assert {pair[1] for pair in link_bytes(plan.tiles, 1)} == {4, 5}  # 2 and 3 copy from themselves
    assert max(loads(plan.tiles).values()) == 6
    assert (plan.before, plan.after) == ((), ())


def test_the_same_ranks_under_other_names_copy_in_place():
    source = DistAttr(ProcessMesh.grid(dp=2, tp=2), parse("[dp, tp]"))
    target = DistAttr(ProcessMesh.grid(a=2, b=2), parse("[a, b]"))
    plan = run_transfer((5, 7), source, target)
    assert link_bytes(plan.tiles, 1) == {}
    assert (plan.before, plan.after) == ((), ())
    assert transfer_cost((5, 7), 4, source, target) == 0
    swapped = DistAttr(ProcessMesh([[0, 2], [1, 3]], ["a", "b"]), parse("[b, a]"))
    assert link_bytes(run_transfer((5, 7), source, swapped).tiles, 1) == {}


def test_on_one_mesh_it_is_a_redistribution():
    plan = run_transfer((8, 6), DistAttr(R4, parse("[x, _]")), DistAttr(R4, parse("[_, x]")))
    assert [step.kind for step in plan.before] == ["all_to_all"]
    assert all(tile.local for tile in plan.tiles)
    assert plan.landing == DistAttr(R4, parse("[_, x]"))


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_pending_reductions_end_on_the_source_mesh(kind):
    source = DistAttr(R4, ShardSpec.of([None, None], {"x": kind}))
    plan = run_transfer((8, 6), source, DistAttr(ProcessMesh.grid(4, y=2), parse("[y, _]")))
    assert [(step.kind, step.reduction) for step in plan.before] == [("reduce_scatter", kind)]
    assert dict(loads(plan.tiles)) == {0: 12, 1: 12, 2: 12, 3: 12}  # all four send, a quarter each


def test_a_partial_target_is_masked_there():
    target = DistAttr(ProcessMesh.grid(4, y=2), parse("[_, _] partial(y)"))
    plan = run_transfer((8, 6), DistAttr(R4, parse("[x, _]")), target)
    assert plan.after[-1].kind == "mask"


def test_stages_of_one_and_three_ranks():
    one, three = ProcessMesh.grid(dp=1), ProcessMesh.grid(1, dp=3)
    there = run_transfer((7, 2), DistAttr(one, parse("[dp, _]")), DistAttr(three, parse("[dp, _]")))
    assert link_bytes(there.tiles, 1) == {(0, 1): 6, (0, 2): 6, (0, 3): 2}
    back = run_transfer((7, 2), DistAttr(three, parse("[dp, _]")), DistAttr(one, parse("[dp, _]")))
    assert link_bytes(back.tiles, 1) == {(1, 0): 6, (2, 0): 6, (3, 0): 2}


def test_one_rank_feeds_replicas_once():
    plan = run_transfer(
        (9, 2),
        DistAttr(ProcessMesh.grid(x=1), parse("[_, _]")),
        DistAttr(ProcessMesh.grid(1, y=3), parse("[_, _]")),
    )
    assert link_bytes(plan.tiles, 4) == {(0, 1): 24, (0, 2): 24, (0, 3): 24}
    assert [(step.kind, step.axes) for step in plan.after] == [("all_gather", ("y",))]


def test_equal_prices_take_the_fewest_messages():
    """Splitting the columns again goes one to one; splitting the rows finer would cut each block in two."""
    far = ProcessMesh.grid(4, x=2, y=2)
    source = DistAttr(ProcessMesh.grid(x=2, y=2), parse("[x, y]"))
    plan = run_transfer((8, 12), source, DistAttr(far, parse("[x, _]")))
    assert link_bytes(plan.tiles, 1) == {(0, 4): 24, (1, 5): 24, (2, 6): 24, (3, 7): 24}


def test_scalars_and_empty_tensors_cross():
    far = DistAttr(ProcessMesh.grid(3, y=3), parse("[]"))
    plan = run_transfer((), DistAttr(R4, parse("[] partial(x)")), far)
    assert [step.kind for step in plan.before] == ["all_reduce"]
    run_transfer((0, 4), DistAttr(R4, parse("[x, _]")), DistAttr(far.mesh, parse("[_, y]")))


def test_cost_is_the_price_of_all_parts():
    seen = []

    def price(kind, sent, group, mesh, axes):
        seen.append((kind, sent))
        return sent * {"permute": 10, "all_gather": 1}.get(kind, 1)

    source, target = DistAttr(R4, parse("[x, _]")), DistAttr(ProcessMesh.grid(4, y=2), parse("[_, _]"))
    # each of two ranks gets half of 8 x 6 x 4 bytes, then gathers the other half
    assert transfer_cost((8, 6), 4, source, target, price=price) == 10 * 96 + 96
    assert ("permute", 96.0) in seen


def test_wrong_specs_are_refused():
    good = DistAttr(R4, parse("[x, _]"))
    with pytest.raises(ShardingError, match=r"source of a transfer: spec .* has 1 dims"):
        transfer((4, 4), 4, DistAttr(R4, parse("[x]")), good)
    with pytest.raises(ShardingError, match=r"target of a transfer: .* names axis 'z'"):
        transfer((4, 4), 4, good, DistAttr(R4, parse("[z, _]")))
    with pytest.raises(ShardingError, match="changes what is partial"):
        tiles_between((4, 4), DistAttr(R4, parse("[_, _] partial(x)")), good)


@st.composite
def layouts(draw, shape, partial):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
    ranks = draw(st.permutations(range(20)))[: math.prod(sizes)]
    mesh = ProcessMesh(
        np.array(ranks).reshape(sizes), list(draw(st.sampled_from(["xy", "yx"])))[: len(sizes)]
    )
    dims, pending = [[] for _ in shape], {}
    for axis in draw(st.permutations(mesh.axes)):
        place = draw(st.sampled_from([None, *range(len(shape)), *(REDUCTIONS if partial else ())]))
        if isinstance(place, int):
            dims[place].append(axis)
        elif place:
            pending[axis] = place
    return DistAttr(mesh, ShardSpec.of([tuple(dim) for dim in dims], pending))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_transfers(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    source, target = data.draw(layouts(shape, True)), data.draw(layouts(shape, True))
    run_transfer(shape, source, target)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_plans_and_prices_do_not_depend_on_the_numbers_of_ranks(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    source, target = data.draw(layouts(shape, True)), data.draw(layouts(shape, True))
    gaps = data.draw(st.lists(st.integers(1, 5), min_size=20, max_size=20))
    ranks = np.cumsum(gaps)  # others, in the same order
    away = [DistAttr(attr.mesh.renumbered(ranks[attr.mesh.ranks]), attr.spec) for attr in (source, target)]

    def price(kind, sent, size, mesh, axes):
        return sent + 0.1 * size

    for options in ({}, {"price": price}):
        here, there = transfer(shape, 4, source, target, **options), transfer(shape, 4, *away, **options)
        renamed = [(ranks[t.source_rank], ranks[t.target_rank], t.bounds) for t in here.tiles]
        assert renamed == [(t.source_rank, t.target_rank, t.bounds) for t in there.tiles]
        assert (here.before, here.landing.spec, here.after) == (there.before, there.landing.spec, there.after)
        cost = transfer_cost(shape, 4, source, target, **options)
        assert cost == transfer_cost(shape, 4, *away, **options)


def test_blocks_of_the_spec_cover_a_dim_of_any_size():
    """The tile arithmetic leans on this: block i of k is [i b, (i + 1) b) clipped, b = ceil(n / k)."""
    for size, parts in itertools.product(range(12), range(1, 6)):
        block = -(-size // parts)
        bounds = [(min(size, block * i), min(size, block * (i + 1))) for i in range(parts)]
        assert [b for b, _ in bounds[1:]] == [e for _, e in bounds[:-1]]
        assert (bounds[0][0], bounds[-1][1]) == (0, size)


@pytest.mark.parametrize("shape", [(64, 32, 16), (6, 10, 4)])
@pytest.mark.parametrize("name", ["dgx_a100_pod", "p3_16xlarge_x8"])
def test_equal_stages_share_plans_that_prices_of_a_cluster_decide(shape: tuple[int, ...], name: str) -> None:
    communication = MeshCommunication(load_cluster(name))

    def price(*arguments):  # says of no meshes that they have equal prices
        return communication.price(*arguments)

    meshes = [ProcessMesh.grid(start, dp=2, tp=4) for start in (0, 8, 4, 16)]
    assert communication.mesh_alike(meshes[0]) is communication.mesh_alike(meshes[1]) is meshes[0]
    assert communication.mesh_alike(meshes[2]) is meshes[2]  # on two machines
    specs = [parse(text) for text in ("[dp, tp, _]", "[_, dp*tp, _]", "[dp, _, _] partial(tp)", "[_, _, tp]")]
    for (a, b), (start, end) in itertools.product(
        itertools.product(meshes, repeat=2), itertools.product(specs, repeat=2)
    ):
        if end.partial:
            continue
        if a == b:
            steps = redistribute(shape, 4, a, start, end, communication.price)
            assert steps == redistribute(shape, 4, a, start, end, price)
        source, target = DistAttr(a, start), DistAttr(b, end)
        assert transfer(shape, 4, source, target, communication.price) == transfer(
            shape, 4, source, target, price
        )
        cost = transfer_cost(shape, 4, source, target, communication.price)
        assert cost == transfer_cost(shape, 4, source, target, price)
