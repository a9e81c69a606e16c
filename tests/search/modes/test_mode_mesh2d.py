"""Mode mesh2d: a transformer trains as on one rank, the tuner's choice is in the plan, and wrong input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.partitioned import run_partitioned, run_serial
from support.programs.search_cases import cluster
from support.programs.searched import Program, two_by_two

import distgraph as dg
from distgraph import nn, optim
from distgraph.engine.compile.train_graph import train_graph
from distgraph.engine.search_driver.baselines.baselines import (
    evaluate_data_parallel,
    evaluate_mesh2d_where_it_gains,
)
from distgraph.engine.search_driver.candidate import plan_of
from distgraph.engine.search_driver.explain.decisions import decisions
from distgraph.engine.search_driver.fixed_mesh_search import mesh2d_programs, mesh2d_where_it_gains
from distgraph.engine.search_driver.layout_costs import LayoutCosts
from distgraph.engine.search_driver.run_search import run_search
from distgraph.engine.search_driver.search_space import pools_of
from distgraph.engine.search_driver.search_state import SearchState
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.matmul_algorithm import MatmulAlgorithm
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.models import GPT, GPTConfig
from distgraph.passes.complete import complete
from distgraph.passes.search.modes.mesh2d import (
    annotate,
    layouts_by_tuner,
    linear_layers,
    shapes,
)
from distgraph.passes.search.modes.weight_stationary import Group, weight_stationary_groups
from distgraph.passes.serial.backward import differentiate
from distgraph.plan.constraints import SearchConstraints
from distgraph.tracing.tracer import Trace


def gpt() -> GPT:
    return GPT(GPTConfig(vocabulary=96, hidden=48, heads=6, layers=1, sequence=8, dtype="f64"))


def engine(model: GPT | None = None, **options: object) -> dg.Engine:
    loss = lambda y, t: dg.ops.mean(dg.ops.cross_entropy(y, t))  # noqa: E731
    return dg.Engine(model or gpt(), loss, optim.AdamW(0.01), **options)


def batch() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 96, size=(12, 9)).astype(np.int32)
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def losses(trained: dg.Engine) -> list[float]:
    return [trained.run(batch())["loss"] for _ in range(2)]


def saved(trained: dg.Engine, folder: Path) -> dg.Plan:
    """The plan as its file has it."""
    trained.plan.save(folder / "plan.json")
    return dg.Plan.load(folder / "plan.json")


def computed(plan: dg.Plan) -> set[str]:
    """Kinds of the ops that an algorithm computes."""
    return {line.kind for layer in plan.ops for line in layer.ops if line.algorithm is not None}


@pytest.mark.parametrize(("machines", "ranks"), [((2, 2), 4), ((3, 3), 6)])
def test_a_transformer_trains_as_on_one_rank(machines: tuple[int, int], ranks: int, tmp_path: Path) -> None:
    sharded = engine(strategy=dg.Strategy(mode="mesh2d"), cluster=cluster(machines))
    assert losses(sharded) == pytest.approx(losses(engine()), rel=0, abs=1e-12)
    plan = saved(sharded, tmp_path)
    rows, cols = plan.stages[0].mesh.shape
    assert rows * cols == ranks
    assert min(rows, cols) > 1
    assert computed(plan) == {"matmul", "einsum"}  # forward and backward
    assert any(name.startswith("mesh2d") for name in plan.baselines)


@pytest.mark.parametrize(
    ("machines", "samples", "shape"), [((2, 2), (4, 4), {(2, 2)}), ((3, 3), (12, 2), {(2, 3), (3, 2)})]
)
def test_weights_stay_in_a_transformer_that_trains_on_few_samples(
    machines: tuple[int, int], samples: tuple[int, int], shape: set[tuple[int, int]], tmp_path: Path
) -> None:
    """By the tuner's choice (RS): attention and MLP read activations whose batch the other axis splits."""

    def model() -> GPT:
        config = GPTConfig(
            vocabulary=96, hidden=96, heads=6, layers=1, sequence=samples[1], packed=False, dtype="f64"
        )
        return GPT(config)

    def trained(**options: object) -> tuple[list[float], dg.Engine]:
        sharded = engine(model(), **options)
        ids = np.random.default_rng(0).integers(0, 96, size=(samples[0], samples[1] + 1)).astype("i4")
        return [sharded.run((ids[:, :-1].copy(), ids[:, 1:].copy()))["loss"] for _ in range(2)], sharded

    found, sharded = trained(strategy=dg.Strategy(mode="mesh2d"), cluster=cluster(machines))
    assert found == pytest.approx(trained()[0], rel=0, abs=1e-12)
    plan = saved(sharded, tmp_path)
    assert plan.stages[0].mesh.shape in shape
    forward = [
        str(line) for layer in plan.ops for line in layer.ops if line.algorithm and line.kind == "matmul"
    ]
    turned = [line.endswith("-> [cols, _, rows]") for line in forward]
    assert turned == [True] * 3 + [False, True, False, False]  # queries, keys, values, out, up, down, head
    assert computed(plan) == {"matmul", "einsum"}


@pytest.mark.parametrize("shape", [(2, 4), (4, 2)])
def test_a_transformer_trains_on_the_mesh_of_an_annotation(shape: tuple[int, int], tmp_path: Path) -> None:
    """Eight ranks on meshes that are not square equal one rank."""

    def model() -> GPT:
        return GPT(GPTConfig(vocabulary=96, hidden=64, heads=8, layers=1, sequence=8, dtype="f64"))

    annotated, mesh = model(), dg.ProcessMesh.grid(rows=shape[0], cols=shape[1])
    dg.shard_tensor(annotated.head.weight, mesh, ["rows", "cols"])
    sharded = engine(annotated, strategy=dg.Strategy(mode="mesh2d"), cluster=cluster((4, 4)))
    assert losses(sharded) == pytest.approx(losses(engine(model())), rel=0, abs=1e-12)
    plan = saved(sharded, tmp_path)
    assert plan.stages[0].mesh.shape == shape
    assert computed(plan) == {"matmul", "einsum"}


def test_a_transformer_trains_on_meshes_beside_each_other(tmp_path: Path) -> None:
    """Data parallelism of 2, each on a mesh of 2 x 2, equals one rank."""
    model, mesh = gpt(), dg.ProcessMesh.grid(dp=2, rows=2, cols=2)
    dg.shard_tensor(model.head.weight, mesh, ["rows", "cols"])
    sharded = engine(model, strategy=dg.Strategy(mode="mesh2d"), cluster=cluster((4, 4)))
    assert losses(sharded) == pytest.approx(losses(engine()), rel=0, abs=1e-12)
    plan = saved(sharded, tmp_path)
    assert plan.stages[0].mesh.shape == (2, 2, 2)
    assert computed(plan) == {"matmul", "einsum"}
    assert any(name.startswith("mesh2d: 2 x 2 x 2") for name in plan.baselines)


def large(samples: int, inputs: int, outputs: int) -> Graph:
    """One linear layer and its gradients, in shapes alone."""

    recorded = Trace("layer")
    with recorded.activate():
        x = recorded.source("input", "x", (samples, inputs), "f32")
        dy = recorded.source("input", "dy", (samples, outputs), "f32")
        w = recorded.source("param", "w", (inputs, outputs), "f32")
        dx, dw = differentiate(recorded, dg.ops.reduce("sum", (dg.ops.gelu(x) @ w) * dy), [x, w])
    return recorded.finish({"dx": dx, "dw": dw})


def test_the_tuner_slices_where_communication_can_be_hidden() -> None:
    boxes = cluster((4, 4))
    graph = large(16384, 4096, 16384)
    (layer,) = linear_layers(graph)
    assert (layer.samples, layer.inputs, layer.outputs) == (16384, 4096, 16384)
    sliced = layouts_by_tuner(graph, shapes(boxes), boxes, "meshslice")
    whole = layouts_by_tuner(graph, shapes(boxes), boxes, "collective")
    assert {len(tuned.mesh.axes) for tuned in sliced} == {2, 3}
    assert sliced[0].seconds < whole[0].seconds
    algorithms = sliced[0].graph.algorithms.values()
    assert len(algorithms) == 3  # forward and both gradients
    assert any(algorithm.slices > 1 for algorithm in algorithms)


def test_the_rings_of_wang_are_those_of_the_tuner() -> None:
    boxes = cluster((4, 4))
    for tuned in layouts_by_tuner(large(16384, 4096, 16384), shapes(boxes), boxes, "wang"):
        rings = [product.seconds.ring for layer in tuned.tuning.layers for product in layer.products]
        named = [tuned.mesh.axes[-2:][ring] for ring in rings if ring is not None]
        assert [algorithm.ring for algorithm in tuned.graph.algorithms.values()] == named


def test_what_does_not_fit_is_refused() -> None:
    def annotated(mesh: dg.ProcessMesh) -> dg.Engine:
        model = gpt()
        dg.shard_tensor(model.head.weight, mesh, [None, mesh.axes[0]])
        return engine(model, strategy=dg.Strategy(mode="mesh2d"), cluster=cluster((2, 2)))

    with pytest.raises(
        ShardingError, match="mode mesh2d needs a mesh of two axes, and maybe one for data before"
    ):
        annotated(dg.ProcessMesh.grid(tp=4)).prepare(batch())
    prime = engine(strategy=dg.Strategy(mode="mesh2d"), cluster=cluster((3, 2)))
    with pytest.raises(ShardingError, match="no mesh of two axes divides a linear layer"):
        prime.prepare(batch())


class Wide(nn.Module):
    """Two layers whose weights are their largest matrices, and one that reads the result of the second."""

    def __init__(self, width: int) -> None:
        self.up = nn.Linear(width, 2 * width, dtype="f64")
        self.down = nn.Linear(2 * width, width, dtype="f64")
        self.head = nn.Linear(width, 8, dtype="f64")

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        return self.head(x + self.down(dg.ops.gelu(self.up(x))))


def wide(samples: int, width: int) -> Graph:
    loss = lambda y, t: dg.ops.mean(dg.ops.square(y - t))  # noqa: E731
    batch = ((samples, width), "f64"), ((samples, 8), "f64")
    return train_graph(Wide(width), batch, loss, optim.SGD(0.1))


def test_weights_stay_in_pairs_of_layers() -> None:
    up, down, head = (layer.op for layer in linear_layers(wide(16, 32)))
    graph = wide(16, 32)
    assert weight_stationary_groups(graph, [up, down, head], [up, down, head]) == [
        Group(frozenset({up}), frozenset({down}))
    ]
    assert weight_stationary_groups(graph, [up, down, head], [up, head]) == []
    assert weight_stationary_groups(graph, [up, down, head], []) == []
    gpt_graph = train_graph(gpt(), (((12, 8), "i32"), ((12, 8), "i32")))
    linear = [layer.op for layer in linear_layers(gpt_graph)]
    query, key, value, out, *mlp, last = linear
    groups = weight_stationary_groups(gpt_graph, linear, linear)
    assert groups == [
        Group(frozenset({query, key, value}), frozenset({out})),
        Group(frozenset({mlp[0]}), frozenset({mlp[1]})),
    ]
    assert last not in groups[0].returning | groups[1].returning


def stationary(shape: tuple[int, int]) -> tuple[Graph, dg.ProcessMesh, dict[str, str]]:
    """Two layers whose weights stay in place."""
    graph = wide(12, 24)
    up, down, _ = (layer.op for layer in linear_layers(graph))
    return graph, dg.ProcessMesh.grid(rows=shape[0], cols=shape[1]), {up: "RS^T", down: "RS"}


def stationary_transformer(shape: tuple[int, ...]) -> tuple[Graph, dg.ProcessMesh, dict[str, str]]:
    """A transformer in which all weights but those of the head stay in place."""
    graph = train_graph(gpt(), (((12, 8), "i32"), ((12, 8), "i32")), None, optim.SGD(0.1))
    linear = [layer.op for layer in linear_layers(graph)]
    flows = dict.fromkeys(linear, "OS")
    for group in weight_stationary_groups(graph, linear, linear):
        flows |= dict.fromkeys(group.leaving, "RS^T") | dict.fromkeys(group.returning, "RS")
    assert list(flows.values()) == ["RS^T"] * 3 + ["RS", "RS^T", "RS", "OS"]
    axes = ("dp", "rows", "cols")[-len(shape) :]
    return graph, dg.ProcessMesh.grid(**dict(zip(axes, shape, strict=True))), flows


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        (stationary, (2, 3)),
        (stationary, (3, 2)),
        (stationary_transformer, (2, 3)),
        (stationary_transformer, (2, 2, 2)),
    ],
)
def test_a_step_with_stationary_weights_equals_the_serial_one(case: Any, shape: tuple[int, ...]) -> None:
    graph, mesh, flows = case(shape)
    annotated, names = annotate(graph, mesh, flows)
    assert names == tuple(flows)
    products = {*flows} | {op.name for op in graph.ops if op.link in flows and op.kind == "einsum"}
    slices = 2 if len(shape) == 2 else 1
    sliced = replace(annotated, algorithms=dict.fromkeys(products, MatmulAlgorithm("meshslice", slices, 1)))
    random = np.random.default_rng(3)

    def arrays(kind: str) -> dict[str, np.ndarray]:
        return {
            str(op.attrs["name"]): random.normal(size=op.result.shape)
            if op.result.dtype == "f64"
            else random.integers(0, 96, op.result.shape, dtype="i4")
            for op in graph.sources(kind)
        }

    feeds, params = [arrays("input")], arrays("param")
    expected, updated = run_serial(graph, feeds, params)
    outputs, new, built = run_partitioned(complete(sliced, mesh), feeds, params)
    assert slices == 1 or any(op.kind == "einsum_add" for op in built.lowered.ops)
    np.testing.assert_allclose(outputs["loss"], expected["loss"], rtol=1e-12)
    assert updated.keys() == new.keys()
    for name, value in updated.items():
        np.testing.assert_allclose(new[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_the_tuner_keeps_large_weights_in_place() -> None:
    graph, boxes = wide(2048, 16384), cluster((4, 4))
    two_axes = [mesh for mesh in shapes(boxes) if len(mesh.axes) == 2]
    tuned = layouts_by_tuner(graph, two_axes, boxes, "meshslice")[0]
    annotated = tuned.graph
    assert [(layer.dataflow, layer.transposed) for layer in tuned.tuning.layers[:2]] == [
        ("RS", True),
        ("RS", False),
    ]
    rows, cols = annotated.attrs[linear_layers(graph)[0].weight.name].mesh.axes
    specs = [annotated.attrs[layer.weight.name].spec for layer in linear_layers(graph)[:2]]
    assert specs == [ShardSpec.of([cols, rows]), ShardSpec.of([rows, cols])]


def test_mode_auto_tries_two_axes_where_the_products_take_less_than_the_best_step() -> None:
    program = Program(lambda: Wide(32), (32,), batch=6)
    state = SearchState(program.compile_request(), two_by_two(), "auto", 600.0)
    tuned, _ = next(mesh2d_programs(state.layout_costs, 1, "meshslice", 1))
    assert mesh2d_where_it_gains(state.layout_costs, 1, tuned.seconds, 2) == []
    list(evaluate_data_parallel(state, eligible=True))
    list(evaluate_mesh2d_where_it_gains(state))
    found = next(each for each in state.evaluations.all if each.origin.startswith("mesh2d"))
    assert found.choices["products"] == "by meshslice"
    assert state.best is not None
    decision = decisions(state.best, state.evaluations.all)["products"]
    assert {decision.chosen, decision.runner_up} == {
        "by meshslice",
        "by collectives where completion puts them",
    }


def test_mode_auto_builds_nothing_on_two_axes_without_the_memory_for_it() -> None:
    program = Program(lambda: Wide(32), (32,), batch=6)
    found = []
    for memory in ("1 GiB", "3 KiB"):
        cluster = two_by_two(memory=memory)
        layout_costs = LayoutCosts(program.compile_request(), cluster, pools_of(cluster))
        found.append(len(mesh2d_where_it_gains(layout_costs, 1, 1.0, 2)))
    assert found == [1, 0]


class Square(nn.Module):
    """Two layers whose three matrices are about as large as each other."""

    def __init__(self, width: int, inner: int) -> None:
        self.up = nn.Linear(width, inner, bias=False, dtype="f64")
        self.down = nn.Linear(inner, width, bias=False, dtype="f64")

    def forward(self, x: dg.Tensor) -> dg.Tensor:
        return self.down(dg.ops.relu(self.up(x)))


@pytest.mark.parametrize(("sizes", "chosen"), [((128, 128, 128), True), ((64, 256, 128), False)])
def test_mode_auto_chooses_two_axes_where_they_are_fastest(sizes: tuple[int, int, int], chosen: bool) -> None:
    """With equal matrices nothing else hides as much; with small weights data parallelism is faster."""
    width, inner, samples = sizes
    program = Program(lambda: Square(width, inner), (width,), batch=samples)
    boxes = two_by_two(flops="30 GFLOP/s")
    given = SearchConstraints(micro_batches=1, stages=1)
    state = SearchState(program.compile_request(), boxes, "auto", 600.0, constraints=given)
    list(run_search(state))
    assert state.best is not None
    assert (state.best.choices["products"] == "by meshslice") == chosen
    others = [each for each in state.evaluations.all if each.fits and not each.origin.startswith("mesh2d")]
    best_other = min(each.seconds for each in others)
    if chosen:
        assert state.best.seconds < 0.9 * best_other
    else:
        assert state.best.seconds == best_other


def test_plans_compare_their_algorithms() -> None:
    program, found = Program(lambda: Wide(32), (32,), batch=6), []
    state = SearchState(program.compile_request(), two_by_two(), "mesh2d", 600.0)
    for algorithm in ("meshslice", "collective"):
        _, build = next(mesh2d_programs(state.layout_costs, 1, algorithm, 1))
        found.append(plan_of(build(), state.layout_costs))
    rows = {what: (mine, theirs) for what, mine, theirs in found[0].compare(found[1]).rows}
    assert rows["matrix products"] == ("8 by meshslice", "8 by collective")
    assert "matrix products" not in {what for what, *_ in found[0].compare(found[0]).rows}
