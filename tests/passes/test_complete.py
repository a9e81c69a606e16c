"""Properties of completion: one result in any order, annotations kept, and the collectives that follow."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.programs.partitioned import assert_same, run_partitioned, run_serial
from support.programs.random_programs import MESHES, PIPELINES, Program, programs

from distgraph import nn, ops, optim
from distgraph.errors import ShardingError
from distgraph.ir.graph import SOURCES, Graph, Op
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import rule_of
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.verifier import verify
from distgraph.passes.assign_meshes import place
from distgraph.passes.complete import complete
from distgraph.passes.propagate_shardings import _class_of, propagate
from distgraph.passes.serial.backward import differentiate
from distgraph.runtime.program.build import Build, build
from distgraph.tracing.tensor import Tensor
from distgraph.tracing.tracer import Trace

ONE = tuple((mesh,) for mesh in MESHES)
checked = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    max_examples=max(40, settings.default.max_examples),
)


def attr(mesh: ProcessMesh, *dims: Any, where: str = "here") -> DistAttr:
    return DistAttr(mesh, ShardSpec.of(dims), Origin("user", where))


def pin(x: Tensor, mesh: ProcessMesh, *dims: Any, where: str = "here") -> Tensor:
    x.trace.annotate(x.value, attr(mesh, *dims, where=where))
    return x


def decided(graph: Graph) -> dict[str, Any]:
    """Everything that completion decides."""
    return dict(graph.attrs) | {f"op {op.name}": op.layout for op in graph.ops}


def reordered(graph: Graph, seed: int) -> Graph:
    """The ops in another topological order; annotated values keep theirs, for their order breaks ties."""
    rng = random.Random(seed)
    waiting, done, ops_ = list(graph.ops), set(), []
    pinned = [op.name for op in graph.ops if any(v.name in graph.attrs for v in op.results)]
    while waiting:
        first = next((n for n in pinned if n not in done), None)
        ready = [
            op
            for op in waiting
            if all(v.name in done for v in op.operands) and (op.name not in pinned or op.name == first)
        ]
        op = rng.choice(ready)
        waiting.remove(op)
        ops_.append(op)
        done.update(v.name for v in op.results)
    names = list(graph.attrs)
    rng.shuffle(names)
    return graph.with_ops(ops_, attrs={n: graph.attrs[n] for n in names})


@checked
@given(programs(ONE, train=True), st.integers(0, 9))
def test_result_does_not_depend_on_the_order(program: Program, seed: int) -> None:
    expected = decided(complete(program.graph))
    assert decided(complete(reordered(program.graph, seed))) == expected


@checked
@given(programs(ONE + PIPELINES, train=True, steps=4))
def test_completing_twice_changes_nothing(program: Program) -> None:
    once = complete(program.graph)
    twice = complete(once)
    assert decided(twice) == decided(once)
    assert [op.name for op in twice.ops] == [op.name for op in once.ops]


@checked
@given(programs(ONE + PIPELINES, train=True, steps=4))
def test_annotations_stay_and_everything_is_decided(program: Program) -> None:
    completed = complete(program.graph)
    for name, told in program.graph.attrs.items():
        assert completed.attrs[name] == told
        assert completed.attrs[name].origin == told.origin
    for op in completed.ops:
        assert op.layout is not None
        for value in op.results:
            found = completed.attrs[value.name]
            found.spec.check(value.shape, found.mesh)
            assert value.name not in completed.live_out or not found.spec.partial


# an independent fixpoint: chaotic iteration over every value and op until nothing changes


def chaotic(graph: Graph, mesh: ProcessMesh, seed: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """(value, axis) -> dim and (op, axis) -> index, each the least claim that its neighbours offer."""
    rng = random.Random(seed)
    position = {name: i for i, name in enumerate(graph.values)}
    values: dict[Any, Any] = {}
    for name, told in graph.attrs.items():
        source = graph.producers[name]
        late = source.kind in ("param", "state") or source.role in ("backward", "optimize")
        for axis in mesh.axes:
            values[name, axis] = None
        for dim, axes in enumerate(told.spec.dims):
            for order, axis in enumerate(axes):
                values[name, axis] = ((2 if late else 0, 0, 0, position[name], order), dim)
    inferred = [op for op in graph.ops if op.kind not in SOURCES]
    items = [(op, axis) for op in inferred for axis in mesh.axes]
    items += [(name, axis) for name in graph.values for axis in mesh.axes if name not in graph.attrs]
    taken: dict[Any, Any] = {}
    limit = len(items)
    changed = True
    while changed:
        changed = False
        rng.shuffle(items)
        for item, axis in items:
            if isinstance(item, Op):
                found = _least_for_op(item, axis, values)
                table, key = taken, (item.name, axis)
            else:
                found = _least_for_value(item, axis, graph, inferred, taken, limit)
                table, key = values, (item, axis)
            if table.get(key) != found:
                table[key] = found
                changed = True
    return {k: v[1] for k, v in values.items() if v}, {k: v[1] for k, v in taken.items() if v}


def _least_for_op(op: Op, axis: str, values: Mapping[Any, Any]) -> Any:
    rule, offers = rule_of(op), []
    for terms, tensors in ((rule.operands, op.operands), (rule.results, op.results)):
        for term, value in zip(terms, tensors, strict=True):
            claim = values.get((value.name, axis))
            if claim is None or not term[claim[1]] or term[claim[1]][0] in rule.whole:
                continue
            offers.append((claim[0], value.name, claim[1], len(offers), term[claim[1]][0]))
    return (min(offers)[0], min(offers)[-1]) if offers else None


def _least_for_value(
    name: str, axis: str, graph: Graph, inferred: Iterable[Op], taken: Mapping[Any, Any], limit: int
) -> Any:
    offers = []
    for op in inferred:
        claim = taken.get((op.name, axis))
        if claim is None or name not in {v.name for v in op.operands + op.results}:
            continue
        (kind, worst, hops, seed, order), index = claim
        if hops >= limit:
            continue  # a claim that only its own echo still supports dies out
        key = (kind, max(worst, _class_of(op)), hops + 1, seed, order)
        for is_result, tensor, dim in rule_of(op).dims_of(index):
            if (op.results if is_result else op.operands)[tensor].name == name:
                offers.append((key, dim))
    return min(offers) if offers else None


@st.composite
def plain_programs(draw: Any) -> tuple[Graph, ProcessMesh]:
    """Products, sums, transposes and softmax of large dims: no claim is refused for want of room."""
    mesh = draw(st.sampled_from(MESHES))
    trace = Trace("plain")

    def perhaps(x: Tensor) -> Tensor:
        if x.value.name not in trace.attrs and draw(st.booleans()):
            dims: list[list[str]] = [[] for _ in x.shape]
            for axis in mesh.axes:
                at = draw(st.integers(0, x.ndim))
                if at < x.ndim:
                    dims[at].append(axis)
            pin(x, mesh, *dims)
        return x

    with trace.activate():
        made = [pin(trace.source("input", "x", (12, 24, 36), "f64"), mesh, mesh.axes[0], None, None)]
        for number in range(draw(st.integers(2, 9))):
            x = made[draw(st.integers(0, len(made) - 1))]
            match draw(st.integers(0, 4)):
                case 0:
                    w = perhaps(trace.source("param", f"w{number}", (x.shape[-1], 24), "f64"))
                    y = ops.matmul(x, w)
                case 1:
                    y = x + perhaps(trace.source("param", f"w{number}", x.shape[-1:], "f64"))
                case 2:
                    y = ops.transpose(x, draw(st.permutations(range(x.ndim))))
                case 3:
                    y = ops.softmax(x, draw(st.integers(0, x.ndim - 1)))
                case _:
                    same = [t for t in made if t.shape == x.shape]
                    y = x * same[draw(st.integers(0, len(same) - 1))]
            made.append(perhaps(y))
    return trace.finish({"y": made[-1]}), mesh


@checked
@given(plain_programs(), st.integers(0, 3))
def test_fixpoint_is_that_of_chaotic_iteration(case: tuple[Graph, ProcessMesh], seed: int) -> None:
    graph, mesh = case
    placed, meshes = place(graph)
    settled = propagate(placed, meshes)
    values, taken = chaotic(placed, mesh, seed)
    found = {
        (n, a): d for n, held in settled.values.items() for a, (d, _, _) in held.items() if d is not None
    }
    assert found == values
    assert {(n, a): i for n, held in settled.ops.items() for a, (i, _, _) in held.items()} == taken


# what a user sees


def test_contradiction_names_both_annotations() -> None:
    mesh, trace = ProcessMesh.grid(x=2, y=3), Trace("two")
    with trace.activate():
        x = trace.source("input", "x", (6, 6), "f32")
        pin(x, mesh, "x", None, where="model.py:3")
        with pytest.raises(ShardingError, match=r"model\.py:9.*model\.py:3"):
            pin(x, mesh, None, "x", where="model.py:9")


def test_axes_on_one_dim_keep_their_order() -> None:
    mesh, trace = ProcessMesh.grid(x=2, y=3), Trace("order")
    with trace.activate():
        x = pin(trace.source("input", "x", (12, 5), "f64"), mesh, ("y", "x"), None)
        y = ops.reshape(ops.tanh(x), (6, 2, 5))
        graph = complete(trace.finish({"y": y}))
    tanh, reshape = graph.ops[1:]
    assert str(graph.attrs[tanh.name].spec) == "[y*x, _]"
    assert str(graph.attrs[reshape.name].spec) == "[y*x, _, _]"
    feeds = [{"x": np.arange(60.0).reshape(12, 5)}]
    assert_same(run_partitioned(graph, feeds, {})[0], run_serial(graph, feeds, {})[0], 1e-12)


@pytest.mark.parametrize(("major", "minor"), [("x", "y"), ("y", "x")])
def test_a_sum_waits_behind_a_reshape_only_where_blocks_stay_blocks(
    major: str, minor: str, rng: np.random.Generator
) -> None:
    """Of a dim that is split into two, the minor one cannot be split while the major one is whole."""
    mesh, trace = ProcessMesh.grid(x=3, y=2), Trace("reshape")
    shape = (mesh.axis_size(major), 12 // mesh.axis_size(major))
    with trace.activate():
        x = pin(trace.source("input", "x", (6, 12), "f64"), mesh, major, minor)
        w = pin(trace.source("input", "w", shape, "f64"), mesh, major, minor)
        y = ops.reshape(ops.reduce("sum", x, (0,)), shape) + w
        graph = verify(complete(trace.finish({"y": y})), "completed")
    feeds = [{"x": rng.normal(size=(6, 12)), "w": rng.normal(size=shape)}]
    assert_same(run_partitioned(graph, feeds, {})[0], run_serial(graph, feeds, {})[0], 1e-12)


def test_axes_are_translated_by_name_between_stages() -> None:
    first, second = ProcessMesh.grid(dp=2), ProcessMesh.grid(2, tp=2, dp=3)
    trace = Trace("stages")
    with trace.activate():
        x = pin(trace.source("input", "x", (12, 8), "f32"), first, "dp", None)
        with trace.on(first):
            h = ops.tanh(x)
        with trace.on(second):
            y = ops.sin(h)
        graph = complete(trace.finish({"y": y}))
    assert graph.attrs[h.value.name] == attr(first, "dp", None)
    assert graph.attrs[y.value.name] == attr(second, "dp", None)


def test_larger_of_two_nested_meshes_computes() -> None:
    large, small = ProcessMesh.grid(x=4), ProcessMesh.grid(x=2)
    for left, right in ((large, small), (small, large)):
        trace = Trace("nested")
        with trace.activate():
            x = pin(trace.source("input", "x", (8,), "f32"), left, "x")
            y = pin(trace.source("input", "y", (8,), "f32"), right, "x")
            z = x + y
            graph = complete(trace.finish({"z": z}))
        assert graph.attrs[z.value.name].mesh == large
        assert graph.attrs[x.value.name].mesh == left
        assert graph.attrs[y.value.name].mesh == right


# collectives of known models


def trained(
    model: nn.Module,
    shape: tuple[int, ...],
    mesh: ProcessMesh,
    specs: Mapping[str, Any],
    batch: Any = None,
    optimizer: Any = None,
    dtype: str = "f32",
) -> Graph:
    """Forward, backward and update of a model; `specs`: end of a parameter's name -> dims."""
    for name, parameter in model.named_parameters():
        for end, dims in specs.items():
            if name.endswith(end):
                parameter.annotation = attr(mesh, *dims, where=name)
    trace = Trace("step")
    with trace.activate():
        x = trace.source("input", "x", shape, dtype)
        if batch:
            pin(x, mesh, *batch)
        loss = ops.mean(ops.square(model(x)))
        params = [trace.tensor(p) for p in model.parameters()]
        pairs = []
        for p, grad in zip(params, differentiate(trace, loss, params), strict=True):
            with trace.within(role="backward"), trace.on_behalf_of(p.value.name, "", ""):
                pairs.append((p, ops.accumulate(grad)))
        (optimizer or optim.SGD(lr=0.1)).update(trace, pairs)
        return complete(trace.finish({"loss": ops.accumulate(loss)}), mesh)


def collectives(
    built: Build, *, roles: Iterable[str] = ("forward", "backward", "optimize")
) -> dict[str, int]:
    """How many collectives of each kind there are; slices and masks cost nothing on the wire."""
    kinds = [op.kind for op in built.lowered.ops if op.kind.startswith("comm.") and op.role in roles]
    found = collections.Counter(
        k.removeprefix("comm.") for k in kinds if k not in ("comm.slice", "comm.mask")
    )
    return dict(found)


MEGATRON = {f"{name}.weight": (None, "tp") for name in ("q", "k", "v", "up")}


@pytest.mark.parametrize("blocks", [1, 3])
def test_megatron_block_has_two_all_reduces_forward(blocks: int) -> None:
    mesh = ProcessMesh.grid(tp=4)
    model = nn.Sequential(*[nn.TransformerBlock(16, 4) for _ in range(blocks)])
    built = build(trained(model, (2, 6, 16), mesh, MEGATRON))
    assert collectives(built, roles=["forward"]) == {"all_reduce": 2 * blocks}


def test_data_parallel_reduces_gradients_once_a_step() -> None:
    mesh = ProcessMesh.grid(dp=4)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    built = build(trained(model, (8, 8), mesh, {}, batch=("dp", None)), micro_batches=3)
    assert collectives(built, roles=["forward"]) == {"all_reduce": 1}  # the loss
    (bucket,) = [op for op in built.lowered.ops if op.kind == "comm.all_reduce" and op.role == "backward"]
    assert len(bucket.results) == 4  # two weights, two biases
    assert collectives(built, roles=["optimize"]) == {}
    for op in built.lowered.ops:
        assert not op.kind.startswith("comm.") or built.parts.phase[op.name] == 2, op


def test_split_states_give_one_reduce_scatter_and_one_all_gather_a_parameter() -> None:
    mesh = ProcessMesh.grid(dp=4)
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    adam = optim.Adam(state_spec=optim.shard_states(mesh, "dp"))
    built = build(trained(model, (8, 8), mesh, {}, batch=("dp", None), optimizer=adam), micro_batches=2)
    assert collectives(built) == {"reduce_scatter": 1, "all_gather": 1, "all_reduce": 1}  # and the loss
    for op in built.lowered.ops:
        assert op.kind not in ("comm.reduce_scatter", "comm.all_gather") or len(op.results) == 4
        assert not op.kind.startswith("comm.") or built.parts.phase[op.name] != 1, op


def test_tied_embedding_is_one_parameter() -> None:
    mesh, trace = ProcessMesh.grid(dp=2, tp=3), Trace("tied")
    rng = np.random.default_rng(5)
    with trace.activate():
        ids = pin(trace.source("input", "ids", (4, 5), "i64"), mesh, "dp", None)
        table = pin(trace.source("param", "table", (7, 6), "f64"), mesh, "tp", None)
        logits = ops.matmul(ops.tanh(ops.embedding(table, ids)), ops.transpose(table, (1, 0)))
        loss = ops.mean(ops.cross_entropy(logits, ids))
        (grad,) = differentiate(trace, loss, [table])
        with trace.on_behalf_of("table", "", ""):
            with trace.within(role="backward"):
                mean = ops.accumulate(grad)
            with trace.within(role="optimize"):
                trace.updates.append(("table", (table - mean * 0.5).value))
        graph = trace.finish({"loss": ops.accumulate(loss)})
    completed = complete(graph)
    assert completed.attrs[logits.value.name] == attr(mesh, "dp", None, "tp")
    feeds = [{"ids": rng.integers(0, 7, (4, 5))} for _ in range(2)]
    params = {"table": rng.normal(size=(7, 6))}
    expected, updates = run_serial(replace(graph), feeds, params)
    found, new, built = run_partitioned(completed, feeds, params)
    assert_same(found, expected, 1e-12)
    assert_same({"table": [new["table"]]}, {"table": [updates["table"]]}, 1e-12)
    gathers = [op for op in built.lowered.ops if op.kind == "comm.all_gather"]
    assert not [op for op in gathers if op.result.shape in ((7, 6), (6, 7))]  # the table is never gathered
