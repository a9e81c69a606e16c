"""Scans of JAX: short ones and those of layers are unrolled, long ones are loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.frontends.jax_comparison import adamw_losses, compare, engine_losses, normal
from support.frontends.jax_models import lstm, lstm_params, transformer, transformer_params

import distgraph as dg
from distgraph import ops
from distgraph.errors import GraphError
from distgraph.frontends.jax.jaxpr_loops import LONGEST, equations

jax: Any = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]
jnp: Any = jax.numpy
lax: Any = jax.lax

PARAMS, X = {"w": normal(0, (4, 4)) * 0.4}, normal(1, (3, 4))


def loops_of(graph: Any) -> list[str]:
    return [op.kind for op in graph.ops if op.kind in ("scan", "while_loop")]


def test_a_long_lstm_is_a_loop_and_a_short_one_is_not() -> None:
    for turns, count in ((6, 0), (100, 2)):  # a scan and its gradient
        _, graph = compare(lstm, lstm_params(), [normal(1, (2, turns, 3))])
        assert loops_of(graph) == ["scan"] * count


def reversed_constants(p: Any, x: Any) -> Any:
    def turn(c: Any, v: Any) -> Any:
        c = jnp.tanh(c @ p["w"] + v)
        return c, (c * 2, 1.0)

    return lax.scan(jax.checkpoint(turn), x, jnp.arange(600.0), reverse=True)


def nested(p: Any, x: Any) -> Any:
    def outer(c: Any, row: Any) -> Any:
        return lax.scan(
            lambda d, v: ((e := jnp.tanh(d @ p["w"] + v)), e.sum()), c, row + jnp.zeros((40, 3, 4))
        )

    return lax.scan(outer, x, jnp.arange(60.0))


def branches(p: Any, x: Any) -> Any:
    def turn(c: Any, v: Any) -> Any:
        c = jax.nn.relu(c @ p["w"]) + v
        return lax.cond(c.sum() > 0, lambda a: a, jnp.sin, c), jax.nn.softmax(c)

    return lax.scan(turn, x, jnp.linspace(-1.0, 1.0, 300))


@jax.custom_vjp
def rounded(x: Any) -> Any:
    return jnp.round(x)


rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


def straight_through(p: Any, x: Any) -> Any:
    return lax.scan(lambda c, v: (rounded(c @ p["w"]) * 0.1 + v, c), x, jnp.linspace(-1.0, 1.0, 400))


def counted(p: Any, x: Any) -> Any:
    return lax.fori_loop(0, 450, lambda i, y: jnp.tanh(y @ p["w"]) + i * 0.01, x)


@pytest.mark.parametrize("function", [reversed_constants, nested, branches, straight_through, counted])
def test_long_scans_compute_what_jax_computes(function: Callable[..., Any]) -> None:
    _, graph = compare(function, PARAMS, [X])
    assert loops_of(graph) == ["scan", "scan"]


@pytest.mark.parametrize("split", [lambda key: jax.random.split(key, 600), lambda key: None])
def test_keys_of_turns_draw_in_the_loop(split: Callable[[Any], Any]) -> None:
    def apply(p: Any, x: Any, key: Any) -> Any:
        def turn(carry: Any, item: Any) -> Any:
            c, k = carry
            k, mine = (k, item) if item is not None else jax.random.split(k)
            return (c * 0.5 + jax.random.normal(mine, c.shape), k), c[0, 0]

        (y, _), every = lax.scan(turn, (x @ p["w"], key), split(key), 600)
        return y, every

    model = dg.frontends.jax.import_function(apply, PARAMS, X, jax.random.key(0))
    assert loops_of(dg.trace(model, X)) == ["scan"]
    engine = dg.Engine(model)
    _, every = engine.predict(X, batch_size=3).values()
    engine.close()
    assert 0.8 < every[20:].std() < 1.6  # sqrt(1 / (1 - 0.25)) = 1.15: each turn draws other numbers


def test_scans_of_layers_stay_copies() -> None:
    params = transformer_params()
    turns = LONGEST // 4
    params["layers"] = {k: normal(0, (turns, *v.shape[1:])) * 0.1 for k, v in params["layers"].items()}
    model = dg.frontends.jax.import_function(transformer, params, jnp.zeros((2, 5), jnp.int32))
    assert f"layers.qkv.{turns - 1}" in dict(model.named_parameters())
    assert loops_of(dg.trace(model, jnp.zeros((2, 5), jnp.int32))) == []


def test_equations_count_those_of_inner_scans_in_every_turn() -> None:
    assert equations(jax.make_jaxpr(lambda x: x * 2 + 1)(1.0)) == 2
    inner = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: (c * 2 + 1, None), x, None, 7)[0])(1.0)
    assert equations(inner) == 14


def test_a_body_that_is_no_loop_is_listed_with_its_line() -> None:
    def apply(p: Any, x: Any) -> Any:
        y, _ = lax.scan(lambda c, v: (c + lax.lgamma(p["w"][0]), None), x, jnp.arange(LONGEST + 1))
        return lax.scan(lambda c, v: (c * 2, None), y, None, LONGEST + 1)[0]

    with pytest.raises(GraphError) as caught:
        dg.frontends.jax.import_function(apply, PARAMS, X)
    lines = str(caught.value).splitlines()
    assert lines[0] == "apply uses 1 primitive of jax without a rule:"
    assert lines[1].startswith("  lgamma (test_jax_loops.py:")
    assert len(lines) == 3  # and nothing about the second scan, which reads the result of the first


def test_a_loop_trains_under_data_parallelism_with_micro_batches() -> None:
    def apply(p: Any, x: Any) -> Any:
        return lstm(p, x)[0]

    batches = [(normal(n, (8, 100, 3)), normal(n + 9, (8, 2))) for n in range(3)]
    params = lstm_params()
    theirs = adamw_losses(lambda p, x, y: ((apply(p, x) - y) ** 2).mean(), params, batches, 1e-2, 0.1)
    model = dg.frontends.jax.import_function(apply, params, batches[0][0])
    strategy = dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", micro_batches=2)
    optimizer = dg.optim.AdamW(1e-2, weight_decay=0.1)
    engine = dg.Engine(model, lambda y, t: ops.mean(ops.square(y - t)), optimizer, strategy=strategy)
    assert engine_losses(engine, batches) == pytest.approx(theirs, abs=1e-4)
