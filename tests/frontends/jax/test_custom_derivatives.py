"""Functions of JAX with a derivative of their own keep it, and are inlined where it is the usual one."""

from __future__ import annotations

from typing import Any

import pytest
from support.frontends.jax_comparison import compare, normal

jax: Any = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
jnp: Any = jax.numpy

PARAMS = {"w": normal(1, (3, 4))}
X = normal(2, (2, 3))


def extra_terms(graph: Any) -> int:
    return sum(op.kind == "stop_gradient" for op in graph.ops)


def test_a_straight_through_estimator_keeps_its_gradient() -> None:
    @jax.custom_vjp
    def rounded(x: Any) -> Any:
        return jnp.round(x)

    rounded.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))
    _, graph = compare(lambda p, x: jnp.tanh(rounded(x @ p["w"])), PARAMS, [X])
    assert extra_terms(graph)


def test_a_reversed_gradient_with_a_factor_is_kept() -> None:
    @jax.custom_vjp
    def reversed_gradient(x: Any, factor: Any) -> Any:
        return x * 1.0

    reversed_gradient.defvjp(lambda x, f: (x * 1.0, f), lambda f, g: (-f * g, None))
    compare(lambda p, x: jnp.sin(reversed_gradient(x @ p["w"], 2.0)), PARAMS, [X])


def test_a_tangent_of_its_own_is_kept() -> None:
    @jax.custom_jvp
    def doubled(x: Any) -> Any:
        return jnp.sin(x)

    doubled.defjvp(lambda p, t: (doubled(p[0]), 2 * jnp.cos(p[0]) * t[0]))
    compare(lambda p, x: doubled(x @ p["w"]), PARAMS, [X])


def test_functions_whose_derivative_is_the_usual_one_are_inlined() -> None:
    @jax.custom_jvp
    def softplus(x: Any) -> Any:
        return jnp.log1p(jnp.exp(x))

    softplus.defjvp(lambda p, t: (softplus(p[0]), t[0] * jax.nn.sigmoid(p[0])))
    _, graph = compare(lambda p, x: jnp.logaddexp(softplus(x @ p["w"]), 0.3), PARAMS, [X])
    assert not extra_terms(graph)
