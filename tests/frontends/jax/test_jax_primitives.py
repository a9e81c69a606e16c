"""Primitives of JAX: indexing, ordering, windows, branches, loops and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.frontends.jax_comparison import compare, normal

import distgraph as dg

jax: Any = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]
jnp: Any = jax.numpy
lax: Any = jax.lax

PARAMS = {"w": normal(1, (3, 3, 4))}
IDS = np.array([[0, 2, 1], [1, 0, 0]], np.int32)

INDEXING: list[Callable[..., Any]] = [
    lambda w, i: w[i[:, 0], i[:, 1]],
    lambda w, i: w[:, i[:, 0]],
    lambda w, i: w[i[:, 0], :, 0],
    lambda w, i: w[i],
    lambda w, i: jnp.take(w, i[0], axis=2, mode="clip"),
    lambda w, i: jnp.take(w, i[0] * 2, axis=1, mode="fill", fill_value=0.0),
    lambda w, i: jnp.take_along_axis(w, i[:1, :, None], 1),
    lambda w, i: jax.vmap(lambda a, j: lax.dynamic_slice(a, (j, 0), (2, 2)))(w[:2], i[:, 0]),
    lambda w, i: lax.dynamic_slice(w, (i[0, 0], 0, i[0, 1]), (2, 3, 1)),
    lambda w, i: lax.dynamic_update_slice(w, w[:1, :1] * 2, (i[0, 0], 0, i[0, 1])),
    lambda w, i: w.at[i[:, 0]].add(w[:2] * 2),
    lambda w, i: w.at[i[:, 0], i[:, 1]].add(1.5, mode="drop"),
    lambda w, i: w.at[i[:, 0] + 2].add(w[:2], mode="drop"),
    lambda w, i: w.at[:, 1].set(w[:, 0] * 3),
    lambda w, i: w.at[jnp.array([0, 2])].set(w[:2]),
    lambda w, i: w[:, ::2, ::-1],
]
MOVING: list[Callable[..., Any]] = [
    lambda w, i: jnp.roll(w, 1, 1),
    lambda w, i: jnp.pad(w, ((1, 0), (0, 2), (0, 0)), constant_values=1.5),
    lambda w, i: lax.pad(w, 0.0, ((-1, 0, 0), (1, 1, 1), (0, -1, 0))),
    lambda w, i: jnp.concatenate([w, w[:1]], 0),
    lambda w, i: jnp.tile(w, (2, 1, 1)) + jnp.repeat(w, 2, 0),
    lambda w, i: jnp.einsum("abc,dbc->ad", w, w),
    lambda w, i: w.transpose(2, 0, 1).reshape(4, 9),
    lambda w, i: jnp.stack(jnp.split(w, 2, -1)),
]
NUMBERS: list[Callable[..., Any]] = [
    lambda w, i: jnp.sort(w, 0) + jnp.median(w, 1, keepdims=True),
    lambda w, i: w[jnp.argsort(w[:, 0, 0])],
    lambda w, i: jnp.cumsum(w, 1) + lax.cumsum(w, 2, reverse=True) + lax.cumlogsumexp(w, 0),
    lambda w, i: jnp.prod(w, 1),
    lambda w, i: jnp.clip(w, -0.5, 0.5) + jnp.maximum(w, 0) + jnp.minimum(w, w),
    lambda w, i: w**3 + jnp.abs(w) ** 2.5 + w**-2 + jnp.sqrt(jnp.abs(w)),
    lambda w, i: jnp.linalg.norm(w, axis=0) + jnp.var(w, 0),
    lambda w, i: jnp.arctan2(w, 2.0) + jnp.cbrt(w) + jnp.exp2(w) + jnp.sinh(w) + jnp.arcsinh(w),
    lambda w, i: jax.nn.softplus(w) + jax.nn.elu(w) + jax.nn.leaky_relu(w) + jax.nn.hard_swish(w),
    lambda w, i: w * (i[0, 0] % 2 + i[0, 1] // 2).astype(jnp.float32),
    lambda w, i: jnp.where(i[0, 1] > 1, w, -w) + jnp.sum(w > 0),
    lambda w, i: jax.nn.dot_product_attention(w[None], w[None], w[None], is_causal=True),
]
CONTROL: list[Callable[..., Any]] = [
    lambda w, i: lax.cond(i[0, 0] > 0, lambda a: a * 2, jnp.sin, w),
    lambda w, i: lax.switch(i[0, 1], [jnp.sin, jnp.cos, jnp.tanh], w),
    lambda w, i: lax.cond(True, jnp.sin, jnp.cos, w),
    lambda w, i: lax.fori_loop(0, 3, lambda n, a: a * 1.5 + n, w),
    lambda w, i: lax.scan(lambda c, row: (c + row, c * row), w[0], w, reverse=True)[1],
    lambda w, i: lax.map(jnp.sin, w),
    lambda w, i: w * lax.while_loop(lambda n: n < 5, lambda n: n + 2, i[0, 0]).astype(jnp.float32),
    lambda w, i: lax.associative_scan(jnp.add, w),
]


@pytest.mark.parametrize("functions", [INDEXING, MOVING, NUMBERS, CONTROL])
def test_primitives_compute_what_jax_computes(functions: list[Callable[..., Any]]) -> None:
    def apply(params: Any, ids: Any) -> Any:
        return [function(params["w"], ids) for function in functions]

    compare(apply, PARAMS, [IDS])


def test_windows_compute_what_jax_computes() -> None:
    def apply(params: Any, x: Any) -> Any:
        y = x @ params["w"]
        low = lax.reduce_window(y, jnp.inf, lax.min, (1, 2, 1), (1, 2, 1), "VALID")
        total = lax.reduce_window(y, 0.0, lax.add, (2, 1, 3), (1, 1, 2), "SAME")
        kernel = params["kernel"]
        wide = lax.conv_transpose(y, kernel, (2,), "SAME")
        numbers = ("NWC", "WIO", "NWC")
        cut = lax.conv_general_dilated(
            y, kernel, (1,), [(-1, 2)], rhs_dilation=(2,), dimension_numbers=numbers
        )
        return low, total, wide, cut

    compare(apply, {"w": normal(1, (3, 4)), "kernel": normal(2, (2, 4, 5))}, [normal(3, (2, 6, 3))])


def test_constants_are_folded_and_large_ones_computed() -> None:
    def apply(params: Any, x: Any) -> Any:
        n = x.shape[0]
        mask = jnp.tril(jnp.ones((n, n), bool))
        return jnp.where(mask, x @ params["w"], -1.0)

    for length, kinds in ((8, {"constant"}), (100, {"greater_equal"})):
        x = normal(0, (length, 3))
        model, _ = compare(apply, {"w": normal(1, (3, length))}, [x])
        graph = dg.trace(model, x)
        assert kinds <= {op.kind for op in graph.ops}
        assert all(np.size(op.attrs["value"]) <= 4096 for op in graph.ops if op.kind == "constant")


@pytest.mark.parametrize("kind", ["key", "PRNGKey"])
def test_keys_that_are_arguments_give_random_ops(kind: str) -> None:
    key = getattr(jax.random, kind)(0)

    def apply(params: Any, x: Any, rng: Any) -> Any:
        first, second = jax.random.split(rng)
        kept = jax.random.bernoulli(first, 0.75, x.shape)
        noise = jax.random.normal(second, x.shape)
        return jnp.where(kept, x / 0.75, 0.0) @ params["w"] + noise.mean()

    x = np.ones((400, 3), np.float32)
    model = dg.frontends.jax.import_function(apply, {"w": np.eye(3, dtype=np.float32)}, x, key)
    graph = dg.trace(model, x)
    assert [op.kind for op in graph.ops if op.kind.startswith("random")] == [
        "random_uniform",
        "random_normal",
    ]
    engine = dg.Engine(model)
    y = engine.predict(x, batch_size=400)
    engine.close()
    zeros = np.isclose(y, y.min()).mean()
    assert 0.2 < zeros < 0.3


def test_keys_made_inside_are_constants() -> None:
    def apply(params: Any, x: Any) -> Any:
        return x @ params["w"] + jax.random.normal(jax.random.key(3), (4,))

    compare(apply, {"w": normal(1, (3, 4))}, [normal(2, (2, 3))])
