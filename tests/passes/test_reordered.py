"""Ops computed on their ranks in another order: what is sent, and that it equals the serial program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ops.graph_equality import same_graph
from support.ops.windows import pinned, windows
from support.programs.partitioned import assert_same, run_partitioned, run_serial

from distgraph import ops
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.verifier import verify
from distgraph.passes.complete import complete
from distgraph.passes.layout_local_search import refine
from distgraph.passes.redistribution.halo import halo_tiles, inside_window, nearest
from distgraph.passes.serial.backward import differentiate
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.tracer import Trace

grid = ProcessMesh.grid
FOUR, SQUARE, SIX = grid(x=4), grid(x=2, y=2), grid(x=2, y=3)
Function = Callable[..., Any]


# Meshes and windows


def test_reordered_mesh_by_hand() -> None:
    assert grid(x=4).reordered(("x",), (3, 2, 1, 0)).members == (3, 2, 1, 0)
    assert grid(x=2, y=3).reordered(("x",), (1, 0)).ranks.tolist() == [[3, 4, 5], [0, 1, 2]]
    # y is the major one of six positions: 0, 3, 1, 4, 2, 5 in the old order
    turned = grid(x=2, y=3).reordered(("y", "x"), (5, 4, 3, 2, 1, 0))
    assert turned.ranks.tolist() == [[5, 4, 3], [2, 1, 0]]
    with pytest.raises(ShardingError, match=r"order \[0, 0\] of mesh\(x=2, y=3\) along x is no permutation"):
        grid(x=2, y=3).reordered(("x",), (0, 0))


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_windows_are_fetched_from_any_layout_of_the_same_ranks(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    mesh = data.draw(st.sampled_from([FOUR, SQUARE, SIX]))
    held_on = ProcessMesh(np.array(data.draw(st.permutations(mesh.members))).reshape(mesh.shape), mesh.axes)

    def spec() -> ShardSpec:
        dims: list[tuple[str, ...]] = [()] * len(shape)
        for axis in mesh.axes:
            if data.draw(st.booleans()):
                dims[data.draw(st.integers(0, len(shape) - 1))] += (axis,)
        return ShardSpec(tuple(dims))

    wanted, held = spec(), DistAttr(held_on, spec())
    split = [dim for dim, axes in enumerate(wanted.dims) if axes]
    read = tuple((dim, windows(data.draw, shape[dim], mesh.count(wanted.dims[dim]))) for dim in split)
    tiles = halo_tiles(shape, mesh, wanted, read, held)
    whole = np.arange(np.prod(shape)).reshape(shape)
    for rank in mesh.members:
        bounds = list(wanted.bounds(shape, mesh, rank))
        for dim, stretches in read:
            bounds[dim] = stretches[mesh.index(rank, wanted.dims[dim])]
        found, own = np.full([b - a for a, b in bounds], -1), held.spec.bounds(shape, held_on, rank)
        for tile in (t for t in tiles if t.target_rank == rank):
            block = held.spec.bounds(shape, held_on, tile.source_rank)
            inside = [
                all(low <= a <= b <= high for (a, b), (low, high) in zip(tile.bounds, where, strict=True))
                for where in (block, own)
            ]
            assert inside[0], f"{tile} is not in the block {block} of its sender"
            assert tile.local or not inside[1], f"{tile} is sent although rank {rank} holds {own}"
            target = found[inside_window(tile, tuple(bounds), shape)]
            assert (target == -1).all(), f"{tile} lands where something lies already"
            target[...] = whole[tuple(slice(a, b) for a, b in tile.bounds)]
        expected = whole
        for dim, (start, stop) in enumerate(bounds):
            expected = np.take(expected, np.arange(start, stop), axis=dim, mode="wrap")
        np.testing.assert_array_equal(found, expected)


def last_op(function: Function, shape: tuple[int, ...], mesh: ProcessMesh, spec: str) -> Any:
    """The completed op that a function of one pinned input ends with."""
    trace = Trace("one")
    with trace.activate():
        y = function(pinned(trace, "input", "x", np.zeros(shape), mesh, spec))
    graph = complete(trace.finish({"y": y}), mesh)
    return graph.ops[-1]


@pytest.mark.parametrize(
    ("function", "shape", "mesh", "spec", "order"),
    [
        (lambda x: ops.flip(x, 0), (8, 3), FOUR, "[x, _]", [3, 2, 1, 0]),
        (lambda x: ops.flip(x, 1), (8, 3), FOUR, "[x, _]", [0, 1, 2, 3]),  # along the whole dim
        (lambda x: ops.flip(x, 0), (8, 4), SQUARE, "[x, y]", [[2, 3], [0, 1]]),
        (ops.flip, (8, 4), SQUARE, "[x, y]", [[3, 2], [1, 0]]),
        (lambda x: ops.flip(x, 0), (12,), SIX, "[x*y]", [[5, 4, 3], [2, 1, 0]]),
        (lambda x: ops.roll(x, 4, 0), (8,), FOUR, "[x]", [2, 3, 0, 1]),  # by two blocks
        (lambda x: ops.roll(x, -2, 0), (8,), FOUR, "[x]", [1, 2, 3, 0]),
        (lambda x: ops.roll(x, 1, 0), (12,), FOUR, "[x]", [0, 1, 2, 3]),  # most of a block stays
        (lambda x: ops.roll(x, 2, 0), (12,), FOUR, "[x]", [3, 0, 1, 2]),  # two thirds come from before
    ],
)
def test_order_in_which_most_is_read_from_oneself(
    function: Function, shape: tuple[int, ...], mesh: ProcessMesh, spec: str, order: list[Any]
) -> None:
    op = last_op(function, shape, mesh, spec)
    assert nearest(op, op.layout).ranks.tolist() == order


# Programs


def train(function: Function, x: np.ndarray, mesh: ProcessMesh, spec: str, out: str | None = None) -> Graph:
    """Serial graph of y = function(x, w), a scalar of it, the gradients; x is pinned, and y with `out`."""
    trace = Trace("reordered")
    with trace.activate():
        given = pinned(trace, "input", "x", x, mesh, spec)
        w = pinned(trace, "param", "w", np.zeros((x.shape[-1],) * 2), mesh, "[_, _]")
        y = function(given, w)
        if out is not None:
            trace.annotate(y.value, DistAttr(mesh, ShardSpec.parse(out), Origin("user", "y")))
        loss = ops.mean(ops.square(y))
        dx, dw = differentiate(trace, loss, [given, w])
        trace.annotate(dx.value, DistAttr(mesh, ShardSpec.parse(spec), Origin("user", "dx")))
    return trace.finish({"y": y, "loss": loss, "dx": dx, "dw": dw})


def refined(graph: Graph, x: np.ndarray, mesh: ProcessMesh) -> Build:
    """The refined program; on real ranks it equals the serial one, and its text parses back."""
    rng = np.random.default_rng(5)
    params, feeds = {"w": rng.standard_normal((x.shape[-1],) * 2)}, [{"x": x}, {"x": x[::-1] * 0.5}]
    completed = refine(replace(complete(graph, mesh), micro_batches=len(feeds)))
    outputs, _, built = run_partitioned(completed, feeds, params)
    assert_same(outputs, run_serial(graph, feeds, params)[0], 1e-11)
    verify(built.lowered, "lowered")
    assert same_graph(parse_graph(print_graph(built.lowered)), built.lowered)
    return built


def sent(built: Build) -> float:
    """Bytes of the busiest rank in a step of one micro-batch."""
    return max(built.program(rank).bytes_sent() for rank in built.ranks)


FUNCTIONS: dict[str, Function] = {
    "flip": lambda x, w: ops.flip(x, 0),
    "reverse": lambda x, w: x[::-1],
    "roll": lambda x, w: ops.roll(x, x.shape[0] // 2, 0),
    "then elementwise": lambda x, w: ops.exp(ops.flip(x, 0) * 0.1) + 1,
    "between elementwise": lambda x, w: ops.flip(ops.tanh(x), 0) * 3 - x,
    "then a product": lambda x, w: ops.matmul(ops.flip(x, 0), w),
    "back again": lambda x, w: ops.flip(ops.tanh(ops.flip(x, 0)), 0) + x,
    "a wider reversal": lambda x, w: x[::-2],
    "both": lambda x, w: ops.flip(x) + ops.roll(x, 1, 0),
    "cumulative": lambda x, w: ops.cumsum(ops.flip(x, 0), 1),
}
LAYOUTS = {"4": (FOUR, "[x, _]"), "2x2": (SQUARE, "[x, y]"), "2x3 rows": (SIX, "[x*y, _]")}


@pytest.mark.parametrize(
    ("layout", "rows"), [("4", 13), ("4", 5), ("2x2", 12), ("2x2", 13), ("2x3 rows", 13)]
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_training_equals_serial(name: str, layout: str, rows: int) -> None:
    """Blocks of equal length (12 rows), uneven ones, and ranks without any (5)."""
    mesh, spec = LAYOUTS[layout]
    x = np.random.default_rng(rows).standard_normal((rows, 6))
    graph = train(FUNCTIONS[name], x, mesh, spec)
    before = build(complete(graph, mesh), micro_batches=2)
    assert sent(refined(graph, x, mesh)) <= sent(before) + 0.5


@pytest.mark.parametrize("name", ["flip", "reverse", "roll", "then elementwise", "back again"])
def test_only_the_loss_is_sent(name: str) -> None:
    """Reversals of equal blocks send nothing, back and forth; the mean is one number a micro-batch."""
    x = np.random.default_rng(0).standard_normal((12, 6))
    built = refined(train(FUNCTIONS[name], x, FOUR, "[x, _]"), x, FOUR)
    assert sent(built) == 2 * 2 * 3 / 4 * 8  # micro-batches, all_reduce over 4 of 8 bytes


def test_a_result_that_is_pinned_is_where_the_user_wants_it() -> None:
    x = np.random.default_rng(0).standard_normal((12, 6))
    built = refined(train(FUNCTIONS["flip"], x, FOUR, "[x, _]", "[x, _]"), x, FOUR)
    (y,) = (value for label, value in built.lowered.outputs if label == "y")
    assert built.lowered.attrs[y.name].mesh == FOUR
    assert sent(built) >= 2 * 3 * 6 * 8  # a block of 3 rows goes to another rank in every micro-batch


def test_a_reader_that_stays_behind_pays_for_the_move() -> None:
    """y reversed and y * x in one program: reversing again, or moving a block, costs a block."""
    x = np.random.default_rng(0).standard_normal((12, 6))
    built = refined(train(lambda x, w: ops.flip(x, 0) * ops.exp(x), x, FOUR, "[x, _]"), x, FOUR)
    assert sent(built) >= 2 * 3 * 6 * 8


def test_one_place_has_one_task() -> None:
    """Meshes of the same ranks are no pipeline."""
    x = np.random.default_rng(0).standard_normal((12, 6))
    built = refined(train(FUNCTIONS["then elementwise"], x, FOUR, "[x, _]"), x, FOUR)
    assert len(built.lowered.meshes) == 2
    assert {part.stage for part in built.parts.tasks} == {0}
    assert len({part.kind for part in built.parts.tasks}) == len(built.parts.tasks)


def test_between_other_ranks_no_window_is_fetched() -> None:
    x = np.random.default_rng(0).standard_normal((12, 6))
    lowered = refined(train(FUNCTIONS["flip"], x, FOUR, "[x, _]"), x, FOUR).lowered
    halo = next(op for op in lowered.ops if op.kind == "comm.halo")
    elsewhere = replace(lowered.attrs[halo.name], mesh=grid(1, x=4))
    attrs = {**lowered.attrs, halo.name: elsewhere}
    with pytest.raises(GraphError, match="halo leaves the layout as it is, but leads from"):
        verify(lowered.with_ops(lowered.ops, attrs=attrs), "lowered")
