"""Gradients in 16 bits on the wire: half the bytes, sums within the stated error, and what is refused."""

from __future__ import annotations

from contextlib import closing
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.programs.equivalence import gathered
from support.programs.forecasts import machines
from support.programs.rank_threads import run_ranks

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.errors import GraphError, ShardingError
from distgraph.ir.dtypes import to_numpy
from distgraph.ir.parser import parse_graph
from distgraph.ir.printer import print_graph
from distgraph.ir.verifier import verify
from distgraph.runtime.forecast.forecast import forecast
from distgraph.runtime.program.build import Build
from distgraph.runtime.transport import collectives
from distgraph.runtime.transport.transport import Transport

LAYERS, WIDTH, RANKS = 3, 16, 4
U = 2.0**-8  # rounding error of bf16
mesh = dg.ProcessMesh.grid(dp=RANKS)


class Net(nn.Module):
    """Equal layers."""

    def __init__(self, width: int = WIDTH) -> None:
        self.layers = [nn.Linear(width, width) for _ in range(LAYERS)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.tanh(layer(x))
        return x


@cache
def trained(
    zero: int, wire: str | None, precision: str | None = None
) -> tuple[Build, list[float], dict[str, Any]]:
    """The program, the losses of four steps, and the tensors after the first."""
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(16, WIDTH)).astype("f4") for _ in range(2)]
    strategy = dg.Strategy(
        mesh=mesh, batch_axis="dp", zero=zero, micro_batches=2, gradient_precision=wire, precision=precision
    )
    optimizer = optim.SGD(lr=1.0, momentum=0.5)
    with closing(dg.Engine(Net(), nn.MeanSquaredError(), optimizer, strategy=strategy, seed=1)) as engine:
        losses = [engine.run(batch)["loss"]]
        first = gathered(engine)
        losses += [engine.run(batch)["loss"] for _ in range(3)]
        (compiled,) = engine._session.programs.values()
        return compiled.build, losses, first


def gradient_bytes(zero: int) -> float:
    """Bytes that a rank sends for gradients in f32: those of an all_reduce, or of (two) reduce_scatters."""
    return (1 if zero == 1 else 2) * 4 * LAYERS * (WIDTH * WIDTH + WIDTH) * (RANKS - 1) / RANKS


@pytest.mark.parametrize("zero", range(4))
def test_half_the_bytes_and_nearly_the_same_update(zero: int) -> None:
    narrow, losses, tensors = trained(zero, "bf16")
    wide, expected, values = trained(zero, None)
    saved = wide.program(0).bytes_sent() - narrow.program(0).bytes_sent()
    assert saved == gradient_bytes(zero) / 2
    assert losses[0] == expected[0]
    assert losses != expected
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
    # After one step of rate 1 biases, which were 0, are their gradients; terms are at most twice as large.
    size = max(np.abs(value).max() for name, value in values.items() if name.endswith("bias"))
    for name, value in values.items():
        assert tensors[name].dtype == value.dtype == np.float32
        np.testing.assert_allclose(tensors[name], value, rtol=0, atol=2 * size * U * (2 + U))


def test_sums_are_accurate_as_stated_and_the_same_on_every_rank() -> None:
    rng = np.random.default_rng(1)
    terms = rng.normal(size=(RANKS, 40, 25)).astype("f4") * 10.0 ** rng.integers(-6, 6, (40, 25))
    terms = terms.astype("f4")
    exact, size = terms.astype("f8").sum(0), np.abs(terms.astype("f8")).sum(0)
    wire, group = to_numpy("bf16"), tuple(range(RANKS))
    sums: dict[int, Any] = {}
    parts: dict[int, Any] = {}

    def reduce(transport: Transport) -> None:
        x, sizes = terms[transport.rank].copy(), [7, 6, 6, 6]
        sums[transport.rank] = collectives.all_reduce_start(transport, x, group, "sum", wire=wire).wait()
        part = collectives.reduce_scatter_start(transport, x, 1, sizes, "sum", group, wire=wire)
        parts[transport.rank] = part.wait()

    run_ranks(RANKS, reduce)
    error = np.abs(sums[0] - exact) / size
    assert U / 4 < error.max() <= U * (2 + U) + 1e-6
    for rank in range(1, RANKS):
        np.testing.assert_array_equal(sums[rank], sums[0])
    np.testing.assert_array_equal(np.concatenate([parts[rank] for rank in range(RANKS)], 1), sums[0])


def test_buckets_and_forecast_know_the_narrow_messages() -> None:
    graph = trained(0, "bf16")[0].lowered
    (op,) = (op for op in graph.ops if "wire" in op.attrs)
    assert len(op.results) == 2 * LAYERS
    assert {value.dtype for value in (*op.operands, *op.results)} == {"f32"}
    verify(parse_graph(print_graph(graph)), "lowered")
    cluster, forecasts = machines(*[1] * RANKS, cable="1 GB/s"), []
    for wire in ("bf16", None):
        strategy = dg.Strategy(mesh=mesh, batch_axis="dp", gradient_precision=wire)
        engine = dg.Engine(Net(256), nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
        with closing(engine):
            engine.prepare([np.zeros((8, 256), "f4")] * 2)
            (compiled,) = engine._session.programs.values()
            forecasts.append(forecast(compiled.build, cluster))
    narrow, wide = forecasts
    saved = sum(wide.traffic.values()) - sum(narrow.traffic.values())
    assert saved == RANKS * 1.5 * 2 * LAYERS * (256 * 256 + 256)
    assert narrow.step_seconds < 0.6 * wide.step_seconds


def test_with_mixed_precision() -> None:
    _, losses, _ = trained(1, "bf16", "bf16")
    _, expected, _ = trained(1, None, "bf16")
    np.testing.assert_allclose(losses, expected, rtol=1e-2)


def test_the_verifier_refuses_a_wire_without_meaning() -> None:
    text = print_graph(trained(0, "bf16")[0].lowered)
    for wrong, what in (('"f32"', "'f32'"), ('"i8"', "'i8'"), ("3", "3")):
        with pytest.raises(GraphError, match=f"wire is {what} but must be a float narrower than f32"):
            verify(parse_graph(text.replace('wire="bf16"', f"wire={wrong}")), "lowered")


@pytest.mark.parametrize("given", ["fp16", "f32", 16, True])
def test_other_types_are_refused(given: Any) -> None:
    with pytest.raises(
        ShardingError, match=f"gradient_precision of Strategy is {given!r} but must be ('bf16'|text or None)"
    ):
        dg.Strategy(gradient_precision=given)


def test_a_program_without_a_sum_over_ranks_is_refused() -> None:
    batch = [np.zeros((4, WIDTH), "f4") for _ in range(2)]
    strategy = dg.Strategy(gradient_precision="bf16")
    engine = dg.Engine(Net(), nn.MeanSquaredError(), optim.SGD(lr=0.1), strategy=strategy)
    message = "gradient_precision of Strategy is 'bf16' but no rank of @train sends a gradient in f32"
    with closing(engine), pytest.raises(ShardingError, match=message):
        engine.prepare(batch)
