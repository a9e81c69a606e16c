"""Optimisers of optax are imported with what they do; those without a counterpart are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.frontends.jax_comparison import engine_losses, normal
from support.frontends.jax_models import mlp, mlp_params

import distgraph as dg
from distgraph import optim
from distgraph.errors import GraphError

jax: Any = pytest.importorskip("jax")
optax: Any = pytest.importorskip("optax", reason="optax is not installed")
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]
import_optimizer = dg.frontends.jax.import_optimizer

STEPS = 6
IMPORTED: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "sgd with decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9)),
    "adam": lambda: optax.adam(0.01, b1=0.8, b2=0.99, eps=1e-4),
    "adamw with schedule": lambda: optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, STEPS), weight_decay=0.3
    ),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adamw(0.02, weight_decay=0.2)),
    "clipped sgd": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(1.0)),
}


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return ((mlp(params, x) - y) ** 2).mean()


def batches() -> list[tuple[Any, Any]]:
    return [(normal(2 * n, (8, 6)), normal(2 * n + 1, (8, 5))) for n in range(STEPS)]


def losses_of_jax(optimizer: Any) -> list[float]:
    params = mlp_params()
    state, step, losses = optimizer.init(params), jax.jit(jax.value_and_grad(loss_of)), []
    for x, y in batches():
        loss, gradients = step(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("name", IMPORTED)
def test_training_is_that_of_optax(name: str) -> None:
    optimizer = IMPORTED[name]()
    model = dg.frontends.jax.import_function(mlp, mlp_params(), batches()[0][0])
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), import_optimizer(optimizer))
    found = engine_losses(engine, batches())
    np.testing.assert_allclose(found, losses_of_jax(optimizer), rtol=2e-5)


def test_hyper_parameters() -> None:
    found = import_optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.1)))
    assert isinstance(found, optim.AdamW)
    assert (found.lr, found.clip_norm, found.weight_decay, found.beta2) == (1e-3, 1.0, 0.1, 0.999)
    coupled = import_optimizer(optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-3)))
    assert isinstance(coupled, optim.Adam)
    assert not coupled.decoupled


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optax.rmsprop(0.1),
            r"optax \(scale_by_rms, scale\) has scale_by_rms, which has no counterp",
        ),
        (lambda: optax.adamw(0.1, mask={"a": True}), "has masked, which has no counterpart at its place"),
        (
            lambda: optax.adam(0.1, nesterov=True),
            "has nesterov=True in scale_by_adam but only False has a co",
        ),
        (optax.scale_by_adam, "ends with scale_by_adam but must end with a learning rate"),
        (optax.identity, "ends with nothing but must end with a learning rate"),
        (
            lambda: optax.chain(optax.sgd(0.1), optax.clip_by_global_norm(1.0)),
            "ends with clip_by_global_norm",
        ),
        (lambda: optax.sgd(-0.1), "multiplies by 0.1, which ascends"),
        (
            lambda: optax.chain(optax.add_decayed_weights(0.1), optax.adamw(0.1)),
            "has two weight decays",
        ),
        (
            lambda: optax.chain(optax.add_decayed_weights(lambda step: 0.1), optax.sgd(0.1)),
            "has a schedule of weight_decay but only the learning rate may have one",
        ),
        (
            lambda: optax.MultiSteps(optax.adam(0.1), 2),
            r"is a MultiSteps but .* Strategy\(micro_batches=...\)",
        ),
        (lambda: optim.Adam(0.1), "optimizer is a Adam but must be a GradientTransformation of optax"),
    ],
)
def test_what_has_no_counterpart_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        import_optimizer(make())
