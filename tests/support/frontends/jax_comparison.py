"""Comparison of imported functions of JAX with the functions themselves: outputs, gradients, loss curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import ops
from distgraph.ir.dtypes import is_float
from distgraph.ir.graph import Graph
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace

jax: Any = pytest.importorskip("jax")


def normal(seed: int, shape: Any) -> Any:
    """Normal numbers; of NumPy, as JAX starts threads with its first array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def compare(
    function: Callable[..., Any],
    params: Any,
    inputs: Sequence[Any],
    *,
    example: Sequence[Any] | None = None,
    tolerance: float = 1e-5,
) -> tuple[Any, Graph]:
    """Compare outputs and gradients of an imported function with those of JAX.

    Args:
        function: (params, *inputs) -> outputs.
        params: pytree of arrays.
        inputs: of the compared evaluation.
        example: inputs for the import; the compared ones where it is None.
        tolerance: of the difference, relative to the largest number of each array.

    Returns:
        the imported function and its graph with gradients.
    """
    model = dg.frontends.jax.import_function(function, params, *(inputs if example is None else example))
    theirs, their_gradients = of_jax(function, params, inputs)
    ours, our_gradients, graph = of_distgraph(model, inputs)
    assert len(ours) == len(theirs)
    for number, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        close(found, expected, tolerance, f"output {number}")
    for name, expected in their_gradients.items():
        layers = [
            our_gradients.pop(f"{name}.{i}", None) for i in range(len(expected) if expected.ndim else 0)
        ]
        if layers and all(layer is not None for layer in layers):
            our_gradients[name] = np.stack([np.asarray(layer) for layer in layers])
    assert set(our_gradients) <= set(their_gradients)
    for name, expected in their_gradients.items():
        if name in our_gradients:
            close(our_gradients[name], expected, tolerance, f"gradient of {name}")
        else:
            assert not np.any(expected), f"{name} has a gradient in JAX only"
    return model, graph


def close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    assert found.shape == expected.shape, what
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=what)


def weights_of(shape: Sequence[int], number: int) -> np.ndarray:
    """Weights of the elements of an output in the scalar that is differentiated."""
    return np.random.default_rng(number).standard_normal(tuple(shape))


def floating(outputs: Any) -> list[Any]:
    """The floating arrays of an output of JAX, in order."""
    leaves = jax.tree_util.tree_leaves(outputs)
    return [x for x in leaves if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]


def of_jax(
    function: Callable[..., Any], params: Any, inputs: Sequence[Any]
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    def scalar(values: Any) -> tuple[Any, Any]:
        outputs = floating(function(values, *inputs))
        parts = [(x * weights_of(x.shape, i).astype(x.dtype)).sum() for i, x in enumerate(outputs)]
        return sum(parts), outputs

    (_, outputs), gradients = jax.jit(jax.value_and_grad(scalar, has_aux=True))(params)
    named = {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(gradient)
        for path, gradient in jax.tree_util.tree_flatten_with_path(gradients)[0]
    }
    return [np.asarray(x) for x in outputs], named


def of_distgraph(model: Any, inputs: Sequence[Any]) -> tuple[list[np.ndarray], dict[str, np.ndarray], Graph]:
    trace = Trace("compare")
    arrays = {f"x{i}": np.asarray(x) for i, x in enumerate(jax.tree_util.tree_leaves(list(inputs)))}
    with trace.activate():
        sources = [trace.source("input", name, a.shape, str(a.dtype)) for name, a in arrays.items()]
        returned = model(*sources)
        if isinstance(returned, dg.Tensor):
            returned = (returned,)
        every = list(returned.values()) if isinstance(returned, dict) else list(returned)
        outputs = [x for x in every if is_float(x.dtype)]
        total: Any = ops.full((), 0.0, "f64")
        for number, x in enumerate(outputs):
            weights = trace.constant(weights_of(x.shape, number)).astype(x.dtype)
            total = total + ops.reduce("sum", x * weights).astype("f64")
        used = {str(op.attrs["name"]) for op in trace.ops if op.kind == "param"}
        parameters = {n: trace.tensor(p) for n, p in model.named_parameters() if n in used}
        gradients = differentiate(trace, total, list(parameters.values())) if parameters else []
        named = {f"g:{n}": g for n, g in zip(parameters, gradients, strict=True)}
        graph = trace.finish({f"y{i}": x for i, x in enumerate(outputs)} | named)
    values = {name: tensor.value for name, tensor in model.named_tensors()}
    results, _ = interpret(graph, arrays | {"key": np.uint64(0)}, values)
    found = {name[2:]: array for name, array in results.items() if name.startswith("g:")}
    return [results[f"y{i}"] for i in range(len(outputs))], found, graph


def adamw_losses(
    loss: Callable[..., Any], params: Any, batches: Any, rate: float, decay: float
) -> list[float]:
    """The losses of JAX's own training by AdamW, as `distgraph.optim.AdamW` defines it."""
    step_of = jax.jit(jax.value_and_grad(loss))
    first = second = jax.tree_util.tree_map(jax.numpy.zeros_like, params)
    losses = []
    for number, batch in enumerate(batches, start=1):
        value, gradients = step_of(params, *batch)
        first = jax.tree_util.tree_map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
        second = jax.tree_util.tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
        root, scale = (1 - 0.999**number) ** 0.5, 1 - 0.9**number
        params = jax.tree_util.tree_map(
            lambda p, m, v, root=root, scale=scale: (
                p * (1 - rate * decay) - rate * (m / scale) / (v**0.5 / root + 1e-8)
            ),
            params,
            first,
            second,
        )
        losses.append(float(value))
    return losses


def engine_losses(engine: dg.Engine, batches: Any) -> list[float]:
    """The losses of an engine on the same batches."""
    try:
        return [engine.run(tuple(np.asarray(x) for x in batch))["loss"] for batch in batches]
    finally:
        engine.close()
