"""Optimisers against their formulas, written over plain arrays, and schedules against their definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.programs.serial_training import step_of

import distgraph as dg
from distgraph import nn, ops, optim, schedules
from distgraph.errors import GraphError
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.sharding_spec import DistAttr, ShardSpec
from distgraph.tracing.tracer import Trace

STEPS = 4
START = {"w": np.arange(12.0).reshape(4, 3) / 7 - 0.8, "b": np.array([0.3, -0.2, 0.9])}


class Affine(nn.Module):
    def __init__(self) -> None:
        self.w = nn.Parameter((4, 3), "f64")
        self.b = nn.Parameter((3,), "f64")

    def forward(self, x: Any) -> Any:
        return ops.matmul(x, self.w) + self.b


def squared(prediction: Any, target: Any) -> Any:
    return ops.mean(ops.square(prediction - target))


def batches(rng: np.random.Generator) -> list[tuple[Any, Any]]:
    return [(rng.standard_normal((5, 4)), rng.standard_normal((5, 3))) for _ in range(STEPS)]


def gradients(params: dict[str, Any], x: Any, y: Any) -> dict[str, Any]:
    error = 2 * (x @ params["w"] + params["b"] - y) / y.size
    return {"w": x.T @ error, "b": error.sum(0)}


def check(optimizer: optim.Optimizer, rule: Callable[..., Any], data: list[tuple[Any, Any]]) -> None:
    """`rule(name, p, g, memory, step)` returns the new p; memory is a dict of its own for every parameter."""
    step = step_of(Affine(), squared, optimizer, data[0])
    step = type(step)(step.graph, optimizer, {**step.start, **START})
    _, found = step.train(data)
    params: dict[str, Any] = dict(START)
    memory: dict[str, dict[str, Any]] = {"w": {}, "b": {}}
    for number, (x, y) in enumerate(data):
        grads = gradients(params, x, y)
        params = {name: rule(name, params[name], grads[name], memory[name], number + 1) for name in params}
    for name, expected in params.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)  # lr and step are float32


def test_gradient_descent_with_decay_of_matrices_only(rng: np.random.Generator) -> None:
    def rule(name: str, p: Any, g: Any, memory: Any, step: int) -> Any:
        return p - 0.1 * (g + (0.05 * p if p.ndim > 1 else 0))

    check(optim.SGD(lr=0.1, weight_decay=0.05, decays=optim.matrices_only), rule, batches(rng))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum(rng: np.random.Generator, nesterov: bool) -> None:
    def rule(name: str, p: Any, g: Any, memory: Any, step: int) -> Any:
        memory["v"] = 0.9 * memory.get("v", 0) + g
        return p - 0.1 * (g + 0.9 * memory["v"] if nesterov else memory["v"])

    check(optim.SGD(lr=0.1, momentum=0.9, nesterov=nesterov), rule, batches(rng))


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(rng: np.random.Generator, decoupled: bool) -> None:
    def rule(name: str, p: Any, g: Any, memory: Any, step: int) -> Any:
        g = g if decoupled else g + 0.1 * p
        memory["m"] = 0.8 * memory.get("m", 0) + 0.2 * g
        memory["v"] = 0.9 * memory.get("v", 0) + 0.1 * g**2
        p = p - 0.03 * 0.1 * p if decoupled else p
        return p - 0.03 * (memory["m"] / (1 - 0.8**step)) / (np.sqrt(memory["v"] / (1 - 0.9**step)) + 1e-6)

    kind = optim.AdamW if decoupled else optim.Adam
    check(kind(lr=0.03, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1), rule, batches(rng))


def test_adafactor(rng: np.random.Generator) -> None:
    def rule(name: str, p: Any, g: Any, memory: Any, step: int) -> Any:
        beta = 1 - step**-0.8
        square = g**2 + 1e-30
        if p.ndim == 1:
            memory["v"] = beta * memory.get("v", 0) + (1 - beta) * square
            second = memory["v"]
        else:  # rank one, from the sums of rows and of columns
            memory["r"] = beta * memory.get("r", 0) + (1 - beta) * square.mean(1)
            memory["c"] = beta * memory.get("c", 0) + (1 - beta) * square.mean(0)
            second = np.outer(memory["r"], memory["c"]) / memory["r"].mean()
        change = g / np.sqrt(second)
        change = change / max(1, np.sqrt((change**2).mean()) / 0.7)
        return p - 0.02 * change

    check(optim.Adafactor(lr=0.02, clip=0.7), rule, batches(rng))


@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_clipping_scales_all_gradients_by_their_common_norm(rng: np.random.Generator, limit: float) -> None:
    data = batches(rng)
    step = step_of(Affine(), squared, optim.SGD(lr=1.0, clip_norm=limit), data[0])
    step = type(step)(step.graph, step.optimizer, dict(START))
    _, found = step.train(data[:1])
    grads = gradients(START, *data[0])
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    for name, g in grads.items():
        np.testing.assert_allclose(START[name] - found[name], g * min(1, limit / norm), rtol=1e-4)


def test_updates_are_linked_to_their_parameters_and_marked(rng: np.random.Generator) -> None:
    graph = step_of(Affine(), squared, optim.Adam(), batches(rng)[0]).graph
    steps = [op for op in graph.ops if op.kind == "adam"]
    assert [op.link for op in steps] == ["w", "b"]
    assert {op.role for op in steps} == {"optimize"}
    assert [name for name, _ in graph.updates] == [
        "w", "w.adam_m", "w.adam_v", "b", "b.adam_m", "b.adam_v",
    ]  # fmt: skip
    assert {op.attrs["name"] for op in graph.sources("state")} == {n for n, _ in graph.updates} - {"w", "b"}


def test_states_can_be_laid_out_apart_from_their_parameters(rng: np.random.Generator) -> None:
    mesh = ProcessMesh.grid(dp=3, tp=2)
    optimizer = optim.Adam(state_spec=optim.shard_states(mesh, "dp"))
    graph = step_of(Affine(), squared, optimizer, batches(rng)[0]).graph
    specs = {name: str(attr.spec) for name, attr in graph.attrs.items()}
    assert specs == {
        "w.adam_m": "[_, dp]", "w.adam_v": "[_, dp]", "b.adam_m": "[dp]", "b.adam_v": "[dp]",
    }  # fmt: skip
    assert all(
        attr.pinned and attr.origin.where.startswith("test_optimizers.py:") for attr in graph.attrs.values()
    )
    beside = optim.shard_states(mesh, "dp")
    assert str(beside("w", (6, 12), None).spec) == "[dp, _]"  # the first dim of equal parts
    assert str(beside("w", (4, 10), None).spec) == "[_, dp]"  # no equal parts: the longest
    held = DistAttr(mesh, ShardSpec.of([None, "tp"]))
    assert str(beside("w", (4, 10), held).spec) == "[_, tp*dp]"
    assert str(beside("w", (6, 10), held).spec) == "[dp, tp]"
    assert beside("w", (2, 2), held) is None
    assert beside("w", (6, 10), DistAttr(ProcessMesh.grid(x=2), ShardSpec.of([None, "x"]))) is None
    with pytest.raises(GraphError, match="axes dp, tp but the states are to be split over 'x'"):
        optim.shard_states(mesh, "x")


def test_only_parameters_can_be_optimised() -> None:
    trace = Trace()
    with trace.activate():
        x = trace.source("input", "x", (3,), "f32")
        with pytest.raises(GraphError, match="%x is no parameter"):
            optim.SGD().update(trace, [(x, x)])
        p, g = trace.source("param", "p", (3,), "f32"), trace.source("input", "g", (4,), "f32")
        with pytest.raises(GraphError, match=r"%p is f32\[3\] but its gradient f32\[4\]"):
            optim.SGD().update(trace, [(p, g)])


# schedules


def test_schedules_at_their_ends_and_in_the_middle() -> None:
    assert schedules.constant(0.1)(7) == 0.1
    line = schedules.linear(1.0, steps=4, final=0.2)
    assert [round(line(s), 12) for s in (0, 1, 2, 4, 9)] == [1.0, 0.8, 0.6, 0.2, 0.2]
    wave = schedules.cosine(1.0, steps=10, final=0.1)
    assert wave(0) == 1.0
    assert wave(5) == pytest.approx(0.55)
    assert wave(10) == wave(99) == pytest.approx(0.1)
    assert all(wave(s) > wave(s + 1) for s in range(10))


def test_warmup_reaches_the_first_rate_of_what_follows() -> None:
    rate = schedules.warmup(schedules.cosine(0.8, steps=6), steps=4)
    assert [rate(s) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rate(10) == pytest.approx(0.0)
    with pytest.raises(GraphError, match="steps of warmup is 0"):
        schedules.warmup(0.1, 0)


def test_the_optimiser_feeds_rate_and_step_number() -> None:
    optimizer = optim.Adam(lr=schedules.linear(1.0, steps=4))
    assert optimizer.inputs(0) == {"lr": 1.0, "step": 1.0}
    assert optimizer.inputs(2) == {"lr": 0.5, "step": 3.0}


class Narrow(nn.Module):
    """An affine map in a dtype."""

    def __init__(self, dtype: str) -> None:
        self.w = nn.Parameter((4, 3), dtype, ("normal", 0.5))

    def forward(self, x: Any) -> Any:
        return ops.matmul(x, self.w)


def narrow(dtype: str, optimizer: optim.Optimizer, data: list[tuple[Any, Any]]) -> tuple[Any, Any, Any]:
    """Start, end, and the data in the dtype's precision."""
    wide = {"f16": np.float16, "f32": np.float32}[dtype]
    cast = [(x.astype(wide), y.astype(wide)) for x, y in data]
    step = step_of(Narrow(dtype), squared, optimizer, cast[0])
    return step.start, step.train(cast)[1], step


OPTIMIZERS = {
    "adamw": lambda **k: optim.AdamW(1e-5, **k),
    "momentum": lambda **k: optim.SGD(1e-5, momentum=0.9, **k),
    "sgd": lambda **k: optim.SGD(1e-5, **k),
    "adafactor": lambda **k: optim.Adafactor(1e-5, **k),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_master_copy_keeps_what_a_narrow_parameter_rounds_away(name: str, rng: np.random.Generator) -> None:
    make, data = OPTIMIZERS[name], batches(rng) * 6
    start, wide, _ = narrow("f32", make(), data)
    _, found, _ = narrow("f16", make(master="f32"), data)
    assert found["w.master"].dtype == np.float32
    np.testing.assert_array_equal(found["w"], found["w.master"].astype(np.float16))
    # Gradients carry the rounding of f16, some 2^-11 in every operand; the path they make is as exact.
    moved = np.abs(wide["w"] - start["w"]).max()
    np.testing.assert_allclose(found["w.master"], wide["w"], rtol=0, atol=0.02 * moved)
    # Steps of 1e-5 are below half a unit of f16 at the parameters' size: without the copy most are lost.
    _, lost, _ = narrow("f16", make(), data)
    assert np.abs(lost["w"].astype(np.float32) - wide["w"]).max() > 0.2 * moved


def test_a_master_copy_starts_from_the_numbers_of_its_parameter(rng: np.random.Generator) -> None:
    start, _, _ = narrow("f16", optim.AdamW(master="f32"), batches(rng))
    np.testing.assert_array_equal(start["w"], start["w.master"].astype(np.float16))
    assert np.abs(start["w.master"]).max() > 0.1


def test_parameters_as_wide_as_the_master_have_no_copy(rng: np.random.Generator) -> None:
    start, _, _ = narrow("f32", optim.AdamW(master="f32"), batches(rng))
    assert "w.master" not in start


def test_a_master_of_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(GraphError, match="master of AdamW is 'f16' but must be 'f32' or 'f64' or None"):
        optim.AdamW(master="f16")


def test_a_master_copy_follows_loaded_parameters(rng: np.random.Generator, tmp_path: Path) -> None:
    x, y = (rng.standard_normal((8, n)).astype(np.float16) for n in (4, 3))

    def engine(lr: float, seed: int) -> dg.Engine:
        return dg.Engine(Narrow("f16"), squared, optim.AdamW(lr, weight_decay=0.0, master="f32"), seed=seed)

    first = engine(1e-2, 1)
    first.fit((x, y), epochs=2, batch_size=4, progress=False)
    first.save(tmp_path / "parameters")
    second = engine(0.0, 2)
    second.load(tmp_path / "parameters", states=False)
    second.fit((x, y), epochs=1, batch_size=4, progress=False)  # writes the copy over the parameter
    np.testing.assert_array_equal(second.memory.block("w", 0), first.memory.block("w", 0))


def test_a_master_copy_is_the_same_on_ranks_that_split_it(rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal((8, n)).astype(np.float16) for n in (4, 3))
    mesh = ProcessMesh.grid(dp=2)

    def trained(strategy: dg.Strategy | None, spec: optim.StateSpec | None) -> dg.Engine:
        optimizer = optim.AdamW(1e-2, master="f32", state_spec=spec)
        found = dg.Engine(Narrow("f16"), squared, optimizer, strategy=strategy, seed=1)
        found.fit((x, y), epochs=3, batch_size=8, progress=False)
        return found

    alone = trained(None, None).memory.block("w", 0)
    split = trained(dg.Strategy(mesh=mesh, batch_axis="dp"), optim.shard_states(mesh, "dp"))
    assert split.memory.block("w.master", 0).shape == (2, 3)
    # Two halves of the batch are summed in f16 instead of one whole: 2^-11 of a gradient, in each of 3 steps.
    np.testing.assert_allclose(split.memory.block("w", 0), alone, rtol=0, atol=2**-10)
