"""Redistribution on one mesh: values on every pair of layouts, bytes, and no plan cheaper by brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.redistribution.simulate_steps import check_layout, every_spec, run_step, scatter

from distgraph.errors import ShardingError
from distgraph.ir.collective_registry import Space, Step
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import REDUCTIONS, ShardSpec
from distgraph.passes.redistribution.planner import (
    cheapest_path,
    redistribute,
    redistribute_cost,
    step_bytes,
    wire_price,
)
from distgraph.passes.redistribution.tiles import without_unit_axes

MESHES = {
    "2": ProcessMesh.grid(x=2),
    "3": ProcessMesh.grid(x=3),
    "4": ProcessMesh.grid(x=4),
    "2x2": ProcessMesh.grid(x=2, y=2),
    "2x3": ProcessMesh([[4, 0, 2], [1, 5, 3]], ["x", "y"]),
}
SHAPES = ((6, 8), (5, 7), (4, 6, 3))
parse = ShardSpec.parse


def value_of(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(3.0, 3.0 + math.prod(shape)).reshape(shape)


def with_detours(shape, mesh, source, target) -> tuple[Step, ...]:
    """The cheapest steps through all layouts, those too that lead away from the target or split replicas."""
    start, goal = without_unit_axes(source, mesh), without_unit_axes(target, mesh)
    working = tuple(axis for axis in mesh.axes if mesh.axis_size(axis) > 1)
    return cheapest_path(Space(shape, mesh, working, goal, wide=True), start, 1, wire_price)[1]


def run_plan(shape, mesh, source, target, start=None, value=None) -> list[str]:
    """Plans, runs and checks; returns the kinds of the steps."""
    return run_steps(redistribute(shape, 1, mesh, source, target), shape, mesh, source, target, start, value)


def run_steps(steps, shape, mesh, source, target, start=None, value=None) -> list[str]:
    value = value_of(shape) if value is None else value
    blocks = scatter(value, mesh, source) if start is None else start
    spec, label = source, f"{source} -> {target} on {mesh}, {shape}"
    for step in steps:
        assert step.source == spec, label
        blocks, sent = run_step(step, blocks, shape, mesh)
        spec = step.target
        assert sent <= step_bytes(step, shape, 1, mesh) + 1e-9, f"{label}: {step}"
        if step.kind in ("all_gather", "reduce_scatter"):
            assert sent == step_bytes(step, shape, 1, mesh), f"{label}: {step}"
    if steps:
        assert spec == target, label
    check_layout(blocks, value, mesh, target, label)
    return [step.kind for step in steps]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_every_pair_of_layouts_keeps_the_value(name, shape):
    mesh = MESHES[name]
    value = value_of(shape)
    targets = every_spec(mesh, len(shape), kinds=REDUCTIONS if len(shape) == 2 else ("sum",))
    for source in every_spec(mesh, len(shape)):
        start = scatter(value, mesh, source)
        for target in targets:
            kinds = run_plan(shape, mesh, source, target, start, value)
            assert (kinds == []) == (source == target)


# --- brute force: every move between any two layouts, found from the ranks' blocks alone ---


def brute_moves(shape, mesh, specs) -> np.ndarray:
    """Cheapest single move between any two layouts, from the blocks of the ranks; inf where there is none."""
    blocks = {spec: {r: spec.bounds(shape, mesh, r) for r in mesh.members} for spec in specs}
    size = {spec: {r: math.prod(b - a for a, b in at) for r, at in blocks[spec].items()} for spec in specs}
    table = np.full((len(specs), len(specs)), np.inf)
    for (i, s), (j, t) in itertools.permutations(enumerate(specs), 2):
        table[i, j] = brute_move(mesh, s, t, blocks, size)
    return table


def brute_move(mesh, s, t, blocks, size) -> float:
    before, after = max(size[s].values()), max(size[t].values())
    lost = {axis: kind for axis, kind in s.partial if t.reduction(axis) is None}
    gained = {axis: kind for axis, kind in t.partial if s.reduction(axis) is None}
    changed = [d for d in range(len(s.dims)) if s.dims[d] != t.dims[d]]
    inside = all(
        a == b or (c <= a and b <= d)
        for r in mesh.members
        for (a, b), (c, d) in zip(blocks[t][r], blocks[s][r], strict=True)
    )
    if any(s.reduction(axis) not in (None, t.reduction(axis)) for axis, _ in t.partial):
        return np.inf
    if not lost and not gained:
        if inside and all(t.dims[d][: len(s.dims[d])] == s.dims[d] for d in changed):
            return 0.0
        options = [
            brute_gather(mesh, s, t, blocks, size, changed),
            brute_all_to_all(mesh, s, t, blocks, size, changed),
        ]
        parts = [mesh.count(a for dim in spec.dims for a in dim) for spec in (s, t)]
        if parts[0] == parts[1]:
            options.append(max(before, after) + 1.25e-3)
        return min(options)
    if gained:
        legal = all(kind != "prod" or all(k != "sum" for _, k in t.partial) for kind in gained.values())
        free = not lost and not changed and not any(a in s.axes for a in gained) and legal
        return 0.0 if free else np.inf
    last = max(i for i, (axis, _) in enumerate(s.partial) if axis in lost)
    if len({*lost.values(), *(kind for _, kind in s.partial[:last])}) > 1:
        return np.inf  # unequal reductions do not commute
    group = mesh.count(lost)
    if not changed:
        return 2 * before * (group - 1) / group + 1e-3
    if len(changed) != 1 or not inside:
        return np.inf
    old, new = s.dims[changed[0]], t.dims[changed[0]]
    if new[: len(old)] != old or set(new[len(old) :]) != set(lost):
        return np.inf
    groups = {r: mesh.group(r, tuple(lost)) for r in mesh.members if size[s][r] == before}
    return max(before - min(size[t][g] for g in group) for group in groups.values()) + 1e-3


def brute_gather(mesh, s, t, blocks, size, changed) -> float:
    if len(changed) != 1 or s.dims[changed[0]][: len(t.dims[changed[0]])] != t.dims[changed[0]]:
        return np.inf
    group = {r: mesh.group(r, s.dims[changed[0]][len(t.dims[changed[0]]) :]) for r in mesh.members}
    if any(sum(size[s][g] for g in group[r]) != size[t][r] for r in mesh.members):
        return np.inf
    for r in mesh.members:
        (start, stop), parts = blocks[t][r][changed[0]], [blocks[s][g][changed[0]] for g in group[r]]
        if any(a < b and not (start <= a and b <= stop) for a, b in parts):
            return np.inf
    return max(size[t][r] - min(size[s][g] for g in group[r]) for r in mesh.members) + 1.5e-3


def brute_all_to_all(mesh, s, t, blocks, size, changed) -> float:
    if len(changed) != 2:
        return np.inf
    for give, get in itertools.permutations(changed):
        keep = len(t.dims[give])
        axes = s.dims[give][keep:]
        if s.dims[give][:keep] != t.dims[give] or t.dims[get] != s.dims[get] + axes:
            continue
        middle = ShardSpec(
            tuple(t.dims[d] if d == give else axes_ for d, axes_ in enumerate(s.dims)), s.partial
        )
        if middle not in blocks or not np.isfinite(brute_gather(mesh, s, middle, blocks, size, [give])):
            continue
        if any(a < b and not (c <= a and b <= d) for r in mesh.members
               for (a, b), (c, d) in zip(blocks[t][r], blocks[middle][r], strict=True)):  # fmt: skip
            continue
        group = mesh.count(axes)
        width = max(b - a for a, b in (blocks[s][r][get] for r in mesh.members))
        cut = max(b - a for a, b in (blocks[t][r][get] for r in mesh.members))
        before = max(size[s].values())
        return min(before, (group - 1) * cut * before // max(width, 1)) + 1e-3
    return np.inf


@pytest.mark.parametrize("kinds", [("sum",), ("max", "prod")], ids=str)
@pytest.mark.parametrize("shape", [(6, 8), (5, 7), (12,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_no_four_moves_are_cheaper(name, shape, kinds):
    mesh = MESHES[name]
    specs = every_spec(mesh, len(shape), kinds)
    one = brute_moves(shape, mesh, specs)
    np.fill_diagonal(one, 0.0)
    best = one
    for _ in range(3):
        best = np.min(best[:, :, None] + one[None, :, :], axis=1)
    met = 0
    for (i, s), (j, t) in itertools.product(enumerate(specs), repeat=2):
        steps = with_detours(shape, mesh, s, t)
        cost = sum(step_bytes(step, shape, 1, mesh) for step in steps)
        assert cost <= best[i, j] + 0.01, f"{s} -> {t}: {[str(step) for step in steps]}"
        met += cost >= best[i, j] - 0.01
        # without detours: the same, but for reduced pieces that would pass through another dim
        assert redistribute_cost(shape, 1, mesh, s, t) <= best[i, j] * 4 / 3 + 0.01, f"{s} -> {t}"
    assert (
        met > 0.95 * len(specs) ** 2
    )  # the brute force is not a straw man: it finds nearly all the same plans


# --- single plans, by hand ---

XY = MESHES["2x2"]
X4 = MESHES["4"]
X2Y3 = MESHES["2x3"]
NAMED = [
    # mesh, shape, source, target, kinds, bytes of one rank at 4 bytes an element, by hand from the formulas
    (XY, (8, 6), "[x, _]", "[y, _]", ["permute"], [96]),  # a shard moves between two axes on the same dim
    (XY, (5, 7), "[x, _]", "[y, _]", ["permute"], [84]),
    (XY, (8, 6), "[x*y, _]", "[y*x, _]", ["permute"], [48]),  # axis order on one dim
    (XY, (8, 6), "[x, y]", "[y, x]", ["permute"], [48]),  # 2D swap
    (X2Y3, (6, 12), "[x, y]", "[y, x]", ["permute"], [48]),
    (X4, (8, 12), "[x, _]", "[_, x]", ["all_to_all"], [72]),  # never all_gather, then slice
    (XY, (8, 12), "[x*y, _]", "[_, x*y]", ["all_to_all"], [72]),
    (X4, (8, 12), "[_, _] partial(x)", "[_, x]", ["reduce_scatter"], [288]),  # never all_reduce, then slice
    (X4, (8, 12), "[_, _] partial(x:max)", "[_, _]", ["all_reduce"], [576]),
    (
        X2Y3,
        (12, 5),
        "[_, _] partial(x, y)",
        "[_, _]",
        ["all_reduce"],
        [400],
    ),  # one collective on the joint group
    (X2Y3, (12, 5), "[_, _] partial(x, y)", "[x*y, _]", ["reduce_scatter"], [200]),
    (X2Y3, (12, 5), "[x*y, _]", "[_, _]", ["all_gather"], [200]),
    (X2Y3, (12, 5), "[y*x, _]", "[y, _]", ["all_gather"], [40]),
    (X2Y3, (12, 5), "[_, _]", "[y*x, _]", ["slice"], [0]),
    (X2Y3, (12, 5), "[_, _] partial(y)", "[_, _] partial(y)", [], []),
    (X2Y3, (12, 5), "[_, _]", "[_, _] partial(x, y)", ["mask"], [0]),
    (X2Y3, (12, 5), "[y, _] partial(x:min)", "[y, _] partial(x:max)", ["all_reduce", "mask"], [80, 0]),
    (X2Y3, (12, 6), "[x, _] partial(y)", "[x, y]", ["reduce_scatter"], [96]),
    (XY, (5,), "[x]", "[x*y]", ["permute"], [12]),  # 2, 2, 1, 0 do not nest in 3, 2
    (X4, (3,), "[x]", "[_]", ["all_gather"], [12]),  # an empty shard: the others are all there is to send
]


@pytest.mark.parametrize(("mesh", "shape", "source", "target", "kinds", "sent"), NAMED, ids=str)
def test_named_plans(mesh, shape, source, target, kinds, sent):
    steps = redistribute(shape, 4, mesh, parse(source), parse(target))
    assert [step.kind for step in steps] == kinds
    assert [step_bytes(step, shape, 4, mesh) for step in steps] == pytest.approx(sent)
    assert run_plan(shape, mesh, parse(source), parse(target)) == kinds


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_every_reduction_stays_itself(kind):
    source = ShardSpec.of([None, "y"], {"x": kind})
    for target in ("[x, y]", "[_, y]", "[_, _]"):
        for step in redistribute((6, 9), 4, X2Y3, source, parse(target)):
            assert step.reduction in (None, kind)
        run_plan((6, 9), X2Y3, source, parse(target))


def test_unequal_reductions_apply_in_the_order_of_the_spec():
    mesh = ProcessMesh.grid(x=2, y=2)
    spec = parse("[_] partial(x, y:max)")
    start = {0: [1.0], 1: [5.0], 2: [10.0], 3: [4.0]}  # sums over x are 11 and 9; maxima first would give 15
    blocks = {rank: np.array(values) for rank, values in start.items()}
    for step in redistribute((1,), 4, mesh, spec, parse("[_]")):
        blocks, _ = run_step(step, blocks, (1,), mesh)
    assert [float(block[0]) for block in blocks.values()] == [11.0] * 4


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[_, _] partial(x:sum, y:prod)", "[x, y]"),
        ("[_, _]", "[_, _] partial(x:sum, y:prod)"),
        ("[_, _] partial(x:sum)", "[_, _] partial(x:sum, y:prod)"),
        ("[_, _] partial(x:prod, y:sum)", "[_, _] partial(y:sum)"),
        ("[y, _] partial(x:prod)", "[x, _] partial(y:min)"),
    ],
)
def test_sums_and_products_mixed(source, target):
    run_plan((5, 7), X2Y3, parse(source.replace(":sum", "")), parse(target.replace(":sum", "")))


def test_axes_of_size_one_cost_nothing():
    mesh = ProcessMesh.grid(x=2, u=1)
    assert redistribute((6,), 4, mesh, parse("[x*u]"), parse("[x] partial(u)")) == ()
    [step] = redistribute((6,), 4, mesh, parse("[u*x]"), parse("[_] partial(u)"))
    assert (step.kind, step.source, step.target) == ("all_gather", parse("[u*x]"), parse("[_] partial(u)"))


def test_scalars_and_empty_tensors():
    assert run_plan((), X2Y3, parse("[] partial(x, y)"), parse("[]")) == ["all_reduce"]
    assert run_plan((0, 4), X2Y3, parse("[x, y]"), parse("[y, _]"))
    assert redistribute_cost((0, 4), 4, X2Y3, parse("[x, y]"), parse("[_, _]")) < 1


def test_price_of_a_cluster_changes_the_plan():
    """A reduce_scatter that is dear to start: the plan reduces in place instead."""
    seen = set()

    def price(kind, sent, group, mesh, axes):
        seen.add((kind, group, axes))
        assert group == mesh.count(axes)
        return sent * (100 if "y" in axes else 1) + (1e6 if kind == "reduce_scatter" else 0)

    steps = redistribute((12, 12), 4, X2Y3, parse("[_, _] partial(x)"), parse("[x, _]"), price)
    assert [step.kind for step in steps] == ["all_reduce", "slice"]
    assert not {"slice", "mask"} & {kind for kind, _, _ in seen}
    assert (
        redistribute_cost((12, 12), 4, X2Y3, parse("[_, _] partial(x)"), parse("[x, _]"), price)
        == 2 * 144 * 4 / 2
    )


def test_cost_is_the_price_of_the_steps():
    args = ((12, 12), 4, X2Y3, parse("[x, y]"), parse("[y, _]"))
    steps = redistribute(*args)
    total = sum(
        wire_price(s.kind, step_bytes(s, (12, 12), 4, X2Y3), X2Y3.count(s.axes), X2Y3, s.axes) for s in steps
    )
    assert redistribute_cost(*args) == pytest.approx(total)


def test_wrong_specs_are_refused():
    with pytest.raises(ShardingError, match=r"source of a redistribution: spec .* has 1 dims but shape"):
        redistribute((4, 4), 4, XY, parse("[x]"), parse("[_, _]"))
    with pytest.raises(ShardingError, match=r"target of a redistribution: .* names axis 'z'"):
        redistribute_cost((4, 4), 4, XY, parse("[x, _]"), parse("[_, z]"))


@st.composite
def redistributions(draw):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 12))
    ranks = draw(st.permutations(range(math.prod(sizes))))
    mesh = ProcessMesh(np.array(ranks).reshape(sizes), list("xyz")[: len(sizes)])
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    specs = []
    for _ in range(2):
        dims, partial = [[] for _ in shape], {}
        for axis in draw(st.permutations(mesh.axes)):
            place = draw(st.sampled_from([None, *range(len(shape)), *REDUCTIONS]))
            if isinstance(place, int):
                dims[place].append(axis)
            elif place:
                partial[axis] = place
        specs.append(ShardSpec.of([tuple(d) for d in dims], partial))
    return shape, mesh, *specs


@settings(max_examples=150, deadline=None)
@given(redistributions(), st.booleans())
def test_random_redistributions(case, exhaustive):
    shape, mesh, source, target = case
    if exhaustive and len(mesh.axes) < 3:
        source, target = without_unit_axes(source, mesh), without_unit_axes(target, mesh)
        run_steps(with_detours(shape, mesh, source, target), shape, mesh, source, target)
    else:
        run_plan(shape, mesh, source, target)
