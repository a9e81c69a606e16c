"""Modules of Flax and Equinox by example, and states such as running statistics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.frontends.jax_comparison import compare, normal

import distgraph as dg
from distgraph import ops

jax: Any = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]
jnp: Any = jax.numpy

X = normal(0, (8, 3))


def normalized(params: Any, state: Any, x: Any) -> Any:
    y = x @ params["w"]
    mean = y.mean(0)
    return y - mean, {"mean": 0.5 * state["mean"] + 0.5 * mean}


def normalized_by_state(params: Any, state: Any, x: Any) -> Any:
    return x @ params["w"] - state["mean"], state


def test_a_state_follows_the_training_and_is_read_by_evaluation() -> None:
    params, state = {"w": normal(1, (3, 4))}, {"mean": jnp.zeros(4)}
    model = dg.frontends.jax.import_function(
        normalized, params, X, state=state, evaluation=normalized_by_state
    )
    assert [name for name, _ in model.named_buffers()] == ["mean"]
    engine = dg.Engine(model, lambda y, target: ops.mean(ops.square(y - target)), dg.optim.SGD(0.0))
    for _ in range(2):
        _, state = normalized(params, state, X)
        engine.run((np.asarray(X), np.zeros((8, 4), np.float32)))
    found = engine.predict(np.asarray(X), batch_size=8)
    engine.close()
    expected, _ = normalized_by_state(params, state, X)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_arguments_that_are_no_arrays_are_part_of_the_program() -> None:
    def apply(params: Any, x: Any, power: int, centred: bool) -> Any:
        y = (x @ params["w"]) ** power * params["scale"]
        return y - y.mean() if centred else y

    params = {"w": normal(1, (3, 4)), "scale": 2.0}
    model = dg.frontends.jax.import_function(apply, params, X, 2, True)
    assert [name for name, _ in model.named_parameters()] == ["w"]
    graph = dg.trace(model, np.asarray(X))
    assert len(list(graph.sources("input"))) == 1


def test_parameters_without_values_are_drawn() -> None:
    shapes = jax.eval_shape(lambda: {"w": jnp.zeros((3, 4))})
    model = dg.frontends.jax.import_function(lambda p, x: {"y": x @ p["w"]}, shapes, X)
    engine = dg.Engine(model)
    assert engine.predict(np.asarray(X), batch_size=8)["y"].std() > 0
    engine.close()


def test_a_module_of_flax_linen() -> None:
    linen: Any = pytest.importorskip("flax.linen")

    class Net(linen.Module):  # type: ignore[misc]
        @linen.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = linen.relu(linen.GroupNorm(2)(linen.Conv(4, (3, 3))(x)))
            x = linen.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1, 4)
            x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x))
            return linen.Dense(5)(linen.Dropout(0.1, deterministic=not train)(x).mean(1))

    net, x = Net(), normal(0, (2, 8, 8, 3))
    variables = net.init(jax.random.key(0), x)
    model, graph = compare(net.apply, variables, [x])
    assert "params.Conv_0.kernel" in dict(model.named_parameters())
    assert "Net.Dense_0" in {op.scope for op in graph.ops}
    trained = dg.frontends.jax.import_function(
        lambda p, x, rng: net.apply(p, x, True, rngs={"dropout": rng}), variables, x, jax.random.key(1)
    )
    assert any(op.kind == "random_uniform" for op in dg.trace(trained, np.asarray(x)).ops)


def test_a_module_of_flax_nnx() -> None:
    nnx: Any = pytest.importorskip("flax.nnx")
    net = nnx.Sequential(nnx.Embed(7, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 4, rngs=nnx.Rngs(1)), nnx.gelu)
    definition, state = nnx.split(net)
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    compare(lambda p, ids: nnx.merge(definition, p)(ids), state, [ids])


def test_a_module_of_equinox() -> None:
    equinox: Any = pytest.importorskip("equinox")
    net = equinox.nn.MLP(3, 2, 8, 2, key=jax.random.key(0))
    model = dg.frontends.jax.import_function(lambda net, x: jax.vmap(net)(x), net, X)
    assert "layers.0.weight" in dict(model.named_parameters())
    engine = dg.Engine(model)
    np.testing.assert_allclose(engine.predict(np.asarray(X), batch_size=8), jax.vmap(net)(X), atol=1e-5)
    engine.close()
