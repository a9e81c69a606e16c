"""Activations, elementwise, with gradient ops that are linear in the incoming gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import checked_arguments
from distgraph.ir.graph import Value
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, define, elementwise, ufunc
from distgraph.kernels import activation as kernels
from distgraph.kernels import workspace
from distgraph.ops.normalization import require_float
from distgraph.tracing.tensor import Tensor, emit_one

Grads = Sequence[Tensor | None]


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    first = operands[0]
    for other in operands[1:]:
        if other.shape != first.shape:
            raise GraphError(f"shapes {first.shape} and {other.shape} differ")
    return [(first.shape, require_float(first))]


def _relu_kernel(xp: Any, x: Any, out: Any = None) -> Any:
    if xp is not np:  # arrays of a device must not be kept across devices and streams
        return xp.maximum(x, x.dtype.type(0), out=out)
    return np.maximum(x, _zeros(x.shape[-1:], x.dtype), out=out)


@lru_cache(maxsize=256)
def _zeros(shape: Shape, dtype: Any) -> Any:
    """Zeros to compare with: NumPy's maximum of two arrays is faster than that of an array and a scalar."""
    return np.zeros(shape, dtype)


def _activation(name: str, kernel: Any, *, of_result: bool, flops: int, numpy: str = "") -> None:
    """An activation and its gradient op `name_grad(x or y, dy)`.

    Args:
        of_result: the gradient is a function of the result, so that the operand need not stay in memory.
    """

    def gradient(c: GradientContext) -> Grads:
        return [emit_one(f"{name}_grad", c.results[0] if of_result else c.operands[0], c.grad, **c.attrs)]

    define(
        name,
        elementwise,
        kernel,
        infer=_infer,
        gradient=gradient,
        flops=flops,
        inplace=(0,),
        ufunc=numpy,
        workspace=None if numpy or name == "relu" else workspace.contiguous,
    )


def _gradient_op(name: str, kernel: Any, flops: int) -> None:
    define(
        name,
        elementwise,
        kernel,
        infer=_infer,
        flops=flops,
        linear=((1,),),
        inplace=(0, 1),
        workspace=workspace.contiguous,
    )


def _erf_gradient(c: GradientContext) -> Grads:
    slope = emit_one("exp", -emit_one("square", c.operands[0]))
    return [c.grad * (slope * (2 / math.sqrt(math.pi)))]


_activation("relu", _relu_kernel, of_result=True, flops=1)
_activation("gelu", kernels.gelu, of_result=False, flops=14)
_activation("silu", kernels.silu, of_result=False, flops=5)
_activation("sigmoid", kernels.sigmoid, of_result=True, flops=4)
_activation("tanh", ufunc("tanh"), of_result=True, flops=6, numpy="tanh")
_gradient_op("relu_grad", kernels.relu_grad, 1)
_gradient_op("gelu_grad", kernels.gelu_grad, 20)
_gradient_op("silu_grad", kernels.silu_grad, 8)
_gradient_op("sigmoid_grad", kernels.sigmoid_grad, 3)
_gradient_op("tanh_grad", kernels.tanh_grad, 3)

define(
    "erf",
    elementwise,
    kernels.erf,
    infer=_infer,
    gradient=_erf_gradient,
    flops=12,
    inplace=(0,),
    workspace=workspace.contiguous,
)


def relu(x: Any) -> Tensor:
    """max(x, 0)."""
    return emit_one("relu", x)


@checked_arguments()
def gelu(x: Any, approximate: bool = False) -> Tensor:
    """x times the normal distribution function of x, or its tanh approximation."""
    return emit_one("gelu", x, approximate=approximate)


def silu(x: Any) -> Tensor:
    """x * sigmoid(x)."""
    return emit_one("silu", x)


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + exp(-x))."""
    return emit_one("sigmoid", x)


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent."""
    return emit_one("tanh", x)


def erf(x: Any) -> Tensor:
    """Error function."""
    return emit_one("erf", x)
