"""Elementwise ops: arithmetic, comparison, logic, powers and exponentials, cast, select, identities.

Two identities change how the rest of a program runs. `accumulate` ends the part of a step that runs once for
each micro-batch: its result is the mean over the micro-batches, so whatever follows it runs once a step.
`reshard` is an explicit change of layout; the pass `lower` turns it into the collectives of
`distgraph.ir.collectives`. The layouts of its operand and result are part of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.errors.arguments import is_number
from distgraph.ir.dtypes import is_float, promote, short, to_numpy
from distgraph.ir.graph import Value
from distgraph.ir.op_registry import Attrs, GradientContext, Shape, define, elementwise, ufunc
from distgraph.kernels._common import converted, store
from distgraph.ops.contraction import as_tensors
from distgraph.tracing.tensor import Tensor, emit_one

__all__ = [
    "absolute", "accumulate", "add", "arccos", "arcsin", "arctan", "arctan2", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "cast", "ceil", "clip", "cos", "cosh", "divide", "equal", "exp", "expm1",
    "floor", "floor_divide", "greater", "greater_equal", "hypot", "identity", "isfinite", "isinf", "isnan",
    "left_shift", "less", "less_equal", "log", "log10", "log1p", "log2", "logical_and", "logical_not",
    "logical_or", "logical_xor", "maximum", "minimum", "multiply", "negative", "not_equal", "power",
    "reciprocal", "remainder", "right_shift", "rint", "rsqrt", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "subtract", "tan", "trunc", "where",
]  # fmt: skip

Grads = Sequence[Tensor | None]


def unbroadcast(grad: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the dims along which its operand was broadcast, in the dtype of the operand."""
    if grad.shape == like.shape:
        return _follow(grad, like)
    extra = grad.ndim - like.ndim
    dims = tuple(range(extra)) + tuple(
        d for d in range(extra, grad.ndim) if like.shape[d - extra] == 1 and grad.shape[d] != 1
    )
    summed = emit_one("reduce_sum", grad, dims=dims, keepdims=False) if dims else grad
    shaped = summed if summed.shape == like.shape else emit_one("reshape", summed, shape=like.shape)
    return _follow(shaped, like)


def _follow(grad: Tensor, like: Tensor) -> Tensor:
    """Casts a gradient back to the dtype of its operand, which the op may have promoted."""
    return emit_one("cast", grad, dtype=like.dtype) if grad.dtype != like.dtype else grad


def _shape(operands: Sequence[Value]) -> Shape:
    try:
        return tuple(int(n) for n in np.broadcast_shapes(*(v.shape for v in operands)))
    except ValueError:
        shapes = " and ".join(v.type for v in operands)
        raise GraphError(f"shapes of {shapes} do not broadcast; reshape one of them") from None


def _infer(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    dtype = operands[0].dtype
    for value in operands[1:]:
        dtype = promote(dtype, value.dtype)
    return [(_shape(operands), dtype)]


def _infer_float(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    ((shape, dtype),) = _infer(operands, attrs)
    if not is_float(dtype):
        raise GraphError(f"operand of dtype {dtype} must be floating; cast it first with .astype")
    return [(shape, dtype)]


def _infer_exact(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    ((shape, dtype),) = _infer(operands, attrs)
    if is_float(dtype):
        raise GraphError(f"operand of dtype {dtype} has no bits; cast it to integers or bool first")
    return [(shape, dtype)]


def _infer_shifted(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    ((shape, dtype),) = _infer_exact(operands, attrs)
    if dtype == "bool":
        raise GraphError("operands are bool, which has one bit to shift; cast one to integers with .astype")
    return [(shape, dtype)]


def _infer_signed(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    ((shape, dtype),) = _infer(operands, attrs)
    if dtype == "bool":
        raise GraphError("operands are bool, which has no signs; cast one with .astype, or use logical ops")
    return [(shape, dtype)]


def _infer_bool(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(_shape(operands), "bool")]


def _function(kind: str, arity: int) -> Callable[..., Tensor]:
    """The function that emits an elementwise op."""

    def function(*operands: Any) -> Tensor:
        if len(operands) != arity:
            raise GraphError(
                f"{kind} takes {arity} operand{'s' if arity > 1 else ''} but got {len(operands)}"
            )
        return emit_one(kind, *operands)

    function.__name__ = function.__qualname__ = kind
    function.__doc__ = f"Elementwise {kind.replace('_', ' ')}; see the NumPy function of that name."
    return function


def _ufunc(name: str, gradient: Any = None, *, arity: int, **fields: Any) -> Callable[..., Tensor]:
    """Declare the op of a NumPy ufunc and return its function; `fields` as of `OpDef`."""
    declared = {"infer": _infer, "inplace": tuple(range(arity)), **fields}
    define(name, elementwise, ufunc(name), gradient=gradient, ufunc=name, **declared)
    return _function(name, arity)


_unary = partial(_ufunc, arity=1, infer=_infer_float)
_binary = partial(_ufunc, arity=2)
_test = partial(_ufunc, infer=_infer_bool, inplace=())


def _needed(c: GradientContext, *gradients: Callable[[], Tensor]) -> Grads:
    """The gradients of the operands that need one, each in the shape and dtype of its operand."""
    parts = zip(gradients, c.operands, c.needs, strict=True)
    return [unbroadcast(gradient(), x) if need else None for gradient, x, need in parts]


def _add(c: GradientContext) -> Grads:
    return _needed(c, lambda: c.grad, lambda: c.grad)


def _subtract(c: GradientContext) -> Grads:
    return _needed(c, lambda: c.grad, lambda: -c.grad)


def _multiply(c: GradientContext) -> Grads:
    x, y = c.operands
    return _needed(c, lambda: c.grad * y, lambda: c.grad * x)


def _divide(c: GradientContext) -> Grads:
    y = c.operands[1]
    return _needed(c, lambda: c.grad / y, lambda: -c.grad * c.results[0] / y)


def _power(c: GradientContext) -> Grads:
    x, y = c.operands
    return _needed(
        c,
        lambda: c.grad * y * emit_one("power", x, y - 1),
        lambda: c.grad * c.results[0] * emit_one("log", x),
    )


def _extreme(kind: str) -> Any:
    def gradient(c: GradientContext) -> Grads:
        x, y = c.operands
        first = emit_one(kind, x, y)  # ties go to the left operand, as in the kernel of where
        return _needed(
            c, lambda: emit_one("where", first, c.grad, 0), lambda: emit_one("where", first, 0, c.grad)
        )

    return gradient


def _arctan2(c: GradientContext) -> Grads:
    y, x = c.operands
    square = emit_one("square", x) + emit_one("square", y)
    return _needed(c, lambda: c.grad * x / square, lambda: -c.grad * y / square)


def _hypot(c: GradientContext) -> Grads:
    x, y = c.operands
    return _needed(c, lambda: c.grad * x / c.results[0], lambda: c.grad * y / c.results[0])


add = _binary("add", _add, linear=((0, 1),))
subtract = _binary("subtract", _subtract, linear=((0, 1),), infer=_infer_signed)
multiply = _binary("multiply", _multiply, linear=((0,), (1,)))
divide = _binary("divide", _divide, linear=((0,),), infer=_infer_float)
power = _binary("power", _power)
maximum = _binary("maximum", _extreme("greater_equal"))
minimum = _binary("minimum", _extreme("less_equal"))
arctan2 = _binary("arctan2", _arctan2, infer=_infer_float)
hypot = _binary("hypot", _hypot, infer=_infer_float)
floor_divide = _binary("floor_divide")
remainder = _binary("remainder")
bitwise_and = _binary("bitwise_and", infer=_infer_exact)
bitwise_or = _binary("bitwise_or", infer=_infer_exact)
bitwise_xor = _binary("bitwise_xor", infer=_infer_exact)
left_shift = _binary("left_shift", infer=_infer_shifted)
right_shift = _binary("right_shift", infer=_infer_shifted)

equal = _test("equal", arity=2)
not_equal = _test("not_equal", arity=2)
less = _test("less", arity=2)
less_equal = _test("less_equal", arity=2)
greater = _test("greater", arity=2)
greater_equal = _test("greater_equal", arity=2)
logical_and = _test("logical_and", arity=2)
logical_or = _test("logical_or", arity=2)
logical_xor = _test("logical_xor", arity=2)
logical_not = _test("logical_not", arity=1)
isnan = _test("isnan", arity=1)
isfinite = _test("isfinite", arity=1)
isinf = _test("isinf", arity=1)

negative = _unary("negative", lambda c: [-c.grad], linear=((0,),), infer=_infer_signed)
absolute = _unary("absolute", lambda c: [c.grad * emit_one("sign", c.operands[0])], infer=_infer)
sign = _unary("sign", lambda c: [None], infer=_infer_signed)
exp = _unary("exp", lambda c: [c.grad * c.results[0]])
log = _unary("log", lambda c: [c.grad / c.operands[0]])
log1p = _unary("log1p", lambda c: [c.grad / (c.operands[0] + 1)])
expm1 = _unary("expm1", lambda c: [c.grad * (c.results[0] + 1)])
sqrt = _unary("sqrt", lambda c: [c.grad * 0.5 / c.results[0]])
square = _unary("square", lambda c: [c.grad * c.operands[0] * 2], infer=_infer)
reciprocal = _unary("reciprocal", lambda c: [-c.grad * c.results[0] * c.results[0]])
sin = _unary("sin", lambda c: [c.grad * emit_one("cos", c.operands[0])])
cos = _unary("cos", lambda c: [-c.grad * emit_one("sin", c.operands[0])])
tan = _unary("tan", lambda c: [c.grad * (emit_one("square", c.results[0]) + 1)])
arcsin = _unary("arcsin", lambda c: [c.grad * emit_one("rsqrt", 1 - emit_one("square", c.operands[0]))])
arccos = _unary("arccos", lambda c: [-c.grad * emit_one("rsqrt", 1 - emit_one("square", c.operands[0]))])
arctan = _unary("arctan", lambda c: [c.grad / (emit_one("square", c.operands[0]) + 1)])
sinh = _unary("sinh", lambda c: [c.grad * emit_one("cosh", c.operands[0])])
cosh = _unary("cosh", lambda c: [c.grad * emit_one("sinh", c.operands[0])])
log2 = _unary("log2", lambda c: [c.grad / (c.operands[0] * math.log(2))])
log10 = _unary("log10", lambda c: [c.grad / (c.operands[0] * math.log(10))])
trunc = _unary("trunc", lambda c: [None])
floor = _unary("floor", lambda c: [None])
ceil = _unary("ceil", lambda c: [None])
rint = _unary("rint", lambda c: [None])
bitwise_not = _unary("bitwise_not", infer=_infer_exact)


def _rsqrt_kernel(xp: Any, x: Any, out: Any = None) -> Any:
    root = xp.asarray(xp.sqrt(x, out=out))  # of no dims NumPy makes a number
    return xp.reciprocal(root, out=root)


define(
    "rsqrt",
    elementwise,
    _rsqrt_kernel,
    infer=_infer_float,
    gradient=lambda c: [c.grad * -0.5 * c.results[0] * c.results[0] * c.results[0]],
    inplace=(0,),
)
rsqrt = _function("rsqrt", 1)


# ops that are the identity on the global tensor


def _identity_kernel(xp: Any, x: Any, out: Any = None, *, each_micro_batch: bool = False) -> Any:
    return x  # when a `reshard` runs is of no meaning to its value (`EACH_MICRO_BATCH`)


def _define_identity(name: str, **fields: Any) -> Callable[..., Tensor]:
    define(name, elementwise, _identity_kernel, linear=((0,),), view="same", infer=_infer, **fields)
    return _function(name, 1)


identity = _define_identity("identity", gradient=lambda c: [c.grad])
stop_gradient = _define_identity("stop_gradient", gradient=lambda c: [None])
_define_identity("accumulate", cost="launch")
_define_identity("reshard", cost="comm", gradient=lambda c: [c.grad])


def accumulate(x: Any) -> Tensor:
    """Mean over the micro-batches of a step; what uses the result runs once a step."""
    return emit_one("accumulate", x)


def _cast_kernel(xp: Any, x: Any, out: Any = None, *, dtype: str) -> Any:
    return converted(xp, x, to_numpy(dtype)) if out is None else store(xp, x, out)


def _cast_gradient(c: GradientContext) -> Grads:
    x = c.operands[0]
    return [emit_one("cast", c.grad, dtype=x.dtype) if is_float(x.dtype) and is_float(c.grad.dtype) else None]


# not linear: rounding to a narrower type before a reduction is another sum than after it
define(
    "cast",
    elementwise,
    _cast_kernel,
    infer=lambda operands, attrs: [(operands[0].shape, attrs["dtype"])],
    gradient=_cast_gradient,
)


def _where_kernel(xp: Any, condition: Any, x: Any, y: Any, out: Any = None) -> Any:
    if out is None:
        return xp.where(condition, x, y)
    out[...] = y
    xp.copyto(out, x, where=condition)
    return out


def _infer_where(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    if operands[0].dtype != "bool":
        raise GraphError(f"condition is {operands[0].type} but must be bool; compare it with something")
    return [(_shape(operands), promote(operands[1].dtype, operands[2].dtype))]


def _where(c: GradientContext) -> Grads:
    condition, x, y = c.operands
    return [
        None,
        unbroadcast(emit_one("where", condition, c.grad, 0), x) if c.needs[1] else None,
        unbroadcast(emit_one("where", condition, 0, c.grad), y) if c.needs[2] else None,
    ]


define("where", elementwise, _where_kernel, infer=_infer_where, gradient=_where, linear=((1, 2),))
where = _function("where", 3)


def clip(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """`x` limited to the range between two bounds; either may be None.

    Raises:
        GraphError: both are numbers, and the low one is not below the high one or equal to it.
    """
    if is_number(low) and is_number(high) and low > high:
        raise GraphError(f"clip has the bounds {low!r} and {high!r} but low must not be above high")
    (result,) = as_tensors(x)
    if low is not None:
        result = emit_one("maximum", result, low)
    return result if high is None else emit_one("minimum", result, high)


def cast(x: Any, dtype: Any) -> Tensor:
    """The same numbers in another dtype."""
    (tensor,) = as_tensors(x)
    name = short(dtype)
    return tensor if tensor.dtype == name else emit_one("cast", tensor, dtype=name)
