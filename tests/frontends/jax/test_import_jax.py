"""Functions of JAX as modules of distgraph: outputs, gradients and training are those of JAX."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from support.frontends.jax_comparison import adamw_losses, compare, engine_losses, normal
from support.frontends.jax_models import (
    VOCABULARY,
    conv_net,
    conv_params,
    lstm,
    lstm_params,
    mlp,
    mlp_params,
    moe,
    moe_params,
    transformer,
    transformer_params,
)

import distgraph as dg
from distgraph import ops
from distgraph.tracing.tracer import Trace

jax: Any = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.timeout(300)]

IDS = np.arange(10, dtype=np.int32).reshape(2, 5) % VOCABULARY


def in_double(tree: Any) -> Any:
    return jax.tree_util.tree_map(lambda x: np.asarray(x, np.float64), tree)


@pytest.mark.parametrize("size", [1, 3])
def test_a_perceptron_computes_what_jax_computes_for_any_batch(size: int) -> None:
    model, _ = compare(mlp, mlp_params(), [normal(1, (size, 6))], example=[normal(0, (2, 6))])
    assert [name for name, _ in model.named_parameters()][:2] == ["layers.0.b", "layers.0.w"]


def test_a_conv_net_computes_what_jax_computes() -> None:
    compare(conv_net, conv_params(), [normal(1, (2, 8, 8, 3))])


def test_a_transformer_scanned_over_layers_computes_what_jax_computes() -> None:
    _, graph = compare(transformer, transformer_params(), [IDS])
    scopes = {op.scope for op in graph.ops}
    assert {"scan.0", "scan.1", "scan.2"} <= scopes
    assert any(op.kind == "embedding" for op in graph.ops)
    assert any(op.source.startswith("jax_models.py:") for op in graph.ops)


def test_an_lstm_by_scan_computes_what_jax_computes() -> None:
    compare(lstm, lstm_params(), [normal(1, (2, 6, 3))])


def test_a_mixture_of_experts_computes_what_jax_computes() -> None:
    compare(moe, moe_params(), [normal(1, (7, 6))])


def test_double_precision_agrees_to_ten_digits() -> None:
    with jax.enable_x64(True):
        compare(transformer, in_double(transformer_params()), [IDS], tolerance=1e-10)


def test_names_and_values_are_those_of_the_pytree() -> None:
    params = transformer_params()
    model = dg.frontends.jax.import_function(transformer, params, IDS)
    named = dict(model.named_parameters())
    layers = {f"layers.{name}.{i}" for name in params["layers"] for i in range(3)}
    assert set(named) == {"norm", "positions", "tokens"} | layers
    np.testing.assert_array_equal(named["layers.qkv.1"].value, params["layers"]["qkv"][1])


def test_checkpointed_blocks_are_recomputed() -> None:
    model = dg.frontends.jax.import_function(transformer, transformer_params(), IDS)
    trace = Trace("recompute")
    with trace.activate():
        model(trace.source("input", "ids", IDS.shape, "i32"))
    assert len(set(trace.recomputed.values())) == 3


def mean_cross_entropy(logits: Any, labels: Any) -> Any:
    return ops.mean(ops.cross_entropy(logits, labels))


def jax_cross_entropy(logits: Any, labels: Any) -> Any:
    chosen = jax.numpy.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
    return -chosen.mean()


CASES: dict[str, Any] = {
    "mlp": (mlp, mlp_params, (6,), ()),
    "conv": (conv_net, conv_params, (8, 8, 3), ()),
    "transformer": (transformer, transformer_params, None, (5,)),
}


@cache
def curve(name: str) -> tuple[Any, Any, list[float]]:
    """Batches, parameters and JAX's own losses of a case."""
    function, params, shape, labels = CASES[name]
    numbers = np.random.default_rng(3)
    batches = []
    for seed in range(4):
        x = numbers.integers(0, VOCABULARY, (8, 5), np.int32) if shape is None else normal(seed, (8, *shape))
        batches.append((x, numbers.integers(0, 5, (8, *labels), np.int32)))
    values = params()
    losses = adamw_losses(
        lambda p, x, y: jax_cross_entropy(function(p, x), y), values, batches * 5, 1e-2, 0.1
    )
    return batches * 5, values, losses


STRATEGIES: dict[str, Any] = {
    "serial": dg.Strategy,
    "data": lambda: dg.Strategy(mesh=dg.ProcessMesh.grid(dp=4), batch_axis="dp"),
    "micro": lambda: dg.Strategy(mesh=dg.ProcessMesh.grid(dp=2), batch_axis="dp", micro_batches=2),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_training_follows_the_loss_curve_of_jax(name: str, strategy: str) -> None:
    batches, params, theirs = curve(name)
    model = dg.frontends.jax.import_function(CASES[name][0], params, batches[0][0])
    optimizer = dg.optim.AdamW(1e-2, weight_decay=0.1)
    engine = dg.Engine(model, mean_cross_entropy, optimizer, strategy=STRATEGIES[strategy]())
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)


def test_training_under_annotations_follows_the_loss_curve_of_jax() -> None:
    """Columns and rows of two matrices over one axis, samples over the other, on four ranks."""
    batches, params, theirs = curve("mlp")
    model = dg.frontends.jax.import_function(mlp, params, batches[0][0])
    mesh = dg.ProcessMesh.grid(dp=2, tp=2)
    dg.shard_tensor(model.parameter("layers.0.w"), mesh, [None, "tp"])
    dg.shard_tensor(model.parameter("layers.1.w"), mesh, ["tp", None])
    strategy = dg.Strategy(mesh=mesh, batch_axis="dp")
    optimizer = dg.optim.AdamW(1e-2, weight_decay=0.1)
    engine = dg.Engine(model, mean_cross_entropy, optimizer, strategy=strategy)
    np.testing.assert_allclose(engine_losses(engine, batches), theirs, rtol=0, atol=1e-4)


def test_layers_that_are_also_read_together_stay_one_parameter() -> None:
    def apply(params: Any, x: Any) -> Any:
        y, _ = jax.lax.scan(lambda y, w: (jax.numpy.tanh(y @ w), None), x, params["both"])
        y, _ = jax.lax.scan(lambda y, w: (jax.numpy.tanh(y @ w), None), y, params["scanned"])
        return y + (params["both"] ** 2).sum()

    params = {"both": normal(0, (2, 4, 4)), "scanned": normal(1, (2, 4, 4))}
    model, _ = compare(apply, params, [normal(2, (3, 4))])
    assert [name for name, _ in model.named_parameters()] == ["both", "scanned.0", "scanned.1"]
