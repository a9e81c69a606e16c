"""Functions of JAX that cannot be imported: the error names the line of the function and the way out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.frontends.jax_comparison import normal

import distgraph as dg
from distgraph.errors import GraphError

jax: Any = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
jnp: Any = jax.numpy
lax: Any = jax.lax

X = normal(0, (2, 3))
PARAMS = {"w": normal(1, (3, 4))}


def refused(function: Any, *inputs: Any, params: Any = PARAMS, **options: Any) -> str:
    with pytest.raises(GraphError) as error:
        dg.frontends.jax.import_function(function, params, *(inputs or (X,)), **options)
    return str(error.value)


def test_all_primitives_without_a_rule_are_listed_with_their_lines() -> None:
    def apply(params: Any, x: Any) -> Any:
        y = lax.lgamma(x) @ params["w"]
        return lax.digamma(y) + lax.lgamma(y)

    message = refused(apply)
    first = apply.__code__.co_firstlineno
    assert message.startswith("apply uses 2 primitives of jax without a rule:\n")
    assert f"  lgamma (test_import_errors.py:{first + 1}, test_import_errors.py:{first + 2})\n" in message
    assert f"  digamma (test_import_errors.py:{first + 2})\n" in message
    assert message.endswith('@distgraph.frontends.jax.register_jax_primitive("name")')


def test_a_rule_can_be_registered_once() -> None:
    @dg.frontends.jax.register_jax_primitive("bessel_i1e")
    def _bessel(x: Any, **params: Any) -> Any:
        return x * 0.5

    model = dg.frontends.jax.import_function(lambda p, x: lax.bessel_i1e(x @ p["w"]), PARAMS, X)
    assert any(op.kind == "multiply" for op in dg.trace(model, np.asarray(X)).ops)
    with pytest.raises(GraphError, match="bessel_i1e has a rule already"):
        dg.frontends.jax.register_jax_primitive("bessel_i1e")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda p, x: x @ p["w"] if x[0, 0] > 0 else x,
            r"cannot be traced by jax \(test_.*with jax.numpy.where",
        ),
        (
            lambda p, x: x.T @ p["w"],
            r"<lambda>\(x f32\[2, 3\]\) cannot be traced by jax.*give inputs that it",
        ),
        (
            lambda p, x: lax.fori_loop(
                0, 1000, lambda i, c: c.at[:, jax.numpy.array([i, i + 1]) % 4].set(1.0), x @ p["w"]
            ),
            r"scatter \(.*may repeat.*unique_indices=True",
        ),
        (
            lambda p, x: jax.vmap(lambda r: lax.psum(r, ("rows", "columns")), axis_name="rows")(x @ p["w"]),
            r"cannot be traced by jax.*columns",
        ),
        (
            lambda p, x: p["w"].at[x[:, 0].astype(int)].set(0.0),
            r"scatter \(.*may repeat.*unique_indices=True",
        ),
        (
            lambda p, x: lax.reduce_window(
                x @ p["w"], -jnp.inf, lax.max, (1, 2), (1, 1), "VALID", window_dilation=(1, 2)
            ),
            r"reduce_window_max \(.*window_dilation is \(1, 2\) but only 1 has a rule",
        ),
        (
            lambda p, x: lax.sort((x[0], x[1], x[0]), num_keys=2)[0] @ p["w"],
            r"sort \(.*has 2 keys but only 1 has a rule",
        ),
        (lambda p, x: jnp.fft.fft(x @ p["w"]).real, r"uses .* primitives? of jax without a rule"),
    ],
)
def test_what_a_rule_refuses_is_named_with_its_line(function: Any, message: str) -> None:
    assert re.search(message, refused(function), re.DOTALL)


def test_a_key_that_is_read_as_numbers_is_refused() -> None:
    message = refused(lambda p, x, rng: x @ p["w"] + jax.random.bits(rng, (4,)), X, jax.random.key(0))
    assert "random_bits (test_import_errors.py:" in message


def test_inputs_of_other_ranks_and_dtypes_are_refused() -> None:
    model = dg.frontends.jax.import_function(lambda p, x: x @ p["w"], PARAMS, X)
    with pytest.raises(GraphError, match=r"input x of <lambda> is f32\[3\] but its example f32\[2, 3\]"):
        dg.trace(model, np.zeros(3, np.float32))
    with pytest.raises(GraphError, match=r"is f64\[2, 3\] but its example f32\[2, 3\]; convert the array"):
        dg.trace(model, np.zeros((2, 3)))
    with pytest.raises(GraphError, match=r"takes the inputs of its example, \(x\)"):
        dg.trace(model, np.zeros((2, 3), np.float32), np.zeros(3, np.float32))


def test_arguments_are_checked() -> None:
    assert "function is a dict but must be callable" in refused(PARAMS)  # type: ignore[arg-type]
    clash = {"a.b": X[0], "a": {"b": X[0]}}
    assert "two leaves of the arguments are named 'a.b'" in refused(lambda p, x: x, params=clash)
    assert "parameter w: dtype" in refused(lambda p, x: x, params={"w": np.zeros(3, np.complex64)})
    model = dg.frontends.jax.import_function(lambda p, x: x @ p["w"], PARAMS, X)
    with pytest.raises(GraphError, match="no parameter or buffer 'v'"):
        model.parameter("v")


def test_a_derivative_that_is_not_linear_is_refused() -> None:
    @jax.custom_vjp
    def clipped(x: Any) -> Any:
        return x * 1

    clipped.defvjp(lambda x: (x * 1, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))
    message = refused(lambda p, x: clipped(x @ p["w"]))
    assert re.search(r"custom_vjp_call \(test_.*clipped declares is not that .* and not linear", message)


def test_a_state_must_be_returned_whole() -> None:
    state = {"mean": jnp.zeros(4)}
    message = refused(lambda p, s, x: x @ p["w"], state=state)
    assert "is imported with a state but returns" in message
    message = refused(lambda p, s, x: (x @ p["w"], {}), state=state)
    assert "state of <lambda> has leaves of shapes [(4,)] but the new state []" in message
