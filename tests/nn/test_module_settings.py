"""Settings of modules that change after a program was traced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import GraphError
from distgraph.models import GPT, GPTConfig

BATCH = (np.ones((8, 4), "f4"), np.ones((8, 1), "f4"))


class Dropped(nn.Module):
    """A layer behind dropout, with attributes that its forward part does not read."""

    def __init__(self) -> None:
        self.linear, self.drop, self.activation = nn.Linear(4, 1), nn.Dropout(0.5), ops.tanh
        self.calls, self.epoch = 0, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.activation(self.linear(self.drop(x)))


def _engine(model: nn.Module, **settings: Any) -> dg.Engine:
    return dg.Engine(model, nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=dg.Strategy(**settings))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model.drop, "rate", 0.0), "drop.rate was 0.5 and is 0.0; the program keeps"),
        (lambda model: setattr(model, "drop", nn.Dropout(0.25)), "drop is another object"),
        (lambda model: setattr(model, "activation", ops.sin), "activation is another object|activation was"),
    ],
    ids=["number", "module", "function"],
)
def test_a_setting_that_the_program_depends_on(change: Any, message: str, micro_batches: int) -> None:
    """It is an error for a batch of the same size and of another one."""
    model = Dropped()
    engine = _engine(model, micro_batches=micro_batches)
    before = dict(vars(model))
    engine.run(BATCH)
    model.epoch = 3
    change(model)
    for count in (8, 4):
        with pytest.raises(GraphError, match=message) as raised:
            engine.run(tuple(x[:count] for x in BATCH))
        assert "epoch" not in str(raised.value)
        assert "calls" not in str(raised.value)
    model.drop, model.activation = before["drop"], before["activation"]
    model.drop.rate = 0.5
    engine.run(BATCH)


def test_settings_that_no_program_reads_may_change() -> None:
    model = Dropped()
    engine = _engine(model)
    for epoch in range(3):
        model.epoch, model.note, model.range = epoch, f"epoch {epoch}", (epoch, 0.5)
        engine.run(BATCH)
        engine.evaluate(BATCH, batch_size=4)
    assert engine.step == 3


def test_a_mode_that_does_not_read_a_setting_goes_on() -> None:
    """Dropout takes no part in evaluation."""
    model = Dropped()
    engine = _engine(model)
    engine.run(BATCH)
    first = engine.evaluate(BATCH, batch_size=8)
    model.drop.rate = 0.0
    assert engine.evaluate(BATCH, batch_size=8) == first
    with pytest.raises(GraphError, match=r"drop.rate was 0.5 and is 0.0"):
        engine.fit(BATCH, batch_size=8)


def test_a_setting_of_the_loss() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            self.weight = 1.0

        def forward(self, output: Any, target: Any) -> Any:
            return self.weight * ops.mean((output - target) ** 2)

    loss = Weighted()
    engine = dg.Engine(nn.Linear(4, 1), loss, optim.SGD(lr=0.1))
    engine.run(BATCH)
    loss.weight = 0.5
    with pytest.raises(GraphError, match=r"weight was 1.0 and is 0.5; .* make a new Engine"):
        engine.run(BATCH)


def test_a_setting_of_generation() -> None:
    model = GPT(GPTConfig(hidden=16, layers=1, heads=2, vocabulary=40, sequence=8))
    engine = dg.Engine(model)
    prompts = np.ones((2, 3), "i4")
    first = engine.generate(prompts, max_new_tokens=2)
    model.note = 1
    np.testing.assert_array_equal(engine.generate(prompts, max_new_tokens=2), first)
    model.blocks[0].norm1.eps = 0.5
    with pytest.raises(GraphError, match=r"blocks.0.norm1.eps was 1e-05 and is 0.5"):
        engine.generate(prompts, max_new_tokens=2)


def test_another_module_may_be_made_and_changed_meanwhile() -> None:
    model = Dropped()
    engine = _engine(model)
    engine.run(BATCH)
    other = Dropped()
    other.drop.rate = 0.1
    engine.run(BATCH)


@pytest.mark.filterwarnings("ignore:.*random:UserWarning")
def test_a_trace_that_differs_each_time_blames_no_setting() -> None:
    class Noisy(Dropped):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * float(np.random.normal())  # noqa: NPY002 - as users write

    model = Noisy()
    engine = _engine(model)
    engine.run(BATCH)
    model.epoch = 1
    engine.run(BATCH)
    assert engine.step == 2
