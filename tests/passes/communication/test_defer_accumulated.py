"""Planned layouts reduce what micro-batches add up after its `accumulate`, where that costs nothing."""

from __future__ import annotations

import pytest

from distgraph.ir.graph import Graph
from distgraph.ir.parser import parse_graph
from distgraph.ir.verifier import verify
from distgraph.passes.communication.defer_accumulated import defer_accumulated
from distgraph.passes.lower import lower
from distgraph.passes.reshard import reshard

HEAD = """graph @plan
  mesh m0 = (dp=2, tp=3) ranks 0..5
  %x : f32[4, 6] [dp, _] = input {name="x"} <z0:dp> data by default ""
  %w : f32[6]    [_]     = param {name="w"} <> forward by default ""
"""
SUM = 'reduce_sum(%x) {dims=(0,), keepdims=false} <i0:dp> backward by default ""'
RESHAPED = f"""
  %g : f32[6]    [_]    = {SUM}
  %r : f32[2, 3] [_, _] = reshape(%g) {{shape=(2, 3)}} <> backward by default ""
  %a : f32[2, 3] [_, _] = accumulate(%r) <> backward by default ""
"""
ADDED = f"""
  %g : f32[6] [_] = {SUM}
  %h : f32[6] [_] = {SUM}
  %s : f32[6] [_] = add(%g, %h) <> backward by default ""
  %a : f32[6] [_] = accumulate(%s) <> backward by default ""
"""
READ_TWICE = RESHAPED + '  %o : f32[6] [_] = relu(%g) <> backward by default ""\n'
SUMMED_TWICE = f"""
  %g : f32[6] [_] = {SUM}
  %a : f32[6] [_] = accumulate(%g) <> backward by default ""
  %r : f32[6] [_] = negative(%g) <> backward by default ""
  %b : f32[6] [_] = accumulate(%r) <> backward by default ""
"""
PRODUCT = ADDED.replace("add(%g, %h)", "multiply(%g, %h)")
WITH_ANOTHER = ADDED.replace("add(%g, %h)", "add(%g, %w)")
SCATTERED = (
    RESHAPED.replace("%g : f32[6]    [_] ", "%g : f32[6]    [dp]")
    .replace(
        '%r : f32[2, 3] [_, _] = reshape(%g) {shape=(2, 3)} <> backward by default ""',
        '%r : f32[6]    [dp]   = multiply(%g, %g) <i0:dp> backward by default ""',
    )
    .replace("%a : f32[2, 3] [_, _] = accumulate(%r) <>", "%a : f32[6] [dp] = accumulate(%r) <i0:dp>")
)
SCATTERED_AFTER = f"""
  %g : f32[6] [_]  = {SUM}
  %a : f32[6] [dp] = accumulate(%g) <i0:dp> backward by default ""
"""
ATTENTION = """
  %d : f32[1, 2, 4, 3] [_, _, dp, _] = input {name="d"} <z2:dp> data by default ""
  %q : f32[1, 2, 4, 3] [_, _, dp, _] = input {name="q"} <z2:dp> data by default ""
  %k : f32[1, 2, 4, 3] [_, _, _, _]  = input {name="k"} <> data by default ""
  %v : f32[1, 2, 4, 3] [_, _, _, _]  = input {name="v"} <> data by default ""
  %o : f32[1, 2, 4, 3] [_, _, dp, _] = input {name="o"} <z2:dp> data by default ""
  %l : f32[1, 2, 4]    [_, _, dp]    = input {name="l"} <z2:dp> data by default ""
  %dq : f32[1, 2, 4, 3] [_, _, dp, _], %dk : f32[1, 2, 4, 3] [_, _, _, _], \
%dv : f32[1, 2, 4, 3] [_, _, _, _] = \
attention_grad(%d, %q, %k, %v, %o, %l) {causal=false, scale=1.0} <s:dp> backward \
by default "", default "", default ""
  %a : f32[1, 2, 4, 3] [_, _, _, _] = accumulate(%dk) <> backward by default ""
"""
PINNED = RESHAPED.replace(SUM, SUM.replace('default ""', 'user "train.py:9"'))


def planned(ops: str) -> Graph:
    graph = parse_graph(HEAD + ops)
    verify(graph, "completed")
    return graph


def partial(graph: Graph) -> set[str]:
    """Names of the values that are partial sums."""
    verify(graph, "completed")
    return {name for name, attr in graph.attrs.items() if attr.spec.partial}


@pytest.mark.parametrize(
    ("ops", "sums"), [(RESHAPED, {"g", "r"}), (ADDED, {"g", "h", "s"})], ids=["view", "sum"]
)
def test_a_sum_is_reduced_after_its_accumulate(ops: str, sums: set[str]) -> None:
    graph = planned(ops)
    deferred = defer_accumulated(graph)
    assert partial(deferred) == sums
    assert {name: attr.spec.dims for name, attr in deferred.attrs.items()} == {
        name: attr.spec.dims for name, attr in graph.attrs.items()
    }
    lowered = lower(reshard(deferred))
    (message,) = [op for op in lowered.ops if op.kind == "comm.all_reduce"]
    assert lowered.producers[message.operands[0].name].kind == "accumulate"
    assert defer_accumulated(deferred) is deferred


@pytest.mark.parametrize(
    "ops",
    [READ_TWICE, SUMMED_TWICE, PRODUCT, WITH_ANOTHER, SCATTERED, SCATTERED_AFTER, PINNED, ATTENTION],
    ids=[
        *("read-twice", "summed-twice", "product", "other-term", "scattered", "scattered-after"),
        *("annotated", "attention"),
    ],
)
def test_what_would_change_more_than_the_order_stays(ops: str) -> None:
    graph = planned(ops)
    assert defer_accumulated(graph) is graph


def test_axes_of_one_rank_are_no_partial_sums() -> None:
    graph = parse_graph((HEAD + ADDED).replace("dp=2, tp=3", "dp=1, tp=6"))
    assert defer_accumulated(graph) is graph


def test_terms_of_which_one_is_planned_as_a_partial_sum() -> None:
    graph = planned(ADDED.replace("%h : f32[6] [_]", "%h : f32[6] [_] partial(dp)"))
    assert partial(defer_accumulated(graph)) == {"g", "h", "s"}
