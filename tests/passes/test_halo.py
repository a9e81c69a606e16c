"""Ops that read neighbours' positions of a split dim: what is fetched, and that partitioned equals serial."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
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
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.parser import parse_graph, print_graph
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.verifier import verify
from distgraph.passes.complete import complete
from distgraph.passes.redistribution.halo import halo_tiles, halo_volume, inside_window
from distgraph.passes.serial.backward import differentiate
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.tracer import Trace

ONE = {n: ProcessMesh.grid(x=n) for n in (2, 3, 4)}
TWO = ProcessMesh.grid(x=2, y=3)


@st.composite
def requests(draw: Any) -> Any:
    mesh = draw(st.sampled_from([*ONE.values(), TWO]))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    axes: list[tuple[str, ...]] = [()] * len(shape)
    for axis in mesh.axes:
        axes[draw(st.integers(0, len(shape) - 1))] += (axis,)
    cut = [dim for dim, split in enumerate(axes) if split and draw(st.booleans())]
    read = tuple((dim, windows(draw, shape[dim], mesh.count(axes[dim]))) for dim in cut)
    return shape, mesh, ShardSpec(tuple(axes)), read


@settings(max_examples=150, deadline=None)
@given(requests())
def test_every_rank_gets_its_window_once(request: Any) -> None:
    shape, mesh, spec, read = request
    whole = np.arange(math.prod(shape)).reshape(shape)
    sent, received = Counter[int](), Counter[int]()
    held = {}
    for rank in mesh.members:
        bounds = list(spec.bounds(shape, mesh, rank))
        for dim, stretches in read:
            bounds[dim] = stretches[mesh.index(rank, spec.dims[dim])]
        held[rank] = tuple(bounds), np.full([b - a for a, b in bounds], -1)
    for tile in halo_tiles(shape, mesh, spec, read):
        block = spec.bounds(shape, mesh, tile.source_rank)
        for (a, b), (start, stop) in zip(tile.bounds, block, strict=True):
            assert start <= a < b <= stop, f"{tile} is not in the block {block} of its sender"
        bounds, target = held[tile.target_rank]
        where = inside_window(tile, bounds, shape)
        assert (target[where] == -1).all(), f"{tile} lands where something lies already"
        target[where] = whole[tuple(slice(a, b) for a, b in tile.bounds)]
        if not tile.local:
            sent[tile.source_rank] += tile.volume
            received[tile.target_rank] += tile.volume
    for bounds, target in held.values():
        wanted = whole
        for dim, (start, stop) in enumerate(bounds):
            wanted = np.take(wanted, np.arange(start, stop), axis=dim, mode="wrap")
        np.testing.assert_array_equal(target, wanted)
    most = max([*sent.values(), *received.values()], default=0)
    even = all(n % mesh.count(axes) == 0 for n, axes in zip(shape, spec.dims, strict=True))
    assert most <= halo_volume(shape, mesh, spec, read)
    if even:
        assert most == halo_volume(shape, mesh, spec, read)


def program(
    function: Callable[..., Any], arrays: Sequence[Any], mesh: ProcessMesh, specs: Sequence[str], out: str
) -> tuple[Graph, dict[str, Any]]:
    """Completed graph of a function of x and weights, pinned at both ends, with all gradients of a sum."""
    trace = Trace("halo")
    rng = np.random.default_rng(3)
    with trace.activate():
        x = pinned(trace, "input", "x", arrays[0], mesh, specs[0])
        given_weights = zip(arrays[1:], specs[1:], strict=True)
        weights = [pinned(trace, "param", f"w{i}", a, mesh, s) for i, (a, s) in enumerate(given_weights)]
        y = function(x, *weights)
        trace.annotate(y.value, DistAttr(mesh, ShardSpec.parse(out), Origin("user", "y")))
        scale = rng.standard_normal(y.shape)
        loss = ops.reduce("sum", y * trace.source("param", "scale", y.shape, "f64"))
        grads = differentiate(trace, loss, [x, *weights])
        trace.annotate(grads[0].value, DistAttr(mesh, ShardSpec.parse(specs[0]), Origin("user", "dx")))
    outputs = {"y": y, **{f"g{i}": g for i, g in enumerate(grads)}}
    params = {f"w{i}": a for i, a in enumerate(arrays[1:])} | {"scale": scale}
    return complete(trace.finish(outputs), mesh), params


def check(
    function: Callable[..., Any], arrays: Sequence[Any], mesh: ProcessMesh, specs: Sequence[str], out: str
) -> Build:
    """The program on real ranks equals the serial one; its text parses back and passes the verifier."""
    graph, params = program(function, arrays, mesh, specs, out)
    feeds = [{"x": arrays[0]}, {"x": arrays[0][::-1].copy()}]
    outputs, _, built = run_partitioned(graph, feeds, params)
    assert_same(outputs, run_serial(graph, feeds, params)[0], 1e-11)
    verify(built.lowered, "lowered")
    assert same_graph(parse_graph(print_graph(built.lowered)), built.lowered)
    return built


def kinds(built: Build) -> Counter[str]:
    return Counter(op.kind for op in built.lowered.ops if op.kind.startswith("comm."))


def data(*shape: int) -> Any:
    """Different numbers, so that maxima are unique."""
    size = math.prod(shape)
    return np.random.default_rng(size).permutation(size).reshape(shape) / 7 - 3


CONVS = {
    "same": {"padding": 1},
    "valid": {},
    "stride": {"stride": 2, "padding": 1},
    "gaps": {"stride": (4, 3), "padding": ((0, 2), (1, 0))},
    "dilated": {"dilation": (2, 1), "padding": (2, 1)},
    "lopsided": {"padding": ((3, 0), (0, 2))},
    "groups": {"padding": 1, "groups": 2},
}


@pytest.mark.parametrize("name", CONVS)
@pytest.mark.parametrize("parts", ONE)
def test_convolution_split_along_a_spatial_dim(name: str, parts: int) -> None:
    options = CONVS[name]
    w = data(4, 4 // options.get("groups", 1), 3, 3)
    specs = ["[_, _, x, _]", "[_, _, _, _]"]
    built = check(
        lambda x, w: ops.conv(x, w, **options), [data(2, 4, 13, 9), w], ONE[parts], specs, "[_, _, x, _]"
    )
    assert set(kinds(built)) <= {"comm.halo", "comm.slice", "comm.all_reduce"}


def test_convolution_split_along_both_spatial_dims() -> None:
    specs = ["[_, _, x, y]", "[_, _, _, _]"]
    arrays = [data(2, 2, 8, 9), data(2, 2, 3, 3)]
    built = check(lambda x, w: ops.conv(x, w, padding=1), arrays, TWO, specs, "[_, _, x, y]")
    assert kinds(built)["comm.all_gather"] == 0


def test_only_the_edges_cross() -> None:
    """Forward one row to each neighbour: of 2 samples x 4 channels x 9 numbers of 8 bytes."""
    arrays = [data(2, 4, 12, 9), data(4, 4, 3, 3)]
    specs = ["[_, _, x, _]", "[_, _, _, _]"]
    built = check(lambda x, w: ops.conv(x, w, padding=1), arrays, ONE[3], specs, "[_, _, x, _]")
    halo = next(op.name for op in built.lowered.ops if op.kind == "comm.halo")
    sent = [
        local.attrs["wire"]
        for rank in built.ranks
        for task in built.program(rank).tasks
        for local in task.ops
        if local.op.name == halo
    ]
    assert sent == [2 * 4 * 9 * 8, 2 * 2 * 4 * 9 * 8, 2 * 4 * 9 * 8]


def test_one_halo_serves_forward_and_weight_gradient() -> None:
    arrays = [data(2, 4, 12, 9), data(4, 4, 3, 3)]
    specs = ["[_, _, x, _]", "[_, _, _, _]"]
    built = check(lambda x, w: ops.conv(x, w, padding=1), arrays, ONE[2], specs, "[_, _, x, _]")
    assert kinds(built)["comm.halo"] == 2  # of x, and of the gradient of y


def test_windows_that_match_the_blocks_fetch_nothing() -> None:
    built = check(lambda x: ops.avg_pool(x, 2), [data(2, 3, 12, 6)], ONE[3], ["[_, _, x, _]"], "[_, _, x, _]")
    assert kinds(built)["comm.halo"] == 0


@pytest.mark.parametrize("parts", ONE)
@pytest.mark.parametrize("pool", [ops.max_pool, ops.avg_pool])
@pytest.mark.parametrize("options", [{"stride": 1}, {"stride": 2, "padding": 1}, {"stride": 4}], ids=str)
def test_pooling_split_along_a_spatial_dim(parts: int, pool: Any, options: dict[str, int]) -> None:
    arrays, split = [data(2, 3, 18, 7)], "[_, _, x, _]"
    built = check(lambda x: pool(x, 3, **options), arrays, ONE[parts], [split], split)
    assert kinds(built)["comm.all_gather"] == 0


SHAPED: dict[str, Callable[[Any], Any]] = {
    "roll": lambda x: ops.roll(x, 2, 0),
    "roll back": lambda x: ops.roll(x, -9, 0),
    "flip": lambda x: ops.flip(x, 0),
    "shift": lambda x: x[1:],
    "stride": lambda x: x[1::2],
    "reverse": lambda x: x[::-3],
    "pad": lambda x: ops.pad(x, (5, 0), (1, 2), 1.5),
    "concat": lambda x: ops.concat([x, x[:7], x * 2], 0),
    "difference": lambda x: x[1:] - x[:-1],
    "pairs": lambda x: ops.concat([x[6:], -x[:6]], 0),
}


@pytest.mark.parametrize("name", SHAPED)
@pytest.mark.parametrize("parts", ONE)
def test_shape_ops_along_a_split_dim(name: str, parts: int) -> None:
    built = check(SHAPED[name], [data(13, 5)], ONE[parts], ["[x, _]"], "[x, _]")
    assert set(kinds(built)) <= {"comm.halo", "comm.slice", "comm.all_reduce"}


def test_a_wrong_window_is_refused() -> None:
    graph, _ = program(SHAPED["roll"], [data(12, 5)], ONE[3], ["[x, _]"], "[x, _]")
    lowered = build(graph).lowered
    halo = next(op for op in lowered.ops if op.kind == "comm.halo")
    wrong = {"windows": ((0, ((0, 4), (4, 8), (8, 12))),)}
    changed = lowered.with_ops([replace(op, attrs=wrong) if op is halo else op for op in lowered.ops])
    with pytest.raises(GraphError, match="has windows"):
        verify(changed, "lowered")
    short = {"windows": ((0, ((0, 4), (4, 8))),)}
    changed = lowered.with_ops([replace(op, attrs=short) if op is halo else op for op in lowered.ops])
    with pytest.raises(GraphError, match="dim 0 is split in 3 parts but has 2 windows"):
        verify(changed, "lowered")
