"""Reductions of single numbers share one message, which changes no bit of what is trained."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import gathered

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph, Op
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.verifier import verify
from distgraph.passes.communication.fuse_reductions import fuse_reductions

ALONE = ("-bucket_gradients",)
PLAIN = (*ALONE, "-fuse_reductions")
mesh = dg.ProcessMesh.grid(dp=2, tp=2)


class Net(nn.Module):
    """Two layers that are split over tp, with biases: six parameters and as many terms of the norm."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(6, 8, dtype="f64"), nn.Linear(8, 6, dtype="f64")
        self.scale = nn.Parameter((), "f64")
        dg.shard_tensor(self.up.weight, mesh, [None, "tp"])
        dg.shard_tensor(self.down.weight, mesh, ["tp", None])

    def forward(self, x: Any) -> Any:
        x = dg.shard_tensor(x, mesh, ["dp", None])
        return self.down(ops.tanh(self.up(x))) * (self.scale + 1.0)


def error(output: Any, target: Any) -> Any:
    return ops.absolute(output - target).mean()


def spread(output: Any, target: Any) -> Any:
    return ops.square(output).mean()


def trained(passes: tuple[str, ...], micro: int) -> tuple[Graph, list[dict[str, float]], dict[str, Any]]:
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(8, 6)), rng.normal(size=(8, 6))
    strategy = dg.Strategy(micro_batches=micro, passes=passes)
    optimizer = optim.Adam(lr=0.05, clip_norm=0.1)
    engine = dg.Engine(
        Net(), nn.MeanSquaredError(), optimizer, metrics=[error, spread], strategy=strategy, seed=2
    )
    with closing(engine):
        steps = [dict(engine.run(batch)) for _ in range(4)]
        (compiled,) = engine._session.programs.values()
        return compiled.build.lowered, steps, gathered(engine)


def numbers(graph: Graph) -> list[Op]:
    """All_reduces of single numbers after the micro-batches."""
    return [op for op in graph.ops if op.kind == "comm.all_reduce" and op.results[0].size == 1]


@pytest.mark.parametrize("micro", [1, 2])
def test_one_message_for_each_group_of_a_phase_and_the_same_bits(micro: int) -> None:
    fused, steps, tensors = trained(ALONE, micro)
    plain, expected, values = trained(PLAIN, micro)
    assert sorted((op.role, len(op.results)) for op in numbers(fused)) == [
        ("backward", 1),  # the gradient of `scale`, which is ready before the update
        ("forward", 3),  # loss and metrics, over dp
        ("optimize", 3),  # the norm: two weights and a bias are split over tp
    ]
    assert len(numbers(plain)) == 7
    assert steps == expected
    for name, value in values.items():
        np.testing.assert_array_equal(tensors[name], value, name)


def test_fused_programs_are_well_formed_and_survive_their_text() -> None:
    plain, _, _ = trained(PLAIN, 1)
    fused = fuse_reductions(plain)
    verify(fused, "lowered")
    assert print_graph(parse_graph(print_graph(fused))) == print_graph(fused)
    assert {op.name for op in fused.ops} < {op.name for op in plain.ops}
    assert fused.values.keys() == plain.values.keys()
    again = fuse_reductions(fused)
    assert again is fused


CHAIN = """graph @chain
  mesh m0 = (dp=2) ranks 0..1
  %x : f64[4] [dp] = input {name="x"} <z0:dp> data
  %s : f64[] [] partial(dp) = reduce_sum(%x) {dims=(0,), keepdims=false} <i0:dp> forward
  %t : f64[] [] partial(dp) = accumulate(%s) <partial dp:0> forward
  %a : f64[] [] = comm.all_reduce(%t) {axes=("dp",), reduction="sum"} <> forward
  %u : f64[] [] partial(dp) = multiply(%t, %a) <partial dp:0> forward
  %c : f64[] [] = comm.all_reduce(%u) {axes=("dp",), reduction="sum"} <> forward
  %n : f64[] [] partial(dp) = negative(%t) <partial dp:0> forward
  %e : f64[] [] = comm.all_reduce(%n) {axes=("dp",), reduction="sum"} <> forward
  %v : f64[] [] partial(dp) = multiply(%n, %a) <partial dp:0> forward
  %d : f64[] [] = comm.all_reduce(%v) {axes=("dp",), reduction="sum"} <> forward
  output "c" = %c
  output "d" = %d
  output "e" = %e
"""


def test_reductions_that_depend_on_each_other_stay_apart() -> None:
    chain = parse_graph(CHAIN)
    verify(chain, "lowered")
    fused = fuse_reductions(chain)
    verify(fused, "lowered")
    assert [[value.name for value in op.results] for op in numbers(fused)] == [["a", "e"], ["c", "d"]]


def test_what_reads_a_message_that_is_late_itself_follows_it() -> None:
    """The second message waits for the last member of the first, and an op before both reads the second."""
    lines = CHAIN.splitlines(keepends=True)
    (last,) = [line for line in lines if line.startswith("  %e ")]
    reader = "  %q : f64[] [] = negative(%c) <> forward\n"
    lines.remove(last)
    lines.insert(lines.index(next(line for line in lines if line.startswith("  %c "))) + 1, reader)
    lines.insert(lines.index(next(line for line in lines if line.startswith("  %d "))) + 1, last)
    chain = parse_graph("".join(lines))
    verify(chain, "lowered")
    fused = fuse_reductions(chain)
    verify(fused, "lowered")
    assert [[value.name for value in op.results] for op in numbers(fused)] == [["a", "e"], ["c", "d"]]
    assert fused.ops[-1].name == "q"


def test_the_verifier_refuses_what_no_message_carries() -> None:
    text = print_graph(fuse_reductions(parse_graph(CHAIN)))
    (line,) = [line for line in text.splitlines() if "comm.all_reduce(%t, %n)" in line]
    broken = text.replace(line, line.replace("%n)", "%x)").replace("%e ", "%e "))
    with pytest.raises(GraphError):
        verify(parse_graph(broken), "lowered")
    gathered_twice = line.replace("all_reduce", "all_to_all")
    with pytest.raises(GraphError, match="all_to_all takes one tensor but has 2"):
        verify(parse_graph(text.replace(line, gathered_twice)), "lowered")


def test_several_gathered_tensors_have_a_dim_each() -> None:
    text = print_graph(fuse_reductions(parse_graph(CHAIN)))
    (line,) = [line for line in text.splitlines() if "comm.all_reduce(%t, %n)" in line]
    gathered = line.replace("all_reduce", "all_gather")
    with pytest.raises(GraphError, match="one all_gather of 2 tensors has as many dims but dims is None"):
        verify(parse_graph(text.replace(line, gathered)), "lowered")


TASKS = """graph @tasks
  mesh m0 = (dp=2) ranks 0..1
  %x : f64[4] [dp] = input {name="x"} <z0:dp> data
  %s : f64[] [] partial(dp) = reduce_sum(%x) {dims=(0,), keepdims=false} <i0:dp> forward
  %t : f64[] [] partial(dp) = accumulate(%s) <partial dp:0> forward
  %u : f64[] [] partial(dp) = negative(%t) <partial dp:0> optimize task "up"
  %a : f64[] [] = comm.all_reduce(%u) {axes=("dp",), reduction="sum"} <> optimize
  %v : f64[] [] = negative(%a) <> optimize task "READER"
  %w : f64[] [] partial(dp) = negative(%t) <partial dp:0> optimize task "down"
  %b : f64[] [] = comm.all_reduce(%w) {axes=("dp",), reduction="sum"} <> optimize
  %c : f64[] [] partial(dp) = negative(%w) <partial dp:0> optimize task "down"
  %d : f64[] [] = comm.all_reduce(%c) {axes=("dp",), reduction="sum"} <> optimize
  %e : f64[] [] = add(%b, %d) <> optimize task "down"
  output "v" = %v
  output "e" = %e
"""


def test_reductions_for_which_tasks_wait_are_fused_inside_of_each_task() -> None:
    graph = parse_graph(TASKS.replace("READER", "up"))
    verify(graph, "lowered")
    fused = fuse_reductions(graph)
    verify(fused, "lowered")
    assert [[value.name for value in op.results] for op in numbers(fused)] == [["a"], ["b", "d"]]


def test_reductions_for_which_no_task_waits_are_fused_across_tasks() -> None:
    text = TASKS.replace(' task "READER"', "")
    outside = text.replace('add(%b, %d) <> optimize task "down"', "add(%b, %d) <> optimize")
    fused = fuse_reductions(parse_graph(outside))
    verify(fused, "lowered")
    assert [[value.name for value in op.results] for op in numbers(fused)] == [["a", "b", "d"]]
