"""Parameters of no dims, numbers in the precision of the program, one-hot rows of positions that are none."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.engine import Engine
from distgraph.errors import GraphError, RuntimeFault
from distgraph.ir.mesh import ProcessMesh
from distgraph.ir.op_registry import lookup
from distgraph.ir.sharding_spec import DistAttr, Origin, ShardSpec
from distgraph.kernels.optimizer import adam, momentum
from distgraph.kernels.random import random_bits, random_normal, random_uniform
from distgraph.nn.initializers import Init, materialize
from distgraph.optim import Optimizer, shard_states
from distgraph.passes.complete import complete
from distgraph.plan.strategy import Strategy
from distgraph.tracing.tracer import Trace

DP, GRID = ProcessMesh.grid(dp=2), ProcessMesh.grid(dp=2, tp=2)
INITS: tuple[Init, ...] = (("normal", 0.5), ("uniform", 0.5), ("zeros",), ("ones",), ("constant", 0.3))
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": optim.SGD(lr=0.1, weight_decay=0.1),
    "momentum": optim.SGD(lr=0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "adam": optim.Adam(lr=0.1, weight_decay=0.1),
    "adamw": optim.AdamW(lr=0.1),
    "adafactor": optim.Adafactor(lr=0.1, weight_decay=0.1),
    "clipped": optim.AdamW(lr=0.1, clip_norm=0.01),
}


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("init", INITS, ids=str)
def test_a_scalar_starts_from_a_number(init: Init, dtype: str) -> None:
    scalar = materialize(init, "s", 3, (), dtype=dtype)
    vector = materialize(init, "s", 3, (1,), dtype=dtype)
    assert scalar.shape == ()
    assert isinstance(scalar, np.ndarray)
    assert scalar.dtype == vector.dtype
    assert scalar == vector[0]


@pytest.mark.parametrize("draw", [random_bits, random_uniform, random_normal])
def test_random_numbers_of_no_dims(draw: Any) -> None:
    (expected,) = draw(np, 5, shape=(1,))
    assert draw(np, 5, shape=()) == expected


@pytest.mark.parametrize("draw", [random_uniform, random_normal])
def test_random_numbers_fill_arrays_of_no_dims(draw: Any) -> None:
    expected = draw(np, 5, shape=())
    out = np.zeros((), expected.dtype)
    draw(np, 5, shape=(), out=out)
    assert out == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kernel", ["adam", "momentum", "rsqrt"])
def test_kernels_take_and_fill_arrays_of_no_dims(kernel: str, dtype: Any) -> None:
    count, results, numbers = {"adam": (4, 3, (0.1, 2.0)), "momentum": (3, 2, (0.1,)), "rsqrt": (1, 1, ())}[
        kernel
    ]
    function = {"adam": adam, "momentum": momentum}.get(kernel, lookup(kernel).kernel)
    vectors = [np.array([0.3 + i], dtype) for i in range(count)]
    expected = function(np, *vectors, *numbers)
    expected = expected if results > 1 else (expected,)
    scalars = [v.reshape(()) for v in vectors]
    found = function(np, *(s.copy() for s in scalars), *numbers)
    outs = tuple(np.zeros((), dtype) for _ in range(results))
    function(np, *(s.copy() for s in scalars), *numbers, out=outs if results > 1 else outs[0])
    for got, out, wanted in zip(found if results > 1 else (found,), outs, expected, strict=True):
        assert got.shape == ()
        assert got == out == wanted[0]
    if results > 1:  # in place, as the runtime has it
        held = (scalars[0], *scalars[2:])[:results]
        function(np, *scalars, *numbers, out=held)
        assert all(h == w[0] for h, w in zip(held, expected, strict=True))


class Scaled(nn.Module):
    """A layer with a scale and a shift, of no dims or of one element."""

    def __init__(self, shape: tuple[int, ...], dtype: str, mesh: ProcessMesh | None = None) -> None:
        self.weight = nn.Parameter((6, 4), dtype, ("normal", 0.5))
        self.scale = nn.Parameter(shape, dtype, ("normal", 0.5))
        self.shift = nn.Parameter(shape, dtype, ("uniform", 0.5))
        if mesh is not None:
            dg.shard_tensor(self.weight, mesh, [None, "tp" if "tp" in mesh.sizes else None])

    def forward(self, x: Any) -> Any:
        return ops.tanh(x @ self.weight) * self.scale + self.shift


def losses(shape: tuple[int, ...], optimizer: Optimizer, dtype: str, mesh: ProcessMesh | None) -> list[float]:
    rng = np.random.default_rng(0)
    kind = {"f32": np.float32, "f64": np.float64, "f16": np.float16}[dtype]
    batch = rng.normal(size=(8, 6)).astype(kind), rng.normal(size=(8, 4)).astype(kind)
    strategy = Strategy() if mesh is None else Strategy(mesh=mesh, batch_axis="dp", micro_batches=2)
    model = Scaled(shape, dtype, mesh)
    with closing(Engine(model, nn.MeanSquaredError(), optimizer, strategy=strategy, seed=1)) as engine:
        return [engine.run(batch)["loss"] for _ in range(4)]


@pytest.mark.parametrize("mesh", [None, DP, GRID], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_trains_scalars(name: str, mesh: ProcessMesh | None) -> None:
    optimizer = OPTIMIZERS[name]
    if mesh is not None:
        optimizer = replace(optimizer, state_spec=shard_states(mesh, "dp"))
    found = losses((), optimizer, "f64", mesh)
    np.testing.assert_allclose(found, losses((1,), OPTIMIZERS[name], "f64", None), rtol=1e-10)
    assert found[-1] != found[0]


@pytest.mark.parametrize("name", ["momentum", "adamw", "adafactor"])
def test_scalars_of_half_precision_with_master_copies(name: str) -> None:
    optimizer = replace(OPTIMIZERS[name], master="f32")
    np.testing.assert_allclose(
        losses((), optimizer, "f16", DP), losses((1,), optimizer, "f16", DP), rtol=1e-6
    )


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("micro", [1, 2])
def test_the_learning_rate_is_as_precise_as_the_parameters(name: str, micro: int) -> None:
    """One step of a linear loss, whose gradient is 1, from 0."""

    class Line(nn.Module):
        def __init__(self) -> None:
            self.w = nn.Parameter((), "f64", ("zeros",))

        def forward(self, x: Any) -> Any:
            return ops.mean(x) * self.w

    rate = 0.1
    optimizer = {"sgd": optim.SGD(lr=rate), "adam": optim.Adam(lr=rate, eps=0.0)}[name]
    with closing(Engine(Line(), None, optimizer, strategy=Strategy(micro_batches=micro))) as engine:
        engine.run({"x": np.ones((4,))})
        w = float(engine.memory.block("w", 0))
    assert abs(w + rate) < 1e-15, "0.1 as f32 is off by 1.5e-9"


@pytest.mark.parametrize(
    ("dtypes", "master", "expected"),
    [
        (("f32",), None, "f32"),
        (("f16",), "f32", "f32"),
        (("f64",), None, "f64"),
        (("f32", "f64"), None, "f64"),
    ],
)
def test_numbers_have_the_dtype_of_the_finest_parameter(
    dtypes: tuple[str, ...], master: str | None, expected: str
) -> None:
    trace = Trace()
    with trace.activate():
        pairs = []
        for i, dtype in enumerate(dtypes):
            p = trace.source("param", f"w{i}", (2,), dtype)
            pairs.append((p, p * 2))
        optim.AdamW(master=master).update(trace, pairs)
    graph = trace.finish()
    assert {str(op.attrs["name"]): op.result.dtype for op in graph.sources("input")} == dict.fromkeys(
        ("lr", "step"), expected
    )


class Chosen(nn.Module):
    """One-hot rows times a matrix, the classes split or whole."""

    def __init__(self, mesh: ProcessMesh | None, outside: str) -> None:
        self.weight, self.outside = nn.Parameter((6, 3), init=("ones",)), outside
        if mesh is not None:
            dg.shard_tensor(self.weight, mesh, ["tp", None])

    def forward(self, ids: Any) -> Any:
        return ops.one_hot(ids, 6, outside=self.outside) @ self.weight


@pytest.mark.parametrize("mesh", [None, GRID], ids=str)
@pytest.mark.parametrize("wrong", [-1, 6, 100])
def test_one_hot_refuses_what_is_no_class(mesh: ProcessMesh | None, wrong: int) -> None:
    strategy = Strategy() if mesh is None else Strategy(mesh=mesh)
    ids = np.arange(6, dtype=np.int32)
    bad = np.where(ids == 2, wrong, ids).astype(np.int32)
    with closing(Engine(Chosen(mesh, "error"), strategy=strategy)) as engine:
        np.testing.assert_array_equal(engine.predict((ids,)), np.ones((6, 3)))
        with pytest.raises(RuntimeFault, match=rf"position {wrong} is outside 0\.\.5; check the ids"):
            engine.predict((bad,))
    with closing(Engine(Chosen(mesh, "zeros"), strategy=strategy)) as engine:
        np.testing.assert_array_equal(engine.predict((bad,)).sum(), 15.0)


def test_one_hot_over_split_classes_knows_all_of_them() -> None:
    trace = Trace()
    with trace.activate():
        ids = trace.source("input", "ids", (4,), "i32")
        rows = ops.one_hot(ids, 6)
        trace.annotate(rows.value, DistAttr(GRID, ShardSpec(((), ("tp",))), Origin("user", "rows")))
        graph = complete(trace.finish({"rows": rows}))
    (op,) = [op for op in graph.ops if op.kind == "one_hot"]
    assert op.layout is not None
    assert op.layout.of("v") == ("tp",)
    with pytest.raises(GraphError, match=r'outside of one_hot is "?\'?no'):
        ops.one_hot(ids, 6, outside="no")
