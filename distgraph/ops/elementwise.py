"""Elementwise ops: arithmetic, comparison, logic, powers and exponentials, cast, select."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distgraph.errors import GraphError
from distgraph.ir.dtypes import is_float, promote, short, to_numpy
from distgraph.ir.graph import Value
from distgraph.ir.op_registry import (
    Attrs,
    GradientContext,
    Shape,
    define,
    elementwise,
    ufunc,
)
from distgraph.kernels._common import store
from distgraph.ops.contraction import as_tensors
from distgraph.tracing.tensor import Tensor, emit_one

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


def _infer_bool(operands: Sequence[Value], attrs: Attrs) -> list[tuple[Shape, str]]:
    return [(_shape(operands), "bool")]


def _unary(
    name: str, gradient: Any = None, *, numpy: str = "", linear: bool = False, integers: bool = False
) -> None:
    define(
        name,
        elementwise,
        ufunc(numpy or name),
        infer=_infer if integers else _infer_float,
        gradient=gradient,
        linear=((0,),) if linear else (),
        inplace=(0,),
        ufunc=numpy or name,
    )


def _compare(name: str) -> None:
    define(name, elementwise, ufunc(name), infer=_infer_bool, ufunc=name)


def _binary(name: str, gradient: Any, *, linear: Any = (), infer: Any = _infer) -> None:
    define(
        name,
        elementwise,
        ufunc(name),
        infer=infer,
        gradient=gradient,
        linear=linear,
        inplace=(0, 1),
        ufunc=name,
    )


def _add(c: GradientContext) -> Grads:
    return [unbroadcast(c.grad, x) if need else None for x, need in zip(c.operands, c.needs, strict=True)]


def _subtract(c: GradientContext) -> Grads:
    x, y = c.operands
    return [unbroadcast(c.grad, x) if c.needs[0] else None, unbroadcast(-c.grad, y) if c.needs[1] else None]


def _multiply(c: GradientContext) -> Grads:
    x, y = c.operands
    return [
        unbroadcast(c.grad * y, x) if c.needs[0] else None,
        unbroadcast(c.grad * x, y) if c.needs[1] else None,
    ]


def _divide(c: GradientContext) -> Grads:
    x, y = c.operands
    return [
        unbroadcast(c.grad / y, x) if c.needs[0] else None,
        unbroadcast(-c.grad * c.results[0] / y, y) if c.needs[1] else None,
    ]


def _power(c: GradientContext) -> Grads:
    x, y = c.operands
    (z,) = c.results
    return [
        unbroadcast(c.grad * y * emit_one("power", x, y - 1), x) if c.needs[0] else None,
        unbroadcast(c.grad * z * emit_one("log", x), y) if c.needs[1] else None,
    ]


def _extreme(kind: str) -> Any:
    def gradient(c: GradientContext) -> Grads:
        x, y = c.operands
        first = emit_one(kind, x, y)  # ties go to the left operand, as in the kernel of where
        return [
            unbroadcast(emit_one("where", first, c.grad, 0), x) if c.needs[0] else None,
            unbroadcast(emit_one("where", first, 0, c.grad), y) if c.needs[1] else None,
        ]

    return gradient


def _arctan2(c: GradientContext) -> Grads:
    y, x = c.operands
    square = emit_one("square", x) + emit_one("square", y)
    return [
        unbroadcast(c.grad * x / square, y) if c.needs[0] else None,
        unbroadcast(-c.grad * y / square, x) if c.needs[1] else None,
    ]


def _hypot(c: GradientContext) -> Grads:
    return [
        unbroadcast(c.grad * x / c.results[0], x) if need else None
        for x, need in zip(c.operands, c.needs, strict=True)
    ]


_binary("add", _add, linear=((0, 1),))
_binary("subtract", _subtract, linear=((0, 1),))
_binary("multiply", _multiply, linear=((0,), (1,)))
_binary("divide", _divide, linear=((0,),), infer=_infer_float)
_binary("power", _power)
_binary("maximum", _extreme("greater_equal"))
_binary("minimum", _extreme("less_equal"))
_binary("arctan2", _arctan2, infer=_infer_float)
_binary("hypot", _hypot, infer=_infer_float)
_binary("floor_divide", None)
_binary("remainder", None)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"):
    _binary(_name, None)
for _name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):
    _compare(_name)
for _name in ("logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isfinite", "isinf"):
    _compare(_name)

_unary("negative", lambda c: [-c.grad], linear=True, integers=True)
_unary("absolute", lambda c: [c.grad * emit_one("sign", c.operands[0])], integers=True)
_unary("sign", lambda c: [None], integers=True)
_unary("exp", lambda c: [c.grad * c.results[0]])
_unary("log", lambda c: [c.grad / c.operands[0]])
_unary("log1p", lambda c: [c.grad / (c.operands[0] + 1)])
_unary("expm1", lambda c: [c.grad * (c.results[0] + 1)])
_unary("sqrt", lambda c: [c.grad * 0.5 / c.results[0]])
_unary("square", lambda c: [c.grad * c.operands[0] * 2], integers=True)
_unary("reciprocal", lambda c: [-c.grad * c.results[0] * c.results[0]])
_unary("sin", lambda c: [c.grad * emit_one("cos", c.operands[0])])
_unary("cos", lambda c: [-c.grad * emit_one("sin", c.operands[0])])
_unary("tan", lambda c: [c.grad * (emit_one("square", c.results[0]) + 1)])
_unary("arcsin", lambda c: [c.grad * emit_one("rsqrt", 1 - emit_one("square", c.operands[0]))])
_unary("arccos", lambda c: [-c.grad * emit_one("rsqrt", 1 - emit_one("square", c.operands[0]))])
_unary("arctan", lambda c: [c.grad / (emit_one("square", c.operands[0]) + 1)])
_unary("sinh", lambda c: [c.grad * emit_one("cosh", c.operands[0])])
_unary("cosh", lambda c: [c.grad * emit_one("sinh", c.operands[0])])
_unary("log2", lambda c: [c.grad / (c.operands[0] * math.log(2))])
_unary("log10", lambda c: [c.grad / (c.operands[0] * math.log(10))])
_unary("trunc", lambda c: [None])
_unary("floor", lambda c: [None])
_unary("ceil", lambda c: [None])
_unary("rint", lambda c: [None])
_unary("bitwise_not", integers=True)


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


def _identity_kernel(xp: Any, x: Any, out: Any = None) -> Any:
    return x


define(
    "identity",
    elementwise,
    _identity_kernel,
    gradient=lambda c: [c.grad],
    linear=((0,),),
    view=True,
    infer=_infer,
)


def _stop_gradient(c: GradientContext) -> Grads:
    return [None]


define(
    "stop_gradient",
    elementwise,
    _identity_kernel,
    gradient=_stop_gradient,
    linear=((0,),),
    view=True,
    infer=_infer,
)


def _cast_kernel(xp: Any, x: Any, out: Any = None, *, dtype: str) -> Any:
    return x.astype(to_numpy(dtype)) if out is None else store(xp, x, out)


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


def _function(kind: str, arity: int) -> Callable[..., Tensor]:
    def function(*operands: Any) -> Tensor:
        if len(operands) != arity:
            raise GraphError(
                f"{kind} takes {arity} operand{'s' if arity > 1 else ''} but got {len(operands)}"
            )
        return emit_one(kind, *operands)

    function.__name__ = function.__qualname__ = kind
    function.__doc__ = f"Elementwise {kind.replace('_', ' ')}; see the NumPy function of that name."
    return function


absolute = _function("absolute", 1)
arccos = _function("arccos", 1)
arcsin = _function("arcsin", 1)
arctan = _function("arctan", 1)
bitwise_not = _function("bitwise_not", 1)
ceil = _function("ceil", 1)
cos = _function("cos", 1)
cosh = _function("cosh", 1)
exp = _function("exp", 1)
expm1 = _function("expm1", 1)
floor = _function("floor", 1)
identity = _function("identity", 1)
isfinite = _function("isfinite", 1)
isinf = _function("isinf", 1)
isnan = _function("isnan", 1)
log = _function("log", 1)
log10 = _function("log10", 1)
log1p = _function("log1p", 1)
log2 = _function("log2", 1)
logical_not = _function("logical_not", 1)
negative = _function("negative", 1)
reciprocal = _function("reciprocal", 1)
rint = _function("rint", 1)
rsqrt = _function("rsqrt", 1)
sign = _function("sign", 1)
sin = _function("sin", 1)
sinh = _function("sinh", 1)
sqrt = _function("sqrt", 1)
square = _function("square", 1)
stop_gradient = _function("stop_gradient", 1)
tan = _function("tan", 1)
trunc = _function("trunc", 1)

add = _function("add", 2)
arctan2 = _function("arctan2", 2)
bitwise_and = _function("bitwise_and", 2)
bitwise_or = _function("bitwise_or", 2)
bitwise_xor = _function("bitwise_xor", 2)
divide = _function("divide", 2)
equal = _function("equal", 2)
floor_divide = _function("floor_divide", 2)
greater = _function("greater", 2)
greater_equal = _function("greater_equal", 2)
hypot = _function("hypot", 2)
left_shift = _function("left_shift", 2)
less = _function("less", 2)
less_equal = _function("less_equal", 2)
logical_and = _function("logical_and", 2)
logical_or = _function("logical_or", 2)
logical_xor = _function("logical_xor", 2)
maximum = _function("maximum", 2)
minimum = _function("minimum", 2)
multiply = _function("multiply", 2)
not_equal = _function("not_equal", 2)
power = _function("power", 2)
remainder = _function("remainder", 2)
right_shift = _function("right_shift", 2)
subtract = _function("subtract", 2)

where = _function("where", 3)


def clip(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """`x` limited to the range between two bounds; either may be None."""
    (result,) = as_tensors(x)
    if low is not None:
        result = emit_one("maximum", result, low)
    return result if high is None else emit_one("minimum", result, high)


def cast(x: Any, dtype: Any) -> Tensor:
    """The same numbers in another dtype."""
    (tensor,) = as_tensors(x)
    name = short(dtype)
    return tensor if tensor.dtype == name else emit_one("cast", tensor, dtype=name)
