"""`parallelize`: every method gives the numbers of the same step in NumPy, with its gradient by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import distgraph as dg
from distgraph.errors import GraphError, RuntimeFault, ShardingError

RATE, BETA, STEPS = 0.1, 0.9, 3


class State(NamedTuple):
    """A pytree of another kind than dicts."""

    params: Any
    momentum: Any
    step: Any


def start() -> State:
    rng = np.random.default_rng(1)
    params = {
        "layers": [{"w": 0.3 * rng.normal(size=(6, 8))}, {"w": 0.3 * rng.normal(size=(8, 4))}],
        "b": rng.normal(size=4),
    }
    return State(params, dg.tree_map(np.zeros_like, params), np.int64(0))


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(size=(8, 6)), "y": rng.normal(size=(8, 4))} for _ in range(STEPS)]


def step_in_numpy(state: State, batch: dict[str, np.ndarray], total: bool) -> tuple[State, dict[str, float]]:
    first, second = (layer["w"] for layer in state.params["layers"])
    h = np.tanh(batch["x"] @ first)
    o = h @ second + state.params["b"]
    scale = 1.0 if total else 1 / o.size
    d = 2 * (o - batch["y"]) * scale
    g = {
        "layers": [{"w": batch["x"].T @ ((d @ second.T) * (1 - h * h))}, {"w": h.T @ d}],
        "b": d.sum(0),
    }
    loss = ((o - batch["y"]) ** 2).sum() * scale
    momentum = dg.tree_map(lambda m, g: BETA * m + g, state.momentum, g)
    params = dg.tree_map(lambda p, m: p - RATE * scale * m, state.params, momentum)
    metrics = {"loss": loss, "root": np.sqrt(loss), "size": np.abs(o).sum()}
    return State(params, momentum, state.step + 1), metrics


def made(total: bool = False, **settings: Any) -> Any:
    """The training step, distributed."""

    @dg.parallelize(**settings)
    def train_step(state: State, batch: Any) -> Any:
        def loss_func(params: Any) -> Any:
            h = np.tanh(batch["x"] @ params["layers"][0]["w"])
            dg.mark_pipeline_boundary()
            o = h @ params["layers"][1]["w"] + params["b"]
            error = (o - batch["y"]) ** 2
            return (error.sum() if total else error.mean()), np.abs(o).sum()

        (loss, size), grads = dg.value_and_grad(loss_func, has_aux=True)(state.params)
        momentum = dg.tree_map(lambda m, g: BETA * m + g, state.momentum, grads)
        rate = RATE if total else RATE / 32
        params = dg.tree_map(lambda p, m: p - rate * m, state.params, momentum)
        metrics = {"loss": loss, "root": np.sqrt(loss), "size": size}
        return State(params, momentum, state.step + 1), metrics

    return train_step


METHODS: list[dict[str, Any]] = [
    {"method": "data_parallel", "devices": 1},
    {"method": "data_parallel", "devices": 2, "micro_batches": 4},
    {"method": "data_parallel", "devices": 4, "micro_batches": 2, "total": True},
    {"method": "zero2", "devices": 2, "micro_batches": 2},
    {"method": "zero3", "devices": 4},
    {"method": "pipeline", "layers": "manual", "stages": 2, "devices": 4, "micro_batches": 2},
    {"strategy": dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp"), "donate": False},
]


@pytest.mark.parametrize("settings", METHODS, ids=lambda s: "-".join(map(str, s.values()))[:40])
def test_every_method_gives_the_numbers_of_numpy(settings: dict[str, Any]) -> None:
    step, total = made(**settings), settings.get("total", False)
    state, expected = start(), start()
    for batch in batches():
        state, metrics = step(state, batch)
        expected, numbers = step_in_numpy(expected, batch, total)
        assert metrics == pytest.approx(numbers, rel=1e-9)
    dg.tree_map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-9), state, expected)
    assert isinstance(state, State)
    step.close()


@pytest.fixture(scope="module")
def step() -> Iterator[Any]:
    """A step on two ranks that was planned."""
    made_step = made(method="zero2", devices=2, micro_batches=2)
    made_step.plan(start(), batches()[0])
    yield made_step
    made_step.close()


def test_it_is_planned_forecast_and_inspected(step: Any) -> None:
    stored = step.engine.plan.portable.tensors
    assert stored["params.layers.0.w"].kind == "param"
    assert str(stored["params.layers.0.w.momentum"].spec) == "[dp, _]"
    assert step.forecast("local").step_seconds > 0
    assert "accumulate" in step.inspect()
    assert "reduce_scatter" in step.inspect("lowered")


def test_a_checkpoint_goes_on(step: Any, tmp_path: Path) -> None:
    first, second, _ = batches()
    state, _ = step(start(), first)
    step.save(tmp_path / "saved")
    state, expected = step(state, second)
    _, again = step(step.load(tmp_path / "saved"), second)
    assert again == expected


def test_a_state_is_used_up(step: Any) -> None:
    old, _ = step(start(), batches()[0])
    step(old, batches()[1])
    with pytest.raises(RuntimeFault, match=r"leaf step of a state was used up by the step after it"):
        np.asarray(old.step)
    with pytest.raises(RuntimeFault, match=r"used up"):
        step(old, batches()[1])


def test_a_batch_of_another_size(step: Any) -> None:
    with pytest.raises(GraphError, match="batch has 4 samples but the step was compiled for 8"):
        step(start(), {name: x[:4] for name, x in batches()[0].items()})
    with pytest.raises(GraphError, match=r"different numbers of samples: x \(8, 6\), y \(4, 4\)"):
        step(start(), {"x": batches()[0]["x"], "y": batches()[0]["y"][:4]})


def test_another_state(step: Any) -> None:
    with pytest.raises(GraphError, match=r"the state has the leaves .* different are momentum"):
        step(start()._replace(momentum=None), batches()[0])


def mean(w: Any, batch: Any) -> Any:
    return (batch @ w).mean()


def twice(w: Any, batch: Any) -> Any:
    dg.grad(lambda w: mean(w, batch))(w)
    return dg.grad(lambda w: mean(w, batch))(w), {}


def not_in_the_state(w: Any, batch: Any) -> Any:
    return dg.grad(lambda w: mean(w, batch))(w * 2), {}


FAILURES: list[tuple[Any, str]] = [
    (lambda w, batch: (w, {}), "computes no gradient; call distgraph.grad"),
    (twice, "grad is called twice in a training step"),
    (not_in_the_state, "is differentiated but is no leaf of the state"),
    (lambda w, batch: dg.grad(lambda w: batch @ w)(w), r"loss is f64\[8, 2\] but must be one number"),
    (lambda w, batch: dg.grad(lambda w: mean(w, batch))(w), r"returned a Tensor but must return \(state, m"),
    (lambda w, batch: (dg.grad(lambda w: (batch @ w).max())(w), {}), "is no mean and no sum over"),
    (lambda w, batch: (dg.grad(lambda w: mean(w, batch) ** 2)(w), {}), "is no mean and no sum over"),
    (lambda w, batch: (dg.grad(lambda w: mean(w, batch))(w)[:1], {}), r"its new value is f64\[1, 2"),
]


@pytest.mark.parametrize(("function", "message"), FAILURES)
def test_steps_that_cannot_be_distributed(function: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        dg.parallelize(function, method="data_parallel", micro_batches=2)(np.ones((3, 2)), np.ones((8, 3)))


def test_a_batch_that_micro_batches_do_not_divide() -> None:
    step = dg.parallelize(
        lambda w, x: (w - dg.grad(lambda w: (x @ w).mean())(w), {}), method="data_parallel", micro_batches=3
    )
    with pytest.raises(GraphError, match="batch_size is 8 but micro_batches is 3, which does not divide it"):
        step(np.ones((3, 2)), np.ones((8, 3)))


def test_trees_that_differ_are_refused_by_tree_map() -> None:
    with pytest.raises(GraphError, match=r"of tree_map has the leaves b but had a: .* give both the same"):
        dg.tree_map(lambda a, b: a, {"a": 1}, {"b": 1})


def test_grad_outside_of_a_step() -> None:
    with pytest.raises(GraphError, match="grad is called outside of a training step"):
        dg.grad(lambda w: w)(np.ones(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method 'magic' of parallelize does not exist; it is one of data_parallel"),
        ({"layers": "some"}, "layers of parallelize is 'some' but must be one of manual, auto"),
        ({"devices": 0}, "devices of parallelize is 0 but must be a number from 1 up"),
        ({"method": "zero2", "stages": 2}, "stages of parallelize is 2 but method 'zero2' has no pipeline"),
        ({"method": "pipeline", "layers": "manual", "stages": 3, "devices": 4}, "stages of parallelize is 3"),
        ({"method": "shard", "stages": 2}, "stages of parallelize is 2 but method 'shard' has no pipeline"),
        ({"method": "zero2", "layers": "manual"}, "layers .* is 'manual' but method 'zero2' does not read"),
        ({"devices": 2, "strategy": dg.Strategy()}, "devices of parallelize is 2 but a strategy is given"),
        ({"micro_batches": 2, "plan": "plan.json"}, "micro_batches .* is 2 but a plan is given, which"),
        ({"method": "zero2", "strategy": dg.Strategy()}, "method of parallelize is 'zero2' but a strategy"),
        ({"layers": "manual"}, "layers of parallelize is 'manual' but method 'auto' does not read marks"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=message):
        dg.parallelize(lambda state, batch: (state, {}), **settings)


def test_more_marks_than_stages() -> None:
    def loss(w: Any, batch: Any) -> Any:
        dg.mark_pipeline_boundary()
        x = batch @ w
        dg.mark_pipeline_boundary()
        return x.mean()

    step = dg.parallelize(
        lambda w, batch: (dg.grad(lambda w: loss(w, batch))(w), {}),
        method="pipeline",
        layers="manual",
        stages=2,
        devices=2,
    )
    with pytest.raises(GraphError, match="called 2 times but stages is 2, which needs 1; give stages=3"):
        step(np.ones((3, 2)), np.ones((8, 3)))


@pytest.mark.parametrize("marks", [0, 1])
def test_fewer_marks_than_stages(marks: int) -> None:
    def loss(w: Any, batch: Any) -> Any:
        x = batch @ w
        for _ in range(marks):
            dg.mark_pipeline_boundary()
        return x.mean()

    step = dg.parallelize(
        lambda w, batch: (dg.grad(lambda w: loss(w, batch))(w), {}),
        method="pipeline",
        layers="manual",
        stages=3,
        devices=3,
    )
    message = f"called {marks} times but stages is 3, which needs 2; add marks in the loss"
    with pytest.raises(GraphError, match=message + (", or give stages=2" if marks else "$")):
        step.plan(np.ones((3, 2)), np.ones((8, 3)))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({}, "batch has no leaves but a step needs samples; give at least one array"),
        ({"x": np.ones((0, 6)), "y": np.ones((0, 4))}, r"leaf x of the batch has shape \(0, 6\) but a step"),
        ({"x": np.ones((8, 6)), "y": 3}, "leaf y of the batch is the number 3 but must be an array"),
        ({"x": np.ones((8, 6)), "y": "text"}, "leaf y of the batch has dtype <U4 but must be numbers"),
        ({"x": np.ones((8, 6)), "z": np.ones((8, 4))}, "batch has the leaves x, z but .* different are y, z"),
    ],
)
def test_batches_that_do_not_fit(step: Any, batch: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        step(start(), batch)


@pytest.mark.parametrize(
    "settings",
    [{"method": "data_parallel", "devices": 2, "micro_batches": 2}, {"method": "zero3", "devices": 2}, {}],
)
def test_a_leaf_that_nothing_reads_stays_in_the_state(settings: dict[str, Any], tmp_path: Path) -> None:
    @dg.parallelize(**settings)
    def step(state: dict[str, Any], batch: Any) -> Any:
        loss, g = dg.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(state["w"])
        _ = state["scale"] * 2  # nothing reads it
        return {**state, "w": state["w"] - 0.1 * g}, {"loss": loss}

    kept = {"scale": np.float64(2), "mask": np.array([True, False]), "ids": np.arange(8).reshape(4, 2)}
    state: Any = {"w": np.ones((4, 2)), **kept}
    losses = []
    for _ in range(2):
        state, metrics = step(state, np.ones((4, 4)))
        losses.append(metrics["loss"])
    step.save(tmp_path)
    assert losses[1] < losses[0]
    for load in (lambda: state, lambda: step.load(tmp_path)):
        found = load()
        for name, array in kept.items():
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(
    "settings",
    [{}, {"method": "data_parallel", "devices": 2, "micro_batches": 2}, {"method": "zero3", "devices": 2}],
)
def test_leaves_that_take_the_place_of_others(settings: dict[str, Any]) -> None:
    """The new state is made of the old one, also where leaves change places or one keeps weights."""

    @dg.parallelize(**settings)
    def step(s: dict[str, Any], batch: Any) -> Any:
        loss, g = dg.value_and_grad(lambda w: ((batch @ w) ** 2).mean())(s["w"])
        old = {"last": s["w"], "turned": s["w"].T, "a": s["b"], "b": s["a"]}
        return {"w": s["w"] - 0.1 * g, **old}, loss

    w, a, b = np.arange(8.0).reshape(4, 2), np.arange(4.0), np.arange(4.0, 8.0)
    state: Any = {"w": w, "last": 0 * w, "turned": 0 * w.T, "a": a, "b": b}
    batch = np.random.default_rng(0).normal(size=(8, 4))
    for _ in range(3):
        last, a, b = np.asarray(state["w"]), b, a
        state, _ = step(state, batch)
        for name, expected in {"last": last, "turned": last.T, "a": a, "b": b}.items():
            np.testing.assert_array_equal(state[name], expected)
        w = w - 0.1 * 2 * batch.T @ (batch @ w) / (8 * 2)
        np.testing.assert_allclose(state["w"], w)


def test_keys_of_a_state_have_no_order() -> None:
    @dg.parallelize(method="data_parallel", devices=2)
    def step(state: Any, batch: Any) -> Any:
        loss, g = dg.value_and_grad(lambda p: dg.ops.mean((batch @ p) ** 2))(state["p"])
        return {"n": state["n"] + 1, "p": state["p"] - 0.1 * g}, {"loss": loss}

    state: Any = {"p": np.ones((3, 2)), "n": np.int64(0)}
    for _ in range(2):
        state, metrics = step(state, np.ones((4, 3)))
    step.close()
    assert metrics["loss"] == pytest.approx(4.41)
    assert (int(np.asarray(state["n"])), list(state)) == (2, ["p", "n"])


@pytest.mark.parametrize("method", ["data_parallel", "zero2", "zero3"])
def test_one_device_computes_serially(method: str) -> None:
    step = made(method=method, devices=1)
    assert step(start(), batches()[0])[1] == pytest.approx(step_in_numpy(start(), batches()[0], False)[1])
    step.close()


@pytest.mark.parametrize(
    ("leaf", "message"), [("f8", r"p of the state is f64\[3\] but .* is f32"), ("i8", "i64")]
)
def test_a_new_state_of_less_precision_is_refused(leaf: str, message: str) -> None:
    @dg.parallelize(method="data_parallel", devices=1)
    def step(state: Any, batch: Any) -> Any:
        loss, g = dg.value_and_grad(lambda w: dg.ops.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * g, "p": state["p"].astype("f4") / 3.0}, {"loss": loss}

    with pytest.raises(GraphError, match=f"{message}.*convert it with .astype"):
        step({"w": np.ones((3, 2)), "p": np.ones(3, leaf)}, np.ones((4, 3)))
