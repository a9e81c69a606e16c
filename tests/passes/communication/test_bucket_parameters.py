"""Under ZeRO small tensors share messages: the same bits and bytes, fewer messages, hardly more memory."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import gathered

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.verifier import verify
from distgraph.passes.communication.message_buckets import message_bytes
from distgraph.runtime.program.build import Build
from distgraph.runtime.program.kernel_workspace import task_workspace
from distgraph.runtime.program.memory_plan import plan_storage

LAYERS, WIDTH = 6, 12
PLAIN = ("-bucket_gradients", "-bucket_parameters")
GATHER, SCATTER = "comm.all_gather", "comm.reduce_scatter"
grid = dg.ProcessMesh.grid


class Layer(nn.Module):
    """A weight, a bias, and a norm with two vectors."""

    def __init__(self, width: int) -> None:
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Any) -> Any:
        return ops.tanh(self.norm(self.linear(x)))


class Net(nn.Module):
    """Equal layers on one or two stages."""

    def __init__(self, meshes: tuple[dg.ProcessMesh, ...]) -> None:
        self.layers = [Layer(WIDTH) for _ in range(LAYERS)]
        self.meshes = [meshes[n * len(meshes) // LAYERS] for n in range(LAYERS)]

    def forward(self, x: Any) -> Any:
        x = dg.shard_tensor(x, self.meshes[0], ["dp", None])
        for layer, mesh in zip(self.layers, self.meshes, strict=True):
            with dg.on(mesh):
                x = layer(x)
        return x


@cache
def trained(
    zero: int, micro: int, passes: tuple[str, ...], stages: int = 1, schedule: str = "1f1b"
) -> tuple[Build, list[float], dict[str, Any]]:
    meshes = (grid(dp=4),) if stages == 1 else (grid(0, dp=2), grid(2, dp=2))
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(16, WIDTH)).astype("f4") for _ in range(2)]
    strategy = dg.Strategy(zero=zero, micro_batches=micro, passes=passes, schedule=schedule)
    engine = dg.Engine(
        Net(meshes), nn.MeanSquaredError(), optim.Adam(lr=0.05, clip_norm=0.1), strategy=strategy, seed=2
    )
    with closing(engine):
        losses = [engine.run(batch)["loss"] for _ in range(2)]
        (compiled,) = engine._session.programs.values()
        return compiled.build, losses, gathered(engine)


def messages(build: Build, kind: str) -> tuple[int, int]:
    """Messages of a kind, and the tensors that they carry."""
    found = [op for op in build.lowered.ops if op.kind == kind]
    return len(found), sum(len(op.results) for op in found)


@pytest.mark.parametrize(
    ("zero", "micro", "stages", "schedule"),
    [(1, 1, 1, "1f1b"), (1, 2, 2, "1f1b"), (2, 2, 1, "1f1b"), (2, 2, 2, "zb-h1"), (3, 2, 1, "1f1b")],
)
def test_the_bits_and_bytes_are_those_of_single_messages(
    zero: int, micro: int, stages: int, schedule: str
) -> None:
    build, losses, tensors = trained(zero, micro, (), stages, schedule)
    plain, expected, values = trained(zero, micro, PLAIN, stages, schedule)
    assert losses == expected
    for name, value in values.items():
        np.testing.assert_array_equal(tensors[name], value, name)
    for rank in range(4):
        assert build.program(rank).bytes_sent() == plain.program(rank).bytes_sent()
    for kind in (GATHER, SCATTER):
        (fewer, carried), (single, same) = messages(build, kind), messages(plain, kind)
        assert carried == same == single
        assert fewer <= single / 2


def test_no_message_a_tensor() -> None:
    """One message for a layer where a rank has no memory for more; one for many layers where it has."""
    once, parts, whole = (trained(zero, 2, ())[0] for zero in (1, 2, 3))
    assert messages(once, SCATTER)[0] == messages(once, GATHER)[0] == 1
    assert LAYERS <= messages(parts, SCATTER)[0] <= LAYERS + 1
    assert messages(whole, GATHER)[0] == 2 * LAYERS


def test_a_message_names_a_dim_of_each_tensor() -> None:
    graph = trained(3, 2, ())[0].lowered
    verify(parse_graph(print_graph(graph)), "lowered")
    dims = {op.attrs["dims"] for op in graph.ops if op.kind == GATHER and len(op.results) > 1}
    assert dims
    assert all(len(each) > 1 for each in dims)


def test_gradients_under_way_are_those_of_two_layers() -> None:
    """What a rank holds of gradients, and the packed messages, which the plan of memory counts too."""
    build = trained(2, 2, ())[0]
    layer = 4 * (WIDTH * WIDTH + 3 * WIDTH)
    scatters = [op for op in build.lowered.ops if op.kind == SCATTER]
    for op in scatters:
        assert sum(value.nbytes for value in op.operands) <= layer
    program, plain = build.program(0), trained(2, 2, PLAIN)[0].program(0)
    packed, kernels = (
        task_workspace(each, plan_storage(each, build.schedule))["backward.s0"] for each in (program, plain)
    )
    assert layer <= packed <= kernels + 3 * layer


def test_the_bytes_of_a_gather_are_those_of_the_whole_tensor() -> None:
    graph = trained(3, 1, PLAIN)[0].lowered
    gather = next(op for op in graph.ops if op.kind == GATHER and op.results[0].shape == (WIDTH, WIDTH))
    assert message_bytes(graph, gather) == 4 * WIDTH * WIDTH
