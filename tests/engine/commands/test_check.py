"""The check itself: right programs pass; of a mutant op or rule the first value that diverges is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.programs.small_graphs import MESH, mlp

import distgraph as dg
from distgraph.array_api.trace import trace
from distgraph.engine.commands.check import check, join
from distgraph.errors import GraphError
from distgraph.ir import op_registry
from distgraph.ir.graph import Graph, Value
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import REGISTRY, lookup
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.passes.complete import complete
from distgraph.passes.pass_pipeline import Pipeline, pipeline


def arrays(graph: Graph, rng: np.random.Generator):
    inputs, params = {}, {}
    for op in graph.sources("input", "param", "state"):
        value, name = op.result, op.attrs["name"]
        if value.dtype == "i32":
            inputs[name] = rng.integers(0, 6, value.shape).astype(np.int32)
        elif op.kind == "input":
            inputs[name] = np.asarray(rng.uniform(0.1, 1, value.shape), np.float32)
        else:
            params[name] = rng.normal(size=value.shape).astype(np.float32)
    return inputs, params


def run_check(rng, serial: Graph | None = None, passes: Pipeline | None = None):
    serial = serial or mlp()
    return check(complete(serial), *arrays(serial, rng), serial, passes)


@pytest.fixture
def mutate(monkeypatch):
    def change(kind, **fields):
        monkeypatch.setitem(REGISTRY, kind, replace(REGISTRY[kind], **fields))
        op_registry._rule.cache_clear()

    yield change
    op_registry._rule.cache_clear()


def test_a_right_program_passes(rng):
    report = run_check(rng)
    assert report.ok, str(report)
    assert report.ranks == 6
    assert set(report.outputs) == {"loss"}
    assert set(report.gradients) == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    assert report.compared > 2 * len([op for op in mlp().ops if op.operands])
    assert str(report).endswith("partitioned == serial")
    assert all(found.error <= found.bound < 1e-4 for found in report.gradients.values())
    assert not report.widened


def test_gradients_that_are_sent_in_16_bits_are_checked_in_f32(rng):
    report = run_check(rng, passes=pipeline(["narrow_gradients"]))
    assert report.ok, str(report)
    assert report.widened
    assert "gradients were sent in f32, not in 16 bits" in str(report)
    assert not any("wire" in op.attrs for op in report.graph.ops)


def test_a_rule_that_splits_what_must_be_whole_is_named(rng, mutate):
    """A softmax over a split dim without any gather."""
    mesh = ProcessMesh.grid(x=3)

    def program(x, w):
        dg.shard_tensor(w, mesh, [None, "x"])
        return dg.ops.exp(dg.ops.cumsum(x @ w, 1)) * 0.5

    serial = trace(program, ((4, 6), "f32"), ((6, 7), "f32"))
    right = REGISTRY["cumsum"].rule
    mutate("cumsum", rule=lambda shapes, attrs: replace(right(shapes, attrs), whole=frozenset()))
    report = run_check(rng, serial)
    assert not report.ok
    assert report.first.op.kind == "cumsum"
    assert report.first.how == "op by op"
    assert report.first.error > 100 * report.first.bound
    text = str(report)
    assert "first diverging op: %" in text
    assert "cumsum (test_check.py:" in text
    assert "^" in text.split("\n")[-1]


def test_a_wrong_reduction_is_named(rng, mutate):
    mutate("matmul", reduction="max")
    report = run_check(rng)
    assert not report.ok
    assert report.first.op.kind in ("matmul", "comm.all_reduce", "comm.reduce_scatter")
    assert report.first.op.source == "model.py:8"


def test_a_kernel_that_is_wrong_on_blocks_only_is_named(rng, mutate):
    """Wrong where a rank has fewer than ten columns, so never serially."""
    kernel = lookup("gelu").kernel

    def wrong(xp, x, out=None, **attrs):
        found = kernel(xp, x, out=out, **attrs)
        if x.shape[-1] != 10:
            found[..., :1] *= 1.01
        return found

    mutate("gelu", kernel=wrong)
    report = run_check(rng)
    assert report.first is not None
    assert report.first.op.kind == "gelu"
    assert report.first.where[-1] in (0, 4, 8)  # the first column of a block of ceil(10 / 3)
    assert "in fc1 [forward]" in str(report)


def test_a_program_that_means_something_else_is_named(rng):
    """Every op does what it says, but the completed graph is not the serial one."""
    serial = mlp()
    completed = complete(serial)
    op = next(op for op in completed.ops if op.kind == "gelu")
    other = completed.with_ops(
        replace(each, kind="tanh", attrs={}) if each.name == op.name else each for each in completed.ops
    )
    report = check(other, *arrays(serial, rng), serial)
    assert report.first is not None
    assert report.first.op.name == op.name
    assert report.first.how == "whole program"


def test_sums_that_cancel_are_compared_by_the_digits_of_their_parts(rng):
    """Four ranks hold parts of a mean that is 0; what is left of it depends on the order.

    The all_reduce adds in the order of the ranks, the joined operand axis by axis.
    """
    mesh = ProcessMesh.grid(x=2, y=2)

    def program(x):
        return dg.ops.mean(dg.shard_tensor(x, mesh, [("x", "y")]))

    serial = trace(program, ((16,), "f64"))
    (source,) = serial.sources("input")
    for _ in range(20):
        x = rng.normal(size=16)
        x[8:] = -rng.permutation(x[:8])
        report = check(complete(serial), {source.attrs["name"]: x}, {}, serial)
        assert "comm.all_reduce" in {op.kind for op in report.graph.ops}
        assert report.ok, str(report)


def test_missing_arrays_are_refused(rng):
    serial = mlp()
    inputs, params = arrays(serial, rng)
    with pytest.raises(GraphError, match=r"input x is f32\[12, 6\] but nothing is given"):
        check(complete(serial), {n: a for n, a in inputs.items() if n != "x"}, params)
    with pytest.raises(GraphError, match=r"param fc1.bias is f32\[10\] but shape \(3,\) is given"):
        check(complete(serial), inputs, {**params, "fc1.bias": np.zeros(3)})


def test_join_reduces_and_compares(rng):
    value = Value("v", (5, 2), "f64")
    attr = DistAttr(MESH, ShardSpec.parse("[dp, _] partial(tp)"))
    whole = rng.normal(size=(5, 2))
    shares = rng.normal(size=(2, 5, 2))
    parts = [shares[0], shares[1], whole - shares[0] - shares[1]]
    blocks = {
        rank: parts[MESH.index(rank, ("tp",))][attr.spec.slices((5, 2), MESH, rank)] for rank in MESH.members
    }
    found, spread, _ = join(value, attr, blocks)
    assert np.allclose(found, whole, rtol=0, atol=1e-14)
    assert spread == 0
    replicated = DistAttr(MESH, ShardSpec.parse("[_, dp]"))
    blocks = {rank: whole[replicated.spec.slices((5, 2), MESH, rank)].copy() for rank in MESH.members}
    blocks[4][3, 0] += 2.0
    _, spread, where = join(value, replicated, blocks)
    assert spread == pytest.approx(2.0)
    assert where == (3, 1)
