"""A long LSTM, a Flax and an Equinox model train as in JAX, serially and by a searched plan on 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.files.clusters import cluster_of
from support.frontends.jax_comparison import adamw_losses, engine_losses, normal
from support.frontends.jax_models import lstm, lstm_params
from support.programs.searched import slow

import distgraph as dg
from distgraph import ops

jax: Any = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, SAMPLES = 20, 8

Model = tuple[Callable[..., Any], Any, tuple[int, ...]]
"""Function, parameters, shape of a sample."""


def long_lstm() -> Model:
    return lambda params, x: lstm(params, x)[0], lstm_params(), (100, 3)


def of_flax() -> Model:
    linen: Any = pytest.importorskip("flax.linen")

    class Net(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.gelu(linen.Conv(4, (3, 3))(x)).reshape(x.shape[0], -1, 4)
            x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x))
            return linen.Dense(2)(x.mean(1))

    net = Net()
    return net.apply, net.init(jax.random.key(0), normal(0, (2, 6, 4, 3))), (6, 4, 3)


def of_equinox() -> Model:
    equinox: Any = pytest.importorskip("equinox")
    net = equinox.nn.MLP(6, 2, 16, 2, key=jax.random.key(0))
    params, static = equinox.partition(net, equinox.is_inexact_array)
    return lambda p, x: jax.vmap(equinox.combine(p, static))(x), params, (6,)


MODELS = {"lstm": long_lstm, "flax": of_flax, "equinox": of_equinox}


@cache
def curve(name: str) -> tuple[Callable[..., Any], Any, list[Any], list[float]]:
    """Function, parameters, batches, and the losses of JAX."""
    function, params, shape = MODELS[name]()
    few = [(normal(n, (SAMPLES, *shape)), normal(9 + n, (SAMPLES, 2))) for n in range(4)]
    batches = few * (STEPS // 4)
    losses = adamw_losses(lambda p, x, y: ((function(p, x) - y) ** 2).mean(), params, batches, 1e-2, 0.1)
    return function, params, batches, losses


SETTINGS: dict[str, Any] = {
    "serial": dict,
    "searched": lambda: {
        "strategy": dg.Strategy(mode="auto"),
        "cluster": cluster_of(slow(2, 2, flops="1 GFLOP/s")),
    },
}


@pytest.mark.timeout(300)  # a search of up to a minute of work, on a machine that may be busy
@pytest.mark.filterwarnings("ignore:.*wall clock ended the search:RuntimeWarning")  # any plan trains equally
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_twenty_steps_follow_the_loss_curve_of_jax(name: str, setting: str) -> None:
    function, params, batches, theirs = curve(name)
    assert theirs[-1] < theirs[0]
    model = dg.frontends.jax.import_function(function, params, batches[0][0])
    optimizer = dg.optim.AdamW(1e-2, weight_decay=0.1)
    engine = dg.Engine(model, lambda y, t: ops.mean(ops.square(y - t)), optimizer, **SETTINGS[setting]())
    if setting == "searched":
        assert len(engine.prepare(batches[0]).portable.ranks) == 4
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)
