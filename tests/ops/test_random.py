"""Random numbers depend on seed, step, name and position: not on layout, ranks or micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distgraph import ops
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.reference_interpreter import interpret
from distgraph.ir.sharding_spec import ShardSpec
from distgraph.kernels.random import random_key
from distgraph.nn.initializers import materialize
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace


def dropped(x: np.ndarray, key: int, batch_dim: int | None = 0, micro: int = 0, rate: float = 0.3) -> Any:
    trace = Trace()
    with trace.activate():
        y = ops.dropout(trace.source("input", "x", x.shape, x.dtype), rate, batch_dim)
        graph = trace.finish({"y": y})
    return interpret(graph, {"x": x, "key": np.uint64(key)}, micro=micro)[0]["y"]


@pytest.mark.parametrize(("shape", "batch_dim"), [((6, 5), 0), ((5, 6, 3), 1), ((3, 5, 12), 2)])
@pytest.mark.parametrize("count", [2, 3])
def test_micro_batches_drop_what_the_whole_batch_drops(
    shape: tuple[int, ...], batch_dim: int, count: int
) -> None:
    whole = dropped(np.ones(shape), 7, batch_dim)
    parts = [dropped(p, 7, batch_dim, i) for i, p in enumerate(np.split(np.ones(shape), count, batch_dim))]
    np.testing.assert_array_equal(np.concatenate(parts, batch_dim), whole)
    assert not np.array_equal(parts[0], parts[1])


def test_without_a_batch_dim_every_micro_batch_drops_the_same() -> None:
    x = np.ones((4, 50))
    np.testing.assert_array_equal(dropped(x, 7, None, 0), dropped(x, 7, None, 3))


@pytest.mark.parametrize("kind", ["random_uniform", "random_normal"])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_drawn_numbers_follow_the_whole_batch_too(kind: str, batch_dim: int) -> None:
    def draw(shape: tuple[int, int], micro: int) -> Any:
        trace = Trace()
        with trace.activate():
            graph = trace.finish({"y": getattr(ops, kind)(shape, "f64", batch_dim)})
        return interpret(graph, {"key": np.uint64(3)}, micro=micro)[0]["y"]

    small = (2, 6) if batch_dim == 0 else (4, 3)
    parts = [draw(small, micro) for micro in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, batch_dim), draw((4, 6), 0))


def test_each_call_each_module_and_each_key_draws_anew() -> None:
    trace = Trace()
    with trace.activate():
        x = trace.source("input", "x", (50,), "f32")
        with trace.within(scope="a"):
            first, second = ops.dropout(x, 0.5), ops.dropout(x, 0.5)
        with trace.within(scope="b"):
            third = ops.dropout(x, 0.5)
        graph = trace.finish({"first": first, "second": second, "third": third})
    runs = [interpret(graph, {"x": np.ones(50), "key": np.uint64(key)})[0] for key in (1, 1, 2)]
    np.testing.assert_array_equal(runs[0]["first"], runs[1]["first"])
    seen = [runs[0]["first"], runs[0]["second"], runs[0]["third"], runs[2]["first"]]
    for i, one in enumerate(seen):
        assert not any(np.array_equal(one, other) for other in seen[:i])


def test_rate_and_mean_of_dropout() -> None:
    y = dropped(np.ones((200, 500)), 11, rate=0.25)
    share = (y == 0).mean()
    assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / y.size)  # five standard deviations
    assert set(np.unique(y)) == {0.0, 1 / 0.75}


def test_the_gradient_drops_the_same_elements() -> None:
    trace = Trace()
    with trace.activate():
        x = trace.source("input", "x", (6, 7), "f64")
        y = ops.dropout(x, 0.4)
        (dx,) = differentiate(trace, ops.reduce("sum", y), [x])
        graph = trace.finish({"y": y, "dx": dx})
    found, _ = interpret(graph, {"x": np.ones((6, 7)), "key": np.uint64(5)})
    np.testing.assert_array_equal(found["y"], found["dx"])


# initial values


@pytest.mark.parametrize("init", [("normal", 0.02), ("uniform", 0.3), ("ones",), ("constant", 2.5)])
@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16"])
def test_blocks_of_a_parameter_are_the_slices_of_the_whole(init: Any, dtype: str) -> None:
    shape = (7, 5)
    whole = materialize(init, "fc1.weight", 3, shape, dtype=dtype)
    mesh = ProcessMesh.grid(x=2, y=3)
    for dims in ([("x", "y"), None], ["x", "y"], ["y", "x"], [None, ("y", "x")]):
        spec = ShardSpec.of(dims)
        for rank in range(6):
            bounds = spec.bounds(shape, mesh, rank)
            starts, local = tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)
            block = materialize(init, "fc1.weight", 3, shape, starts, local, dtype)
            np.testing.assert_array_equal(block, whole[spec.slices(shape, mesh, rank)])


def test_moments_of_initial_values() -> None:
    normal = materialize(("normal", 0.02), "w", 0, (300, 400), dtype="f64")
    assert abs(normal.std() - 0.02) < 5 * 0.02 / np.sqrt(2 * normal.size)
    uniform = materialize(("uniform", 0.5), "w", 0, (300, 400), dtype="f64")
    assert -0.5 <= uniform.min() < -0.499
    assert 0.499 < uniform.max() < 0.5
    assert abs(uniform.mean()) < 5 * 0.5 / np.sqrt(3 * uniform.size)


def test_name_and_seed_choose_the_numbers() -> None:
    draws = [materialize(("normal", 1.0), n, s, (9,)) for n, s in (("a", 0), ("b", 0), ("a", 1))]
    assert len({d.tobytes() for d in draws}) == 3
    assert random_key(1, "a") != random_key(1, "b")
