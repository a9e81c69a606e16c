"""Where `gather_parameters` and `shard_gradients` place communication, and that programs stay well-formed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from support.ops.graph_equality import same_graph

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.ir.graph import Graph, Op
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.verifier import verify
from distgraph.passes.communication.gather_parameters import gather_parameters, layer_of
from distgraph.passes.communication.shard_gradients import shard_gradients
from distgraph.passes.pass_pipeline import run_passes

mesh = dg.ProcessMesh.grid(dp=4)


class Tied(nn.Module):
    """Two layers and a head whose weight is the transposed weight of the first layer."""

    def __init__(self) -> None:
        self.first, self.second = nn.Linear(8, 12, bias=False), nn.Linear(12, 12, bias=False)

    def forward(self, x: Any) -> Any:
        x = dg.shard_tensor(x, mesh, ["dp", None])
        x = ops.tanh(self.second(ops.tanh(self.first(x))))
        return ops.matmul(x, self.first.weight.T)


@cache
def lowered() -> Graph:
    model = Tied()
    for parameter in model.parameters():
        dg.shard_tensor(parameter, mesh, ["dp", None])
    shapes = ((8, 8), "f32"), ((8, 8), "f32")
    graph = train_graph(model, shapes, nn.MeanSquaredError(), optim.SGD(lr=0.1, momentum=0.9))
    result: Graph = run_passes(graph, ["complete", "reshard", "lower"])
    return result


def of_kind(graph: Graph, kind: str) -> list[Op]:
    return [op for op in graph.ops if op.kind == kind]


def place(graph: Graph, name: str) -> int:
    return next(n for n, op in enumerate(graph.ops) if op.name == name)


@pytest.mark.parametrize(
    "passes", [[gather_parameters], [shard_gradients], [gather_parameters, shard_gradients]]
)
def test_programs_stay_well_formed(passes: list[Any]) -> None:
    graph = lowered()
    for each in passes:
        graph = each(graph)
        verify(graph, "lowered")
        assert same_graph(parse_graph(print_graph(graph)), graph)
        assert each(graph) is graph or same_graph(each(graph), graph)


def test_a_layer_is_gathered_for_each_use_and_one_layer_ahead() -> None:
    before, after = lowered(), gather_parameters(lowered())
    assert len(of_kind(before, "comm.all_gather")) == 3  # one of them of the transposed weight
    gathers = of_kind(after, "comm.all_gather")
    assert [op.role for op in gathers].count("forward") == 3
    assert [op.role for op in gathers].count("backward") == 2  # the input of the first layer has no gradient
    for role in ("forward", "backward"):
        ordered = [op for op in gathers if op.role == role]
        readers = [first_reader(after, op.name) for op in ordered]
        for later, reader in zip(ordered[1:], readers, strict=False):
            assert place(after, later.name) < reader
        for later, reader in zip(ordered[2:], readers, strict=False):
            assert place(after, later.name) > reader


def first_reader(graph: Graph, name: str) -> int:
    return min(place(graph, op.name) for op in graph.users[name])


def test_gradients_are_scattered_as_they_are_made() -> None:
    """Without a cost of the start of a message each gradient goes by itself."""
    before, after = lowered(), shard_gradients(lowered(), lambda _, nbytes, *mesh: nbytes)
    assert len(of_kind(before, "comm.reduce_scatter")) == len(of_kind(after, "comm.reduce_scatter")) == 2
    for scatter in of_kind(after, "comm.reduce_scatter"):
        assert place(after, scatter.name) == place(after, scatter.operands[0].name) + 1
        (reader,) = after.users[scatter.name]
        assert reader.kind == "accumulate"
        assert after.attrs[reader.name].spec == after.attrs[scatter.name].spec


def test_small_gradients_wait_for_their_bucket() -> None:
    after = shard_gradients(lowered())
    first, second = (place(after, op.name) for op in of_kind(after, "comm.reduce_scatter"))
    made = max(place(after, op.operands[0].name) for op in of_kind(after, "comm.reduce_scatter"))
    assert made < first
    assert second == first + 1


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("blocks.3.attn.q", "blocks.3"),
        ("model.layers.12", "model.layers.12"),
        ("0", "0"),
        ("net.fc1.norm", "net"),
        ("", "w"),
    ],
)
def test_layers_are_modules_up_to_the_first_number(scope: str, layer: str) -> None:
    assert layer_of(Op("add", (), (), scope=scope), "w") == layer


def test_unsplit_programs_stay_as_they_are() -> None:
    shapes = ((8, 8), "f32"), ((8, 8), "f32")
    graph = train_graph(Tied(), shapes, nn.MeanSquaredError(), optim.SGD(lr=0.1))
    plain = run_passes(graph, ["complete", "reshard", "lower"])
    assert gather_parameters(plain) is plain
    assert shard_gradients(plain) is plain
