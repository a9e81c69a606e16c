"""Choices as completed graphs: they verify, they train as one rank does, they cost what was said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.programs.forecasts import WAITING
from support.programs.search_cases import MESHES, SLOW, cluster, cost_model, task, train

from distgraph import optim
from distgraph.errors import ShardingError
from distgraph.ir.graph import Graph
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.ir.verifier import verify
from distgraph.passes.complete import complete
from distgraph.passes.pass_pipeline import pipeline
from distgraph.passes.search.intra_op.apply_layouts import assign
from distgraph.passes.search.intra_op.formulate import Formulation, formulate
from distgraph.passes.search.layering.layer_sequence import cluster_layers, layering
from distgraph.passes.search.solver import solve
from distgraph.runtime.forecast.forecast import Forecast, forecast
from distgraph.runtime.program.build import build

OPTIMIZER = optim.Adam(lr=0.01, eps=1e-6)
NAMES = ("mlp", "gpt", "conv", "moe")


@cache
def serial(name: str, micro: int) -> tuple[list[float], dict[str, Any]]:
    """What one rank gives."""
    graph = complete(task(name).graph(micro, OPTIMIZER), ProcessMesh.grid(one=1))
    return train(graph, task(name).batches, OPTIMIZER)


def formulation_of(name: str, mesh: ProcessMesh, micro: int, speed: float, price: float = 0.0) -> Formulation:
    graph = task(name).graph(micro, OPTIMIZER)
    layers = layering(graph, cluster_layers(graph))
    return formulate(graph, mesh, cost_model(speed), layers).with_memory(memory_multiplier=price)


def chosen(formulation: Formulation, how: str) -> tuple[int, ...]:
    if how == "random":
        rng = np.random.default_rng(len(formulation.problem.costs))
        return tuple(int(rng.integers(len(costs))) for costs in formulation.problem.costs)
    found = solve(formulation.problem, seconds=10).choice
    assert found is not None
    return found


def on_one_mesh(formulation: Formulation, choice: tuple[int, ...]) -> Graph:
    placements = {op.name: formulation.mesh for op in formulation.graph.ops}
    return assign(formulation.graph, placements, formulation.decode(choice))


def assert_trains(completed: Graph, name: str) -> None:
    verify(completed, "completed")
    losses, state = train(completed, task(name).batches, OPTIMIZER)
    expected, tensors = serial(name, completed.micro_batches)
    np.testing.assert_allclose(losses, expected, rtol=1e-10)
    for key, tensor in tensors.items():
        if not key.endswith("attn.k.bias"):  # its gradient is zero but for rounding, which Adam scales up
            np.testing.assert_allclose(state[key], tensor, rtol=1e-7, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_best_layouts_train_as_one_rank(name: str, mesh: ProcessMesh) -> None:
    formulation = formulation_of(name, mesh, 2, SLOW)
    choice = chosen(formulation, "best")
    spread = {
        axis for layout in formulation.decode(choice).ops.values() for _, axes in layout.axes for axis in axes
    }
    assert spread == set(mesh.axes)  # computing is slow: all ranks have a part of it
    assert_trains(on_one_mesh(formulation, choice), name)


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_layouts_train_as_one_rank(name: str) -> None:
    formulation = formulation_of(name, MESHES[2], 1, SLOW, price=1e3)
    plain = formulation.with_memory(memory_multiplier=0.0)
    choice = chosen(formulation, "best")
    least, fastest = formulation.profile(choice), plain.profile(chosen(plain, "best"))
    assert least.fixed.sum() + least.activations.sum() <= fastest.fixed.sum() + fastest.activations.sum()
    assert_trains(on_one_mesh(formulation, choice), name)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_any_choice_trains_as_one_rank(name: str, mesh: ProcessMesh) -> None:
    formulation = formulation_of(name, mesh, 1, 1.0)
    assert_trains(on_one_mesh(formulation, chosen(formulation, "random")), name)


def test_stages_of_different_shape_train_as_one_rank() -> None:
    """Two stages, a tied table on both: the sum of its gradients leaves the micro-batch part."""
    graph = task("gpt").graph(2, OPTIMIZER)
    layers = layering(graph, cluster_layers(graph))
    meshes = ProcessMesh.grid(x=2), ProcessMesh.grid(2, x=1, y=2)
    shapes = ProcessMesh.grid(x=2), ProcessMesh.grid(x=1, y=2)
    planned = [formulate(graph, mesh, cost_model(SLOW), layers) for mesh in shapes]
    found = [formulation.decode(chosen(formulation, "best")) for formulation in planned]
    middle = len(layers.layers) // 2
    stage = {op.name: int(layers.of.get(op.name, 0) >= middle) for op in graph.ops}
    placements = {name: meshes[at] for name, at in stage.items()}
    completed = assign(graph, placements, dict(zip(meshes, found, strict=True)))
    assert set(completed.meshes) == set(meshes)
    assert_trains(completed, "gpt")


def test_layouts_of_another_mesh_are_refused() -> None:
    formulation = formulation_of("mlp", MESHES[0], 1, 1.0)
    layouts = formulation.decode(chosen(formulation, "random"))
    mesh = ProcessMesh.grid(x=4)
    with pytest.raises(ShardingError, match=r"laid out for mesh\(x=2\) but runs on mesh\(x=4\)"):
        assign(formulation.graph, {op.name: mesh for op in formulation.graph.ops}, layouts)
    with pytest.raises(ShardingError, match="has no mesh"):
        assign(formulation.graph, {}, layouts)


# what was said


def forecast_of(formulation: Formulation, choice: tuple[int, ...], speed: float) -> Forecast:
    """Of one message for each tensor, which is what the problem prices."""
    built = build(
        on_one_mesh(formulation, choice),
        micro_batches=formulation.graph.micro_batches,
        price=formulation.cost_model.price,
        passes=pipeline(["-bucket_gradients", "-bucket_parameters"]),
    )
    return forecast(built, cluster(speed=speed), runtime=WAITING)


def communication(found: Forecast, micro: int) -> float:
    """Seconds of all collectives of a step."""
    total = 0.0
    for task_ in found.timeline.graph.tasks:
        times = found.tasks[task_.name]
        total += times.last.communication + (micro - 1) * times.body.communication * task_.per_micro
    return total


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "moe"])
def test_communication_is_that_of_the_forecast(name: str, mesh: ProcessMesh) -> None:
    """To the last digit: the same collectives at the same prices. Every one of them is exposed here."""
    formulation = formulation_of(name, mesh, 2, SLOW)
    choice = chosen(formulation, "best")
    computing = sum(float(costs[s]) for costs, s in zip(formulation.cost_terms.compute, choice, strict=True))
    expected = communication(forecast_of(formulation, choice, SLOW), 2)
    assert expected > 0
    assert formulation.profile(choice).seconds(2) - computing == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", "moe"])
def test_memory_of_a_whole_step_is_that_of_the_runtime(name: str, mesh: ProcessMesh) -> None:
    """Where everything is computed in one piece: parameters, gradients, states, inputs and activations."""
    formulation = formulation_of(name, mesh, 2, 1.0)  # so fast that nothing is worth splitting
    choice = chosen(formulation, "best")
    profile = formulation.profile(choice)
    (memory,) = forecast_of(formulation, choice, 1.0).memory.values()
    scalars = sum(8 for op in formulation.graph.ops for v in op.results if not v.shape)
    fixed = memory.parameters + memory.gradients + memory.states + memory.inputs
    assert profile.activations.sum() == memory.activations
    assert abs(profile.fixed.sum() - fixed) <= scalars


def test_memory_of_parameters_that_are_stored_otherwise_than_their_states() -> None:
    """The update reads a copy of each parameter, made when the step begins, and one of its gradient."""
    mesh, graph = MESHES[0], task("mlp").graph(2, OPTIMIZER)
    specs = {"param": ShardSpec.of(["x", None]), "state": ShardSpec.of([None, "x"])}
    matrices = [op for op in graph.sources("param", "state") if len(op.result.shape) == 2]
    attrs = {op.name: DistAttr(mesh, specs[op.kind], Origin("user", "x")) for op in matrices}
    formulation = formulate(replace(graph, attrs=attrs), mesh, cost_model(1.0))
    choice = chosen(formulation, "best")
    (memory,) = forecast_of(formulation, choice, 1.0).memory.values()
    scalars = sum(8 for op in graph.ops for v in op.results if not v.shape)
    copies = 2 * sum(op.result.nbytes // 2 for op in matrices if op.kind == "param")
    fixed = memory.parameters + memory.gradients + memory.states + memory.inputs
    assert abs(formulation.profile(choice).fixed.sum() - fixed - copies) <= scalars
    assert memory.temporary >= copies
