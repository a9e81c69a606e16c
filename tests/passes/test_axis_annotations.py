"""Annotations by names of axes, without a mesh, hold on every mesh, and programs train as on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.programs.searched import Program, two_by_two
from support.search.plan_training import trains_as_one_rank

import distgraph as dg
from distgraph import nn, ops
from distgraph.array_api.trace import trace
from distgraph.engine.commands.plan_search import SearchOptions, search
from distgraph.engine.search_driver.search_space import shapes_of
from distgraph.errors import InfeasibleError, ShardingError
from distgraph.ir.mesh import ProcessMesh
from distgraph.passes.complete import complete
from distgraph.passes.search.inter_op.submesh_placement import Pool
from distgraph.plan.constraints import SearchConstraints
from distgraph.plan.strategy import Strategy

GRID = ProcessMesh.grid(dp=2, tp=2)
FLOATS = ((8, 24), "f32")


class Net(nn.Module):
    """Two residual blocks and a product, with annotations by axes where there are any."""

    def __init__(self, named: bool = True, pin: Any = None) -> None:
        self.wide = [nn.Linear(24, 32, bias=False, dtype="f64") for _ in range(2)]
        self.narrow = [nn.Linear(32, 24, bias=False, dtype="f64") for _ in range(2)]
        self.last = nn.Linear(24, 6, bias=False, dtype="f64")
        self.named, self.pin = named, {"m": "dp", "k": "tp"} if pin is None else pin
        for wide, narrow in zip(self.wide, self.narrow, strict=True) if named else ():
            dg.shard_tensor(wide.weight, axes=[None, "tp"])
            dg.shard_tensor(narrow.weight, axes=["tp", None])

    def forward(self, x: Any) -> Any:
        for wide, narrow in zip(self.wide, self.narrow, strict=True):
            y = narrow(ops.relu(wide(x)))
            x = x + (dg.shard_tensor(y, axes=["dp", None], partial="tp") if self.named else y)
        product = dg.shard_op(ops.matmul, axes=self.pin) if self.named else ops.matmul
        return product(x, self.last.weight)


PROGRAM = Program(lambda: Net(False), (24,), batch=8)


def searched(model: Any, **given: Any) -> dg.Plan:
    """The plan for the model on two machines of two devices."""
    options = SearchOptions(seconds=60, processes=1, constraints=SearchConstraints(**given))
    return search(PROGRAM.compile_request(model), two_by_two(), options)


def test_a_search_keeps_axes_of_tensors_ops_and_partials() -> None:
    plan = searched(Net(), micro_batches=2)
    (stage,) = plan.stages
    assert stage.mesh.sizes == {"dp": 2, "tp": 2}
    assert str(plan.tensors["wide.0.weight"].spec) == "[_, tp]"
    assert str(plan.tensors["narrow.1.weight"].spec) == "[tp, _]"
    lines = [str(line) for layer in plan.ops for line in layer.ops]
    assert any("matmul {k:tp, m:dp}" in line or "einsum {k:tp, m:dp}" in line for line in lines)
    assert any(line.endswith("[dp, _] partial(tp)") for line in lines)
    assert plan.baselines["double recursion"] == "left out: annotations name the axes tp, dp"
    trains_as_one_rank(PROGRAM, plan, Net)
    with pytest.raises(ShardingError, match=r"is annotated \[tp, _\] on .* but plan of Net has it \[_, tp\]"):
        PROGRAM.engine(_other(), plan=plan).fit(PROGRAM.data(1), batch_size=8, progress=False)


def _other() -> Net:
    """The model with another annotation."""
    model = Net()
    model.wide[0].weight.annotation = None
    dg.shard_tensor(model.wide[0].weight, axes=["tp", None])
    return model


def test_stages_that_cannot_have_the_axes_are_not_built() -> None:
    with pytest.raises(
        InfeasibleError, match="tp and dp of two devices or more in every stage, which annota"
    ):
        searched(Net(), stages=2, micro_batches=2)
    with pytest.raises(
        ShardingError, match=r"names axis 'ep' but the meshes .* have the axes dp and tp; use"
    ):
        searched(Net(pin={"m": "ep"}))


@pytest.mark.parametrize("zero", [0, 3])
def test_completion_keeps_them_on_the_mesh_of_the_strategy(zero: int) -> None:
    strategy = Strategy(mesh=GRID, batch_axis="dp", zero=zero)
    engines = PROGRAM.engine(), PROGRAM.engine(Net(), strategy=strategy)
    for engine in engines:
        engine.fit(PROGRAM.data(2), batch_size=8, shuffle=False, progress=False)
    np.testing.assert_allclose(engines[1].history.losses, engines[0].history.losses, rtol=1e-9)
    assert len(engines[1].plan.build.ranks) == 4
    stored = engines[1].plan.build.lowered.attrs["wide.0.weight"].spec
    assert str(stored) == ("[dp, tp]" if zero else "[_, tp]")


def test_each_stage_has_them_on_its_own_mesh() -> None:
    first, second = (ProcessMesh(np.arange(2) + 2 * n, ["tp"]) for n in range(2))
    weight = nn.Parameter((24, 24))
    dg.shard_tensor(weight, axes=[None, "tp"])
    weight.name = "weight"

    def model(x: Any) -> Any:
        x = ops.relu(dg.shard_tensor(x, first, [None, None]))
        dg.pipeline_boundary(x, second)
        return ops.matmul(x, weight)

    attrs = complete(trace(model, FLOATS)).attrs
    assert (attrs["weight"].mesh, str(attrs["weight"].spec)) == (second, "[_, tp]")


def test_shapes_have_the_axes_that_annotations_name() -> None:
    pool = Pool.grid("a", 2, 4)
    assert [str(shape) for shape in shapes_of(pool, 4, ["dp"])] == ["dp=4", "dp=2 x tp=2"]
    assert [str(shape) for shape in shapes_of(pool, 4, ["dp", "tp"])] == ["dp=2 x tp=2"]
    assert shapes_of(pool, 1, ["dp"]) == ()


def _twice(x: Any) -> Any:
    return dg.shard_tensor(dg.shard_tensor(x, axes=["dp", None]), axes=[None, "dp"])


@pytest.mark.parametrize(
    ("annotate", "message"),
    [
        (dg.shard_tensor, r"has no mesh and no axes; give it a mesh and dims, or axes=\[None"),
        (
            lambda x: dg.shard_tensor(x, GRID),
            "has a mesh but no dims; give it a mesh and dims, or axes alone",
        ),
        (lambda x: dg.shard_tensor(x, GRID, axes=["dp"]), "has a mesh and axes; give it a mesh and dims, or"),
        (lambda x: dg.shard_tensor(x, axes=["dp"]), r"spec \[dp\] has 1 dims but shape \(8, 24\) has 2"),
        (
            lambda x: dg.shard_tensor(x, axes=["dp", "dp"]),
            r"shard_tensor \(test_axis_annotations.py:\d+\): spec .*: axis 'dp' is used twice; .*so leave",
        ),
        (
            lambda x: dg.reshard(x, GRID, ["dp", "dp"]),
            r"reshard \(test_axis_annotations.py:\d+\): spec \[dp, dp\]: axis 'dp' is used twice",
        ),
        (
            dg.shard_op(ops.relu, axes={"i0": "dp", "i1": "dp"}),
            r"shard_op \(test_axis_annotations.py:\d+\): spec \[dp, dp\]: axis 'dp' is used twice",
        ),
        (_twice, r"annotated \[_, dp\] on any mesh .* but was annotated \[dp, _\] on any mesh"),
        (
            dg.shard_op(ops.relu, axes={"i0": (3,)}),
            r"spec \[3\]: 3 is no axis name; give names of axes",
        ),
        (dg.shard_op(ops.relu, axes={"z": "dp"}), "relu has no index 'z'; its indices are"),
        (lambda _: dg.shard_op(ops.relu), r"no mesh and no counts; give it a mesh, or counts=\(\(2, 1\)"),
        (lambda _: dg.shard_op(ops.relu, axes=["dp"]), "axes is a list but must name the index that each"),
        (
            lambda _: dg.shard_op(ops.relu, axes={}, counts=((1, 1),)),
            "has counts and axes; leave one of them out",
        ),
        (
            dg.shard_op(ops.relu, GRID, axes={"i0": "pp"}),
            r"axis 'pp' but mesh\(dp=2, tp=2\) has",
        ),
        (
            dg.shard_op(lambda y: ops.relu(y) + 1.0, axes={}),
            "axes are those of one op but the call computes relu, .*; give axes to",
        ),
    ],
)
def test_mistakes_are_named(annotate: Any, message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        trace(annotate, FLOATS)


def test_a_mesh_without_the_axis_and_other_axes_around_an_op_are_named() -> None:
    graph = trace(lambda x: dg.shard_tensor(ops.relu(x), axes=["pp", None]), FLOATS)
    with pytest.raises(ShardingError, match=r"splits over axis 'pp' but mesh\(dp=2, tp=2\) has dp, tp; give"):
        complete(graph, GRID)

    def contradiction(x: Any) -> Any:
        index = "i0"
        y = dg.shard_op(ops.relu, axes={index: "dp"})(x)
        return dg.shard_tensor(y, axes=[None, "tp"])

    with pytest.raises(ShardingError, match=r"relu .* is given the axes .* but other annotations lead to"):
        complete(trace(contradiction, FLOATS), GRID)
    with pytest.raises(ShardingError, match=r"%x0 is annotated .* but is stored and cannot be partial"):
        trace(lambda x: dg.shard_tensor(x, GRID, [None, None], partial="tp"), FLOATS)
    parameter = nn.Parameter((8, 24))
    with pytest.raises(ShardingError, match="is stored and cannot be partial; annotate a tensor inside"):
        dg.shard_tensor(parameter, axes=[None, None], partial="tp")


def test_parameters_may_have_specs_in_a_call() -> None:
    weight = nn.Parameter((24, 6))
    weight.name = "weight"
    for specs in ([["dp", None], [None, "tp"]], [["dp", None]]):
        function = dg.shard_op(ops.matmul, GRID, in_specs=specs)
        graph = trace(lambda x, function=function: function(x, weight), FLOATS)
        assert len([op for op in graph.ops if op.kind == "reshard"]) == len(specs)
    with pytest.raises(ShardingError, match="shard_op has 3 in_specs but the call has 2 tensors"):
        trace(lambda x: dg.shard_op(ops.matmul, GRID, in_specs=[None] * 3)(x, weight), FLOATS)
