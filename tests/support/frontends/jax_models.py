"""Models written for JAX without a thought of distgraph, small enough to compare numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.frontends.jax_comparison import normal

jax: Any = pytest.importorskip("jax")
jnp: Any = jax.numpy
lax: Any = jax.lax


def drawn(shapes: Any, scale: float = 0.5) -> Any:
    """A pytree of arrays for a pytree of shapes."""
    leaves, tree = jax.tree_util.tree_flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree_util.tree_unflatten(tree, [normal(i, s) * scale for i, s in enumerate(leaves)])


def mlp_params() -> Any:
    return drawn(
        {"layers": [{"w": (6, 16), "b": (16,)}, {"w": (16, 16), "b": (16,)}, {"w": (16, 5), "b": (5,)}]}
    )


@jax.jit
def mlp(params: Any, x: Any) -> Any:
    *hidden, last = params["layers"]
    for layer in hidden:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def conv_params() -> Any:
    return drawn({"first": (3, 3, 3, 6), "second": (3, 3, 3, 8), "shift": (6,), "head": (8 * 2 * 2, 5)})


def conv_net(params: Any, x: Any) -> Any:
    """Images [n, h, w, c], as JAX's users have them."""
    numbers = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, params["first"], (1, 1), "SAME", dimension_numbers=numbers)
    x = jax.nn.relu(x + params["shift"])
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = lax.conv_general_dilated(
        x, params["second"], (1, 1), "VALID", dimension_numbers=numbers, feature_group_count=2
    )
    x = jax.nn.silu(x)
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0), (0, 1), (0, 1), (0, 0))) / 4
    return x.reshape(x.shape[0], -1) @ params["head"]


LAYERS, WIDTH, VOCABULARY = 3, 8, 11


def transformer_params() -> Any:
    layer = {"norm1": (), "norm2": (), "qkv": (3 * WIDTH,), "out": (WIDTH,), "up": (16,), "down": None}
    shapes: dict[str, Any] = {
        name: (LAYERS, WIDTH, *rest) for name, rest in layer.items() if rest is not None
    }
    shapes["down"] = (LAYERS, 16, WIDTH)
    return drawn({"tokens": (VOCABULARY, WIDTH), "positions": (7, WIDTH), "norm": (WIDTH,), "layers": shapes})


def normalized(x: Any, scale: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * (1 + scale)


@jax.checkpoint
def transformer_block(layer: Any, x: Any) -> Any:
    batch, length, width = x.shape
    qkv = normalized(x, layer["norm1"]) @ layer["qkv"]
    q, k, v = (t.reshape(batch, length, 2, width // 2) for t in jnp.split(qkv, 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width // 2)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9), -1)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width) @ layer["out"]
    return x + jax.nn.gelu(normalized(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


def transformer(params: Any, ids: Any) -> Any:
    """A decoder whose layers are stacked and scanned; the table of tokens is also the output matrix."""
    x = params["tokens"][ids] + params["positions"][: ids.shape[1]]
    x, _ = lax.scan(lambda x, layer: (transformer_block(layer, x), None), x, params["layers"])
    return normalized(x, params["norm"]) @ params["tokens"].T


def lstm_params() -> Any:
    return drawn({"input": (3, 16), "hidden": (4, 16), "shift": (16,), "head": (4, 2)})


def lstm(params: Any, x: Any) -> Any:
    """x [n, time, 3] -> the last outputs, and all of them."""

    def cell(carry: Any, step: Any) -> Any:
        hidden, state = carry
        gates = step @ params["input"] + hidden @ params["hidden"] + params["shift"]
        i, f, g, o = jnp.split(gates, 4, -1)
        state = jax.nn.sigmoid(f) * state + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(state)
        return (hidden, state), hidden

    zeros = jnp.zeros((x.shape[0], 4), x.dtype)
    (hidden, _), every = lax.scan(cell, (zeros, zeros), x.swapaxes(0, 1))
    return hidden @ params["head"], every


def moe_params() -> Any:
    return drawn({"gate": (6, 4), "up": (4, 6, 12), "down": (4, 12, 5)})


def moe(params: Any, x: Any) -> Any:
    """Two of four experts for each row, and the loss that balances them."""
    gates = jax.nn.softmax(x @ params["gate"])
    weights, chosen = lax.top_k(gates, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    combine = (jax.nn.one_hot(chosen, 4) * weights[..., None]).sum(-2)
    hidden = jax.nn.relu(jnp.einsum("bd,edf->bef", x, params["up"]))
    y = jnp.einsum("bef,efo,be->bo", hidden, params["down"], combine)
    return y, (gates.mean(0) * jax.nn.one_hot(chosen[:, 0], 4).mean(0)).sum()
