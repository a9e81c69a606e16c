"""Trains a function of JAX under applied plans on eight CPU devices; prints the results as JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python applied_functions.py
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distgraph as dg

WIDTH, HIDDEN, ROWS, STEPS, RATE = 8, 16, 16, 4, 0.1
grid = dg.ProcessMesh.grid


def apply(params: Any, x: Any) -> Any:
    """Two blocks with a residual connection."""
    for number, p in enumerate(params["blocks"]):
        with jax.named_scope(f"block{number}"):
            with jax.named_scope("up"):
                h = jax.nn.gelu(x @ p["up"] + p["bias"])
            with jax.named_scope("down"):
                y = h @ p["down"]
            x = x + y
    return x @ params["head"]


def start() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.normal(0, 0.3, shape).astype("f4")

    block = lambda: {"up": draw(WIDTH, HIDDEN), "bias": draw(HIDDEN), "down": draw(HIDDEN, WIDTH)}  # noqa: E731
    return {"blocks": [block(), block()], "head": draw(WIDTH, 3)}


def batches() -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(1)
    return [
        (rng.normal(size=(ROWS, WIDTH)).astype("f4"), rng.normal(size=(ROWS, 3)).astype("f4"))
        for _ in range(STEPS)
    ]


def plan_of(case: str) -> dg.Plan:
    """The plan of a case, annotated on the imported function."""
    model = dg.frontends.jax.import_function(apply, start(), jnp.zeros((ROWS, WIDTH)))
    mesh = grid(dp=4, tp=2) if case == "dp_tp" else grid(dp=8)
    if case == "dp_tp":
        for number in (0, 1):
            dg.shard_tensor(model.parameter(f"blocks.{number}.up"), mesh, [None, "tp"])
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp", zero=3 if case == "zero3" else None)
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1, momentum=0.9), strategy=strategy)
    plan: dg.Plan = engine.prepare(batches()[0]).portable
    return plan


def train(function: Any, params: Any) -> tuple[list[float], Any]:
    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return ((function(params, x) - y) ** 2).mean()

    step, losses = jax.jit(jax.value_and_grad(loss_of)), []
    for x, y in batches():
        loss, grads = step(params, x, y)
        params = jax.tree_util.tree_map(lambda p, g: p - RATE * g, params, grads)
        losses.append(float(loss))
    return losses, params


def calls(function: Any) -> dict[str, float]:
    """The largest difference from the serial results, for arguments that are given in other ways."""
    params, x = start(), batches()[0][0]
    expected = np.asarray(apply(params, x))
    on_third = jax.device_put(params, jax.devices()[3])
    found = {
        "committed": function(on_third, jax.device_put(x, jax.devices()[0])),
        "keyword": function(params, x=x),
        "both keywords": function(x=x, params=on_third),
    }
    serial = jax.grad(lambda p: apply(p, x).sum())(params)
    split = jax.grad(lambda p: function(p, x).sum())(on_third)
    found["gradient"] = split["head"] - serial["head"] + expected[0, 0]
    expected_of = {"gradient": expected[0, 0]}
    return {k: float(np.abs(np.asarray(v) - expected_of.get(k, expected)).max()) for k, v in found.items()}


def leaves() -> float:
    """As `calls`, for parameters among which are indices and a number."""

    def scaled(params: Any, x: Any) -> Any:
        return (x @ params["w"])[:, params["order"]] * params["factor"]

    params = {"w": np.eye(WIDTH, dtype="f4"), "order": np.arange(WIDTH)[::-1].copy(), "factor": 2.0}
    x = np.arange(ROWS * WIDTH, dtype="f4").reshape(ROWS, WIDTH)
    model = dg.frontends.jax.import_function(scaled, params, jnp.asarray(x))
    strategy = dg.Strategy(mesh=grid(dp=8), batch_axis="dp")
    engine = dg.Engine(model, dg.nn.MeanSquaredError(), dg.optim.SGD(lr=0.1), strategy=strategy)
    function = engine.prepare((x, x)).portable.apply_to_jax(scaled)
    return float(np.abs(np.asarray(function(function.place(params), x)) - scaled(params, x)).max())


def main() -> None:
    expected, _ = train(apply, start())
    found: dict[str, Any] = {"serial": expected}
    for case in ("dp", "dp_tp", "zero3"):
        function = plan_of(case).apply_to_jax(apply)
        losses, params = train(function, function.place(start()))
        text = jax.jit(function).lower(params, batches()[0][0]).as_text()
        found[case] = {
            "losses": losses,
            "up": list(params["blocks"][0]["up"].addressable_shards[0].data.shape),
            "constraints": text.count("sharding_constraint") + text.count("@Sharding"),
            "notes": function.notes,
        }
    found["calls"] = calls(plan_of("dp_tp").apply_to_jax(apply))
    found["leaves"] = leaves()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
