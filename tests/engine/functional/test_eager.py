"""`eager` computes the numbers of an engine at once, and shows them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph.errors import GraphError


class Net(dg.nn.Module):
    def __init__(self) -> None:
        self.up, self.norm, self.down = dg.nn.Linear(3, 5), dg.nn.LayerNorm(5), dg.nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        return self.down(dg.ops.dropout(self.norm(dg.ops.gelu(self.up(x))), 0.2))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(4, 3)).astype("f4"), rng.normal(size=(4, 2)).astype("f4")


def test_outputs_loss_and_gradients_are_those_of_the_engine() -> None:
    x, y = data()
    net, loss = Net(), dg.nn.MeanSquaredError()
    engine = dg.Engine(net, loss, dg.optim.SGD(lr=1.0), seed=3)
    with dg.eager(3) as run:
        np.testing.assert_array_equal(np.asarray(net(run.input("x", x))), engine.predict(x))
    with dg.eager(3, training=True) as run:
        value = loss(net(run.input("x", x)), run.input("target", y))
        gradients = run.gradients(value)
    engine.prepare((x, y))
    before = engine.parameters()
    assert engine.run((x, y))["loss"] == float(value)
    for name, after in engine.parameters().items():
        np.testing.assert_allclose(before[name] - after, gradients[name], rtol=0, atol=1e-6)
    engine.close()


def test_tensors_show_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with dg.eager(show=True) as run:
        x = run.input("x", np.array([1.0, -1.0]))
        y = np.log(x)
        assert repr(y * 0 + 1) == "Tensor(%4 : f64[2] = [ 1. nan])"
        assert int(x.sum()) == 0
    shown = capsys.readouterr().out
    assert "log f64[2] (test_eager.py:" in shown
    assert "from 0 to 0, mean 0, 1 not finite" in shown


def test_an_input_without_numbers_and_a_tensor_that_is_only_traced() -> None:
    with dg.eager() as run, pytest.raises(GraphError, match=r"input 'x' has no numbers in eager\(\)"):
        run.source("input", "x", (2,), "f32")
    with pytest.raises(
        GraphError, match=r"its numbers are not known yet, so float\(\) .* debug in distgraph"
    ):
        dg.trace(lambda x: x * float(x), ((), "f32"))


def test_infinite_numbers_are_shown_without_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    with dg.eager(show=True) as run:
        x = run.input("x", np.array([np.inf, -np.inf, 1.0]))
        x * 2 + np.nan
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("from 2 to 2, mean 2, 2 not finite")
    assert shown[1].endswith("all 3 not finite")


def test_gradients_of_what_is_no_loss_of_this_run() -> None:
    with dg.eager() as run:
        loss = (run.input("x", np.ones(2)) ** 2).mean()
        with pytest.raises(
            GraphError, match=r"loss is 1.0 but gradients needs a tensor that was computed in"
        ):
            run.gradients(float(loss))
    with dg.eager() as other, pytest.raises(GraphError, match=r"loss is %\d+ of another trace but"):
        other.gradients(loss)


def test_a_condition_is_told_that_an_engine_does_not_know_the_number() -> None:
    with dg.eager() as run:
        x = run.input("x", np.ones(2))
        with pytest.raises(
            GraphError, match=r"known in eager\(\) but not where an engine traces .*np.asarray"
        ):
            assert x.sum() > 0
