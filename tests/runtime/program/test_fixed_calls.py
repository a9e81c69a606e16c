"""Calls of ops whose arrays are the same at every step do what the calls of their kernels do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import nn, ops, optim
from distgraph.ir.op_registry import lookup
from distgraph.kernels import matmul, optimizer
from distgraph.kernels._jit import has_numba

SHAPES = ((100, 128), (7,), (), (40, 3, 33))  # 16 Ki elements together


def tensors(rng: np.random.Generator, states: int) -> list[tuple[Any, ...]]:
    """Parameter, gradient and states of each shape; states are not negative."""
    return [tuple(np.asarray(rng.uniform(0.1, 2.0, shape)) for _ in range(2 + states)) for shape in SHAPES]


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
@pytest.mark.parametrize(
    ("kind", "states", "numbers", "attrs"),
    [
        ("adam", 2, (1e-3, 3.0), {"weight_decay": 0.1, "decoupled": True}),
        ("adam", 2, (1e-3, 3.0), {"weight_decay": 0.1}),
        ("momentum", 1, (1e-3,), {"nesterov": True, "weight_decay": 0.1}),
    ],
)
@pytest.mark.parametrize("in_place", [True, False])
def test_updates_together(
    rng: np.random.Generator, kind: str, states: int, numbers: Any, attrs: Any, in_place: bool
) -> None:
    declared = lookup(kind)
    given = tensors(rng, states)
    expected = [declared.kernel(np, *arrays, *numbers, **attrs) for arrays in given]
    held = [tuple(arrays[i] for i in (0, *range(2, 2 + states))) for arrays in given]
    outs = held if in_place else [tuple(np.empty_like(a) for a in arrays) for arrays in held]
    assert declared.together is not None
    run = declared.together(np, given, outs, **attrs)
    assert run is not None
    run(*numbers)
    for results, wanted in zip(outs, expected, strict=True):
        for result, value in zip(results, wanted, strict=True):
            np.testing.assert_array_equal(result, value)  # copies of a tensor stay equal on all ranks


def test_updates_that_overlap_are_not_run_together(rng: np.random.Generator) -> None:
    p, g, m, v = (rng.standard_normal(20_000) for _ in range(4))
    assert optimizer.adam_together(np, [(p, g, m, v)], [(p, g, v)]) is None
    assert optimizer.adam_together(np, [(p, g, m, v)], [(p[::-1], m, v)]) is None


@pytest.mark.parametrize(
    ("spec", "a", "b", "out"),
    [
        ("m k, k n -> m n", (3, 4), (4, 5), (3, 5)),
        ("b m, b n -> m n", (6, 3), (6, 5), (3, 5)),
        ("b s m, b s n -> n m", (2, 6, 3), (2, 6, 5), (5, 3)),
        ("b m k, b n k -> b m n", (2, 3, 4), (2, 5, 4), (2, 3, 5)),
    ],
)
def test_products_as_one_call(rng: np.random.Generator, spec: str, a: Any, b: Any, out: Any) -> None:
    left, right, result = rng.standard_normal(a), rng.standard_normal(b), np.empty(out)
    call = matmul.einsum_direct(np, left, right, spec=spec, out=result)
    assert call is not None
    name, operands, target = call
    getattr(np, name)(*operands, out=target)
    np.testing.assert_allclose(result, np.einsum(spec.replace(" ", ""), left, right), rtol=1e-12)


def test_products_that_need_copies_or_sums_are_no_single_call(rng: np.random.Generator) -> None:
    x, y = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 5))
    assert matmul.einsum_direct(np, x, y, spec="a b k, k n -> b n", out=np.empty((3, 5))) is None
    turned = x.transpose(1, 0, 2)
    assert matmul.einsum_direct(np, turned, y, spec="a b k, k n -> a b n", out=np.empty((3, 2, 5))) is None
    assert matmul.matmul_direct(np, x, y, out=np.empty((2, 3, 5), np.float32)) is None
    assert matmul.matmul_direct(np, x, np.empty((4, 0)), out=np.empty((2, 3, 0))) is None
    assert matmul.matmul_direct(np, x[..., :0], y[:0], out=np.empty((2, 3, 5))) is None


class Layers(nn.Module):
    def __init__(self) -> None:
        self.layers = [nn.Linear(80, 80) for _ in range(3)]

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = ops.relu(layer(x))
        return x


@pytest.mark.skipif(not has_numba(), reason="numba is not installed")
def test_a_step_of_calls_together_is_that_of_single_calls(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rng.standard_normal((9, 80)).astype("f4"), rng.standard_normal((9, 80)).astype("f4")

    def losses() -> list[float]:
        engine = dg.Engine(Layers(), nn.MeanSquaredError(), optim.Adam(lr=0.01))
        return [engine.run(batch)["loss"] for _ in range(4)]

    together = losses()
    monkeypatch.setattr("distgraph.runtime.program.codegen.direct_call", lambda *_: None)
    monkeypatch.setattr("distgraph.runtime.program.codegen.call_of_several", lambda *_: None)
    assert together == losses()
    assert together[-1] < together[0]
