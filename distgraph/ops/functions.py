"""Elementwise functions by their NumPy names, over tensors, parameters, arrays and numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distgraph.dtypes import short
from distgraph.errors import GraphError
from distgraph.ops.linear import as_tensors
from distgraph.tensor import Tensor, emit_one


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
    """`x` held between two bounds; either may be None."""
    (result,) = as_tensors(x)
    if low is not None:
        result = emit_one("maximum", result, low)
    return result if high is None else emit_one("minimum", result, high)


def cast(x: Any, dtype: Any) -> Tensor:
    """The same numbers in another dtype."""
    (tensor,) = as_tensors(x)
    name = short(dtype)
    return tensor if tensor.dtype == name else emit_one("cast", tensor, dtype=name)
