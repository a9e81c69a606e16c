"""Trains the GPT of `exported.py`, written in JAX, as exported plans say; a program of its own because the
number of devices is fixed when JAX starts.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python export_jax_program.py FOLDER HEADS RATE CASE...

Reads start.npz, batches.npz and plan_CASE.py, writes CASE.json: losses, shape of the block of every array on
the first device, and the collectives of the compiled step.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def gpt(p: dict[str, Any], ids: Any, heads: int, mark: Any) -> Any:
    def norm(x: Any, path: str) -> Any:
        mean = x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)
        return mark(path, (x - mean) * scale * p[f"{path}.weight"] + p[f"{path}.bias"])

    def linear(x: Any, path: str) -> Any:
        return mark(path, x @ p[f"{path}.weight"] + p.get(f"{path}.bias", 0.0))

    def attention(x: Any, path: str) -> Any:
        b, s, w = x.shape
        q, k, v = (
            linear(x, f"{path}.{n}").reshape(b, s, heads, w // heads).transpose(0, 2, 1, 3) for n in "qkv"
        )
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(w // heads)
        o = jax.nn.softmax(jnp.where(np.tri(s, dtype=bool), scores, -jnp.inf), -1) @ v
        return mark(path, linear(o.transpose(0, 2, 1, 3).reshape(b, s, w), f"{path}.out"))

    def feed(x: Any, path: str) -> Any:
        return mark(path, linear(jax.nn.gelu(linear(x, f"{path}.up"), approximate=False), f"{path}.down"))

    x = mark("tokens", p["tokens.weight"][ids]) + p["positions"]
    for path in sorted({name.rsplit(".norm1", 1)[0] for name in p if ".norm1." in name}):
        x = x + attention(norm(x, f"{path}.norm1"), f"{path}.attn")
        x = mark(path, x + feed(norm(x, f"{path}.norm2"), f"{path}.mlp"))
    return linear(norm(x, "norm"), "head")


def adam(step: Any, p: Any, g: Any, m: Any, v: Any, rate: float) -> tuple[Any, Any, Any]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8), m, v


def train(plan: dict[str, Any], start: Any, data: Any, heads: int, rate: float) -> dict[str, Any]:
    sharding, used = plan["sharding"], set()

    def mark(name: str, x: Any) -> Any:
        used.add(name)
        return plan["constrain"](name, x)

    def loss_of(p: Any, x: Any, y: Any) -> Any:
        logits = gpt(p, x, heads, mark)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
        return -picked.mean()

    def step_of(p: Any, s: Any, number: Any, x: Any, y: Any) -> Any:
        micro = plan["micro_batches"]
        loss, gradients = 0.0, jax.tree.map(jnp.zeros_like, p)
        for a, b in zip(jnp.split(x, micro), jnp.split(y, micro), strict=True):
            found, more = jax.value_and_grad(loss_of)(p, a, b)
            loss, gradients = loss + found / micro, jax.tree.map(lambda g, h: g + h / micro, gradients, more)
        moved = {n: adam(number, p[n], gradients[n], s[f"{n}.adam_m"], s[f"{n}.adam_v"], rate) for n in p}
        states = {f"{n}.adam_{w}": moved[n][1 + i] for n in p for i, w in enumerate("mv")}
        return loss, {n: new for n, (new, _, _) in moved.items()}, states

    laid = {t: {n: sharding(spec) for n, spec in plan[t].items()} for t in ("parameters", "states", "inputs")}
    p = {n: jax.device_put(start[n], laid["parameters"][n]) for n in start}
    s = {
        n: jax.device_put(np.zeros_like(start[n.rpartition(".")[0]]), at) for n, at in laid["states"].items()
    }
    whole = sharding(jax.sharding.PartitionSpec())
    ins, target = laid["inputs"]["ids"], laid["inputs"]["target"]
    compiled = (
        jax.jit(
            step_of,
            in_shardings=(laid["parameters"], laid["states"], whole, ins, target),
            out_shardings=(whole, laid["parameters"], laid["states"]),
        )
        .lower(p, s, np.float32(1), data[0][0], data[0][1])
        .compile()
    )
    text = compiled.as_text()
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
    losses = []
    for number, (x, y) in enumerate(data):
        x, y = jax.device_put(x, ins), jax.device_put(y, target)
        loss, p, s = compiled(p, s, jax.device_put(np.float32(number + 1), whole), x, y)
        losses.append(float(loss))
    blocks = {n: list(a.addressable_shards[0].data.shape) for n, a in (p | s).items()}
    return {
        "losses": losses,
        "blocks": blocks,
        "collectives": [kind for kind in kinds if f"{kind}(" in text or f"{kind}-start(" in text],
        "unused": sorted(set(plan["activations"]) - used),
    }


def main() -> None:
    folder, heads, rate, *cases = sys.argv[1:]
    start = dict(np.load(Path(folder) / "start.npz"))
    stacked = np.load(Path(folder) / "batches.npz")
    data = list(zip(stacked["x"], stacked["y"], strict=True))
    for case in cases:
        plan = runpy.run_path(str(Path(folder) / f"plan_{case}.py"))
        found = train(plan, start, data, int(heads), float(rate))
        (Path(folder) / f"{case}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
