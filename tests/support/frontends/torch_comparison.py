"""Comparison of imported modules of PyTorch with the modules themselves: outputs, gradients, loss curves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import distgraph as dg
from distgraph import ops
from distgraph.ir.dtypes import is_float
from distgraph.ir.reference_interpreter import interpret
from distgraph.passes.serial.backward import differentiate
from distgraph.tracing.tracer import Trace

torch: Any = pytest.importorskip("torch")


def batch_of(example: Any, size: int, seed: int) -> Any:
    """Inputs like an example, with another number of samples."""
    made = torch.Generator().manual_seed(seed)

    def another(x: Any) -> Any:
        shape = (size, *x.shape[1:])
        if x.is_floating_point():
            return torch.randn(shape, generator=made, dtype=x.dtype)
        return torch.randint(0, int(x.max()) + 1, shape, generator=made, dtype=x.dtype)

    return tuple(another(x) for x in example)


def tensors_in(output: Any) -> list[Any]:
    """The floating tensors of an output of torch or of an imported module, in order."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        return [x for item in output for x in tensors_in(item)]
    if isinstance(output, (dg.Tensor, torch.Tensor)):
        floating = output.is_floating_point() if isinstance(output, torch.Tensor) else is_float(output.dtype)
        return [output] if floating else []
    return []


def compare(
    module: Any, example: Sequence[Any], *, size: int | None = 3, tolerance: float = 1e-5, **options: Any
) -> Any:
    """Compare outputs and gradients of an imported module with those of torch.

    Args:
        module: a module of torch; in training mode it must not be random.
        example: positional inputs for the export.
        size: samples of the compared batch; None for the example itself.
        tolerance: of the difference, relative to the largest number of each tensor.
        options: of `import_module`.

    Returns:
        the imported module.
    """
    model = dg.frontends.torch.import_module(module, tuple(example), **options)
    inputs = tuple(example) if size is None else batch_of(example, size, seed=1)
    theirs, their_gradients = of_torch(copy.deepcopy(module), inputs)
    ours, our_gradients = of_distgraph(model, module.training, inputs)
    assert len(ours) == len(theirs)
    for number, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        close(found, expected, tolerance, f"output {number}")
    assert set(our_gradients) <= set(their_gradients)
    for name, expected in their_gradients.items():
        if expected is not None:
            close(our_gradients[name], expected, tolerance, f"gradient of {name}")
    return model


def close(found: Any, expected: Any, tolerance: float, what: str) -> None:
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=what)


def weights_of(shape: Sequence[int], number: int) -> np.ndarray:
    """Weights of the elements of an output in the scalar that is differentiated."""
    return np.random.default_rng(number).standard_normal(tuple(shape))


def of_torch(module: Any, inputs: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray | None]]:
    outputs = tensors_in(module(*inputs))
    total = sum(
        (x * torch.from_numpy(weights_of(x.shape, i)).to(x.dtype)).sum() for i, x in enumerate(outputs)
    )
    parameters = dict(module.named_parameters())
    if parameters and isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()
    gradients = {n: None if p.grad is None else p.grad.numpy() for n, p in parameters.items()}
    return [x.detach().numpy() for x in outputs], gradients


def of_distgraph(model: Any, training: bool, inputs: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    trace = Trace("compare")
    trace.training = training
    arrays = {f"x{i}": x.numpy() for i, x in enumerate(inputs)}
    with trace.activate():
        sources = [trace.source("input", name, a.shape, str(np.dtype(a.dtype))) for name, a in arrays.items()]
        outputs = tensors_in(model(*sources))
        total: Any = ops.full((), 0.0, "f64")
        for number, x in enumerate(outputs):
            weights = trace.constant(weights_of(x.shape, number)).astype(x.dtype)
            total = total + ops.reduce("sum", x * weights).astype("f64")
        used = {str(op.attrs["name"]) for op in trace.ops if op.kind == "param" and op.attrs["trainable"]}
        parameters = {n: trace.tensor(p) for n, p in model.named_parameters() if n in used}
        gradients = differentiate(trace, total, list(parameters.values())) if parameters else []
        named = {f"g:{n}": g for n, g in zip(parameters, gradients, strict=True)}
        graph = trace.finish({f"y{i}": x for i, x in enumerate(outputs)} | named)
    values = {name: tensor.value for name, tensor in model.named_tensors()}
    results, _ = interpret(graph, arrays | {"key": np.uint64(0)}, values)
    found = {name[2:]: array for name, array in results.items() if name.startswith("g:")}
    return [results[f"y{i}"] for i in range(len(outputs))], found


def torch_losses(module: Any, loss: Callable[..., Any], optimizer: Any, batches: Any) -> list[float]:
    """The losses of torch's own training."""
    losses = []
    for x, y in batches:
        value = loss(module(x), y)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def engine_losses(engine: dg.Engine, batches: Any) -> list[float]:
    """The losses of an engine on the same batches."""
    try:
        return [engine.run((x.numpy(), y.numpy()))["loss"] for x, y in batches]
    finally:
        engine.close()
