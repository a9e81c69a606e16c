"""Parameters of an engine as whole arrays by name: out of split ranks, into them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import GraphError, RuntimeFault

MESH = dg.ProcessMesh.grid(dp=2, tp=2)


class Model(nn.Module):
    def __init__(self) -> None:
        self.up, self.norm, self.down = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Any) -> Any:
        return self.down(self.norm(ops.tanh(self.up(x))))


def engine_of(mesh: Any = None, **options: Any) -> dg.Engine:
    model = Model()
    dg.shard_tensor(model.up.weight, mesh, [None, "tp"])
    dg.shard_tensor(model.down.weight, mesh, ["tp", None])
    strategy = dg.Strategy() if mesh is None else dg.Strategy(mesh=mesh, batch_axis="dp")
    return dg.Engine(model, nn.MeanSquaredError(), optim.Adam(lr=0.1, **options), strategy=strategy, seed=3)


@pytest.fixture
def batch(rng: np.random.Generator) -> Any:
    return rng.standard_normal((4, 3)).astype("f4"), rng.standard_normal((4, 2)).astype("f4")


def test_split_parameters_are_whole_arrays_and_come_back(batch: Any) -> None:
    split, serial = engine_of(MESH), engine_of()
    for engine in (split, serial):
        engine.run(batch)
    found, expected = split.parameters(), serial.parameters()
    assert list(found) == [name for name, _ in Model().named_tensors()]
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6)
    losses = [serial.run(batch)["loss"] for _ in range(2)]
    split.assign({name: np.zeros_like(array) for name, array in found.items()})
    assert not any(array.any() for array in split.parameters().values())
    split.assign(found)
    np.testing.assert_allclose([split.run(batch)["loss"] for _ in range(2)], losses, rtol=0, atol=1e-5)
    split.close()


def test_arrays_that_a_module_starts_from_are_its_parameters(batch: Any) -> None:
    model = Model()
    start = {name: np.full(p.shape, 0.25, "f4") for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.assign(start[name])
    engine = dg.Engine(lambda x: model(x) * 1.0, nn.MeanSquaredError(), optim.SGD(lr=0.1))  # a function too
    engine.prepare(batch)
    for name, array in engine.parameters().items():
        np.testing.assert_array_equal(array, start[name])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"up.wieght": np.zeros((3, 8), "f4")}, "engine has no parameter or buffer 'up.wieght' to assign"),
        (
            {"up.weight": np.zeros((8, 3), "f4")},
            r"up.weight has shape \(3, 8\) but is given an array of \(8, 3\)",
        ),
        ({"up.bias": np.zeros(8, "c8")}, "up.bias is f32 but is given an array of complex64"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_none_is_set(batch: Any, arrays: Any, message: str) -> None:
    engine = engine_of()
    engine.prepare(batch)
    before = engine.parameters()
    with pytest.raises(GraphError, match=message):
        engine.assign({"down.bias": np.ones(2, "f4"), **arrays})
    np.testing.assert_array_equal(engine.parameters()["down.bias"], before["down.bias"])


def test_an_engine_without_a_program_has_no_parameters() -> None:
    with pytest.raises(RuntimeFault, match="engine has no parameters yet"):
        engine_of().parameters()
    with pytest.raises(RuntimeFault, match="engine has no parameters yet"):
        engine_of().assign({})


def test_a_loaded_checkpoint_needs_a_program_before_its_parameters(tmp_path: Path, batch: Any) -> None:
    first, second = engine_of(), engine_of()
    first.run(batch)
    first.save(tmp_path / "a")
    second.load(tmp_path / "a")
    message = r"engine has loaded a checkpoint but no program is compiled yet .*; call prepare\(batch\), fit"
    for call in (second.parameters, lambda: second.assign({}), lambda: second.save(tmp_path / "b")):
        with pytest.raises(RuntimeFault, match=message):
            call()
    second.prepare(batch)
    second.save(tmp_path / "b")
    for name, array in first.parameters().items():
        np.testing.assert_array_equal(second.parameters()[name], array)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((3, 2)), r"has shape \(2, 3\) but is given an array of \(3, 2\)"),
        (np.zeros((2, 3), "c8"), "is f32"),
    ],
)
def test_an_array_that_does_not_fit_a_parameter_is_refused(value: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        nn.Parameter((2, 3)).assign(value)


@pytest.mark.parametrize(("kind", "message"), [(nn.Buffer, "is a buffer of"), (nn.Parameter, "an nn.Buffer")])
def test_an_assignment_in_forward_is_no_update(kind: Any, message: str) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            self.linear, self.mean = nn.Linear(3, 2), kind((2,))

        def forward(self, x: Any) -> Any:
            y = self.linear(x)
            self.mean = 0.9 * self.mean + 0.1 * ops.mean(y, 0)
            return y - self.mean

    engine = dg.Engine(Mean(), nn.CrossEntropy(), optim.SGD(lr=0.1))
    with pytest.raises(GraphError, match=rf"Mean.mean .*{message}.* call self.mean.update\(new\)"):
        engine.run((np.ones((4, 3), "f4"), np.zeros(4, "i4")))


class Strays(nn.Module):
    """A model with a layer in its attribute, and another one that its attributes do not lead to."""

    def __init__(self, way: str) -> None:
        self.first, self.way = nn.Linear(3, 2), way
        if way == "set":
            self.others = {nn.Linear(2, 2)}
        if way == "closure":
            layer = nn.Linear(2, 2)
            self.others = lambda x: layer(x) * 1.0

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        if self.way == "set":
            return next(iter(self.others))(x)
        if self.way == "closure":
            return self.others(x)
        layer = nn.Linear(2, 2)
        if self.way == "attribute made in forward":
            self.last = layer
        return layer(x)


@pytest.mark.parametrize("way", ["set", "closure", "made in forward", "attribute made in forward"])
def test_a_layer_that_attributes_do_not_lead_to_is_refused(way: str, batch: Any) -> None:
    engine = dg.Engine(Strays(way), nn.MeanSquaredError(), optim.SGD(lr=0.1))
    message = (
        r"parameter weight \(f32\[2, 2\]\) is used at test_parameter_arrays.py:\d+ but no "
        r"attribute of Strays, or .*; make layers in __init__, keep them in attributes, each, or in a list"
    )
    for _ in range(2):
        with pytest.raises(GraphError, match=message):
            engine.prepare(batch)
    with pytest.raises(GraphError, match=message):
        engine.predict(batch[0])


class Scaled(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        self.log_scale = nn.Parameter((), init=("zeros",))

    def forward(self, output: Any, target: Any) -> Any:
        return ops.mean((output - target) ** 2) * ops.exp(-self.log_scale) + self.log_scale


def test_parameters_of_a_loss_are_in_checkpoints(batch: Any, tmp_path: Path) -> None:
    engines = [dg.Engine(Model(), Scaled(), optim.SGD(lr=0.1), seed=seed) for seed in (0, 1)]
    engines[0].run(batch)
    engines[0].save(tmp_path)
    engines[1].load(tmp_path)
    assert engines[1].run(batch) == engines[0].run(batch)
    assert "log_scale" in engines[1].parameters()


def test_an_engine_of_a_part_of_a_model_names_parameters_from_the_part(batch: Any, tmp_path: Path) -> None:
    whole = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    for _ in range(2):  # the names follow the engine that is used
        engine = dg.Engine(whole, nn.MeanSquaredError(), optim.SGD(lr=0.1))
        engine.run(batch)
        part = dg.Engine(whole.steps[0], nn.MeanSquaredError(), optim.SGD(lr=0.1))
        part.run(batch)
        assert set(part.parameters()) == {"weight", "bias"}
        assert set(engine.parameters()) == {
            f"steps.{n}.{name}" for n in (0, 1) for name in ("weight", "bias")
        }
        part.save(tmp_path)
        part.load(tmp_path)


@pytest.mark.parametrize("rows", [4, 3])  # the program that was compiled, and a new one
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p, "trainable", False), "has trainable=False but had trainable=True"),
        (lambda p: dg.shard_tensor(p, MESH, [None, "tp"]), r"is annotated .* but was annotated no layout"),
        (lambda p: p.assign(np.zeros((3, 8), "f4")), r"starts from another array .*engine.assign"),
        (lambda p: setattr(p, "init", ("zeros",)), "starts from another init"),
    ],
)
def test_changes_of_a_parameter_after_the_first_program_are_refused(
    batch: Any, rows: int, change: Any, message: str
) -> None:
    engine = engine_of()
    engine.run(batch)
    change(engine.training_spec.model.up.weight)
    data = tuple(part[:rows] for part in batch)
    for call, argument in ((engine.run, data), (engine.evaluate, data), (engine.predict, data[0])):
        with pytest.raises(GraphError, match=f"^parameter up.weight {message}"):
            call(argument)


def test_settings_may_be_set_back_and_arrays_given_to_the_engine(batch: Any) -> None:
    engine = engine_of()
    engine.run(batch)
    weight = engine.training_spec.model.up.weight
    weight.trainable = False
    weight.trainable = True
    engine.run(batch)
    array = np.zeros((3, 8), "f4")
    weight.assign(array)
    engine.assign({"up.weight": array})
    engine.run(batch)


def test_a_frozen_model_goes_on_from_a_checkpoint(batch: Any, tmp_path: Path) -> None:
    first = engine_of()
    first.run(batch)
    first.save(tmp_path)
    second = engine_of()
    second.training_spec.model.up.weight.trainable = False
    second.load(tmp_path)
    second.run(batch)
    np.testing.assert_array_equal(first.parameters()["up.weight"], second.parameters()["up.weight"])


def test_a_compiled_prediction_goes_on_where_another_engine_trains_other_parameters(batch: Any) -> None:
    first = engine_of()
    first.run(batch)
    before = first.predict(batch[0])
    model = first.training_spec.model
    model.up.weight.trainable = False
    second = dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1))
    second.run(batch)
    np.testing.assert_array_equal(first.predict(batch[0]), before)
    with pytest.raises(GraphError, match="has trainable=False but had trainable=True"):
        first.run(batch)


class Weighted(nn.Module):
    """A loss with a buffer that is named like a parameter of the model."""

    def __init__(self) -> None:
        self.weight = nn.Buffer((6,), init=("ones",))

    def forward(self, output: Any, target: Any) -> Any:
        return ops.mean((output - target) ** 2 * self.weight)


def test_a_loss_may_name_its_buffer_like_a_parameter_where_it_is_not_read() -> None:
    engine = dg.Engine(nn.Linear(6, 6), Weighted())
    assert engine.predict(np.ones((4, 6), "f4")).shape == (4, 6)
