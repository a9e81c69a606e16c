"""Fused ops: decompositions, costs, the layouts they promise, and errors for operands that do not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.ops.op_checks import Sample, assert_close, build, check_layouts, every, run
from support.ops.op_samples_fused import SAMPLES

from distgraph import ops
from distgraph.errors import GraphError
from distgraph.ir.graph import Graph
from distgraph.ir.index_rule import OpLayout, choices
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import flops, linear_groups, lookup, operand_layout, result_layout, rule_of
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.decompose import decompose
from distgraph.tracing.tensor import emit
from distgraph.tracing.tracer import Trace

DECOMPOSED = [(kind, i) for kind, i in every(SAMPLES) if lookup(kind).decompose is not None]


def traced(kind: str, sample: Sample) -> Graph:
    trace = Trace(kind)
    with trace.activate():
        inputs = [trace.source("input", f"x{i}", a.shape, a.dtype) for i, a in enumerate(sample.operands)]
        results = emit(kind, *inputs, **sample.attrs)
        results = results if isinstance(results, tuple) else (results,)
        return trace.finish({f"y{i}": r for i, r in enumerate(results)})


def fed(sample: Sample) -> dict[str, Any]:
    return {f"x{i}": a for i, a in enumerate(sample.operands)}


def test_every_op_with_a_whole_dim_and_a_softmax_or_norm_decomposes() -> None:
    wanted = {"softmax", "log_softmax", "layer_norm", "rms_norm", "cross_entropy"}
    assert {kind for kind, _ in DECOMPOSED} == wanted | {f"{kind}_grad" for kind in wanted}


@pytest.mark.parametrize(("kind", "position"), DECOMPOSED)
def test_decomposition_gives_the_same_numbers(kind: str, position: int) -> None:
    sample = SAMPLES[kind][position]
    graph = traced(kind, sample)
    (name,) = [op.name for op in graph.ops if op.kind == kind]
    expanded = decompose(graph, [name])
    assert all(lookup(op.kind).decompose is None or op.kind == "argmax" for op in expanded.ops if op.operands)
    fused, _ = interpret(graph, fed(sample))
    simple, _ = interpret(expanded, fed(sample))
    for label, expected in fused.items():
        assert_close(simple[label], expected, build(kind, sample), 32, f"{kind} {label}")


@pytest.mark.parametrize(("kind", "position"), DECOMPOSED)
def test_decomposed_ops_let_the_whole_dim_be_split(kind: str, position: int) -> None:
    """Every op on a tensor of full rank allows a split of the dim; only row-sized values are reduced."""
    sample = SAMPLES[kind][position]
    axis = sample.attrs.get("axis", -1)
    shape = max((a.shape for a in sample.operands), key=len)
    graph = traced(kind, sample)
    expanded = decompose(graph, [op.name for op in graph.ops if op.kind == kind])
    mesh = ProcessMesh.grid(x=2)
    for op in expanded.ops:
        if not op.operands or op.operands[0].shape != shape or lookup(op.kind).view:
            continue
        layouts = choices(rule_of(op), mesh, linear_groups(op))
        split = [c for c in layouts if operand_layout(op, 0, c).dims[axis] == ("x",)]
        assert split, f"{op} cannot be computed with dim {axis} split"
        for value, r in zip(op.results, range(len(op.results)), strict=True):
            if result_layout(op, r, split[0]).partial:
                assert value.size < np.prod(shape)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_half_precision_decomposes_through_float32(dtype: str) -> None:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((4, 40)).astype(np.float32) * 30  # exp of a difference of 60 overflows in f16
    sample = Sample((wide,), {"axis": 1})
    trace = Trace()
    with trace.activate():
        x = trace.source("input", "x0", wide.shape, "f32").astype(dtype)
        y = ops.softmax(x)
        graph = trace.finish({"y": y})
    (name,) = [op.name for op in graph.ops if op.kind == "softmax"]
    fused, _ = interpret(graph, fed(sample))
    simple, _ = interpret(decompose(graph, [name]), fed(sample))
    assert str(simple["y"].dtype) == {"f16": "float16", "bf16": "bfloat16"}[dtype]
    error = np.abs(simple["y"].astype(float) - fused["y"].astype(float)).max()
    assert error <= 2 ** -{"f16": 10, "bf16": 7}[dtype]  # one unit in the last place of 1


# attention


def attention_op(causal: bool, s: int = 6, t: int = 6) -> Any:
    rng = np.random.default_rng(5)
    arrays = (rng.standard_normal((2, 4, s, 3)), *(rng.standard_normal((2, 2, t, 3)) for _ in "kv"))
    return build("attention", Sample(arrays, {"causal": causal, "scale": 0.5})), arrays


def test_split_query_rows_leave_keys_whole_and_key_gradients_partial() -> None:
    op, _ = attention_op(True)
    layout = OpLayout(ProcessMesh.grid(sp=3), (("s", ("sp",)),))
    assert str(operand_layout(op, 0, layout)) == "[_, _, sp, _]"
    assert str(operand_layout(op, 1, layout)) == "[_, _, _, _]"
    assert str(result_layout(op, 0, layout)) == "[_, _, sp, _]"
    q, k, v = op.operands
    o, lse = op.results
    grad = replace(op, kind="attention_grad", operands=(o, q, k, v, o, lse), results=(q, k, v))
    assert str(result_layout(grad, 1, layout)) == "[_, _, _, _] partial(sp)"


def test_heads_of_one_group_cannot_be_split_unevenly_between_ranks() -> None:
    op, _ = attention_op(False)  # 4 heads in 2 groups
    mesh = ProcessMesh.grid(tp=4)
    legal = choices(rule_of(op), mesh, linear_groups(op))
    assert not any(c.of("g") or c.of("r") for c in legal)
    both = ProcessMesh.grid(a=2, b=2)
    assert any(c.of("g") == ("a",) and c.of("r") == ("b",) for c in choices(rule_of(op), both))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_flops_count_what_is_computed(causal: bool) -> None:
    op, _ = attention_op(causal, s=4, t=6)
    pairs = 2 * 4 * (3 + 4 + 5 + 6 if causal else 4 * 6)  # batch x heads x visible keys of each row
    assert flops(op) == 2 * pairs * (3 + 3)


def test_contraction_flops() -> None:
    conv = build("conv", SAMPLES["conv"][1])
    (n, o, *place), (_, inside, *kernel) = conv.result.shape, conv.operands[1].shape
    assert flops(conv) == 2 * n * o * np.prod(place) * inside * np.prod(kernel)


def test_many_query_shards_under_a_causal_mask() -> None:
    """More ranks than rows: some ranks hold no row, others see few keys."""
    op, arrays = attention_op(True, s=3, t=5)
    sample = Sample(arrays, dict(op.attrs))
    assert check_layouts("attention", sample, (ProcessMesh.grid(x=2, y=3),)) > 5
    o, lse = run(op, arrays)
    grads = Sample((np.ones_like(o), *arrays, o, lse), dict(op.attrs))
    assert check_layouts("attention_grad", grads, (ProcessMesh.grid(x=2, y=3),)) > 5


# errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f, i: ops.cross_entropy(f(4, 5), f(4)), r"labels are f32\[4\] but must be integers"),
        (lambda f, i: ops.cross_entropy(f(4, 5), i(3)), r"want one label a row"),
        (lambda f, i: ops.layer_norm(f(4, 5), f(4), f(4)), r"weight is f32\[4\] but x is f32\[4, 5\]"),
        (lambda f, i: ops.softmax(i(4, 5)), r"must be floating"),
        (lambda f, i: ops.attention(f(1, 3, 4, 2), f(1, 2, 4, 2), f(1, 2, 4, 2)), r"h a multiple of g"),
        (lambda f, i: ops.conv(f(1, 4, 5, 5), f(6, 3, 3, 3)), r"takes 3"),
        (lambda f, i: ops.conv(f(1, 4, 2, 2), f(6, 4, 3, 3)), r"does not fit in input \(2, 2\)"),
        (lambda f, i: ops.dropout(f(4), 0.5, batch_dim=1), r"batch_dim is 1 but the tensor has 1 dims"),
        (lambda f, i: ops.gelu(i(4)), r"must be floating"),
    ],
)
def test_operands_that_do_not_fit_are_refused_with_both_sides(call: Any, message: str) -> None:
    trace = Trace()
    with trace.activate(), pytest.raises(GraphError, match=message) as caught:
        call(
            lambda *shape: trace.source("input", f"f{shape}", shape, "f32"),
            lambda *shape: trace.source("input", f"i{shape}", shape, "i32"),
        )
    assert "test_fused_ops.py:" in str(caught.value)


def test_a_gradient_through_row_statistics_is_refused() -> None:
    from distgraph.passes.serial.backward import differentiate

    trace = Trace()
    with trace.activate():
        x = trace.source("input", "x", (3, 4), "f32")
        _, mean, _ = emit("layer_norm", x, np.ones(4, np.float32), np.zeros(4, np.float32), eps=1e-5)
        with pytest.raises(GraphError, match="row statistics of layer_norm have no gradient"):
            differentiate(trace, ops.reduce("sum", mean), [x])
