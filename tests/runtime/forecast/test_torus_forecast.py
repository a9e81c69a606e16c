"""Forecasts on a torus of devices whose rings have measured numbers."""

from __future__ import annotations

from typing import Any

import pytest
from support.programs.forecasts import chain, machines

from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Op, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.complete import complete
from distgraph.passes.partition import LocalOp
from distgraph.resources import ComputeCost, load_cluster
from distgraph.resources.cluster import Cluster
from distgraph.runtime.forecast.communication_cost import Message, TrafficCost
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.forecast.in_flight import NOTHING_IN_FLIGHT
from distgraph.runtime.forecast.op_cost import OpCost
from distgraph.runtime.forecast.stream_model import Streams, _Run
from distgraph.runtime.forecast.task_time import Span
from distgraph.runtime.program.build import Build, build
from distgraph.runtime.program.memory_plan import plan_storage
from distgraph.tracing.annotations import on, reshard, shard_tensor

LENGTH = 4096


class Product(nn.Module):
    """(x * weight) @ (x + weight): factors split over both axes of the mesh, gathered along one each."""

    def __init__(self, mesh: ProcessMesh, dtype: str) -> None:
        self.mesh = mesh
        self.layer = nn.Linear(LENGTH, LENGTH, bias=False, dtype=dtype)
        shard_tensor(self.layer.weight, mesh, ["x", "y"])

    def forward(self, x: Any) -> Any:
        with on(self.mesh):
            x = shard_tensor(x, self.mesh, ["x", "y"])
            left = reshard(x * self.layer.weight, self.mesh, ["x", None])
            right = reshard(x + self.layer.weight, self.mesh, [None, "y"])
            return ops.matmul(left, right)

    def loss(self, y: Any, target: Any) -> Any:
        with on(self.mesh):
            return ops.mean(y * target)


def product(dtype: str, mesh: ProcessMesh) -> Build:
    batch = (((LENGTH, LENGTH), dtype), ((LENGTH, LENGTH), dtype))
    return build(complete(train_graph(Product(mesh, dtype), batch, optimizer=optim.SGD()), mesh))


def forward_spans(build_: Build, cluster: Cluster, devices: tuple[int, ...] | None = None) -> list[Span]:
    found = forecast(build_, cluster, devices, trace=True)
    return list(found.tasks["forward.s0"].last.spans)


def gathers(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.kind == "comm.all_gather"]


def test_a_product_on_a_block_of_the_torus():
    """By hand; the gathers along rows and along columns overlap, both at full speed."""
    cluster = load_cluster("tpu_v4_16x16")
    build_ = product("bf16", ProcessMesh.grid(x=4, y=4))
    found = forward_spans(build_, cluster, cluster.network.corner_block((4, 4)))
    shard = 2 * LENGTH**2 / 16
    left, right = gathers(found)
    assert left.seconds == pytest.approx(13e-6 + 3 * (5e-6 + shard / 79.8e9))
    assert right.seconds == pytest.approx(13e-6 + 3 * (5e-6 + shard / 27.5e9))
    assert left.start <= right.start < left.start + left.seconds
    matmul = next(span for span in found if span.kind == "matmul")
    assert matmul.seconds == pytest.approx(1e-6 + 2 * LENGTH**3 / 16 / 266e12)
    assert matmul.start == pytest.approx(right.start + right.seconds)


def test_groups_behind_one_switch_share_its_links():
    """The same program with groups of both axes on the same links: while both run, each has half of them.

    The left one began first, so it ends first, and the right one when the links have carried both.
    """
    build_ = product("f32", ProcessMesh.grid(x=2, y=2))
    left, right = gathers(forward_spans(build_, machines(4)))
    alone = 10e-6 + 2 * 1e-6 + 4 * LENGTH**2 / 4 / 100e9
    assert left.start < right.start < left.start + alone
    overlap = left.start + alone - right.start
    assert right.start + right.seconds == pytest.approx(left.start + 2 * alone)
    assert right.seconds == pytest.approx(alone + overlap)


def test_which_communication_shares_links():
    """Along different axes none does; an exchange of the axes uses links of both."""
    mesh = ProcessMesh.grid(x=4, y=4)
    cluster = load_cluster("tpu_v4_16x16")
    traffic = traffic_of(product("bf16", mesh), cluster, cluster.network.corner_block((4, 4)))
    left, right, *_ = (op for op in traffic.graph.ops if op.kind == "comm.all_gather")
    assert traffic.share_links(left, left)
    assert not traffic.share_links(left, right)
    switched = traffic_of(product("bf16", mesh), machines(16), tuple(range(16)))
    assert switched.share_links(left, right)
    source, target = left.operands[0], right.result
    exchange = Op("comm.transfer", (source,), (target,), {})
    assert traffic.share_links(exchange, right)
    elsewhere = Op("comm.transfer", (Value("nowhere", (4,), "f32"),), (Value("there", (4,), "f32"),), {})
    assert traffic.share_links(left, elsewhere)


def traffic_of(build_: Build, cluster: Cluster, devices: tuple[int, ...]) -> TrafficCost:
    return TrafficCost(build_.lowered, cluster, devices)


def test_exchanges_follow_one_another_only_over_the_same_links(monkeypatch):
    """a and b share links, c uses others: it starts at once and ends when it would alone."""
    build_ = chain(64, [64, 64], [ProcessMesh.grid(x=1)])
    program, cluster = build_.program(0), machines(1)
    storage = plan_storage(program, build_.schedule)
    traffic = traffic_of(build_, cluster, (0,))
    streams = Streams(program, storage, OpCost(program, storage, ComputeCost(cluster), 0), traffic)
    monkeypatch.setattr(
        traffic, "share_links", lambda first, second: (first.name == "c") == (second.name == "c")
    )
    run = _Run(streams, program.tasks[0], True, {}, NOTHING_IN_FLIGHT, True)
    for name, seconds in (("a", 4.0), ("b", 3.0), ("c", 5.0)):
        op = Op("comm.permute", (Value("x", (8,), "f32"),), (Value(name, (8,), "f32"),), {})
        run._communicate(LocalOp(op, "exchange", {}), Message("send", seconds, 0.0, "ici"))
    assert [(span.start, span.seconds) for span in run.spans] == [(0.0, 4.0), (4.0, 3.0), (0.0, 5.0)]
