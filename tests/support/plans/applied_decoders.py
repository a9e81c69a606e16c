"""Trains GPT-2 in plain JAX and Llama in Flax under applied plans on eight CPU devices; prints JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python applied_decoders.py
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from support.files.clusters import cluster_of
from support.programs.searched import slow

import distgraph as dg

WIDTH, HEADS, KEYS, LAYERS, WORDS, ROWS, LENGTH, STEPS, RATE = 16, 4, 2, 2, 24, 16, 6, 4, 0.2
HEAD = WIDTH // HEADS
grid = dg.ProcessMesh.grid


def attend(q: Any, k: Any, v: Any) -> Any:
    """Causal attention over [batch, position, head, width]."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(*q.shape[:2], -1)


# GPT-2: stacked layers that are scanned, learned positions, tied embeddings


def gpt2_params() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.normal(0, 0.3, shape).astype("f4")

    layers = {
        "norm1": draw(LAYERS, 2, WIDTH), "norm2": draw(LAYERS, 2, WIDTH),
        "qkv": draw(LAYERS, WIDTH, 3 * WIDTH), "out": draw(LAYERS, WIDTH, WIDTH),
        "up": draw(LAYERS, WIDTH, 4 * WIDTH), "down": draw(LAYERS, 4 * WIDTH, WIDTH),
    }  # fmt: skip
    return {"wte": draw(WORDS, WIDTH), "wpe": draw(LENGTH, WIDTH), "norm": draw(2, WIDTH), "layers": layers}


def layer_norm(x: Any, scale: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return normal * (1 + scale[0]) + scale[1]


def gpt2_layer(x: Any, p: Any) -> tuple[Any, None]:
    with jax.named_scope("attention"):
        q, k, v = (
            t.reshape(*x.shape[:2], HEADS, HEAD)
            for t in jnp.split(layer_norm(x, p["norm1"]) @ p["qkv"], 3, -1)
        )
        x = x + attend(q, k, v) @ p["out"]
    with jax.named_scope("mlp"):
        return x + jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"]) @ p["down"], None


def gpt2(params: Any, ids: Any) -> Any:
    x = params["wte"][ids] + params["wpe"][: ids.shape[1]]
    x, _ = jax.lax.scan(gpt2_layer, x, params["layers"])
    return layer_norm(x, params["norm"]) @ params["wte"].T


# Llama: modules of Flax, RoPE, grouped keys, SwiGLU


def rotated(x: Any) -> Any:
    angles = np.outer(np.arange(x.shape[1]), 1e4 ** (-np.arange(0, HEAD, 2) / HEAD))
    cos, sin = (np.tile(f(angles), 2)[:, None].astype("f4") for f in (np.cos, np.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


class LlamaLayer(linen.Module):
    """Attention with two heads of queries for each of keys, and a gated MLP."""

    @linen.compact
    def __call__(self, x: Any) -> Any:
        def dense(name: str, width: int) -> Any:
            return linen.Dense(width, use_bias=False, name=name)

        h, rows = linen.RMSNorm(name="norm1")(x), x.shape[:2]
        q = rotated(dense("q", WIDTH)(h).reshape(*rows, HEADS, HEAD))
        k = rotated(dense("k", KEYS * HEAD)(h).reshape(*rows, KEYS, HEAD))
        v = dense("v", KEYS * HEAD)(h).reshape(*rows, KEYS, HEAD)
        k, v = (jnp.repeat(t, HEADS // KEYS, 2) for t in (k, v))
        x = x + dense("o", WIDTH)(attend(q, k, v))
        h = linen.RMSNorm(name="norm2")(x)
        return x + dense("down", WIDTH)(jax.nn.silu(dense("gate", 3 * WIDTH)(h)) * dense("up", 3 * WIDTH)(h))


class Llama(linen.Module):
    """A decoder whose output matrix is one of its own."""

    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(WORDS, WIDTH, name="embed")(ids)
        for number in range(LAYERS):
            x = LlamaLayer(name=f"layer{number}")(x)
        return linen.Dense(WORDS, use_bias=False, name="head")(linen.RMSNorm(name="norm")(x))


@functools.cache
def llama_params() -> Any:
    return jax.jit(Llama().init)(jax.random.key(0), jnp.zeros((2, LENGTH), jnp.int32))


MODELS = {"gpt2": (gpt2, gpt2_params), "llama": (Llama().apply, llama_params)}
UP = {"gpt2": "layers.up.{}", "llama": "params.layer{}.up.kernel"}


def batches() -> list[Any]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, WORDS, (ROWS, LENGTH + 1)).astype("i4") for _ in range(STEPS)]


def next_word_loss(logits: Any, words: Any) -> Any:
    return dg.ops.mean(dg.ops.cross_entropy(logits, words))


def plan_of(name: str, case: str) -> dg.Plan:
    """The plan of a case for the imported model."""
    function, start = MODELS[name]
    model = dg.frontends.jax.import_function(function, start(), jnp.zeros((ROWS, LENGTH), jnp.int32))
    options: dict[str, Any] = {}
    if case == "searched":
        options["cluster"] = cluster_of(slow(4, 4, flops="1 GFLOP/s"))
        strategy = dg.Strategy(mode="auto", stages=1, micro_batches=1, seconds=2)
    else:
        mesh = grid(dp=4, tp=2) if case == "dp_tp" else grid(dp=8)
        strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=3 if case == "zero3" else None)
        for number in range(LAYERS if case == "dp_tp" else 0):
            dg.shard_tensor(model.parameter(UP[name].format(number)), mesh, [None, "tp"])
    engine = dg.Engine(model, next_word_loss, dg.optim.SGD(lr=RATE), strategy=strategy, **options)
    words = batches()[0]
    plan: dg.Plan = engine.prepare((words[:, :-1], words[:, 1:])).portable
    return plan


def train(function: Any, params: Any) -> list[float]:
    """The losses of training by JAX."""

    def loss_of(params: Any, words: Any) -> Any:
        logs = jax.nn.log_softmax(function(params, words[:, :-1]))
        return -jnp.take_along_axis(logs, words[:, 1:, None], -1).mean()

    step, losses = jax.jit(jax.value_and_grad(loss_of)), []
    for words in batches():
        loss, grads = step(params, words)
        params = jax.tree_util.tree_map(lambda p, g: p - RATE * g, params, grads)
        losses.append(float(loss))
    return losses


def widths(name: str, params: Any) -> list[int]:
    """Shape of the part of a weight that one device stores."""
    weight = params["layers"]["up"] if name == "gpt2" else params["params"]["layer1"]["up"]["kernel"]
    return list(weight.addressable_shards[0].data.shape)[-2:]


def main() -> None:
    found: dict[str, Any] = {}
    for name, (function, start) in MODELS.items():
        found[name] = {"serial": train(function, start())}
        for case in ("dp_tp", "zero3", "searched"):
            applied = plan_of(name, case).apply_to_jax(function)
            params = applied.place(start())
            found[name][case] = {
                "losses": train(applied, params),
                "up": widths(name, params),
                "devices": applied.mesh.size,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
