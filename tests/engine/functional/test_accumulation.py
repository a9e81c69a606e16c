"""Micro-batches give the numbers of the whole batch, or are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph.errors import GraphError

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(8, 3)), "i": RNG.integers(0, 3, 8)}
START = RNG.normal(size=(3, 3))


def trained(loss: Any, micro_batches: int) -> tuple[np.ndarray, float]:
    """State and loss after a step."""

    def step(w: Any, batch: Any) -> Any:
        found, g = dg.value_and_grad(lambda w: loss(batch["x"], w, batch))(w)
        return w - 0.1 * g, {"loss": found}

    made = dg.parallelize(step, method="data_parallel", devices=1, micro_batches=micro_batches)
    w, metrics = made(START, BATCH)
    made.close()
    return np.asarray(w), metrics["loss"]


COUPLED = {
    "variance": lambda x, w, b: ((x @ w - (x @ w).mean(0)) ** 2).mean(),
    "share": lambda x, w, b: ((x @ w / (x @ w).sum(0)) ** 2).sum(),
    "softmax": lambda x, w, b: (dg.ops.softmax(x @ w, 0) ** 2).sum(),
    "cumsum": lambda x, w, b: dg.ops.cumsum(x @ w, 0).mean(),
    "roll": lambda x, w, b: (x @ w * np.roll(x, 1, 0)).mean(),
    "flip": lambda x, w, b: (x @ w * x[::-1]).mean(),
    "half": lambda x, w, b: (x @ w)[: len(x) // 2].mean(),
    "some": lambda x, w, b: (x @ w)[:2].mean(),
    "arange": lambda x, w, b: (x @ w * np.arange(len(x))[:, None]).mean(),
    "iota": lambda x, w, b: (x @ w * dg.ops.arange(len(x))[:, None]).mean(),
    "pairs": lambda x, w, b: ((x @ w @ x.T) ** 2).mean(),
    "repeat": lambda x, w, b: (dg.ops.repeat(w[0], len(x), 0) * (x @ w).reshape(-1)).mean(),
    "major": lambda x, w, b: ((x @ w).T.reshape(-1) * x.reshape(-1)).mean(),
    "two sums": lambda x, w, b: dg.ops.einsum("ab,cb->", x @ w, x),
    "one of them": lambda x, w, b: (x @ w * w[len(x) % 3]).mean(),
}
SPLIT = {
    "mean": lambda x, w, b: ((x @ w) ** 2).mean(),
    "sum": lambda x, w, b: ((x @ w) ** 2).sum(),
    "sum / n": lambda x, w, b: ((x @ w) ** 2).sum() / len(x),
    "terms / n": lambda x, w, b: ((x @ w) ** 2 / len(x)).sum(),
    "weights": lambda x, w, b: ((x @ w) ** 2 * np.full((len(x), 1), 1 / len(x))).sum(),
    "moments": lambda x, w, b: ((x @ w).T @ x / len(x)).sum(),
    "pairs": lambda x, w, b: ((x @ w).reshape(-1, 2, 3).sum(1) ** 2).mean(),
    "flat": lambda x, w, b: ((x @ w).reshape(-1) ** 2).mean(),
    "softmax": lambda x, w, b: (dg.ops.softmax(x @ w, 1) ** 2).mean(),
    "columns": lambda x, w, b: (x @ w)[:, :2].T.mean(),
    "ones": lambda x, w, b: (x @ w * dg.ops.ones((len(x), 1), "f64")).mean(),
    "look-up": lambda x, w, b: ((dg.ops.take(w, b["i"], 0) * x) ** 2).mean(),
    "decay": lambda x, w, b: (x @ w).mean() + (w**2).sum(),
}


@pytest.mark.parametrize("loss", COUPLED.values(), ids=COUPLED)
def test_losses_that_couple_samples_are_refused(loss: Any) -> None:
    with pytest.raises(GraphError, match="is no mean and no sum over the samples, so that 2 micro-batches"):
        trained(loss, 2)


@pytest.mark.parametrize("loss", SPLIT.values(), ids=SPLIT)
def test_losses_of_single_samples_are_those_of_the_batch(loss: Any) -> None:
    expected = trained(loss, 1)
    for micro_batches in (2, 4):
        w, found = trained(loss, micro_batches)
        assert found == pytest.approx(expected[1], rel=1e-9)
        np.testing.assert_allclose(w, expected[0], rtol=0, atol=1e-9)


BEHIND = {
    "metric m is computed": lambda w, loss, batch: (w, {"m": batch["x"].mean()}),
    "metric m.0 is computed": lambda w, loss, batch: (w, {"m": [loss * batch["x"].sum()]}),
    "new state leaf is computed": lambda w, loss, batch: (w + batch["x"].mean(), {"m": loss}),
}


@pytest.mark.parametrize(("message", "behind"), BEHIND.items(), ids=BEHIND)
def test_the_batch_is_not_read_behind_the_gradient(message: str, behind: Any) -> None:
    def step(w: Any, batch: Any) -> Any:
        loss, g = dg.value_and_grad(lambda w: (batch["x"] @ w).mean())(w)
        return behind(w - g, loss, batch)

    with pytest.raises(GraphError, match=message + ".* in 2 micro-batches; return it from the loss with has"):
        dg.parallelize(step, method="data_parallel", devices=1, micro_batches=2)(START, BATCH)
    whole = dg.parallelize(step, method="data_parallel", devices=1)
    assert set(whole(START, BATCH)[1]) == {"m"}
    whole.close()


def numbered(state: Any, batch: Any) -> Any:
    """A step whose metrics are arrays, and that reads the number of samples outside of the loss."""

    def loss_of(w: Any) -> Any:
        y = batch["x"] @ w
        error = y**2
        shares = {"share": error / len(y), "turned": y.T, "most": np.argmax(y, 1)}
        return error.sum(), {"each": error.sum(1), "mean": y.mean(0), **shares}

    (loss, further), g = dg.value_and_grad(loss_of, has_aux=True)(state["w"])
    count = len(batch["x"])
    new = {"w": state["w"] - 0.1 * g / count, "seen": state["seen"] + batch["x"].shape[0]}
    return new, {"loss": loss / count, "count": count, "numbers": np.arange(count), **further}


def test_outputs_of_micro_batches_follow_each_other_and_counts_are_of_the_batch() -> None:
    y = BATCH["x"] @ START
    expected = {
        "loss": (y**2).sum() / 8, "count": 8, "numbers": np.arange(8), "each": (y**2).sum(1),
        "mean": y.mean(0), "share": y**2 / 8, "turned": y.T, "most": y.argmax(1),
    }  # fmt: skip
    w = START - 0.2 * BATCH["x"].T @ y / 8
    for devices, micro_batches in ((1, 1), (1, 4), (2, 2)):
        step = dg.parallelize(numbered, method="data_parallel", devices=devices, micro_batches=micro_batches)
        state, metrics = step({"w": START, "seen": np.int64(5)}, BATCH)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=0, atol=1e-12, err_msg=name)
            assert np.shape(metrics[name]) == np.shape(value)
        np.testing.assert_allclose(np.asarray(state["w"]), w, rtol=0, atol=1e-12)
        assert np.asarray(state["seen"]) == 13
        step.close()


def _doubled(g: Any, batch: Any) -> Any:
    return g * 2 if len(batch["x"]) > 5 else g


NUMBERS: dict[str, tuple[Any, Any]] = {
    "new state leaf": (lambda w, b: w * len(b["x"]), lambda w, g, before, b: before),
    r"%\d+ multiply": (lambda w, b: w * len(b["x"]), lambda w, g, before, b: w - g * before),
    r"%\d+ (multiply|subtract)": (lambda w, b: w, lambda w, g, before, b: w - _doubled(g, b)),
}


@pytest.mark.parametrize(("subject", "step"), NUMBERS.items(), ids=["state", "read", "branch"])
def test_numbers_of_samples_that_are_not_known_are_refused(subject: str, step: Any) -> None:
    def function(w: Any, batch: Any) -> Any:
        before = step[0](w, batch)
        g = dg.grad(lambda w: ((batch["x"] @ w) ** 2).mean())(w)
        return step[1](w, g, before, batch), {}

    message = subject + ".* depends on the number of samples outside of the loss .* in 2 micro-batches; read"
    with pytest.raises(GraphError, match=message):
        dg.parallelize(function, method="data_parallel", devices=1, micro_batches=2)(START, BATCH)
